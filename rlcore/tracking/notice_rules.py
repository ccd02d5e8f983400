"""The table `RULES` of alerts on a run that may be going wrong.

Each rule is a function of a step's row and the rows before it. Its docstring has the reason for the
threshold, its decorator the advice on what to look at.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlcore.tracking.format import LENGTH, LOSS, REWARD, TOKENS_PER_SECOND, first, number

Row = Mapping[str, float]
WINDOW = 20  # earlier rows that the newest row is compared with
MIN_ROWS = 5  # earlier rows that a comparison needs
FAR = 0.1  # nats a token: PPO's usual target for a step is 0.01 to 0.02
THROWN = 1.0
FALLEN = 0.5  # of the reward's standard deviation
RISEN = 0.25  # of the reward's standard deviation: a rise beyond noise


@dataclass(frozen=True)
class History:
    """Earlier rows, with which the newest row is compared.

    Attributes:
        lately: the last rows before the newest, up to `WINDOW`.
        first: the first `MIN_ROWS` rows of the run.
        groups: the number of groups in a step; 0 without groups.
    """

    lately: Sequence[Row]
    first: Sequence[Row]
    groups: int

    def usual(self, *names: str) -> float | None:
        """Return the median of a metric over the last rows; None with fewer than `MIN_ROWS`."""
        values = _values(self.lately, *names)
        return statistics.median(values) if len(values) >= MIN_ROWS else None

    def most(self, name: str) -> float:
        """Return the largest value of a metric in the last rows, 0 without any."""
        return max(_values(self.lately, name), default=0.0)

    def began(self, name: str) -> float:
        """Return the mean of a metric over the first rows, infinite without any."""
        values = _values(self.first, name)
        return statistics.mean(values) if values else math.inf

    def risen(self, row: Row) -> str:
        """Describe the rise of the reward since the first rows; "" if it has not risen."""
        reward = first(row, REWARD)
        earlier = _values(self.first, *REWARD)
        if reward is None or len(earlier) < MIN_ROWS:
            return ""
        began = statistics.mean(earlier)
        spread = [*_values(self.first, "rollout/reward_std"), row.get("rollout/reward_std", 0.0)]
        if reward - began <= RISEN * max(spread):
            return ""
        return f"the reward has risen from {number(began)} to {number(reward)}"


def _values(rows: Sequence[Row], *names: str) -> list[float]:
    """Return each row's value under the first of `names` that it has, if that is finite."""
    found = [first(row, names) for row in rows]
    return [value for value in found if value is not None and math.isfinite(value)]


Check = Callable[[Row, History], str]


@dataclass(frozen=True)
class Rule:
    """A rule that raises an alert.

    Attributes:
        check: returns the problem in the newest row, given the rows before it; "" for none. The
            text follows the name of the rule, as in "kl: it is ...".
        look_at: what to look at next; `{step}` stands for the step.
        patience: consecutive rows that the rule must hold in to raise the alert.
        calm: consecutive rows without it that clear the alert; default: `patience`.
    """

    name: str
    check: Check
    look_at: str
    patience: int = 1
    calm: int | None = None


RULES: list[Rule] = []


def rule(
    name: str, look_at: str, *, patience: int = 1, calm: int | None = None
) -> Callable[[Check], Check]:
    """Add a check to `RULES`."""

    def add(check: Check) -> Check:
        RULES.append(Rule(name, check, look_at, patience, calm))
        return check

    return add


# --- rules ----------------------------------------------------------------------------------------

_RATE = (
    "policy.optimizer.lr (too large?) and its warmup_steps, train/grad_norm,"
    " policy.optimizer.clip_grad, algorithm.epochs"
)
_SAMPLES = (
    "the samples of step {step} with the highest reward, in `rlcore view RUN` or"
    " rollouts/step_{step:06d}.parquet; "
)


