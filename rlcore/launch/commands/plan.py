"""`rlcore plan`: which layouts of the models fit on the GPUs. It reads no weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from backends.megatron.checks.layout import check_layout, check_others, layers_of_stages
from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.read import read_architecture
from rlcore.config import Config
from rlcore.config.derived import Passes, built_in_passes, other_folders, samples_per_step
from rlcore.config.sections.policy import ParallelConfig, default_chunk_elements
from rlcore.errors import ConfigError
from rlcore.planning.devices import GPUS
from rlcore.planning.fit import Frozen, Trained
from rlcore.planning.memory import Layout, Recompute
from rlcore.planning.report import report
from rlcore.planning.search import Job, judge, options

_PROMPT = 1024  # tokens, where data.max_prompt_tokens does not say
# fields that ParallelConfig and Layout share
_SHARED = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "sequence")


def plan(config: Config, *, gpus: int, gpu_memory: int, gpu: str) -> Iterator[str]:
    """Yield lines on the configured layout, and on layouts that fit, the fastest first.

    Args:
        gpus: the number of GPUs.
        gpu_memory: bytes of each.
        gpu: a name in `rlcore.planning.devices.GPUS`.

    Raises ModelError for a `config.json` that is missing or of a family that is not converted.
    """
    arch = read_architecture(config.model.path, weights=False, bridge=config.model.bridge)
    others = {
        key: read_architecture(path, weights=False, bridge=config.model.bridge)
        for key, path in other_folders(config).items()
    }
    job = make_job(config, arch, others)
    device = GPUS[gpu]

    def why_not(parallel: ParallelConfig) -> str | None:
        try:
            check_layout(arch, parallel, gpus)
            check_others(others, parallel, gpus)
        except ConfigError as error:
            return str(error)
        return None

    own = why_not(config.policy.parallel) or judge(
        configured_layout(config, arch, gpus), job, device
    )
    found = options(job, gpus, device, lambda layout: why_not(_parallel(layout)) is None)
    return report(job, gpus, gpu_memory, device, own, found)


def configured_layout(config: Config, arch: Architecture, gpus: int) -> Layout:
    """The configured layout; the GPUs that it leaves are data parallelism.

    Raises ConfigError where the layers do not divide into the stages.
    """
    parallel = config.policy.parallel
    uneven = parallel.first_stage_layers is not None or parallel.last_stage_layers is not None
    return Layout(
        **{name: getattr(parallel, name) for name in _SHARED},
        expert_tensor=parallel.expert_tensor or parallel.tensor,
        data=gpus // (parallel.tensor * parallel.pipeline * parallel.context),
        distributed=config.policy.optimizer.distributed,
        recompute=_recompute(config),
        stages=tuple(layers_of_stages(arch.num_layers, parallel)) if uneven else (),
    )


def make_job(config: Config, arch: Architecture, others: Mapping[str, Architecture]) -> Job:
    """The models that the run builds, and an optimizer step with every sample at its longest.

    Args:
        others: the models with a folder of their own, by its key; a model without has the policy's
            sizes.
    """
    policy = config.policy
    shape = arch.shape
    passes = job_passes(config)
    trained = [Trained("policy", shape, offload_optimizer=policy.optimizer.offload)]
    if passes.critic:
        given = config.critic
        other = others.get("critic.path", arch).shape
        optimizer = given.optimizer
        trained.append(
            Trained("critic", other, True, given.offload, optimizer.offload, optimizer.distributed)
        )
    frozen: list[Frozen] = []
    for name, is_scored, section in (
        ("reference", passes.reference, config.reference),
        ("teacher", passes.teacher, config.teacher),
    ):
        if is_scored:
            other = others.get(f"{name}.path", arch).shape
            frozen.append(Frozen(name, other, section.offload, swapped_in=other == shape))
    prompt = config.data.max_prompt_tokens or min(_PROMPT, policy.max_tokens_per_microbatch // 2)
    response = (
        policy.max_tokens_per_microbatch - prompt
        if config.is_sft
        else config.rollout.sampling.max_new_tokens
    )
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
        siblings=_siblings(config),
    )


def _siblings(config: Config) -> int:
    """The samples of a group, whose prompt a pack holds once; 1 where that is not sure.

    With Transformer Engine's layers, which a GPU may have, nothing is shared.
    """
    policy = config.policy
    sure = policy.share_prefixes == "on" or (
        policy.share_prefixes == "auto" and policy.transformer_engine == "off"
    )
    return config.rollout.samples_per_prompt if sure and not config.is_sft else 1


def job_passes(config: Config) -> Passes:
    """Return the passes of a step; a plugin is asked."""
    found = built_in_passes(config)
    if found is None:  # a plugin must be built, with torch, to say what it needs
        from rlcore.trainer.credit import CreditAssignment
        from rlcore.trainer.objective import Objective

        found = CreditAssignment(config, Objective(config.algorithm)).passes
    return found


def _parallel(layout: Layout) -> ParallelConfig:
    expert_tensor = None if layout.expert_tensor == layout.tensor else layout.expert_tensor
    return ParallelConfig(
        **{name: getattr(layout, name) for name in _SHARED}, expert_tensor=expert_tensor
    )


def _recompute(config: Config) -> Recompute:
    given = config.policy.megatron
    if given.get("recompute_granularity") == "full":
        return "full"
    if given.get("recompute_granularity") != "selective":
        return "none"
    modules = given.get("recompute_modules") or ["core_attn"]
    counted = "+".join(module for module in ("core_attn", "mlp", "moe") if module in modules)
    return cast(Recompute, counted or "none")
