"""Slow estimators: Python floats, one sequence at a time, each written from its paper.

Nothing here shares code with `rlcore.algorithms`; sums over groups are exact. Every reference takes
the sequences of a batch and returns, for each of them, the list of its advantages and that of its
returns (None where it has none).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms import EstimatorInputs

Result = list[tuple[list[float], list[float] | None]]


@dataclass(frozen=True)
class Episode:
    """One sequence: its reward, and a row of numbers for each per-token field of the batch."""

    length: int
    reward: float
    group: int
    baseline: float
    tokens: dict[str, list[float]]
    parts: list[float]

    def token_terms(self, kl_coef: float, distill_coef: float) -> list[float]:
        """What each token earns beside the outcome."""
        terms = []
        for t in range(self.length):
            term = self.tokens["token_rewards"][t] if "token_rewards" in self.tokens else 0.0
            if kl_coef:
                term -= kl_coef * self.tokens["kl"][t]
            if distill_coef:
                term += distill_coef * (
                    self.tokens["teacher_logprobs"][t] - self.tokens["logprobs"][t]
                )
            terms.append(term)
        return terms

    def rewards(self, kl_coef: float, distill_coef: float) -> list[float]:
        """The reward at each token, the outcome on the last."""
        rewards = self.token_terms(kl_coef, distill_coef)
        if rewards:
            rewards[-1] += self.reward
        return rewards


def episodes(inputs: EstimatorInputs) -> list[Episode]:
    """Cut a batch into its sequences."""
    per_token = {
        name: value.double().tolist()
        for name in (
            *("token_rewards", "kl", "values", "logprobs", "teacher_logprobs", "ref_logprobs"),
        )
        if (value := getattr(inputs, name)) is not None
    }
    borders = inputs.cu_seqlens.tolist()
    baselines = inputs.baseline_rewards
    matrix = inputs.reward_parts
    parts = [[]] * inputs.num_sequences if matrix is None else matrix.double().tolist()
    return [
        Episode(
            length=end - start,
            reward=float(inputs.rewards[b]),
            group=int(inputs.group_ids[b]),
            baseline=math.nan if baselines is None else float(baselines[b]),
            tokens={name: row[start:end] for name, row in per_token.items()},
            parts=parts[b],
        )
        for b, (start, end) in enumerate(pairwise(borders))
    ]


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Backwards in time: A_t = delta_t + gamma * lam * A_{t+1}."""
    advantages = [0.0] * len(rewards)
    following_value = following_advantage = 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following_value - values[t]
        following_advantage = delta + gamma * lam * following_advantage
        following_value = values[t]
        advantages[t] = following_advantage
    return advantages


def ppo(
    batch: list[Episode],
    gamma: float = 1.0,
    lam: float = 0.95,
    kl_coef: float = 0.0,
    distill_coef: float = 0.0,
) -> Result:
    result: Result = []
    for episode in batch:
        values = episode.tokens["values"]
        advantages = gae(episode.rewards(kl_coef, distill_coef), values, gamma, lam)
        result.append((advantages, [a + v for a, v in zip(advantages, values)]))
    return result


def vapo(
    batch: list[Episode], gamma: float = 1.0, critic_lam: float = 1.0, actor_lam: float | None =
    None,
    alpha: float = 0.05, kl_coef: float = 0.0, distill_coef: float = 0.0,
) -> Result:  # fmt: skip
    result: Result = []
    for episode in batch:
        rewards = episode.rewards(kl_coef, distill_coef)
        values = episode.tokens["values"]
        lam = actor_lam
        if lam is None:
            lam = (
                min(max(1.0 - 1.0 / (alpha * episode.length), 0.0), 1.0) if episode.length else 0.0
            )
        targets = [c + v for c, v in zip(gae(rewards, values, gamma, critic_lam), values)]
        result.append((gae(rewards, values, gamma, lam), targets))
    return result


def to_go(rewards: list[float], gamma: float) -> list[float]:
    """G_t = r_t + gamma * r_{t+1} + gamma^2 * r_{t+2} + ..."""
    return gae(rewards, [0.0] * len(rewards), gamma, 1.0)


def reinforce_pp(
    batch: list[Episode], gamma: float = 1.0, kl_coef: float = 0.0, distill_coef: float = 0.0
) -> Result:
    returns = [to_go(episode.rewards(kl_coef, distill_coef), gamma) for episode in batch]
    return [(row, row) for row in returns]