@rule(
    "the KL runs away",
    "policy.optimizer.lr (too large?), algorithm.kl.reward_coef and training.target_kl;"
    " the samples with the highest reward in `rlcore view RUN`, for a reward that is gamed",
    patience=2,
)
def _kl(row: Row, history: History) -> str:
    """At 0.02 nats a token a response of 500 tokens is e^10 times as likely as under the reference.

    Five times the median is no slow drift.
    """
    length = first(row, LENGTH)
    kl = row.get("objective/kl")
    usual = history.usual("objective/kl")
    if kl is None or not length or usual is None or kl / length < 0.02 or kl < 5 * usual:
        return ""
    rows = len(_values(history.lately, "objective/kl"))
    return (
        f"objective/kl is {number(kl)} nats a sequence, {number(kl / length)} a token, and its"
        f" median over {rows} steps was {number(usual)}"
    )


@rule(
    "one step moves the policy far",
    _RATE + ", training.max_update_kl; `rlcore view RUN` from the next step on",
    calm=5,
)
def _one_step(row: Row, history: History) -> str:
    """PPO's usual target is 0.01 to 0.02, and at five times that its clipping holds nothing.

    At 1 nat a token what was likely before the step no longer is.
    """
    moved = row.get("policy/step_kl", 0.0)
    before = history.lately[-1].get("policy/step_kl", 0.0) if history.lately else 0.0
    if moved > THROWN:
        return f"policy/step_kl is {number(moved)}, above {THROWN:g}"
    if min(moved, before) > FAR:
        return f"policy/step_kl is {number(moved)}, above {FAR} for the second time"
    return ""


@rule(
    "the reward has collapsed",
    _RATE + "; step {step} in `rlcore view RUN`; resume from a checkpoint before it",
    patience=2,
)
def _collapsed(row: Row, history: History) -> str:
    """It is half a standard deviation, and four times the noise, below the best median of 5 steps.

    Harder prompts alone leave steps, entropy and lengths as they were.
    """
    reward = first(row, REWARD)
    earlier = _values(history.lately, *REWARD)
    if reward is None or not earlier:
        return ""
    starts = range(max(1, len(earlier) - MIN_ROWS + 1))
    best = max(statistics.median(earlier[k : k + MIN_ROWS]) for k in starts)
    least = FALLEN * max(_values([*history.lately, row], "rollout/reward_std"), default=0.0)
    if len(earlier) > MIN_ROWS:
        # The deviation of a step's mean from its trend, from the median difference of two steps.
        between = statistics.median(abs(b - a) for a, b in pairwise(earlier))
        least = max(least, 4 * 1.48 / math.sqrt(2) * between)
    sign = _sign_of_damage(row, history)
    if not best - reward > least or not sign:
        return ""
    return f"the reward has fallen from {number(best)} to {number(reward)}, and {sign}"


def _sign_of_damage(row: Row, history: History) -> str:
    """Return a sign that a fall of the reward is due to the policy, not to harder prompts."""
    moved = history.most("policy/step_kl")
    if moved > FAR:
        return f"policy/step_kl was up to {number(moved)}"
    stopped = _values(history.lately, "val/stop_token_rate")
    now = row.get("val/stop_token_rate", 1.0)
    if stopped and (usual := statistics.median(stopped)) - now > 0.25:
        return f"{1 - now:.0%} of the responses are cut off, where {1 - usual:.0%} were"
    entropies = _values(history.lately, "policy/entropy_avg")
    entropy = row.get("policy/entropy_avg")
    if entropy is not None and entropies:
        usual = statistics.median(entropies)
        if not usual / 3 < entropy < 3 * usual:
            return f"policy/entropy_avg is {number(entropy)}, where it was {number(usual)}"
    return ""


@rule(
    "the entropy has collapsed",
    "rollout/zero_std_groups; raise rollout.sampling.temperature, the clip's upper end or an"
    " entropy bonus, lower policy.optimizer.lr; the samples in `rlcore view RUN`",
    patience=2,
)
def _entropy(row: Row, history: History) -> str:
    """A tenth of what it lately was is no slow decline.

    Below 0.005 nats a token two samples of a prompt hardly differ.
    """
    entropy = row.get("policy/entropy_avg")
    # Supervised fine-tuning, which has no groups, is meant to lower the entropy.
    if not history.groups or entropy is None or history.usual("policy/entropy_avg") is None:
        return ""
    most = history.most("policy/entropy_avg")
    if entropy >= 0.1 * most and entropy >= 0.005:
        return ""
    return f"policy/entropy_avg is {number(entropy)} nats a token; it was {number(most)} lately"


