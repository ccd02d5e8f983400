"""`rlcore plan`: the configuration's models on so many GPUs. Reads `config.json` files, never weights."""

from __future__ import annotations

from collections.abc import Iterator

from backends.megatron.convert.architecture import Architecture, read_architecture
from rlcore.config import Config
from rlcore.config.derived import samples_per_step
from rlcore.config.policy import ParallelConfig
from rlcore.credit import Credit
from rlcore.errors import ConfigError
from rlcore.objective import Objective
from rlcore.planning.devices import GPUS
from rlcore.planning.fit import Frozen, Trained
from rlcore.planning.memory import Layout, Recompute
from rlcore.planning.report import report
from rlcore.planning.search import Job, judge, options

_TILE = 1 << 24     # logits that exist at one time on CUDA, by default
_PROMPT = 1024      # tokens, where data.max_prompt_tokens does not say


def plan(config: Config, *, gpus: int, gpu_memory: int, gpu: str) -> Iterator[str]:
    """Lines to print: the configuration's layout, and those that fit on `gpus` of `gpu_memory` bytes, the fastest first.

    Raises ModelError for a `config.json` that is missing or not converted.
    """
    from backends.megatron.refusals import check_layout

    arch = read_architecture(config.model.path, weights=False)

    def why_not(layout: Layout) -> str | None:
        try:
            check_layout(arch, _parallel(layout), gpus)
        except ConfigError as error:
            return str(error)
        return None

    job = make_job(config, arch)
    device = GPUS[gpu]
    own_layout, refusal = configured_layout(config, gpus), None
    if gpus % (own_layout.tensor * own_layout.pipeline * own_layout.context):
        refusal = f"policy.parallel: {gpus} GPUs do not divide into models of tensor x pipeline x context"
    refusal = refusal or why_not(own_layout)
    own = refusal or judge(own_layout, job, device)
    found = options(job, gpus, device, lambda layout: why_not(layout) is None)
    return report(job, gpus, gpu_memory, device, own, found)


def configured_layout(config: Config, gpus: int) -> Layout:
    """What the configuration says; what is left of the GPUs is data parallelism."""
    parallel = config.policy.parallel
    replica = parallel.tensor * parallel.pipeline * parallel.context
    return Layout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor or parallel.tensor,
        data=max(1, gpus // replica),
        sequence=parallel.sequence,
        distributed=config.policy.optimizer.distributed,
        recompute=_recompute(config),
    )


def make_job(config: Config, arch: Architecture) -> Job:
    """The models that the run builds, and the work of one optimizer step with every sample at its longest."""
    policy, shape = config.policy, arch.shape
    trained = [Trained("policy", shape, offload_optimizer=policy.optimizer.offload)]
    credit = None if config.is_sft else Credit(config, Objective(config.algorithm))
    if credit is not None and credit.needs_critic:
        given = config.critic
        of_critic = shape if given.path is None else read_architecture(given.path, weights=False).shape
        trained.append(Trained("critic", of_critic, True, given.offload, given.optimizer.offload))
    frozen, passes = [], len(trained) - 1 + int(credit is not None and credit.needs_logprobs)
    if credit is not None and credit.needs_reference:
        other = shape if config.reference.path is None else read_architecture(config.reference.path, weights=False).shape
        frozen.append(Frozen("reference", other, config.reference.offload, guest=other == shape))
        passes += 1
    if credit is not None and credit.needs_teacher and config.teacher.path is not None:
        teacher = read_architecture(config.teacher.path, weights=False).shape
        frozen.append(Frozen("teacher", teacher, config.teacher.offload, guest=teacher == shape))
        passes += 1
    prompt = config.data.max_prompt_tokens or min(_PROMPT, policy.max_tokens_per_microbatch // 2)
    response = policy.max_tokens_per_microbatch - prompt if config.is_sft else config.rollout.sampling.max_new_tokens
    return Job(
        trained=tuple(trained),
        frozen=tuple(frozen),
        sequences=max(1, samples_per_step(config) // config.algorithm.minibatches),
        length=prompt + response,
        trainable=response,
        scoring_passes=passes,
        pack_tokens=policy.max_tokens_per_microbatch,
        dtype_bytes=2 if config.model.dtype == "bf16" else 4,
        vocab_multiple=config.model.vocab_divisible_by,
        chunk_elements=policy.logprobs.chunk_elements or _TILE,
    )


def _parallel(layout: Layout) -> ParallelConfig:
    return ParallelConfig(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual_pipeline=layout.virtual_pipeline,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=None if layout.expert_tensor == layout.tensor else layout.expert_tensor,
        sequence=layout.sequence,
    )


def _recompute(config: Config) -> Recompute:
    given = config.policy.megatron
    if given.get("recompute_granularity") == "full":
        return "full"
    if given.get("recompute_granularity") != "selective":
        return "none"
    modules = set(given.get("recompute_modules") or ["core_attn"])
    both: dict[frozenset[str], Recompute] = {
        frozenset({"core_attn"}): "core_attn", frozenset({"mlp"}): "mlp", frozenset({"core_attn", "mlp"}): "core_attn+mlp"
    }  # fmt: skip
    return both.get(frozenset(modules & {"core_attn", "mlp"}), "none")
