"""Every metric that a run writes, by name. `rlcore metrics` prints this.

Metrics of a step's tensors are defined where they are computed, in `rollout_metrics` and `moments`;
the counts of the loop, the optimizer and the rollouts are defined here, since no algorithm knows
them.

A "token" is a trainable token: prompts, tool output, observations and padding are in no metric. A
"sequence" is one with at least one trainable token, unless a line says "all sequences". A metric
whose inputs were not computed is absent from the log, never 0. A name with `<...>` in it stands for
a family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlcore.algorithms.moments import STREAMED_METRICS, MetricSpec
from rlcore.algorithms.rollout_metrics import BATCH_METRICS, CONVERSATION_METRICS

_ROWS = (
    # progress
    ("step", "step of the loop, from 1; 0 is the evaluation before training", "-", "steps"),
    ("episode", "samples trained on so far", "-", "samples"),
    ("epoch", "passes over the training data so far: prompts trained on, dropped by a filter or "
     "failed, by those that there are", "-", "epochs"),
    ("lr", "learning rate of the policy at this step", "-", "1"),
    # optimizer
    ("train/grad_norm", "global norm of the policy's gradient before clipping, at the last "
     "optimizer step", "-", "1"),
    ("train/optimizer_steps", "optimizer steps that this step's batch got", "-", "steps"),
    ("train/skipped_updates", "of those, steps left out because the gradient norm was not finite",
     "-", "steps"),
    ("train/updates_without_signal", "of those, steps left out because the gradient of the policy, "
     "or of the critic, was exactly 0: weights, moments and schedule stay", "-", "steps"),
    ("train/moe_aux_loss", "the policy's load-balancing loss, without its coefficient: 1 where "
     "routing is even", "tokens and layers with experts", "1"),
    ("train/moe_z_loss", "squared log of the denominator of its routers' softmax, without its "
     "coefficient", "tokens and layers with experts", "1"),
    ("train/routing_replay_changed", "pairs whose router would have chosen other experts than the "
     "replayed, at the last update", "pairs of a token and a layer with experts", "share"),
    ("train/critic_lr", "learning rate of the critic at this step", "-", "1"),
    ("train/critic_grad_norm", "global norm of the critic's gradient before clipping, at the last "
     "optimizer step", "-", "1"),
    # preferences
    ("preference/loss", "loss of the preference estimator", "pairs; answers for kto", "1"),
    ("preference/accuracy", "the chosen answer has the larger implicit reward", "pairs", "share"),
    ("preference/margin", "implicit reward of the chosen answer less that of the rejected one",
     "pairs", "reward"),
    ("preference/chosen_reward", "reward that the policy implies for a chosen, or good, answer, as "
     "the estimator defines it", "answers", "reward"),
    ("preference/rejected_reward", "the same of a rejected, or bad, answer", "answers", "reward"),
    ("preference/chosen_logprob", "mean log-prob of a token of a chosen answer", "answers", "nats"),
    ("preference/rejected_logprob", "the same of a rejected answer", "answers", "nats"),
    # rollout service
    ("rollout/scored_samples", "samples that were given a reward, since the row before; with those "
     "that filters dropped and the greedy ones of a baseline", "-", "samples"),
    ("rollout/reward_errors", "samples on which a part of the reward raised or returned no number",
     "-", "samples"),
    ("rollout/reward_timeouts", "samples on which a part took longer than its timeout_s", "-",
     "samples"),
    ("rollout/unscored_samples", "of both, samples that have no score for it: left out of group "
     "and loss, or given the number reward.on_error; the others are answers that a built-in grader "
     "failed over, and count as wrong", "-", "samples"),
    ("rollout/failed_tries", "tries of rollouts that failed (rollout.workflow.retries), since the "
     "row before", "-", "tries"),
    ("rollout/failed_tries_<kind>", "of those: error (an exception), timeout, exit, result "
     "(nonsense was returned); absent where there were none", "-", "tries"),
    ("rollout/failed_groups", "groups given up and replaced by others: a rollout failed in its "
     "last try, or too few have a score", "-", "groups"),
    ("rollout/requeued_prompts", "prompts given back to the data set: cut again and again, or more "
     "than the step needed", "-", "prompts"),
    ("rollout/excluded_prompts", "rows of the data left out: longer than data.max_prompt_tokens, "
     "or than the model's context less the response", "-", "prompts"),
    ("rollout/engine_restarts", "engines started again after they failed, since the row before",
     "-", "engines"),
    ("rollout/overdue_requests", "requests aborted at rollout.engine.request_timeout_s, which "
     "continue from their tokens, since the row before", "-", "requests"),
    ("rollout/retried_requests", "requests sent again because their engine failed, since the row "
     "before", "-", "requests"),
    ("rollout/resumed_responses", "responses that were cut (rollout.on_update abort) and continued "
     "by at least one token, since the row before; a response cut twice counts twice", "-",
     "responses"),
    ("rollout/resumed_tokens", "tokens that these had when they continued", "-", "tokens"),
    ("rollout/draft_acceptance", "proposed tokens that the model accepted (speculative decoding), "
     "in all answers since the row before, those of evaluations too; absent without a draft",
     "tokens that a draft proposed", "share"),
    ("rollout/tokens_per_verification", "tokens that a forward pass of the model commits: the "
     "accepted ones and one of its own; likewise", "verifications", "tokens"),
    ("rollout/engines_serving", "engines with the policy's weights when the samples were complete",
     "-", "engines"),
    ("rollout/buffered_groups", "groups that were finished and left for later steps at the "
     "hand-over (rollout.max_staleness above 0)", "-", "groups"),
    ("rollout/in_flight_groups", "groups that were in flight then", "-", "groups"),
    ("rollout/dropped_stale", "groups too old for any step to come, drawn again, since the row "
     "before", "-", "groups"),
    ("rollout/dropped_<filter>", "groups that this filter of rollout.filters dropped", "-",
     "groups"),
    # the curriculum, at the hand-over (data.curriculum)
    ("curriculum/seen", "prompts of which a group has finished", "prompts", "share"),
    ("curriculum/most_seen", "finished groups of the prompt that has the most", "-", "groups"),
    ("curriculum/pass_rate", "recent pass rate of a prompt; absent while none is known",
     "prompts with a pass rate", "share"),
    ("curriculum/always_right", "recent pass rate of 1", "prompts with a pass rate", "share"),
    ("curriculum/never_right", "recent pass rate of 0", "prompts with a pass rate", "share"),
    ("curriculum/effective_prompts", "(sum of weights)^2 / sum of their squares: as many prompts "
     "with equal weights are as spread out", "-", "prompts"),
    # evaluation, in the row of its step
    ("eval/score", "reward of the held-out prompts", "rollouts", "reward"),
    ("eval/accuracy", "1 where the answer is right; absent where nothing says right or wrong",
     "rollouts with a verdict", "share"),
    ("eval/loss", "negative log-prob of held-out labels, in supervised fine-tuning", "tokens",
     "nats"),
    ("eval/preference_<name>", "of held-out rows, what preference/<name> is of those trained on",
     "pairs, or answers", "as there"),
    ("eval/sequence_lengths", "trainable tokens", "rollouts", "tokens"),
    ("eval/stop_token_rate", "1 where the response ended with a stop token", "rollouts", "share"),
    ("eval/reward_errors", "samples on which a part of the reward raised or returned no number",
     "-", "samples"),
    ("eval/reward_timeouts", "samples on which a part took longer than its timeout_s", "-",
     "samples"),
    ("eval/unscored", "of both, samples that have no score for it: in no mean, or given the number "
     "reward.on_error", "-", "samples"),
    ("eval/failed", "rollouts that failed in all tries, taken for wrong; their score is 0, or the "
     "number reward.on_error", "-", "rollouts"),
    ("eval/<metric>_low", "lower end of the metric's 95 % interval over prompts", "-",
     "as the metric"),
    ("eval/<metric>_high", "upper end of it", "-", "as the metric"),
    ("eval/avg@<n>", "share of right answers among the n samples of a prompt", "prompts", "share"),
    ("eval/pass@<k>", "at least one of k answers is right: mean over all subsets of k of the "
     "samples, unbiased", "prompts", "share"),
    ("eval/maj@<k>", "the most frequent of k answers is right: mean over all subsets of k, ties at "
     "even odds", "prompts", "share"),
    ("eval/<name>", "of held-out conversations, what conversation/<name> is of those trained on",
     "as there", "as there"),
    ("eval/<set>/<metric>", "any of these, of one set of evaluation.sets", "as the metric",
     "as the metric"),
    # time and speed
    ("time/from_scratch", "wall clock since the run began, resumed parts included", "-", "s"),
    ("time/start", "start of rank 0's process, until the engines had weights; in the first row of "
     "each start", "-", "s"),
    ("time/step", "all of one step but its evaluation, log and checkpoint", "-", "s"),
    ("time/generation", "wait of the trainer for rollouts in one step", "-", "s"),
    ("time/engine", "engines had a request: while the trainer waited, or (rollout.max_staleness "
     "above 0) since the hand-over before", "-", "s"),
    ("time/transfer", "laying the batch out and sending each rank its share", "-", "s"),
    ("time/logprobs", "passes for log-probs, KL and values in one step", "-", "s"),
    ("time/advantages", "estimator, loss weights, and sending them to the ranks", "-", "s"),
    ("time/training", "forward, backward and optimizer of one step", "-", "s"),
    ("time/publish", "publication of one version of the weights", "-", "s"),
    ("time/handover", "shared GPUs changed hands between trainer and engines "
     "(`rollout.engine.colocated`)", "-", "s"),
    ("time/evaluation", "generating and scoring the held-out prompts", "-", "s"),
    ("time/checkpoint", "training stood still for checkpoints since the row before", "-", "s"),
    ("time/checkpoint_write", "the slowest rank wrote in the background what was committed since "
     "the row before", "-", "s"),
    ("perf/tokens_per_second", "model tokens trained, prompts included, by the time of the step",
     "seconds", "tokens/s"),
    ("perf/shared_tokens", "model tokens that a micro-batch had at the same place behind the same "
     "tokens already, and that were not computed again (policy.share_prefixes)",
     "model tokens", "share"),
    ("perf/computed_tokens_per_second", "model tokens trained and not shared, by the time of the "
     "step", "seconds", "tokens/s"),
    ("perf/mfu", "model FLOPs of the policy's passes, an update as three forward ones, by what the "
     "trainer's GPUs could have done in the time of the step; only where their peak is known" ,
     "seconds x peak FLOP/s", "share"),
    ("perf/computed_mfu", "the same without what the plan shares", "seconds x peak FLOP/s",
     "share"),
    ("perf/trainer_idle_fraction", "time that the trainer waited", "time of the step", "share"),
    ("perf/engine_idle_fraction", "time that the engines had no request",
     "time of the step, or between two hand-overs (rollout.max_staleness above 0)", "share"),
)  # fmt: skip

_SECTIONS = (
    *(
        "",
        "objective",
        "preference",
        "loss",
        "policy",
        "train",
        "val",
        "rollout",
        "conversation",
        "correction",
    ),
    *("curriculum", "eval", "time", "perf"),
)


def _section(spec: MetricSpec) -> int:
    return _SECTIONS.index(spec.name.partition("/")[0] if "/" in spec.name else "")


METRICS: Mapping[str, MetricSpec] = {
    spec.name: spec
    for spec in sorted(
        (
            *BATCH_METRICS,
            *CONVERSATION_METRICS,
            *STREAMED_METRICS,
            *(MetricSpec(*row) for row in _ROWS),
        ),
        key=_section,
    )
}
_FAMILIES = tuple(
    (re.compile(re.sub("<[^>]*>", "[^/]+", name)), spec)
    for name, spec in METRICS.items()
    if "<" in name
)


def metric_spec(name: str) -> MetricSpec | None:
    """Return the definition of a name in metrics.jsonl: its own, or that of its family."""
    own = METRICS.get(name)
    return own or next((spec for pattern, spec in _FAMILIES if pattern.fullmatch(name)), None)