@rule(
    "no group has a variance",
    "`rlcore view RUN`: a reward that is always the same, or prompts that are all too"
    " easy or too hard (data.curriculum, rollout.filters)",
    patience=2,
)
def _variance(row: Row, history: History) -> str:
    """Advantages within a group are then all 0; two steps in a row are no chance."""
    equal = row.get("rollout/zero_std_groups", 0.0)
    if not history.groups or equal < history.groups or _no_update(row, history):
        return ""
    reward = first(row, REWARD)
    mean = "" if reward is None else f" (their mean is {number(reward)})"
    return (
        f"the rewards of all {history.groups} groups are equal within the group{mean}: nothing is"
        " learnt"
    )


@rule(
    "a step trained nothing",
    "`rlcore view RUN`: a reward that is always the same or fails, or prompts that are"
    " all too easy or too hard (data.curriculum, rollout.filters)",
)
def _no_update(row: Row, history: History) -> str:
    """No term of the loss had a gradient: weights, moments and schedule stayed as they were."""
    updates = row.get("train/optimizer_steps", 0.0)
    if not updates or row.get("train/updates_without_signal", 0.0) < updates:
        return ""
    equal = row.get("rollout/zero_std_groups", 0.0)
    groups = history.groups
    why = f"; the rewards of {equal:.0f} of {groups} groups are equal within the group"
    return f"no optimizer step was taken, as the gradient is exactly 0{why if groups else ''}"


@rule(
    "engines and trainer are apart",
    "rollout/train_rollout_logprob_diff_max, rollout/staleness_mean, algorithm.correction",
    patience=2,
)
def _apart(row: Row, history: History) -> str:
    """0.2 nats is what FP8 engines may differ by, twice what bf16 does.

    Below one half most tokens weigh nothing in a correction.
    """
    gap = row.get("rollout/train_rollout_logprob_diff", 0.0)
    share = row.get("rollout/ess", 1.0)
    if gap <= 0.2 and share >= 0.5:
        return ""
    return (
        f"the engines' log-probs are {number(gap)} nats from the trainer's on average, and the"
        f" effective sample size is {share:.0%}"
    )


@rule(
    "most tokens are not trained on",
    "rollout/staleness_mean against algorithm.correction.max_staleness and"
    " rollout.max_staleness; bounds and level of algorithm.correction",
    patience=2,
)
def _dropped(row: Row, history: History) -> str:
    """Generating them was wasted; a step without any left trains nothing."""
    stale = row.get("correction/stale_fraction", 0.0)
    masked = row.get("correction/masked_fraction", 0.0)
    if max(stale, masked) <= 0.5:
        return ""
    if stale >= masked:
        return f"{stale:.0%} of the tokens are older than algorithm.correction.max_staleness"
    return f"algorithm.correction masks the policy loss of {masked:.0%} of the tokens"


@rule(
    "the reward fails",
    "`rlcore view RUN` (filter error=1) and logs/ say why; reward.timeout_s, reward.workers,"
    " retries of a service or judge; reward.max_failed ends a run",
)
def _rewards(row: Row, history: History) -> str:
    """One in twenty is more than noise; samples without a score are left out (reward.on_error)."""
    scored = row.get("rollout/scored_samples", 0.0)
    failed = row.get("rollout/reward_errors", 0.0) + row.get("rollout/reward_timeouts", 0.0)
    if not scored or failed <= 0.05 * scored:
        return ""
    return f"the reward failed on {failed:.0f} of {scored:.0f} samples, {failed / scored:.0%}"