def remax(batch: list[Episode], kl_coef: float = 0.0, distill_coef: float = 0.0) -> Result:
    result: Result = []
    for episode in batch:
        returns = to_go(episode.rewards(kl_coef, distill_coef), 1.0)
        result.append(([g - episode.baseline for g in returns], returns))
    return result


def group_of(batch: list[Episode], episode: Episode) -> list[Episode]:
    """Return the members of an episode's group that have a trainable token, itself included."""
    return [other for other in batch if other.group == episode.group and other.length > 0]


def mean(numbers: Sequence[float]) -> float:
    return float(sum(map(Fraction, numbers)) / len(numbers))  # exact, then rounded once


def deviation(numbers: Sequence[float]) -> float:
    """Unbiased standard deviation; 0 of one number."""
    centre = mean(numbers)
    return math.sqrt(math.fsum((x - centre) ** 2 for x in numbers) / max(len(numbers) - 1, 1))


def everywhere(batch: list[Episode], score: Callable[[Episode, list[Episode]], float]) -> Result:
    """One score a sequence, of it and its group, on each of its tokens; 0 in a group of one."""
    result: Result = []
    for episode in batch:
        group = group_of(batch, episode)
        value = score(episode, group) if episode.length and len(group) > 1 else 0.0
        result.append(([value] * episode.length, None))
    return result


def grpo(
    batch: list[Episode], normalize_std: bool = True, eps: float = 1e-6, leave_one_out: bool = False
) -> Result:
    def score(episode: Episode, group: list[Episode]) -> float:
        baseline = [other.reward for other in group if other is not episode or not leave_one_out]
        advantage = episode.reward - mean(baseline)
        return (
            advantage / (deviation([other.reward for other in group]) + eps)
            if normalize_std
            else advantage
        )

    return everywhere(batch, score)


def dr_grpo(batch: list[Episode]) -> Result:
    return everywhere(
        batch, lambda episode, group: episode.reward - mean([other.reward for other in group])
    )


def rloo(batch: list[Episode], kl_coef: float = 0.0, distill_coef: float = 0.0) -> Result:
    def total(episode: Episode) -> float:
        return math.fsum([episode.reward, *episode.token_terms(kl_coef, distill_coef)])

    def score(episode: Episode, group: list[Episode]) -> float:
        return total(episode) - mean([total(other) for other in group if other is not episode])

    return everywhere(batch, score)


def reinforce_pp_baseline(
    batch: list[Episode], kl_coef: float = 0.0, distill_coef: float = 0.0
) -> Result:
    centred = dr_grpo(batch)
    return [
        (
            [a + term for a, term in zip(advantages, episode.token_terms(kl_coef, distill_coef))],
            None,
        )
        for episode, (advantages, _) in zip(batch, centred)
    ]


def opo(batch: list[Episode]) -> Result:
    def score(episode: Episode, group: list[Episode]) -> float:
        weighted = math.fsum(other.length * other.reward for other in group)
        return episode.reward - weighted / sum(other.length for other in group)

    return everywhere(batch, score)


def gpg(batch: list[Episode]) -> Result:
    members = [episode for episode in batch if episode.length]
    teaching = [e for e in members if len({other.reward for other in group_of(batch, e)}) > 1]
    alpha = len(members) / len(teaching) if teaching else 1.0
    return everywhere(
        batch, lambda e, group: alpha * (e.reward - mean([other.reward for other in group]))
    )


def max_rl(batch: list[Episode]) -> Result:
    def score(episode: Episode, group: list[Episode]) -> float:
        rate = mean([other.reward for other in group])
        return (episode.reward - rate) / rate if rate > 0 else 0.0

    return everywhere(batch, score)


def gdpo(
    batch: list[Episode], reward_weights: Sequence[float] = (1.0, 1.0, 1.0), eps: float = 1e-6
) -> Result:
    """Equations 4 to 6 of the paper; a part that is NaN is left out."""

    def score(episode: Episode) -> float:
        terms = []
        for k, weight in enumerate(reward_weights):
            of_group = [other.parts[k] for other in group_of(batch, episode)]
            given = [reward for reward in of_group if not math.isnan(reward)]
            if not math.isnan(episode.parts[k]) and len(given) > 1:
                spread = deviation(given) + eps
                terms.append(weight * (episode.parts[k] - mean(given)) / spread)
        return math.fsum(terms)

    sums = [score(episode) for episode in batch if episode.length]
    centre = mean(sums) if sums else 0.0
    spread = deviation(sums) + eps if sums else 1.0
    return [([(score(e) - centre) / spread] * e.length if e.length else [], None) for e in batch]


