"""Every metric that a run writes: what it is, what it is divided by, and its unit. `rlcore metrics` prints this.

A "token" is a trainable token: prompts, tool output, observations and padding are in no metric. A "sequence" is one
with at least one trainable token, unless a line says "all sequences". A metric whose inputs were not computed is
absent from the log, never 0. A name with `<...>` in it stands for a family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MetricSpec:
    """One metric: its name, what it is, over what it is averaged ("-" where over nothing), and its unit."""

    name: str
    definition: str
    denominator: str
    unit: str


_ROWS = (
    # progress
    ("step", "step of the loop, from 1; 0 is the evaluation before training", "-", "steps"),
    ("episode", "samples trained on so far", "-", "samples"),
    ("epoch", "passes over the training data so far", "-", "epochs"),
    ("lr", "learning rate of the policy at this step", "-", "1"),
    # objective
    ("objective/kl", "token sum of the raw KL estimate (algorithm.kl.reward_kind) against the reference", "sequences",
     "nats"),
    ("objective/scores", "outcome reward", "sequences", "reward"),
    ("objective/rlhf_reward", "objective/scores + objective/non_score_reward", "sequences", "reward"),
    ("objective/non_score_reward", "-reward_coef * objective/kl (open-instruct's page prints the other sign)",
     "sequences", "reward"),
    ("objective/entropy", "token sum of the policy's entropy", "sequences", "nats"),
    ("objective/loss", "what the optimizer minimised: policy, KL and entropy terms", "optimizer steps", "1"),
    ("objective/verifiable_correct_rate", "1 where the verifier accepted the answer", "sequences given a verdict",
     "share"),
    # training
    ("loss/policy_avg", "sum of loss weight * policy loss over tokens", "optimizer steps", "1"),
    ("loss/value_avg", "sum of loss weight * value loss over tokens", "optimizer steps", "1"),
    ("policy/approxkl_avg", "half the squared log-ratio of the policy to the one before the step", "tokens", "nats"),
    ("policy/clipfrac_avg", "1 where the clip changes the policy loss", "tokens", "share"),
    ("policy/clipfrac_high_avg", "1 where the upper limit does, advantage > 0", "tokens", "share"),
    ("policy/clipfrac_low_avg", "1 where the lower limit does, advantage < 0", "tokens", "share"),
    ("policy/dual_clipfrac_avg", "1 where dual clip caps the policy loss", "tokens", "share"),
    ("policy/entropy_avg", "entropy of the policy", "tokens", "nats"),
    ("policy/<name>_avg", "what a policy loss plugin reports as <name>", "tokens or sequences", "the plugin's"),
    ("train/grad_norm", "global norm of the policy's gradient before clipping, at the last optimizer step", "-", "1"),
    ("train/optimizer_steps", "optimizer steps that this step's batch got", "-", "steps"),
    ("train/skipped_updates", "of those, steps left out because the gradient norm was not finite", "-", "steps"),
    ("train/critic_lr", "learning rate of the critic at this step", "-", "1"),
    ("train/critic_grad_norm", "global norm of the critic's gradient before clipping, at the last optimizer step", "-", "1"),
    # validation
    ("val/sequence_lengths", "response tokens", "all sequences", "tokens"),
    ("val/sequence_lengths_min", "response tokens of the shortest sequence", "-", "tokens"),
    ("val/sequence_lengths_max", "response tokens of the longest sequence", "-", "tokens"),
    ("val/num_stop_token_ids", "sequences that ended with a stop token, of all", "-", "sequences"),
    ("val/stop_token_rate", "1 where the sequence ended with a stop token", "all sequences", "share"),
    ("val/ratio", "probability ratio of the policy to the one before the step", "tokens", "1"),
    ("val/ratio_var", "variance of that ratio", "tokens - 1", "1"),
    ("val/ratio_max", "largest such ratio", "-", "1"),
    ("val/clipfrac_avg", "1 where the clip raises the value loss", "tokens", "share"),
    ("val/explained_variance", "1 - var(returns - values) / var(returns); absent where the returns do not vary",
     "tokens", "share"),
    # rollout
    ("rollout/kl", "raw KL estimate against the reference", "tokens", "nats"),
    ("rollout/kl_clamped_share", "1 where the log-ratio to the reference is beyond +-20", "tokens", "share"),
    ("rollout/reward", "outcome reward", "all sequences", "reward"),
    ("rollout/reward_std", "standard deviation of the outcome reward", "all sequences - 1", "reward"),
    ("rollout/zero_std_groups", "groups of two or more sequences whose rewards are all equal", "-", "groups"),
    ("rollout/singleton_groups", "groups of one sequence", "-", "groups"),
    ("rollout/staleness_mean", "policy version trained minus the version that made the token", "tokens", "versions"),
    ("rollout/staleness_max", "largest such difference", "-", "versions"),
    ("rollout/train_rollout_logprob_diff", "absolute difference of the trainer's and the engine's log-prob", "tokens",
     "nats"),
    ("rollout/train_rollout_logprob_diff_max", "largest such difference", "-", "nats"),
    ("rollout/train_rollout_logprob_diff_kl", "k3 estimate of KL(engine || trainer)", "tokens", "nats"),
    ("rollout/ess", "effective sample size of w = trainer / engine probability: (sum w)^2 / (M * sum w^2)", "tokens",
     "share"),
    ("rollout/reward_errors", "samples whose reward raised or returned no number, scored reward.on_error", "-", "samples"),
    ("rollout/reward_timeouts", "samples whose reward took longer than reward.timeout_s, scored so too", "-", "samples"),
    ("rollout/requeued_prompts", "prompts given back to the data set: aborted, or more than the step needed", "-",
     "prompts"),
    ("rollout/excluded_prompts", "rows of the data left out as longer than data.max_prompt_tokens", "-", "prompts"),
    ("rollout/dropped_<filter>", "groups that this filter of rollout.filters dropped", "-", "groups"),
    # evaluation, in the row of its step
    ("eval/score", "reward of the held-out prompts", "samples", "reward"),
    ("eval/accuracy", "1 where a verifier accepted the answer (without one: where the reward is above 0)", "samples",
     "share"),
    ("eval/sequence_lengths", "response tokens", "samples", "tokens"),
    ("eval/stop_token_rate", "1 where the response ended with a stop token", "samples", "share"),
    ("eval/reward_errors", "samples whose reward raised or returned no number", "-", "samples"),
    ("eval/reward_timeouts", "samples whose reward took longer than reward.timeout_s", "-", "samples"),
    # time and speed
    ("time/from_scratch", "wall clock since the run began, resumed parts included", "-", "s"),
    ("time/step", "all of one step but its evaluation, log and checkpoint", "-", "s"),
    ("time/generation", "wait of the trainer for rollouts in one step", "-", "s"),
    ("time/engine", "of that, time in which the engines had a request", "-", "s"),
    ("time/transfer", "laying the batch out and sending each rank its share", "-", "s"),
    ("time/logprobs", "passes for log-probs, KL and values in one step", "-", "s"),
    ("time/advantages", "estimator, loss weights, and sending them to the ranks", "-", "s"),
    ("time/training", "forward, backward and optimizer of one step", "-", "s"),
    ("time/publish", "publication of one version of the weights", "-", "s"),
    ("time/evaluation", "generating and scoring the held-out prompts", "-", "s"),
    ("perf/tokens_per_second", "model tokens trained, prompts included, by the time of the step", "seconds",
     "tokens/s"),
    ("perf/trainer_idle_fraction", "time that the trainer waited", "time of the step", "share"),
    ("perf/engine_idle_fraction", "time that the engines had no request", "time of the step", "share"),
)  # fmt: skip

METRICS: Mapping[str, MetricSpec] = {row[0]: MetricSpec(*row) for row in _ROWS}
_FAMILIES = tuple(
    (re.compile(re.sub("<.*>", ".+", name)), spec) for name, spec in METRICS.items() if "<" in name
)


def metric_spec(name: str) -> MetricSpec | None:
    """The definition of a name in metrics.jsonl: its own, or that of its family."""
    own = METRICS.get(name)
    return own or next((spec for pattern, spec in _FAMILIES if pattern.fullmatch(name)), None)
