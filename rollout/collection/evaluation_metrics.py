"""What people quote of an evaluation: avg@n, pass@k and maj@k of n answers, with 95 % intervals.

A prompt is the unit of all intervals: its n answers depend on one another. pass@k and maj@k are
means over all subsets of k of the n answers, so they are unbiased whatever n is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlcore.config.evaluation_sets import EvaluationSet
from rlcore.data.sample import Sample, joint_verdict

Z = 1.959963984540054  # quantile of a two-sided 95 % interval
Interval = tuple[float, float]


@dataclass(frozen=True)
class Answer:
    """One judged answer to a prompt."""

    text: str | None  # text compared in a vote; None abstains
    is_right: bool


def quoted_metrics(groups: Sequence[Sequence[Sample]], given: EvaluationSet) -> dict[str, float]:
    """The metrics of a set with k, by their names without the set.

    Without verdicts there is only the score's interval. pass@k and maj@k are absent if a prompt has
    fewer than k judged answers. `groups` has the scored samples of each prompt that has any.
    """
    if not given.k or not groups:
        return {}
    found: dict[str, float] = {}
    scores = [
        sum(rollout[0].reward for rollout in rollouts) / len(rollouts)
        for rollouts in map(rollouts_of, groups)
    ]
    found |= _bounds("score", mean_interval(scores))
    judged = any("correct" in s.metadata for samples in groups for s in samples)
    prompts = [answers for samples in groups if (answers := judged_answers(samples))]
    if not judged or not prompts:
        return found

    def add(name: str, values: Sequence[float]) -> None:
        found[name] = sum(values) / len(values)
        found.update(_bounds(name, share_interval(values, answers=sum(map(len, prompts)))))

    right = [sum(answer.is_right for answer in answers) for answers in prompts]
    add(
        f"avg@{given.samples_per_prompt}",
        [count / len(answers) for count, answers in zip(right, prompts)],
    )
    for k in given.k:
        if k > min(map(len, prompts)):
            continue
        add(f"pass@{k}", [pass_at_k(len(a), count, k) for a, count in zip(prompts, right)])
        if k > 1:
            add(
                f"maj@{k}",
                [maj_at_k([a.text for a in p], [a.is_right for a in p], k) for p in prompts],
            )
    return found


def _bounds(name: str, interval: Interval | None) -> dict[str, float]:
    return {} if interval is None else {f"{name}_low": interval[0], f"{name}_high": interval[1]}


def rollouts_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Group the samples of one prompt by rollout: each is one answer, in its segments."""
    rollouts: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        rollouts[sample.rollout_id].append(sample)
    return [*rollouts.values()]


def verdict_of(rollout: Sequence[Sample]) -> bool | None:
    """Whether the answer of a rollout is right; None: no verdict."""
    return joint_verdict(part.verdict for part in rollout)


def judged_answers(samples: Sequence[Sample]) -> list[Answer]:
    """The answers to one prompt that have a verdict.

    Of a rollout with several samples, the last one's text counts.
    """
    return [
        Answer(voted_text(rollout[-1]), right)
        for rollout in rollouts_of(samples)
        if (right := verdict_of(rollout)) is not None
    ]


def voted_text(sample: Sample) -> str | None:
    """The `answer` that a grader reports (None: not found), otherwise the response text."""
    for info in sample.metadata.get("reward_info", {}).values():
        if "answer" in info:
            answer = info["answer"]
            return None if answer is None else " ".join(str(answer).split())
    return " ".join(sample.response_text.split())


# --- estimates for one prompt ---------------------------------------------------------------------


def pass_at_k(answers: int, right: int, k: int) -> float:
    """The probability that at least one of k of the answers is right: 1 - C(n-c, k) / C(n, k).

    The quotient is a product of factors below 1, since the binomials overflow.
    """
    _check_k(k, answers)
    wrong = answers - right
    if wrong < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(wrong + 1, answers + 1)))


