"""`rlcore plan`: layouts of the models that fit on the GPUs, and the keys of the fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, cast, get_args

from backends.megatron.checks.layout import check_layout, check_others, layers_of_stages
from backends.megatron.convert.adapters import LAYER_NUMBER, factor_rows
from backends.megatron.convert.architecture import Architecture, weight_tensors
from backends.megatron.convert.read import read_models
from backends.megatron.convert.table import Split
from rlcore.config import Config
from rlcore.config.checks.all_checks import check
from rlcore.config.derived import (
    Passes,
    answers_per_prompt,
    built_in_passes,
    embedded_in_trainer,
    generates,
    published_adapters,
    samples_per_step,
    world_size,
)
from rlcore.config.engine_registry import KINDS
from rlcore.config.sections.policy import ParallelConfig, PolicyConfig, default_chunk_elements
from rlcore.config.sections.rollout import RolloutConfig
from rlcore.config.sections.training import ClusterConfig
from rlcore.config.yaml_settings import render_config
from rlcore.errors import ConfigError, UserError
from rlcore.planning.devices import GPUS, GPUS_PER_NODE
from rlcore.planning.fit import Option, by_time, judge, options
from rlcore.planning.job import Frozen, Job, Trained
from rlcore.planning.memory import AdapterSize, Layout, Recompute, RecomputeMethod
from rlcore.planning.publication import (
    Publication,
    bucket_limit,
    cut,
    fp8_bytes,
    is_projection,
    together,
)
from rlcore.planning.report import describe, report

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_PROMPT = 1024  # tokens, unless data.max_prompt_tokens is set
# Fields that ParallelConfig and Layout share.
_SHARED = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "sequence")
# Fields of policy.megatron that a `Layout` decides.
_RECOMPUTE = (
    *("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers"),
    "distribute_saved_activations",
)
# Keys that a plan decides, in addition to _RECOMPUTE.
_DECIDED = (
    *("cluster.launcher", "cluster.nodes", "cluster.processes_per_node"),
    *(f"policy.parallel.{name}" for name in ParallelConfig.model_fields),
    *("policy.optimizer.distributed", "rollout.engine.count", "rollout.engine.gpus"),
    "rollout.engine.tensor_parallel",
)


def plan(
    config: Config, *, trainer_gpus: int | None, engine_gpus: int | None, gpu_memory: int, gpu: str
) -> Iterator[str]:
    """Yield the configured layout, the layouts that fit, and the keys of the fastest.

    Args:
        trainer_gpus: GPUs of the trainer alone; None: as configured.
        engine_gpus: GPUs of the engines next to these; None: as configured.
        gpu_memory: bytes of each.
        gpu: a name in `rlcore.planning.devices.GPUS`.

    Raises:
        UserError: the engines cannot use that many GPUs.
        ModelError: `config.json` is missing, or its family is not supported.
    """
    gpus = trainer_gpus or world_size(config)
    given = config
    config = _placed(config, gpus, engine_gpus)
    arch, others = read_models(config, weights=False)
    job = make_job(config, arch, others)
    device = GPUS[gpu]

    def why_not(parallel: ParallelConfig) -> str | None:
        try:
            check_layout(arch, parallel, gpus)
            check_others(others, parallel, gpus)
        except ConfigError as error:
            return str(error)
        return None

    def admits(layout: Layout) -> bool:
        return why_not(_parallel(layout)) is None and not check(_laid_out(config, layout))

    own = why_not(config.policy.parallel) or judge(
        configured_layout(config, arch, gpus), job, device
    )
    found = options(job, gpus, device, admits)
    if isinstance(own, Option) and own.layout not in {option.layout for option in found}:
        found = sorted([own, *found], key=by_time)
    yield from report(job, gpus, _engines(config), gpu_memory, device, own, found)
    fastest = next((option.layout for option in found if option.fits(gpu_memory)), None)
    if fastest is not None:
        is_own = isinstance(own, Option) and fastest == own.layout
        yield ""
        yield f"# {describe(fastest)} as keys, for the configuration or a second file:"
        changed = config if is_own else _laid_out(config, fastest)
        yield from render_config(_keys(changed, given), {}).splitlines()


# --- counts of GPUs, and keys ---------------------------------------------------------------------


def _placed(config: Config, trainer: int, engine_gpus: int | None) -> Config:
    """Return the configuration for these numbers of trainer and engine GPUs.

    Raises UserError if the engines have no GPUs of their own, or cannot use that many.
    """
    engine = config.rollout.engine
    if engine_gpus is not None:
        got = f"--engine-gpus: got {engine_gpus}, but"
        if not _engine_gpus(config):
            raise UserError(
                f"{got} there is {_engines(config)}: leave it out, or change rollout.engine"
            )
        if engine_gpus % engine.tensor_parallel:
            raise UserError(
                f"{got} each engine takes {engine.tensor_parallel}"
                " (rollout.engine.tensor_parallel): give a multiple, or change the key"
            )
        config = config.model_copy(deep=True)
        engine = config.rollout.engine
        engine.count = engine_gpus // engine.tensor_parallel
        if len(engine.gpus) < engine_gpus:
            engine.gpus = []
    nodes = 1
    if trainer > GPUS_PER_NODE:
        divisors = (n for n in range(2, trainer + 1) if trainer % n == 0)
        nodes = next(n for n in divisors if trainer // n <= GPUS_PER_NODE)
    cluster: dict[str, Any] = {"nodes": nodes, "processes_per_node": trainer // nodes}
    needed = trainer + (0 if _shares_gpus(config) else _engine_gpus(config))
    takes_turns = engine.colocated and generates(config)
    if config.cluster.launcher == "local" and needed > GPUS_PER_NODE:
        cluster["launcher"] = "ray" if generates(config) else "torchrun"
    elif takes_turns and nodes > 1:
        # Only Ray starts engines on every node of the trainer.
        cluster["launcher"] = "ray"
    if takes_turns and nodes > 1 and trainer != world_size(config):
        config = config.model_copy(deep=True)
        on_each = max(1, trainer // nodes // engine.tensor_parallel)
        config.rollout.engine.count = nodes * on_each
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=cluster)})


def _engine_gpus(config: Config) -> int:
    """Return the GPUs that engines of the run take next to the trainer's."""
    engine = config.rollout.engine
    elsewhere = engine.colocated or engine.is_external or engine.device == "cpu"
    if not generates(config) or elsewhere or embedded_in_trainer(config):
        return 0
    return engine.count * engine.tensor_parallel


