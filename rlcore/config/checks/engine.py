"""Checks of `rollout.engine`: its kind, its servers, its GPUs. Pure, like all checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from rlcore.config.derived import (
    embedded_in_trainer,
    generates,
    recorded_fields,
    truncates,
    world_size,
)
from rlcore.config.engine_registry import KINDS, EngineKind, is_import_path
from rlcore.config.messages import ConfigIssue
from rlcore.config.secrets import mask_text
from rlcore.config.sections.base import Found
from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.root import Config
from rlcore.deadlines import ENGINE_ENDING_S

ENGINE = "rollout.engine"
COLOCATED = "rollout.engine.colocated"
SERVER = "rollout.engine.server"
# Keys of engines that the run starts; external engines are configured where they are started.
MANAGED_ONLY = ("count", "python", "gpus", "host", "server", "threads", "device", "environment")
ANY_ADDRESS = ("", "0.0.0.0", "::")
# An offloaded trainer still holds its CUDA context and NCCL's buffers.
MAX_GPU_SHARE = 0.8
# The speed of one response on a full engine, time in the queue included. A time limit that requires
# more aborts responses.
MAX_TOKENS_PER_S = 20

# Arguments that quantise weights -> the values that do not.
QUANTISING: dict[str, tuple[Any, ...]] = {
    "quantization": (None, "none", "unquant"),
    "torchao_config": (None, ""),
    "modelopt_quant": (None,),
    "quantize_and_serve": (None, False),
}
FLASH_RL = "flash_rl"  # SGLang's load format that can reload FP8 weights
ATTENTION_PARTS = "attn_dp_size"  # parts into which SGLang divides the batch for attention
FP32_HEAD = "enable_fp32_lm_head"  # SGLang's argument for logits in fp32
_WEIGHTS = (
    "weights are published to the ranks of one server, all of which hold parts of every layer"
)
# What to do instead -> arguments of sglang.launch_server.
_REFUSED = {
    "set model.path": "model_path model",
    "set model.tokenizer": "tokenizer_path",
    "set rollout.engine.dtype": "dtype",
    "set rollout.engine.tensor_parallel": "tp_size tensor_parallel_size",
    "set rollout.engine.device": "device",
    "set rollout.engine.gpus": "base_gpu_id gpu_id_step",
    "set rollout.engine.host": "host",
    "free ports are chosen when the engine starts": "port nccl_port",
    "set RLCORE_ENGINE_API_KEY in the environment": "api_key",
    "set RLCORE_ENGINE_ADMIN_KEY in the environment": "admin_api_key",
    "write its arguments here": "config",
    f"set rollout.engine.count: {_WEIGHTS}": "dp_size data_parallel_size",
    f"set rollout.engine.tensor_parallel: {_WEIGHTS}": "pp_size pipeline_parallel_size",
    f"write {ATTENTION_PARTS}": "attention_data_parallel_size",
    "set rollout.engine.tensor_parallel: each rank of a server is taken to hold its own part of"
    " every layer, and no copies": "attn_cp_size attention_context_parallel_size dcp_size"
    " decode_context_parallel_size moe_dp_size moe_data_parallel_size dwdp_size",
    "rlcore calls engines over HTTP, which a server of SMG's gRPC does not speak":
    "grpc_mode smg_grpc_mode",
    "call `rlcore engine` with --nodes on each machine of an engine, and give its URL in"
    " rollout.engine.urls": "nnodes node_rank dist_init_addr nccl_init_addr",
    "sglang checks its keys only if it has a single tokenizer": "tokenizer_worker_num",
    "set cluster.tls, which the engines' clients use too": "ssl_keyfile ssl_certfile ssl_ca_certs",
    "a key with a passphrase is not supported": "ssl_keyfile_password",
    "it counts the publications of the run": "weight_version",
}  # fmt: skip
OURS = {name: instead for instead, names in _REFUSED.items() for name in names.split()}


def engine_kind(config: Config) -> Iterator[ConfigIssue]:
    """Every key of the engine is one that its kind reads."""
    # rlcore/launch/input_checks.py imports an engine of another package and checks it likewise.
    if (kind := KINDS.get(config.rollout.engine.kind)) is not None:
        yield from fits_kind(config, kind)


def fits_kind(config: Config, kind: EngineKind) -> Iterator[ConfigIssue]:
    """Yield keys and requirements that do not fit the kind of the engine."""
    engine = config.rollout.engine
    foreign = is_import_path(engine.kind)
    for name, other in KINDS.items():
        if name != engine.kind:
            reason = f"{kind.title} does not read it: leave it out" if foreign else other.not_read
            unread = [key for key in other.own_keys if key not in kind.own_keys]
            yield from _given(engine, unread, reason)
    unserved = {
        key: f"does not report {field.replace('_', ' ')}"
        for field, key in recorded_fields(config).items()
        if field not in kind.records
    }
    if config.rollout.sampling.stop and not kind.stop_strings:
        unserved["rollout.sampling.stop"] = "knows no stop strings"
    if engine.colocated and not kind.colocated:
        unserved[COLOCATED] = "cannot give its memory back"
    for key, why in unserved.items():
        yield ConfigIssue(
            key, f"{kind.title} {why}: leave it out, or use another rollout.engine.kind"
        )


def engine_servers(config: Config) -> Found:
    """Engines are either started by the run or given by URL."""
    engine = config.rollout.engine
    with_tls = config.cluster.tls is not None
    if engine.is_external:
        why = (
            f"engines given by {engine.named_by} are started elsewhere: leave it out here, and give"
            " it to `rlcore engine` if that starts them"
        )
        # For an engine of another package `server` holds the options of its class.
        options = ("server",) if is_import_path(engine.kind) else ()
        yield from _given(engine, [key for key in MANAGED_ONLY if key not in options], why)
        for url in engine.urls:
            if problem := url_problem(url, with_tls=with_tls):
                yield f"{ENGINE}.urls", problem
        if engine.urls and engine.urls_file is not None:
            yield f"{ENGINE}.urls_file", "got both it and urls: leave one of them out"
        if len({url.rstrip("/") for url in engine.urls}) < len(engine.urls):
            yield f"{ENGINE}.urls", "one engine is named twice"
    if engine.router_url is None:
        return
    if not engine.urls or engine.urls_file is not None:
        yield (
            f"{ENGINE}.router_url",
            "a router sends requests to engines that it knows by URL: give the same URLs in"
            " rollout.engine.urls (weights and control go to them directly), or leave it out",
        )
    if problem := url_problem(engine.router_url, with_tls=with_tls):
        yield f"{ENGINE}.router_url", problem
    lost = {
        "rollout.sampling.stop": bool(config.rollout.sampling.stop),
        "policy.routing_replay": config.policy.routing_replay == "engine",
        "policy.logprobs.keep_sets": config.policy.logprobs.keep_sets and truncates(config),
    }
    for path in (path for path, is_asked in lost.items() if is_asked):
        message = "sglang-router 0.3.2 does not pass that on: leave rollout.engine.router_url out"
        yield path, f"{message}, or this"


def engine_tls(config: Config) -> Found:
    """With TLS, engines have https URLs, and engines that the run starts have a certificate."""
    tls = config.cluster.tls
    engine = config.rollout.engine
    if tls is None:
        return
    if (tls.certificate_file is None) != (tls.key_file is None):
        missing = "key_file" if tls.key_file is None else "certificate_file"
        yield f"cluster.tls.{missing}", "not given: a certificate and its key go together"
    elsewhere = is_import_path(engine.kind) or engine.is_external or not generates(config)
    if tls.certificate_file is None and not elsewhere and not embedded_in_trainer(config):
        yield (
            "cluster.tls.certificate_file",
            "not given, but the run starts engines, which are servers: give it and"
            " cluster.tls.key_file, or rollout.engine.urls",
        )


def managed_servers(config: Config) -> Iterator[ConfigIssue]:
    """Servers that the run starts have an address and a device of this machine, and no argument
    that rlcore sets itself.
    """
    engine = config.rollout.engine
    if engine.kind == "sglang" and not engine.is_external:
        yield from cannot_start(engine)


def cannot_start(engine: EngineConfig) -> Iterator[ConfigIssue]:
    """Yield arguments, hosts and devices with which no server can start."""
    for name in engine.server:
        if (instead := OURS.get(argument_name(name))) is not None:
            yield ConfigIssue(f"{SERVER}.{name}", f"not to be given here: {instead}")
    for name, value in engine.server.items():
        argument = argument_name(name)
        if argument not in QUANTISING or value in QUANTISING[argument]:
            continue
        # The engine could not load the published weights.
        load_format = server_argument(engine, "load_format")
        if engine.quantization is not None:
            yield ConfigIssue(
                f"{SERVER}.{name}",
                f"got {value!r}, but {ENGINE}.quantization: {engine.quantization} says how the"
                " servers are quantised: leave one of them out",
            )
        elif (argument, value, load_format) != ("quantization", "fp8", FLASH_RL):
            yield ConfigIssue(
                f"{SERVER}.{name}",
                f"got {value!r}, but weights are published in fp32 or bf16, and SGLang loads those"
                " into quantised layers only with quantization: fp8 and load_format: flash_rl"
                f" (dense Qwen2 and Qwen3; got load_format {load_format!r}): leave it out and set"
                f" {ENGINE}.quantization: fp8, which publishes in FP8, or set both",
            )
    parts = server_argument(engine, ATTENTION_PARTS)
    ranks = engine.tensor_parallel
    if parts is not None and (not isinstance(parts, int) or parts < 1 or ranks % parts):
        message = f"got {parts!r}, expected a divisor of {ENGINE}.tensor_parallel ({ranks}), whose"
        yield ConfigIssue(
            f"{SERVER}.{ATTENTION_PARTS}", f"{message} ranks are divided among the parts"
        )
    if engine.host in ANY_ADDRESS:
        message = f"{engine.host!r} is every address of this machine; give one at which others can"
        yield ConfigIssue(f"{ENGINE}.host", f"{message} reach it")
    if engine.device not in (None, "cuda", "cpu"):
        message = f"got {engine.device!r}, expected 'cuda' or 'cpu'; rollout.engine.gpus chooses"
        yield ConfigIssue(f"{ENGINE}.device", f"{message} among GPUs")


def expected_fp32_head(config: Config) -> bool | None:
    """Return whether servers must keep their logits in fp32; None where they may do either."""
    wanted = config.policy.logprobs.fp32_head
    trainer = config.model.dtype
    engine = config.rollout.engine.dtype or trainer
    return None if engine == "fp32" or (trainer == "fp32" and not wanted) else wanted


def fp32_head(config: Config) -> Found:
    """Trainer and servers agree on whether the logits of a bf16 model are rounded to bf16."""
    engine = config.rollout.engine
    if engine.kind != "sglang" or not generates(config):
        return
    expected = expected_fp32_head(config)
    given = server_argument(engine, FP32_HEAD)
    if expected is True and given is not None and not given:
        yield (
            f"{SERVER}.{FP32_HEAD}",
            f"got {_show(given)}, but policy.logprobs.fp32_head: true keeps the trainer's logits in"
            " fp32, and sets this: leave it out",
        )
    elif expected is False and given:
        yield (
            f"{SERVER}.{FP32_HEAD}",
            f"got {_show(given)}, but the trainer rounds its logits to bf16, so the log-probs would"
            " differ more: set policy.logprobs.fp32_head: true instead, which sets this too",
        )
    target = server_argument(engine, "rl_on_policy_target")
    if expected is True and target is not None:
        yield (
            f"{SERVER}.rl_on_policy_target",
            f"got {_show(target)}, with which SGLang rounds its logits to bf16 again, but"
            " policy.logprobs.fp32_head is true: leave one of them out",
        )


def engine_transport(config: Config) -> Found:
    """A folder for weights is given with a transport that writes there, and external engines share
    it.
    """
    engine = config.rollout.engine
    got = f"got {engine.transport!r}"
    by_folder = engine.transport in ("disk", "delta")
    if engine.weights_dir is not None and not by_folder:
        message = f"only transports disk and delta write there: set {ENGINE}.transport to one of"
        yield f"{ENGINE}.weights_dir", f"{message} these, {got}"
    for key in ("senders", "rails"):
        if getattr(engine, key) is not None and engine.transport not in ("auto", "distributed"):
            message = f"only transport distributed has {key}: leave it out, or {ENGINE}.transport"
            yield f"{ENGINE}.{key}", f"{message}, {got}"
    if engine.quantization is not None and by_folder:
        message = f"{got}, but a folder of weights is not quantised: leave it out"
        yield f"{ENGINE}.transport", f"{message}, or {ENGINE}.quantization"
    if engine.transport == "delta" and engine.is_external and engine.weights_dir is None:
        message = "not given; engines elsewhere follow the changes there: name a folder that they"
        yield f"{ENGINE}.weights_dir", f"{message} share with the trainer"


def engine_gpus(config: Config) -> Found:
    """An engine's GPUs are its own, and enough for its tensor-parallel ranks."""
    engine = config.rollout.engine
    path = f"{ENGINE}.gpus"
    given = len(engine.gpus)
    needed = engine.count * engine.tensor_parallel
    if given and engine.device == "cpu":
        message = f"got {engine.gpus}, but rollout.engine.device is 'cpu': leave one of them out"
        yield path, message
    elif len(set(engine.gpus)) < given:
        twice = next(gpu for gpu in engine.gpus if engine.gpus.count(gpu) > 1)
        yield path, f"{twice} is named twice: every rank of every engine needs a GPU of its own"
    elif 0 < given < needed:
        width = engine.tensor_parallel
        message = f"got {given}, but count {engine.count} x tensor_parallel {width} need {needed}"
        yield path, message


