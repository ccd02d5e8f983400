"""Slow policy losses from the papers: Python floats, one sequence at a time, hand-made gradients.

Each returns, for every sequence, its losses and their Jacobian: `slopes[t][u]` is d loss_t / d
logprobs_u, with what the papers mark as "no gradient" held constant. Nothing here imports the code
under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Rows = list[tuple[list[float], list[list[float]]]]  # losses [n] and slopes [n][n] of each sequence
LIMIT = 20.0
TWO_64 = 1 << 64


@dataclass(frozen=True)
class Sequence:
    """The tokens of one sequence."""

    identity: int
    logprobs: list[float]
    old: list[float]
    rollout: list[float]
    advantages: list[float]

    @property
    def log_ratios(self) -> list[float]:
        return [new - old for new, old in zip(self.logprobs, self.old)]


def clamped(log_ratio: float) -> tuple[float, float]:
    """The log-ratio between its limits, and the slope of that."""
    return max(-LIMIT, min(LIMIT, log_ratio)), 1.0 if abs(log_ratio) <= LIMIT else 0.0


def surrogate(
    ratio: float, advantage: float, low: float, high: float, dual: float | None = None
) -> tuple[float, float]:
    """PPO's clipped loss and its slope in the ratio."""
    limited = max(1.0 - low, min(1.0 + high, ratio))
    loss = -advantage * ratio
    slope = -advantage
    if -advantage * limited > loss:
        loss = -advantage * limited
        slope = 0.0
    if dual is not None and advantage < 0 and loss > -dual * advantage:
        loss = -dual * advantage
        slope = 0.0
    return loss, slope


def each_token(step: list[Sequence], token: Callable[[Sequence, int], tuple[float, float]]) -> Rows:
    """Losses whose tokens know nothing of each other: `token` gives loss and slope."""
    rows: Rows = []
    for sequence in step:
        n = len(sequence.logprobs)
        losses = [0.0] * n
        slopes = [[0.0] * n for _ in range(n)]
        for t in range(n):
            losses[t], slopes[t][t] = token(sequence, t)
        rows.append((losses, slopes))
    return rows