def _shares_gpus(config: Config) -> bool:
    """Whether engines may share the trainer's GPUs, which they do only if no other GPU is free."""
    kind = KINDS.get(config.rollout.engine.kind)
    return kind is not None and kind.shares_gpu


def _engines(config: Config) -> str:
    """Describe the engines of the run and their GPUs."""
    if not generates(config):
        return "no engines"
    engine = config.rollout.engine
    if engine.urls_file is not None:
        return "engines by rollout.engine.urls_file, whose GPUs are not counted"
    count = len(engine.urls) or engine.count
    number = f"{count} engine{'s' * (count > 1)}"
    if engine.urls:
        return f"{number} by rollout.engine.urls, whose GPUs are not counted"
    number += f" of TP {engine.tensor_parallel}"
    if engine.device == "cpu":
        return f"{number} on the CPU"
    if own := _engine_gpus(config):
        suffix = ", or on the trainer's where none is free" if _shares_gpus(config) else ""
        return f"{number} on {own} GPU{'s' * (own > 1)} of their own{suffix}"
    return f"{number} on the trainer's GPUs"


def _laid_out(config: Config, layout: Layout) -> Config:
    """Return the configuration with a layout that the search found."""
    policy = config.policy
    megatron = policy.megatron
    if (layout.recompute, layout.recompute_method, layout.recompute_layers) != _recompute(config):
        wanted: dict[str, Any] = {}
        if layout.recompute == "full":
            wanted = {
                "recompute_granularity": "full",
                "recompute_method": layout.recompute_method,
                "recompute_num_layers": layout.recompute_layers,
            }
        elif layout.recompute != "none":
            modules = layout.recompute.split("+")
            wanted = {"recompute_granularity": "selective", "recompute_modules": modules}
        cleared = {name: None for name in _RECOMPUTE if megatron.get(name) is not None}
        megatron = megatron | cleared | wanted
    distributed = layout.distributed or policy.optimizer.distributed
    changed = {
        "parallel": _parallel(layout),
        "megatron": megatron,
        "optimizer": policy.optimizer.model_copy(update={"distributed": distributed}),
    }
    return config.model_copy(update={"policy": policy.model_copy(update=changed)})