def colocated(config: Config) -> Found:
    """Colocated engines belong to the run, are divided evenly among its nodes, and never generate
    while the trainer trains.
    """
    engine = config.rollout.engine
    if not engine.colocated or not generates(config):
        return
    if engine.is_external:
        message = f"engines given by {engine.named_by} are stopped and started elsewhere"
        yield COLOCATED, f"{message}: turn it off"
    if (versions := config.rollout.max_staleness) > 0:
        yield (
            "rollout.max_staleness",
            f"got {versions}, but engines that take turns with the trainer do not generate while it"
            f" trains: set it to 0, or turn {COLOCATED} off",
        )
    nodes = config.cluster.nodes
    if nodes > 1 and config.cluster.launcher != "ray":
        yield (
            "cluster.nodes",
            f"got {nodes}, but cluster.launcher {config.cluster.launcher} starts engines on the"
            f" first node alone, and {COLOCATED} engines share the GPUs of every node: set"
            " cluster.launcher to ray, use 1 node, or turn it off",
        )
    elif engine.count % nodes:
        message = f"got {engine.count}, but {COLOCATED} engines are divided evenly among"
        yield f"{ENGINE}.count", f"{message} cluster.nodes ({nodes}): use a multiple of it"
    if engine.transport == "distributed":
        message = "got 'distributed', but NCCL takes no two processes on one GPU: leave it at auto"
        yield f"{ENGINE}.transport", f"{message}, which is 'tensor' here"
    if server_argument(engine, "enable_memory_saver") is False:
        message = f"got false, but {COLOCATED} needs it: leave it out"
        yield f"{SERVER}.enable_memory_saver", message