@rule(
    "a number is not finite",
    "the first such row of metrics.jsonl, then the samples of that step; policy.optimizer.lr"
    " and the dtype; an estimator or reward that divides by 0",
)
def _finite(row: Row, history: History) -> str:
    """None may be: what follows from it is lost."""
    names = (*REWARD, *LOSS, "train/grad_norm", "objective/kl")
    found = [f"{name} is {row[name]}" for name in names if not math.isfinite(row.get(name, 0.0))]
    if skipped := row.get("train/skipped_updates", 0.0):
        found.append(f"{skipped:.0f} optimizer steps were left out: their gradient was not finite")
    return "; ".join(found)


@rule(
    "the run has become slow",
    "the timeline of `rlcore view RUN`: what each process waits for; time/* in metrics.jsonl",
    patience=5,
)
def _speed(row: Row, history: History) -> str:
    """Half the usual speed for five steps is more than a long response."""
    speed = first(row, TOKENS_PER_SECOND)
    usual = history.usual(*TOKENS_PER_SECOND)
    if speed is None or usual is None or speed >= 0.5 * usual:
        return ""
    rows = len(_values(history.lately, *TOKENS_PER_SECOND))
    return f"{number(speed)} tokens/s, where the median over {rows} steps is {number(usual)}"


@rule(
    "an engine is out",
    "rollout/engine_restarts and service.log (with rollout.service: in_process the log of rank 0)",
    patience=2,
)
def _engines(row: Row, history: History) -> str:
    """Any engine that is missing makes steps slower; one that only restarts is back in the next."""
    serving = row.get("rollout/engines_serving")
    most = history.most("rollout/engines_serving")
    if serving is None or serving >= most:
        return ""
    return f"{serving:.0f} engines serve, where {most:.0f} did"


@rule(
    "rewarded responses repeat the prompt",
    _SAMPLES + "`rlcore data` shows whether reward.parts pays for the prompt or its expressions",
    patience=2,
)
def _repeats(row: Row, history: History) -> str:
    """A grader may take a way to the answer for the answer.

    Half as much again as in the first five steps is no chance, and below 0.3 a response is mostly
    words of its own.
    """
    name = "rollout/rewarded_prompt_overlap"
    share = row.get(name, 0.0)
    began = history.began(name)
    risen = history.risen(row)
    if not risen or share < 0.3 or share < 1.5 * began:
        return ""
    return f"{risen}, and {name} from {number(began)} to {number(share)}"


@rule(
    "rewarded responses are cut off",
    _SAMPLES + "reward.non_stop_penalty, rollout.sampling.max_new_tokens",
    patience=2,
)
def _cut_off(row: Row, history: History) -> str:
    """What is right is mostly finished; below three quarters it is a limit that is too low.

    A task whose responses are cut off from the start is meant to be so.
    """
    share = row.get("rollout/rewarded_truncated", 0.0)
    began = history.began("rollout/rewarded_truncated")
    risen = history.risen(row)
    if not risen or share < 0.75 or share < began + 0.25:
        return ""
    return f"{risen}, and {share:.0%} of the responses that earn it are cut off; {began:.0%} were"


@rule(
    "one response answers all prompts",
    _SAMPLES + "the labels of the data, and whether reward.parts reads them",
    patience=2,
)
def _one_text(row: Row, history: History) -> str:
    """Prompts of four groups or more have different answers, unless labels are all alike."""
    share = row.get("rollout/commonest_response", 0.0)
    risen = history.risen(row)
    if not risen or history.groups < 4 or share < 0.8:
        return ""
    return f"{risen}, and {share:.0%} of the responses, of all prompts, are the same text"


@rule(
    "rewarded responses grow",
    _SAMPLES + "whether reward.parts pays for length; an `overlong` part bounds it",
    patience=2,
)
def _grows(row: Row, history: History) -> str:
    """Twice the length within 20 steps is faster than reasoning grows."""
    length = first(row, LENGTH)
    usual = history.usual(*LENGTH)
    risen = history.risen(row)
    if not risen or length is None or usual is None or length < 2 * usual:
        return ""
    rows = len(_values(history.lately, *LENGTH))
    return (
        f"{risen}, and responses have {number(length)} tokens, where the median over {rows} steps"
        f" is {number(usual)}"
    )