# --- preferences: derivatives by hand -------------------------------------------------------------


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def log_ratio(episode: Episode) -> float:
    return math.fsum(episode.tokens["logprobs"]) - math.fsum(episode.tokens["ref_logprobs"])


def mean_logprob(episode: Episode) -> float:
    return math.fsum(episode.tokens["logprobs"]) / episode.length


def of_pairs(
    batch: list[Episode], slopes: Callable[[Episode, Episode], tuple[float, float]]
) -> Result:
    """Credit answers by a loss of pairs.

    Args:
        slopes: a pair's derivatives by the log-prob of the better and that of the worse answer.
    """
    credit = {id(episode): 0.0 for episode in batch}
    members = [episode for episode in batch if episode.length]
    for group in {episode.group for episode in members}:
        answers = [episode for episode in members if episode.group == group]
        pairs = [(w, l) for w in answers for l in answers if w.reward > l.reward]  # noqa: E741
        for better, worse in pairs:
            of_better, of_worse = slopes(better, worse)
            credit[id(better)] -= len(answers) / len(pairs) * of_better
            credit[id(worse)] -= len(answers) / len(pairs) * of_worse
    return [([credit[id(episode)]] * episode.length, None) for episode in batch]


def dpo(batch: list[Episode], beta: float = 0.1, **given: Any) -> Result:
    kind = given.get("kind", "sigmoid")
    noise = given.get("label_smoothing", 0.0)
    sft = given.get("sft_coef", 0.0)

    def slopes(better: Episode, worse: Episode) -> tuple[float, float]:
        up, down = beta * log_ratio(better), beta * log_ratio(worse)
        p = sigmoid(up - down)
        by_margin = {
            "sigmoid": -(1 - noise) * (1 - p) + noise * p,
            "robust": (-(1 - noise) * (1 - p) - noise * p) / (1 - 2 * noise),
            "hinge": -1.0 if up - down < 1 else 0.0,
            "exo": p * (1 - p) * (math.log(p / (1 - p)) - math.log((1 - noise) / noise))
            if noise and 0 < p < 1
            else 0.0,
        }
        if kind == "nca":
            a, b = -(1 - sigmoid(up)) + 0.5 * sigmoid(up), 0.5 * sigmoid(down)
        elif kind == "apo_zero":
            a, b = -sigmoid(up) * sigmoid(-up), sigmoid(down) * sigmoid(-down)
        elif kind == "apo_down":
            a, b = sigmoid(up) * sigmoid(-up) - p * (1 - p), p * (1 - p)
        else:
            a, b = by_margin[kind], -by_margin[kind]
        return beta * a - sft / better.length, beta * b

    return of_pairs(batch, slopes)


def ipo(batch: list[Episode], beta: float = 0.1) -> Result:
    def slopes(better: Episode, worse: Episode) -> tuple[float, float]:
        margin = log_ratio(better) / better.length - log_ratio(worse) / worse.length
        slope = 2 * (margin - 1 / (2 * beta))
        return slope / better.length, -slope / worse.length

    return of_pairs(batch, slopes)


def simpo(batch: list[Episode], beta: float = 2.0, gamma: float = 1.0) -> Result:
    def slopes(better: Episode, worse: Episode) -> tuple[float, float]:
        margin = beta * (mean_logprob(better) - mean_logprob(worse)) - gamma
        slope = -beta * sigmoid(-margin)
        return slope / better.length, -slope / worse.length

    return of_pairs(batch, slopes)


def orpo(batch: list[Episode], beta: float = 0.1) -> Result:
    def odds(logprob: float) -> tuple[float, float]:
        """(log odds, their derivative)."""
        rest = -math.expm1(min(logprob, -1e-12))
        return min(logprob, -1e-12) - math.log(rest), 1 / rest if logprob < -1e-12 else 0.0

    def slopes(better: Episode, worse: Episode) -> tuple[float, float]:
        up, rises = odds(mean_logprob(better))
        down, falls = odds(mean_logprob(worse))
        slope = -beta * sigmoid(down - up)
        return (slope * rises - 1) / better.length, -slope * falls / worse.length

    return of_pairs(batch, slopes)