def maj_at_k(answers: Sequence[Hashable | None], right: Sequence[bool], k: int) -> float:
    """The probability that the most frequent of k of the answers is right.

    Equal answers are one candidate; a candidate that was judged unequally (for its format, say)
    counts by its share of right verdicts. None abstains, and k abstentions are wrong. Ties are
    broken at random.

    The counts of the candidates in a random subset are independent binomials, given their sum k.
    Candidate j wins with m votes if no other has more. Averaging over its ties t needs the weight
    1 / (t + 1), which is the integral of s^t over 0..1: Gauss-Legendre nodes give it exactly.
    """
    n = len(answers)
    _check_k(k, n)
    votes: dict[Hashable, list[bool]] = {}
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(is_right)
    if not votes:
        return 0.0
    # any share is correct; this one keeps all terms at similar magnitude
    odds = (k + 0.5) / (n + 1)
    wins: list[float] = []
    nodes: list[float] = []
    weights: list[float] = []
    for m in range(1, min(k, max(map(len, votes.values()))) + 1):
        s, w = np.polynomial.legendre.leggauss((k // m + 1) // 2)
        wins += [m] * len(s)
        nodes += ((s + 1) / 2).tolist()
        weights += (w / 2).tolist()
    # By (m, node): polynomials in the number of votes cast, up to k. In `one`, one candidate
    # has been taken as the winner; in `none`, no candidate yet.
    none = np.zeros((len(wins), k + 1))
    none[:] = _binomial(n - sum(map(len, votes.values())), odds, k)
    one = np.zeros_like(none)
    most = np.asarray(wins)[:, None]
    tie = np.asarray(nodes)[:, None]
    for judged in votes.values():
        chances = _binomial(len(judged), odds, k)
        number = np.arange(k + 1)
        below = np.where(number < most, chances, 0.0)
        exactly = np.where(number == most, chances, 0.0)
        share = sum(judged) / len(judged)
        one = _product(one, below + tie * exactly) + _product(none, share * exactly)
        none = _product(none, below + tie * exactly)
    return float(np.asarray(weights) @ one[:, k] / _binomial(n, odds, k)[k])


def _check_k(k: int, answers: int) -> None:
    if not 1 <= k <= answers:
        raise ValueError(f"k must be from 1 to the {answers} answers, got {k}")


def _binomial(n: int, odds: float, k: int) -> NDArray[np.float64]:
    """The chances of 0 to k successes in n trials, float64 [k + 1]."""
    chances = np.zeros(k + 1)
    for i in range(min(n, k) + 1):
        chances[i] = math.exp(
            math.lgamma(n + 1)
            - math.lgamma(i + 1)
            - math.lgamma(n - i + 1)
            + i * math.log(odds)
            + (n - i) * math.log1p(-odds)
        )
    return chances


def _product(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Multiply polynomials, row by row, up to their length."""
    result = np.zeros_like(a)
    for power in np.flatnonzero(b.any(axis=0)).tolist():
        result[:, power:] += b[:, power : power + 1] * a[:, : a.shape[1] - power]
    return result


# --- intervals ------------------------------------------------------------------------------------


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The mean of the prompts' values +- 1.96 standard errors; None for a single prompt."""
    if len(values) < 2:
        return None
    error = Z * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    mean = float(np.mean(values))
    return mean - error, mean + error


def share_interval(values: Sequence[float], *, answers: int) -> Interval | None:
    """Wilson's interval of a mean of per-prompt shares; None for a single prompt.

    The effective number of trials follows from the spread between prompts: all answers if prompts
    do not differ, the number of prompts if each is all right or all wrong. So the interval is never
    empty and stays within 0..1, even for 30 prompts that are all right. `answers` counts those to
    all prompts together.
    """
    prompts = len(values)
    if prompts < 2:
        return None
    mean = min(max(float(np.mean(values)), 0.0), 1.0)
    variance = float(np.var(values, ddof=1)) / prompts
    trials = float(prompts)
    if 0 < mean < 1:
        trials = mean * (1 - mean) / variance if variance > 0 else math.inf
        trials = min(max(trials, 1.0), float(answers))
    scale = 1 + Z * Z / trials
    centre = (mean + Z * Z / (2 * trials)) / scale
    spread = Z * math.sqrt(mean * (1 - mean) / trials + Z * Z / (4 * trials * trials)) / scale
    return max(centre - spread, 0.0), min(centre + spread, 1.0)
