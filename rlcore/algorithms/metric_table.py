"""Every metric that a run writes: what it is, what it is divided by, and its unit. `rlcore metrics` prints this.

A "token" is a trainable token: prompts, tool output, observations and padding are in no metric. A "sequence" is one
with at least one trainable token, unless a line says "all sequences". A metric whose inputs were not computed is
absent from the log, never 0.
"""

from __future__ import annotations

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
    ("step", "optimisation step of the loop, from 1", "-", "steps"),
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
    # time and speed
    ("time/from_scratch", "wall clock since the run began, resumed parts included", "-", "s"),
    ("time/training", "forward, backward and optimizer of one step", "-", "s"),
    ("time/generation", "wait of the trainer for rollouts in one step", "-", "s"),
    ("time/logprobs", "passes for log-probs, KL and values in one step", "-", "s"),
    ("time/publish", "publication of one version of the weights", "-", "s"),
    ("perf/tokens_per_second", "model tokens trained, prompts included, by the time of the step", "seconds",
     "tokens/s"),
    ("perf/mfu", "model FLOPs of training by the peak of the devices and the time of training", "peak FLOPs", "share"),
    ("perf/trainer_idle_fraction", "time that the trainer waited", "time of the step", "share"),
    ("perf/engine_idle_fraction", "time that the engines had no request", "time of the step", "share"),
)  # fmt: skip

METRICS: Mapping[str, MetricSpec] = {row[0]: MetricSpec(*row) for row in _ROWS}