def kto(
    batch: list[Episode],
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Result:
    ratios = [log_ratio(episode) for episode in batch if episode.length]
    z = max(0.0, math.fsum(ratios) / len(ratios)) if ratios else 0.0
    result: Result = []
    for episode in batch:
        if not episode.length:
            result.append(([], None))
            continue
        far = beta * (log_ratio(episode) - z)
        slope = beta * sigmoid(far) * sigmoid(-far)
        good = desirable_weight if episode.reward > 0.5 else -undesirable_weight
        result.append(([good * slope] * episode.length, None))
    return result


REFERENCES: dict[str, Callable[..., Result]] = {
    "ppo": ppo, "vapo": vapo, "reinforce++": reinforce_pp, "reinforce++_baseline":
    reinforce_pp_baseline,
    "remax": remax, "grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "opo": opo, "gpg": gpg,
    "max_rl": max_rl, "gdpo": gdpo, "dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo,
    "kto": kto,
}  # fmt: skip

CASES: list[tuple[str, dict[str, Any]]] = [
    ("ppo", {}),
    ("ppo", {"gamma": 0.9, "lam": 0.8, "kl_coef": 0.1, "distill_coef": 0.3}),
    ("ppo", {"lam": 1.0}),
    ("ppo", {"gamma": 0.0, "lam": 0.0}),
    ("vapo", {}),
    ("vapo", {"gamma": 0.99, "critic_lam": 0.9, "alpha": 0.5, "kl_coef": 0.1, "distill_coef": 0.3}),
    ("vapo", {"actor_lam": 0.95}),
    ("reinforce++", {}),
    ("reinforce++", {"gamma": 0.9, "kl_coef": 0.25, "distill_coef": 0.5}),
    ("reinforce++_baseline", {}),
    ("reinforce++_baseline", {"kl_coef": 0.25, "distill_coef": 0.5}),
    ("remax", {}),
    ("remax", {"kl_coef": 0.25, "distill_coef": 0.5}),
    ("grpo", {}),
    ("grpo", {"normalize_std": False}),
    ("grpo", {"leave_one_out": True, "normalize_std": False}),
    ("grpo", {"leave_one_out": True, "eps": 1e-3}),
    ("dr_grpo", {}),
    ("rloo", {}),
    ("rloo", {"kl_coef": 0.25, "distill_coef": 0.5}),
    ("opo", {}),
    ("gpg", {}),
    ("max_rl", {}),
    ("gdpo", {}),
    ("gdpo", {"reward_weights": [1.0, 0.25, -2.0], "eps": 1e-4}),
    ("dpo", {}),
    ("dpo", {"beta": 0.4, "label_smoothing": 0.2, "sft_coef": 0.7}),
    ("dpo", {"beta": 0.4, "label_smoothing": 0.2, "kind": "robust"}),
    ("dpo", {"beta": 0.4, "label_smoothing": 0.2, "kind": "exo"}),
    *(("dpo", {"kind": kind}) for kind in ("hinge", "nca", "apo_zero", "apo_down")),
    ("ipo", {}),
    ("ipo", {"beta": 0.4}),
    ("simpo", {}),
    ("simpo", {"beta": 1.0, "gamma": 0.0}),
    ("orpo", {}),
    ("orpo", {"beta": 0.5}),
    ("kto", {}),
    ("kto", {"beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.6}),
]


def case_id(case: object) -> str:
    """How pytest names a keyword dictionary of `CASES`."""
    return (
        ",".join(f"{k}={v}" for k, v in case.items()) or "defaults"
        if isinstance(case, dict)
        else str(case)
    )


def reference(name: str, inputs: EstimatorInputs, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Advantages and returns, float64 `[M]`, by the slow reference of estimator `name`."""
    rows = REFERENCES[name](episodes(inputs), **options)
    advantages = torch.tensor([a for row, _ in rows for a in row], dtype=torch.float64)
    if any(returns is None for _, returns in rows):
        return advantages, None
    return advantages, torch.tensor(
        [g for _, returns in rows for g in returns or ()], dtype=torch.float64
    )