def _keys(config: Config, given: Config) -> dict[str, Any]:
    """Return the keys that a plan decides, nested, where they differ from `given` or defaults."""
    defaults = SimpleNamespace(
        cluster=ClusterConfig(), policy=PolicyConfig(), rollout=RolloutConfig()
    )
    nested: dict[str, Any] = {}

    def put(key: str, value: Any) -> None:
        *sections, name = key.split(".")
        section = nested
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value

    for key in _DECIDED:
        value = attrgetter(key)(config)
        if value != attrgetter(key)(given) or value != attrgetter(key)(defaults):
            put(key, value)
    for name in _RECOMPUTE:
        value = config.policy.megatron.get(name)
        if value is not None or given.policy.megatron.get(name) is not None:
            put(f"policy.megatron.{name}", value)
    return nested


# --- the job --------------------------------------------------------------------------------------


def configured_layout(config: Config, arch: Architecture, gpus: int) -> Layout:
    """Return the configured layout; the remaining GPUs are data parallelism.

    Raises ConfigError if the layers do not divide into the stages.
    """
    parallel = config.policy.parallel
    recompute, method, count = _recompute(config)
    uneven = parallel.first_stage_layers is not None or parallel.last_stage_layers is not None
    layout = Layout(
        **{name: getattr(parallel, name) for name in _SHARED},
        expert_tensor=parallel.expert_tensor or parallel.tensor,
        data=gpus // (parallel.tensor * parallel.pipeline * parallel.context),
        recompute=recompute,
        recompute_method=method,
        recompute_layers=count,
        stages=tuple(layers_of_stages(arch.num_layers, parallel)) if uneven else (),
    )
    return replace(layout, distributed=config.policy.optimizer.distributed and layout.has_copies)


