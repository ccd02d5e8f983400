"""Values that follow from a configuration: pure functions for every part of rlcore."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter
from typing import Any

from rlcore.config.built_in import ESTIMATORS, LOSSES
from rlcore.config.engine_registry import is_import_path
from rlcore.config.evaluation_sets import evaluation_sets
from rlcore.config.sections.policy import LoraConfig
from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.root import Config
from rlcore.deadlines import ABORT_S, REQUEST_S, TOKEN_S, TRANSPORT_GRACE_S

# Estimator keywords that have their own configuration key -> that key.
COEFFICIENTS = {
    "kl_coef": "algorithm.kl.reward_coef",
    "distill_coef": "algorithm.distillation.coef",
}

# The keyword through which estimators get the weights of the reward's parts.
PART_WEIGHTS = "reward_weights"

FP8_MULTIPLE = 16  # the number of tokens in an FP8 matmul is a multiple of this

REFERENCE_FIELDS = frozenset({"kl", "ref_logprobs"})


def in_weight_group(engine: EngineConfig) -> bool:
    """Whether engines may receive weights over a process group (NCCL if both sides have GPUs)."""
    return engine.transport in ("auto", "distributed") and not engine.colocated


def compares_pairs(config: Config) -> bool:
    """Whether every row must have a chosen and a rejected answer; not known of a plugin."""
    declared = ESTIMATORS.get(config.algorithm.estimator.name)
    return declared is not None and declared.preferences and declared.compares_group


def generates(config: Config) -> bool:
    """Whether engines generate the training data, rather than labels or a recording."""
    return not config.learns_from_rows and config.training.replay is None


def truncates(config: Config) -> bool:
    """Whether sampling is restricted to a part of the vocabulary. Greedy decoding is not."""
    sampling = config.rollout.sampling
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def recorded_fields(config: Config) -> dict[str, str]:
    """Return the `Sample` fields that the engine records -> the key that requests each."""
    asked = {
        "sampling_mask": ("policy.logprobs.keep_sets", config.policy.logprobs.keep_sets),
        "routed_experts": ("policy.routing_replay", config.policy.routing_replay == "engine"),
    }
    return {name: key for name, (key, on) in asked.items() if on}


def per_rollout_loss(config: Config) -> bool:
    """Return whether the samples of one rollout count as one sequence in the loss."""
    given = config.algorithm.loss.per_rollout
    if given is None:
        return config.is_sft or config.rollout.workflow.name != "single_turn"
    return given


def needs_teacher(config: Config, estimator_needs: Collection[str] = ()) -> bool:
    """Return whether the frozen teacher is loaded.

    Args:
        estimator_needs: the fields that the built estimator declares.
    """
    return not config.learns_from_rows and bool(
        config.algorithm.distillation.coef or "teacher_logprobs" in estimator_needs
    )


def needs_critic(estimator_needs: Collection[str]) -> bool:
    """Return whether a value model is trained."""
    return "values" in estimator_needs


def coefficients(config: Config) -> dict[str, float]:
    """Return the values of COEFFICIENTS, by the estimator's keyword."""
    return {keyword: attrgetter(path)(config) for keyword, path in COEFFICIENTS.items()}


def takes_coefficients(config: Config) -> bool | None:
    """Return whether a built-in estimator takes COEFFICIENTS; None for a plugin."""
    declared = ESTIMATORS.get(config.algorithm.estimator.name)
    return None if declared is None else declared.shaped_rewards


def estimator_options(config: Config, keywords: Collection[str]) -> dict[str, Any]:
    """Return the estimator's keywords: its own, and those that other keys give it.

    These are COEFFICIENTS, and PART_WEIGHTS in the order of `reward.parts`.

    Args:
        keywords: the names that its constructor takes.
    """
    weights = [part.weight for part in config.reward.parts.values()]
    given = {**coefficients(config), PART_WEIGHTS: weights}
    shared = {name: value for name, value in given.items() if name in keywords}
    return config.algorithm.estimator.options | shared


def samples_per_step(config: Config) -> int:
    """Return how many sequences one step trains on."""
    rows = config.training.batch_size
    prompts = rows if config.learns_from_rows else config.rollout.prompts_per_step
    return prompts * answers_per_prompt(config)