def engine_notes(config: Config) -> Found:
    """Yield keys of `rollout` that have no effect, or not the expected one."""
    if not generates(config):
        return
    rollout = config.rollout
    if rollout.on_update != "drain" and rollout.max_staleness == 0:
        message = "changes nothing: with max_staleness 0 no response is unfinished when weights"
        yield "rollout.on_update", f"{message} change"
    update_s = rollout.engine.update_timeout_s
    collective_s = config.cluster.collective_timeout_s
    if world_size(config) > 1 and update_s + ENGINE_ENDING_S > collective_s:
        yield (
            f"{ENGINE}.update_timeout_s",
            f"got {update_s:g}, but while an engine hangs the other ranks wait in a collective, for"
            f" {collective_s:g} s at most: leave cluster.collective_timeout_s at least"
            f" {ENGINE_ENDING_S:g} s more than this",
        )
    given = rollout.engine.request_timeout_s
    longest = rollout.sampling.max_new_tokens
    if given is not None and longest > MAX_TOKENS_PER_S * given:
        yield (
            f"{ENGINE}.request_timeout_s",
            f"got {given:g}, in which a response of rollout.sampling.max_new_tokens ({longest})"
            f" must make {longest / given:.0f} tokens a second, the time in the engine's queue"
            " included; slower ones are aborted and continued, which computes their prefix again:"
            " leave it out",
        )
    if (kind := KINDS.get(rollout.engine.kind)) is not None:
        yield from kind_warnings(config, kind)