def make_job(config: Config, arch: Architecture, others: Mapping[str, Architecture]) -> Job:
    """Return the run's models, and an optimizer step with every sample at its longest.

    Args:
        others: models with their own folder, by its key; other models have the policy's sizes.
    """
    policy = config.policy
    passes = job_passes(config)
    sizes = adapter_sizes(config, arch)
    without_mtp = replace(arch, mtp=False)
    trained = [
        Trained(
            "policy",
            arch.shape,
            offload_optimizer=policy.optimizer.offload,
            fp32_gradients=policy.optimizer.grad_reduce_in_fp32,
            adapters=sizes,
        )
    ]
    if passes.critic:
        given = config.critic
        own = others.get("critic.path", without_mtp)
        trained.append(
            Trained(
                "critic",
                own.shape,
                value_head=True,
                offload=given.offload,
                offload_optimizer=given.optimizer.offload,
                fp32_gradients=given.optimizer.grad_reduce_in_fp32,
                distributed=given.optimizer.distributed,
                adapters=adapter_sizes(config, own),
                shares_base=policy.lora is not None and given.path is None,
            )
        )
    frozen: list[Frozen] = []
    for name, is_scored, section in (
        ("reference", passes.reference, config.reference),
        ("teacher", passes.teacher, config.teacher),
    ):
        if is_scored:
            model = others.get(f"{name}.path", without_mtp)
            swapped = model.computes_like(arch)
            # The policy's adapters as they were are a few bytes on the host.
            is_policy = bool(sizes) and f"{name}.path" not in others
            offload = section.offload or is_policy
            frozen.append(Frozen(name, model.shape, offload, is_policy or (swapped and not sizes)))
    prompt = config.data.max_prompt_tokens or min(_PROMPT, policy.max_tokens_per_microbatch // 2)
    response = config.rollout.sampling.max_new_tokens
    if config.learns_from_rows:
        response = policy.max_tokens_per_microbatch - prompt
    # How many samples surely share a prompt in a pack. Transformer Engine's layers, which a GPU may
    # use, share nothing, and neither do some models.
    share = policy.share_prefixes
    is_shared = share == "on" or (share == "auto" and policy.transformer_engine == "off")
    is_shared = is_shared and not policy.mtp_coef and arch.why_whole is None
    return Job(
        trained=tuple(trained),
        frozen=tuple(frozen),
        sequences=max(1, samples_per_step(config) // config.algorithm.minibatches),
        length=prompt + response,
        trainable=response,
        scoring_passes=passes.count,
        pack_tokens=policy.max_tokens_per_microbatch,
        dtype_bytes=2 if config.model.dtype == "bf16" else 4,
        vocab_multiple=config.model.vocab_divisible_by,
        chunk_elements=policy.logprobs.chunk_elements or default_chunk_elements("cuda"),
        siblings=answers_per_prompt(config) if is_shared else 1,
        publication=make_publication(config, arch),
    )


def make_publication(config: Config, arch: Architecture) -> Publication | None:
    """Return how the run publishes its policy; None without engines."""
    if not generates(config):
        return None
    given = config.rollout.engine
    engines = len(given.urls) or given.count
    transport: str = given.transport
    kind = KINDS.get(given.kind)
    if embedded_in_trainer(config):
        transport = "copy"
    elif transport == "auto":
        has_handles = kind is None or "transport" in kind.own_keys
        transport = "tensor" if given.colocated and has_handles else "distributed"
    dtype = _DTYPES[given.dtype or config.model.dtype]
    tensors = [*weight_tensors(arch, dtype, "lm")]
    sizes = [(math.prod(shape) * _ITEM_BYTES[own], own) for _, shape, own in tensors]
    published = [
        fp8_bytes(shape) if given.quantization and is_projection(name, shape) else size
        for (name, shape, _), (size, _) in zip(tensors, sizes)
    ]
    limit = bucket_limit(sum(size for size, _ in sizes), given.bucket_bytes)
    senders = given.senders or engines
    cuts = cut(sizes, limit, together([name for name, _, _ in tensors]))
    buckets = tuple(sum(published[index] for index in bucket) for bucket in cuts)
    whole = [sum(sizes[index][0] for index in bucket) for bucket in cuts]
    adapted = () if published_adapters(config) is None else adapter_sizes(config, arch)
    return Publication(
        buckets,
        bucket_limit=limit,
        engines=engines,
        transport=transport,
        senders=senders * (1 if engines > senders else given.rails or given.tensor_parallel),
        unrounded=max((size for size, own in zip(whole, buckets) if size > own), default=0),
        engine_tensor=given.tensor_parallel,
        engine_dtype_bytes=_ITEM_BYTES[dtype],
        colocated=given.colocated,
        adapters=_ITEM_BYTES[dtype] * sum(one.whole + one.divided for one in adapted),
    )


def adapter_sizes(config: Config, arch: Architecture) -> tuple[AdapterSize, ...]:
    """Return the sizes of the adapters that a model gets by `policy.lora`."""
    lora = config.policy.lora
    if lora is None:
        return ()
    found = []
    for entry, shape in factor_rows(arch, lora):
        layer = LAYER_NUMBER.search(entry.megatron)
        assert layer is not None, f"{entry.megatron} is in no layer"
        size = math.prod(shape)
        whole = size if entry.split is Split.REPLICATED else 0
        found.append(AdapterSize(int(layer[1]), whole, size - whole, entry.expert is not None))
    return tuple(found)


def job_passes(config: Config) -> Passes:
    """Return the passes of a step; for a plugin, build it and ask."""
    found = built_in_passes(config)
    # Only a plugin that is built, with torch, knows its needs.
    if found is None:
        from rlcore.trainer.credit import CreditAssignment
        from rlcore.trainer.objective import Objective

        found = CreditAssignment(config, Objective(config.algorithm)).passes
    return found


def _parallel(layout: Layout) -> ParallelConfig:
    expert_tensor = None if layout.expert_tensor == layout.tensor else layout.expert_tensor
    return ParallelConfig(
        **{name: getattr(layout, name) for name in _SHARED}, expert_tensor=expert_tensor
    )


def _recompute(config: Config) -> tuple[Recompute, RecomputeMethod, int]:
    given = config.policy.megatron
    granularity = given.get("recompute_granularity")
    if granularity == "full":
        method = given.get("recompute_method")
        count = given.get("recompute_num_layers")
        if method not in get_args(RecomputeMethod) or not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"policy.megatron: recompute_granularity full with recompute_method {method!r} and"
                f" recompute_num_layers {count!r}: set uniform or block, and a number of layers"
            )
        return "full", cast(RecomputeMethod, method), count
    if granularity != "selective":
        return "none", "uniform", 1
    modules = given.get("recompute_modules") or ["core_attn"]
    counted = "+".join(module for module in ("core_attn", "mlp", "moe") if module in modules)
    return cast(Recompute, counted or "none"), "uniform", 1
