"""Builds SGLang engines: servers that the run starts, or servers that the user runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlcore.adapter_folder import read_policies
from rlcore.config import Config
from rlcore.config.checks.drafts import ALGORITHM, has_draft, has_own_draft
from rlcore.config.checks.engine import FP32_HEAD, expected_fp32_head, server_argument
from rlcore.config.derived import published_adapters
from rlcore.errors import ConfigError, ModelError
from rlcore.hf_config.read import read_config
from rollout.engines.checks import ExpertLayers
from rollout.engines.child_process import Server
from rollout.engines.factories import EngineNode, EngineSite, Keys, engine_log, engine_name
from rollout.engines.sglang.adapters import server_arguments
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.entry import VERSION
from rollout.engines.sglang.external import ExternalServer
from rollout.engines.sglang.server_process import ManagedServer

# Model types whose classes in SGLang have a separate head, whatever config.json says.
UNTIED = frozenset({"qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe", "glm4_moe_lite"})
# Those of which every layer has experts there, whatever config.json says.
EXPERTS_IN_ALL_LAYERS = frozenset({"qwen2_moe", "qwen3_moe", "qwen3_next"})
# Keys without which SGLang leaves norms, biases or rotary positions out that the family has.
NEEDED = {"minimax_m2": ("use_qk_norm", "use_routing_bias", "scoring_func", "rotary_dim")}
GATED_DELTA = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})

ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})


def check_adapters_on_cpu(model: str, targets: Collection[str]) -> None:
    """Raise ConfigError for adapters that SGLang computes by Triton alone: those of experts."""
    if not ATTENTION.issuperset(targets) and ExpertLayers.of(model) is not None:
        raise ConfigError(
            f"policy.lora.targets: got {', '.join(targets)}, but on a CPU SGLang takes no"
            f" adapters of layers with experts: set them to {', '.join(sorted(ATTENTION))}, or"
            " rollout.engine.kind to embedded"
        )


def check_adapters(folder: str, targets: Collection[str]) -> None:
    """Raise ConfigError for adapters that SGLang does not compute on any device.

    It takes Qwen3-Next's output gates for no rows of `q_proj`, and one matrix of Qwen3.5's
    `in_proj_qkv` and `in_proj_z` together.
    """
    model = read_config(folder)
    family = (model.get("text_config") or model).get("model_type")
    wrong = [name for name in targets if name.startswith("in_proj") or name == "all-linear"]
    if family == "qwen3_next":
        wrong = list(targets)
    if family in GATED_DELTA and wrong:
        raise ConfigError(
            f"policy.lora.targets: got {', '.join(wrong)}, of which SGLang {VERSION} takes no"
            f" adapters for {family}: set policy.lora.merged to true, or rollout.engine.kind to"
            " embedded" + ("" if family == "qwen3_next" else ", or take other targets")
        )


def check_dense_layers(folder: str, model: Mapping[str, Any]) -> None:
    """Raise ModelError for dense layers in whose place SGLang makes experts, or the reverse.

    A publication would not reach them: SGLang ignores tensors that it has no place for.
    """
    family = model.get("model_type")
    if family in EXPERTS_IN_ALL_LAYERS:
        key = "mlp_only_layers and decoder_sparse_step"
        step = model.get("decoder_sparse_step") or 1
        only = model.get("mlp_only_layers") or ()
        layers = range(int(model.get("num_hidden_layers") or 0))
        dense = [layer for layer in layers if (layer + 1) % step or layer in only]
        made = []
    elif (kinds := model.get("mlp_layer_types")) and "first_k_dense_replace" in model:
        key = "mlp_layer_types"
        dense = [layer for layer, kind in enumerate(kinds) if kind == "dense"]
        made = list(range(model["first_k_dense_replace"]))
    else:
        return
    if dense != made:
        raise ModelError(
            f"model.path: {folder} says by {key} that layers {dense} are dense, but SGLang"
            f" {VERSION} makes {made or 'none'} dense for {family}, and computes with random"
            " numbers where no tensor fits; take rollout.engine.kind: embedded"
        )


def check_attention_layers(folder: str, model: Mapping[str, Any]) -> None:
    """Raise ModelError for layers with attention where SGLang makes gated delta rules, or back."""
    text = model.get("text_config") or model
    if text.get("model_type") not in GATED_DELTA or not (kinds := text.get("layer_types")):
        return
    every = text.get("full_attention_interval") or 4
    made = ["linear_attention" if (k + 1) % every else "full_attention" for k in range(len(kinds))]
    if kinds != made:
        raise ModelError(
            f"model.path: {folder} has layer_types {kinds}, but SGLang {VERSION} goes by"
            f" full_attention_interval, {every}: set it to the distance of layers with"
            " full_attention, or take rollout.engine.kind: embedded"
        )


class SGLangFactory:
    """`rollout.engines.factories.HostedFactory` of SGLang engines."""

    @classmethod
    def build(cls, site: EngineSite) -> list[SGLangEngine]:
        """Return the engines of `rollout.engine.urls`, or as many as the run starts itself.

        Raises ConfigError: no environment for SGLang, too few GPUs, or a server argument that is
        not the user's to set.
        """
        config = site.config
        engine = config.rollout.engine
        if not engine.urls:
            keys = Keys.from_environment()
            return cls.build_clients(config, cls.build_servers(site, keys), keys=keys)
        return [
            cls.build_external(config, engine_name(index), url)
            for index, url in enumerate(engine.urls)
        ]

    @classmethod
    def build_servers(cls, site: EngineSite, keys: Keys) -> list[ManagedServer]:
        """Return `rollout.engine.count` servers, not started."""
        return [
            cls.build_server(
                site.config, index, logs=site.logs, gpus=gpus, keys=keys, node=site.node
            )
            for index, gpus in enumerate(site.assign_gpus())
        ]

    @classmethod
    def build_server(
        cls,
        config: Config,
        index: int,
        *,
        logs: Path,
        gpus: Sequence[str],
        keys: Keys,
        node: EngineNode | None = None,
    ) -> ManagedServer:
        """See `HostedFactory`; `node` is this machine's part of a server on several machines."""
        engine = config.rollout.engine
        on_gpu = bool(gpus) or (engine.device != "cpu" and torch.cuda.is_available())
        drafts = has_draft(engine)
        if drafts and not on_gpu:
            raise ConfigError(
                f"rollout.engine.server.{ALGORITHM}: on a CPU SGLang {VERSION} verifies drafted"
                " tokens greedily, whatever the temperature: leave it out"
            )
        # Arguments that the rest of the configuration requires.
        needed = {
            "enable_return_routed_experts": config.policy.routing_replay == "engine",
            FP32_HEAD: config.policy.logprobs.fp32_head,
            # On a CPU there is no memory to release.
            "enable_memory_saver": engine.colocated and on_gpu,
            # Released memory comes back empty, and no publication has the draft's weights.
            "enable_draft_weights_cpu_backup": drafts and engine.colocated,
        }
        arguments: dict[str, Any] = {name: True for name, is_needed in needed.items() if is_needed}
        if not any(server_argument(engine, name) for name in ("load_format", "quantization")):
            # It serves nothing before the first publication, which has every weight but those of a
            # draft model.
            arguments["load_format"] = "dummy"
            if drafts:
                draft = server_argument(engine, "speculative_draft_load_format")
                arguments["speculative_draft_load_format"] = draft or "auto"
        if (lora := published_adapters(config)) is not None:
            policies = read_policies(config.rollout.policies).values()
            if not on_gpu:
                others = (name for folder in policies for name in folder.targets)
                check_adapters_on_cpu(config.model.path, [*lora.targets, *others])
            device = "cuda" if on_gpu else "cpu"
            arguments |= server_arguments(lora, device, config.model.path, policies)
        return ManagedServer(
            engine_name(index),
            config.model.path,
            config=engine,
            dtype=config.model.dtype,
            tokenizer=config.model.tokenizer,
            log=engine_log(logs, index),
            keys=keys,
            gpus=gpus,
            arguments=arguments,
            tls=config.cluster.tls,
            node=node,
        )

    @classmethod
    def build_clients(
        cls, config: Config, servers: Sequence[Server], *, keys: Keys
    ) -> list[SGLangEngine]:
        """See `HostedFactory`.

        Raises ModelError for a model with tied embeddings for which SGLang makes a separate head,
        which no publication would write, and for others of which SGLang makes another model.
        """
        model = read_config(config.model.path)
        family = model.get("model_type")
        if model.get("tie_word_embeddings") and family in UNTIED:
            raise ModelError(
                f"model.path: {config.model.path} says tie_word_embeddings, which SGLang {VERSION}"
                f" does not read for {family}: its head would be another one, of random numbers."
                " Take a folder with a head (`rlcore init-model --no-tied`), or"
                " rollout.engine.kind: embedded"
            )
        if missing := [key for key in NEEDED.get(str(family), ()) if key not in model]:
            raise ModelError(
                f"model.path: {config.model.path} has a config.json without {', '.join(missing)},"
                f" from which SGLang {VERSION} knows of the norms of Q and K, the routers' biases"
                " and the rotated part of a head; add them"
            )
        check_dense_layers(config.model.path, model)
        check_attention_layers(config.model.path, model)
        lora = published_adapters(config)
        policies = read_policies(config.rollout.policies)
        if lora is not None:
            others = (name for folder in policies.values() for name in folder.targets)
            check_adapters(config.model.path, [*lora.targets, *others])
        return [
            SGLangEngine(
                server,
                config=config.rollout.engine,
                keys=keys,
                model_path=config.model.path,
                tls=config.cluster.tls,
                lora=lora,
                policies=policies,
                trains_draft=config.policy.mtp_coef > 0 and not has_own_draft(config),
            )
            for server in servers
        ]

    @classmethod
    def build_external(cls, config: Config, name: str, url: str) -> SGLangEngine:
        """Return the engine `name`, whose server the user runs at `url`."""
        keys = Keys.from_environment()
        server = ExternalServer(
            name,
            url,
            config.model.path,
            config=config.rollout.engine,
            keys=keys,
            fp32_head=expected_fp32_head(config),
            tls=config.cluster.tls,
        )
        [engine] = cls.build_clients(config, [server], keys=keys)
        return engine