def answers_per_prompt(config: Config) -> int:
    """Return how many answers a prompt has in a step."""
    if config.learns_from_rows:
        return 1 + config.is_preference
    return config.rollout.samples_per_prompt


def total_steps(config: Config, num_prompts: int) -> int:
    """Return the steps of the run; a started step counts.

    Args:
        num_prompts: rows of the data, used only where the length is given in `training.epochs`.
    """
    training = config.training
    if training.steps is not None:
        return training.steps
    if training.episodes is not None:
        return math.ceil(training.episodes / samples_per_step(config))
    if training.epochs is None:
        raise ValueError(
            "one of training.steps, training.episodes and training.epochs must be given"
        )
    if num_prompts < 1:
        raise ValueError(f"training.epochs needs the number of prompts, got {num_prompts}")
    per_step = training.batch_size if config.learns_from_rows else config.rollout.prompts_per_step
    # as written: in floats 1.1 * 100 is more than 110
    return max(1, math.ceil(Fraction(str(training.epochs)) * num_prompts / per_step))


def updates_per_step(config: Config) -> int:
    """Return the optimizer steps that one batch gets."""
    return config.algorithm.epochs * config.algorithm.minibatches


def policy_updates(config: Config, updates: int) -> int:
    """Return how many of `updates` train the policy too, in a run with a critic."""
    return max(1, updates - config.critic.warmup_steps * updates_per_step(config))


def other_folders(config: Config) -> dict[str, str]:
    """Return the folders of reference, teacher and critic by their keys, where configured."""
    keys = ("reference.path", "teacher.path", "critic.path")
    return {key: path for key in keys if (path := attrgetter(key)(config))}


def world_size(config: Config) -> int:
    """Return the configured number of ranks; if torchrun decides, the fewest that fit."""
    processes = config.cluster.nodes * config.cluster.processes_per_node
    if config.cluster.launcher == "torchrun" and processes == 1:
        return model_parallel_size(config)
    return processes


def embedded_in_trainer(config: Config) -> bool:
    """Whether the embedded engine runs in the trainer's process, where a debugger reaches it.

    That requires the rollout service in the same process, and no other engine.
    """
    rollout = config.rollout
    return (
        rollout.service == "in_process"
        and rollout.engine.kind == "embedded"
        and rollout.engine.count == 1
        and config.cluster.launcher != "ray"
    )


def hosted_engines(config: Config) -> int:
    """Return the number of engines that Ray places, each in an actor.

    Engines of other packages run in the process of the rollout service instead.
    """
    engine = config.rollout.engine
    if not generates(config) or engine.is_external or is_import_path(engine.kind):
        return 0
    return engine.count


def placement_timeout_s(config: Config) -> float:
    """Return the seconds that an engine may wait for Ray's placement before its start."""
    return config.cluster.start_timeout_s if config.cluster.launcher == "ray" else 0.0


def restart_timeout_s(engine: EngineConfig, placement_timeout_s: float) -> float:
    """Return the longest restart of a failed engine in seconds: pause, placement, start."""
    return engine.restart.max_backoff_s + placement_timeout_s + engine.start_timeout_s


def max_request_s(config: Config) -> float:
    """Return the seconds after which a request is aborted; pauses of its engine do not count."""
    if (given := config.rollout.engine.request_timeout_s) is not None:
        return given
    evaluated = [one.max_new_tokens or 0 for one in evaluation_sets(config)]
    return REQUEST_S + TOKEN_S * max(config.rollout.sampling.max_new_tokens, *evaluated, 0)


def all_engines_timeout_s(config: Config) -> float:
    """Return the seconds for a step that needs every engine.

    An engine may have to restart first, and requests in flight to end. The end of a publication
    alone waits for six answers: to load (twice the limit), to close, to compare, to set, to resume.
    """
    engine = config.rollout.engine
    return (
        restart_timeout_s(engine, placement_timeout_s(config))
        + max_request_s(config)
        + engine.update_timeout_s * 6
    )


def publication_call_s(config: Config) -> float:
    """Return the seconds after which the engines' event loop counts as blocked in a publication.

    Each step of a call has its own deadline. This is the longest of them times the number of steps.
    """
    engine = config.rollout.engine
    longest = max(
        engine.update_timeout_s,
        max_request_s(config) + ABORT_S,
        restart_timeout_s(engine, placement_timeout_s(config)),
    )
    return 6 * (longest + TRANSPORT_GRACE_S)