def ppo_clip(
    step: list[Sequence],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Rows:
    def token(sequence: Sequence, t: int) -> tuple[float, float]:
        d, inside = clamped(sequence.log_ratios[t])
        loss, slope = surrogate(math.exp(d), sequence.advantages[t], clip_low, clip_high, dual_clip)
        return loss, slope * math.exp(d) * inside

    return each_token(step, token)


def gspo(step: list[Sequence], clip_low: float = 3e-4, clip_high: float = 4e-4) -> Rows:
    rows: Rows = []
    for sequence in step:
        n = len(sequence.logprobs)
        losses: list[float] = []
        slopes: list[list[float]] = []
        for t in range(n):
            mean, inside = clamped(math.fsum(sequence.log_ratios) / n)
            loss, slope = surrogate(math.exp(mean), sequence.advantages[t], clip_low, clip_high)
            losses.append(loss)
            slopes.append([slope * math.exp(mean) * inside / n] * n)
        rows.append((losses, slopes))
    return rows


def gspo_token(step: list[Sequence], clip_low: float = 3e-4, clip_high: float = 4e-4) -> Rows:
    def token(sequence: Sequence, t: int) -> tuple[float, float]:
        mean, inside = clamped(math.fsum(sequence.log_ratios) / len(sequence.log_ratios))
        own = clamped(sequence.log_ratios[t])[1]
        loss, slope = surrogate(math.exp(mean), sequence.advantages[t], clip_low, clip_high)
        return loss, slope * math.exp(mean) * inside * own

    return each_token(step, token)


def cispo(step: list[Sequence], clip_low: float = 1.0, clip_high: float = 4.0) -> Rows:
    def token(sequence: Sequence, t: int) -> tuple[float, float]:
        weight = max(
            1.0 - clip_low, min(1.0 + clip_high, math.exp(clamped(sequence.log_ratios[t])[0]))
        )
        return (
            -weight * sequence.advantages[t] * sequence.logprobs[t],
            -weight * sequence.advantages[t],
        )

    return each_token(step, token)


def reinforce(step: list[Sequence]) -> Rows:
    return each_token(step, lambda s, t: (-s.advantages[t] * s.logprobs[t], -s.advantages[t]))


def sft(step: list[Sequence]) -> Rows:
    return each_token(step, lambda s, t: (-s.logprobs[t], -1.0))


def sapo(step: list[Sequence], tau_pos: float = 1.0, tau_neg: float = 1.05) -> Rows:
    def token(sequence: Sequence, t: int) -> tuple[float, float]:
        d, inside = clamped(sequence.log_ratios[t])
        advantage = sequence.advantages[t]
        ratio = math.exp(d)
        tau = tau_pos if advantage > 0 else tau_neg
        # e^-700 is 0 beside 1, and no overflow
        p = 1.0 / (1.0 + math.exp(-min(tau * (ratio - 1.0), 700.0)))
        return -advantage * p * 4.0 / tau, -advantage * 4.0 * p * (1.0 - p) * ratio * inside

    return each_token(step, token)


def geo_mean(step: list[Sequence], clip_low: float = 0.4, clip_high: float = 0.4) -> Rows:
    rows: Rows = []
    for sequence in step:
        n = len(sequence.logprobs)
        bounded = [0.0] * n
        inside = [0.0] * n
        for t, (d, advantage) in enumerate(zip(sequence.log_ratios, sequence.advantages)):
            if advantage > 0:
                bounded[t] = min(d, clip_high)
                inside[t] = float(d <= clip_high)
            if advantage < 0:
                bounded[t] = max(d, -clip_low)
                inside[t] = float(d >= -clip_low)
        mean, whole = clamped(math.fsum(bounded) / n) if n else (0.0, 0.0)
        losses = [-advantage * math.exp(mean) for advantage in sequence.advantages]
        rows.append((losses, [[loss * whole * inside[u] / n for u in range(n)] for loss in losses]))
    return rows


def decoupled_ppo(
    step: list[Sequence], behavior_cap: float | None = None, cap_mode: str = "truncate", **clip: Any
) -> Rows:
    rows: Rows = []
    for sequence, (losses, slopes) in zip(step, ppo_clip(step, **clip)):
        for t in range(len(losses)):
            weight = math.exp(clamped(sequence.old[t] - sequence.rollout[t])[0])
            if behavior_cap is not None and weight > behavior_cap:
                weight = behavior_cap if cap_mode == "truncate" else 0.0
            losses[t] *= weight
            slopes[t] = [weight * slope for slope in slopes[t]]
        rows.append((losses, slopes))
    return rows


def clip_cov(
    step: list[Sequence], clip_low: float = 0.2, clip_high: float = 0.2, clip_cov_ratio: float =
    2e-4,
    clip_cov_lb: float = 1.0, clip_cov_ub: float = 5.0,
) -> Rows:  # fmt: skip
    cov = covariances(step)
    eligible = sorted(
        (draw(step[b].identity, t), b, t) for b, t in cov if clip_cov_lb < cov[b, t] < clip_cov_ub
    )
    chosen = {(b, t) for _, b, t in eligible[: max(int(clip_cov_ratio * len(cov)), 1)]}
    rows = ppo_clip(step, clip_low, clip_high)
    for b, t in chosen:
        rows[b][0][t] = 0.0
        rows[b][1][t] = [0.0] * len(rows[b][0])
    return rows


def kl_cov(step: list[Sequence], kl_cov_ratio: float = 2e-4, ppo_kl_coef: float = 1.0) -> Rows:
    cov = covariances(step)
    ranked = sorted((-cov[b, t], draw(step[b].identity, t), b, t) for b, t in cov if cov[b, t] > 0)
    chosen = {(b, t) for _, _, b, t in ranked[: max(int(kl_cov_ratio * len(cov)), 1)]}
    index = {id(sequence): b for b, sequence in enumerate(step)}

    def token(sequence: Sequence, t: int) -> tuple[float, float]:
        d, inside = clamped(sequence.log_ratios[t])
        loss = slope = -sequence.advantages[t] * math.exp(d)
        if (index[id(sequence)], t) in chosen:
            loss = loss + ppo_kl_coef * abs(d)
            slope = slope + ppo_kl_coef * ((d > 0) - (d < 0))
        return loss, slope * inside

    return each_token(step, token)


def covariances(step: list[Sequence]) -> dict[tuple[int, int], float]:
    """Of advantage and old log-prob, about the means of the whole step, by (sequence, position)."""
    tokens = [(b, t) for b, sequence in enumerate(step) for t in range(len(sequence.old))]
    mean_advantage = math.fsum(step[b].advantages[t] for b, t in tokens) / max(len(tokens), 1)
    mean_old = math.fsum(step[b].old[t] for b, t in tokens) / max(len(tokens), 1)
    return {
        (b, t): (step[b].advantages[t] - mean_advantage) * (step[b].old[t] - mean_old)
        for b, t in tokens
    }


def draw(identity: int, position: int) -> float:
    """Return the number in [0, 1) of a token: splitmix64 seeded with the scrambled identity."""
    state = (splitmix(identity % TWO_64) + (position + 1) * 0x9E3779B97F4A7C15) % TWO_64
    return (splitmix(state) >> 11) / (1 << 53)


def splitmix(z: int) -> int:
    """The finaliser of splitmix64 on an unsigned integer."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % TWO_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % TWO_64
    return z ^ (z >> 31)


REFERENCES: dict[str, Callable[..., Rows]] = {
    "cispo": cispo, "clip_cov": clip_cov, "decoupled_ppo": decoupled_ppo, "geo_mean": geo_mean,
    "gspo": gspo,
    "gspo_token": gspo_token, "kl_cov": kl_cov, "ppo_clip": ppo_clip, "reinforce": reinforce,
    "sapo": sapo, "sft": sft,
}  # fmt: skip