def kind_warnings(config: Config, kind: EngineKind) -> Iterator[ConfigIssue]:
    """Yield keys that have an unexpected effect with this kind of engine."""
    if config.run.deterministic and not kind.repeatable:
        message = f"covers the trainer alone: what {kind.title} samples differs from run to run"
        yield ConfigIssue("run.deterministic", message)


def colocated_notes(config: Config) -> Found:
    """Yield a memory share that may not leave the trainer enough."""
    engine = config.rollout.engine
    share = server_argument(engine, "mem_fraction_static")
    if engine.colocated and isinstance(share, int | float) and share > MAX_GPU_SHARE:
        yield (
            f"{SERVER}.mem_fraction_static",
            f"{share:g} may be too much: an offloaded trainer keeps CUDA's context and NCCL's"
            " communicators, 7 to 10 GiB per process",
        )


def server_argument(engine: EngineConfig, name: str) -> Any:
    """Return the user's value of an SGLang argument in any spelling; None if not given."""
    for given, value in engine.server.items():
        if argument_name(given) == name:
            return value
    return None


def argument_name(given: str) -> str:
    """Return SGLang's name of an argument spelled `tp_size`, `tp-size` or `--tp-size`."""
    return given.lstrip("-").replace("-", "_")


def _given(engine: EngineConfig, keys: Sequence[str], message: str) -> Iterator[ConfigIssue]:
    default = EngineConfig()
    for key in keys:
        if (got := getattr(engine, key)) != getattr(default, key):
            yield ConfigIssue(f"{ENGINE}.{key}", f"got {_show(got)}, but {message}")


def _show(value: object) -> str:
    return repr(value) if isinstance(value, str | int | float | list) else "a value"


def url_problem(url: str, *, with_tls: bool) -> str | None:
    """Return the error of a server's URL, or None."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    # ValueError: a port beyond 65535, or half an IPv6 address.
    except ValueError:
        good = False
    if not good:
        return f"got {url!r}, expected http://HOST:PORT"
    if with_tls and parts.scheme == "http":
        return (
            f"got {mask_text(url)!r}, but cluster.tls is set and the engines' keys would go there"
            " in clear: expected https://..., or leave cluster.tls out"
        )
    return None