def gpus_per_node(config: Config) -> float:
    """Return the number of GPUs that the ranks of a node request from Ray.

    Each rank takes whole GPUs, or a share of a single GPU.
    """
    share = config.cluster.ray.rank_gpus
    ranks = config.cluster.processes_per_node
    if not 0 < share < 1:
        return share * ranks
    full, others = divmod(ranks, math.floor(1 / share))
    return full + others * share


def pack_multiple(config: Config) -> int:
    """Return the multiple to which micro-batches are padded, so that ranks hold equal shares.

    Context parallelism cuts a sequence into 2 x CP chunks, sequence parallelism a pack into slices;
    FP8 has its own unit.
    """
    parallel = config.policy.parallel
    chunks = 1 if parallel.context == 1 else 2 * parallel.context
    slices = parallel.tensor if parallel.sequence else 1
    return chunks * slices * (1 if config.policy.fp8 is None else FP8_MULTIPLE)


def micro_batch_tokens(config: Config) -> int:
    """Return the tokens of a full micro-batch, rounded down so that padding fits too."""
    limit = config.policy.max_tokens_per_microbatch
    return limit - limit % pack_multiple(config)


def model_parallel_size(config: Config) -> int:
    """Return the smallest number of ranks that the layout fits.

    These ranks hold a whole number of copies of the dense weights, and of the experts.
    """
    parallel = config.policy.parallel
    expert_tensor = parallel.tensor if parallel.expert_tensor is None else parallel.expert_tensor
    dense = parallel.tensor * parallel.context
    experts = expert_tensor * parallel.expert
    return math.lcm(dense, experts if parallel.expert > 1 else 1) * parallel.pipeline


# --- the passes of a step -------------------------------------------------------------------------


@dataclass(frozen=True)
class Passes:
    """The passes of a step without gradients; a model without a pass is not loaded."""

    policy: bool
    reference: bool
    teacher: bool
    critic: bool

    @property
    def count(self) -> int:
        """The number of passes in a step."""
        return sum((self.policy, self.reference, self.teacher, self.critic))


def passes(
    config: Config,
    *,
    estimator_needs: Collection[str],
    loss_needs: Collection[str],
    whole_step_loss: bool,
) -> Passes:
    """Return the passes of the configured algorithm.

    Args:
        estimator_needs, loss_needs: the fields that the built estimator and policy loss declare.
        whole_step_loss: the loss needs the log-probs of the whole optimizer step before it is
            split.
    """
    algorithm = config.algorithm
    training = config.training
    kl = algorithm.kl
    reference = not config.is_sft and bool(
        kl.reward_coef
        or kl.loss_coef
        or kl.monitor
        or training.early_stopping
        or REFERENCE_FIELDS.intersection((*estimator_needs, *loss_needs))
    )
    critic = needs_critic(estimator_needs)
    # A single update sees the whole batch with the weights that generated it.
    updated_once = (
        updates_per_step(config) == 1
        and training.debug != "rollout_only"
        and not (critic and config.critic.warmup_steps)
    )
    policy = not config.is_sft and bool(
        whole_step_loss
        or algorithm.old_logprobs == "recompute"
        or training.early_stopping
        or config.policy.routing_replay == "logprobs"
        or any(coefficients(config).values())
        or not {"kl", "logprobs"}.isdisjoint(estimator_needs)
        or (not updated_once and (algorithm.old_logprobs == "auto" or reference))
    )
    return Passes(policy, reference, needs_teacher(config, estimator_needs), critic)


def built_in_passes(config: Config) -> Passes | None:
    """Return `passes` if estimator and loss are built in; None if one is a plugin."""
    estimator = ESTIMATORS.get(config.algorithm.estimator.name)
    loss = LOSSES.get(config.algorithm.loss.name)
    if estimator is None or loss is None:
        return None
    return passes(
        config,
        estimator_needs=estimator.needs,
        loss_needs=loss.needs,
        whole_step_loss=loss.batch_stats,
    )


def published_adapters(config: Config) -> LoraConfig | None:
    """The adapters that engines get by themselves; None where they get whole weights."""
    lora = config.policy.lora
    return None if lora is None or lora.merged else lora
