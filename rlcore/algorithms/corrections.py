"""The gap between the sampling engine and the trainer, and what the loss does about it.

Both hold the same weights, but other kernels, precisions or (asynchronously) versions give other
probabilities, so what looks like on-policy data is off-policy. Here are the measures of that gap,
the importance weight with the ways in use to bound it, and the mask of tokens that are too old
(`algorithm.correction.max_staleness`; the bound on generation, `rollout.max_staleness`, is kept by
the scheduler of the rollouts).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from rlcore.algorithms.errors import InputError, known_names
from rlcore.algorithms.kl import approx_kl, clamp_log_ratio, clamped_log_ratio
from rlcore.algorithms.ragged import expand_to_tokens, segment_mean, segment_sum, without_gradient
from rlcore.algorithms.types import check_cu_seqlens

if TYPE_CHECKING:
    from torch import Tensor

CorrectionName = Literal["tis", "mis", "icepop"]
CorrectionLevel = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class CorrectionSpec:
    """One way to bound the weight: formula, default bounds and source."""

    formula: str
    lower: float | None  # None means 1 / upper
    upper: float
    source: str


CORRECTIONS: Mapping[str, CorrectionSpec] = {
    "tis": CorrectionSpec(
        "weight = clip(w, lower, upper)",
        0.0,
        2.0,
        "truncated importance sampling: F. Yao et al., Your Efficient RL Framework Secretly Brings "
        "You Off-Policy RL "
        "Training, 2025",
    ),
    "mis": CorrectionSpec(
        "weight = w where lower <= w <= upper, else the token is masked: no policy, KL or entropy "
        "term",
        None,
        2.0,
        "masked importance sampling: J. Liu, Y. Li et al., When Speed Kills Stability, 2025",
    ),
    "icepop": CorrectionSpec(
        "weight = w where lower <= w <= upper, else 0; KL and entropy terms stay",
        0.5,
        5.0,
        "IcePop: Ling Team, Every Step Evolves, arXiv:2510.18855",
    ),
}


@dataclass(frozen=True)
class CorrectionResult:
    """The result of a correction for M tokens, detached."""

    weights: Tensor  # float [M], >= 0: multiplies the policy loss, and only that
    keep: Tensor  # bool [M]: where False every term of the token is lost (policy, KL, entropy)
    metrics: Mapping[str, Tensor]  # [M] or [B], for `Moments` under these names


@dataclass(frozen=True)
class Correction:
    """Weights and masks from the ratio of the trainer's to the engine's probability.

        d_t = old_logprobs_t - rollout_logprobs_t                  trainer - engine
        w   = exp(d_t)                            level token: of each token
              exp(sum of d over the sequence)     sequence: the same for all its tokens, unbiased
              exp(mean of d over the sequence)    geometric: the same, whatever their number

        tis      weight = clip(w, lower, upper)
        mis      weight = w where lower <= w <= upper; other tokens are not kept
        icepop   weight = w where lower <= w <= upper, else 0; all tokens are kept

    The log-ratio is clamped to +-20 before exp. The weight multiplies the policy loss only. A token
    that is not kept loses every term: policy, KL and entropy. Denominators never change: the loss
    weights were fixed from the whole optimizer step, and a dropped token counts in them.

    `mis` and `icepop` differ in what happens outside the bounds, as in their implementations.
    Masked importance sampling rejects: the token leaves the loss mask (verl's `rollout_rs`, slime's
    `mask` mode); IcePop only zeroes the coefficient of the policy gradient, and KL and entropy
    still act there (verl's `rollout_is_threshold: lower_upper`, slime's `icepop_function`). Bounds
    are on w; those of verl's `rollout_rs` are on 1 / w.

    Args:
        name: "tis", "mis" or "icepop".
        level: "token", "sequence" or "geometric". The first two were published per token or
            sequence for `tis` and `mis`, per token for `icepop`; bounds of the geometric mean are
            useful close to 1 (0.999 and 1.001, say).
        lower: 0 <= lower <= 1; by default 0 for `tis`, 1 / upper for `mis` (as verl and slime), 0.5
            for `icepop`.
        upper: >= 1; by default 2 for `tis` and `mis`, 5 for `icepop`.
        veto: a sequence with any token whose own exp(d_t) is below this is not kept as a whole, at
            every level; off by default, 1e-4 is usual (slime, verl).

    A log-prob of the engine that is not finite means a corrupt reply: its whole sequence is not
    kept, with every name and level, and counts in `correction/vetoed_fraction`. The trainer's own
    are not excused: NaN stays NaN, so that the step is seen to be broken. An empty sequence
    contributes nothing.

    Example:
        correction = Correction("mis", level="geometric", lower=0.999, upper=1.001, veto=1e-4)
        result = correction(old_logprobs, rollout_logprobs, cu_seqlens)
        loss = torch.where(result.keep, result.weights * policy_loss + other_terms, 0.0)

    Raises:
        ValueError: at construction, for an unknown name or level or a bound out of its range.
    """

    name: CorrectionName
    _: KW_ONLY
    level: CorrectionLevel = "token"
    lower: float | None = None
    upper: float | None = None
    veto: float | None = None

    def __post_init__(self) -> None:
        for field, known in (("name", tuple(CORRECTIONS)), ("level", get_args(CorrectionLevel))):
            value = getattr(self, field)
            if value not in known:
                raise ValueError(
                    f"correction.{field}: unknown {value!r}; {known_names(str(value), known)}"
                )
        # Where both sides agree w is 1, which must never be clipped or masked.
        if self.upper is not None and not 1.0 <= self.upper < math.inf:
            raise ValueError(f"correction.upper: expected a finite number >= 1, got {self.upper}")
        if self.lower is not None and not 0.0 <= self.lower <= 1.0:
            raise ValueError(f"correction.lower: expected a number in [0, 1], got {self.lower}")
        if self.veto is not None and not 0.0 < self.veto < 1.0:
            raise ValueError(
                f"correction.veto: expected a number in (0, 1) or none, got {self.veto}"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """`lower` and `upper` with the defaults of the name filled in."""
        spec = CORRECTIONS[self.name]
        upper = spec.upper if self.upper is None else self.upper
        default = 1.0 / upper if spec.lower is None else spec.lower
        return default if self.lower is None else self.lower, upper

    @without_gradient
    def __call__(
        self, old_logprobs: Tensor, rollout_logprobs: Tensor, cu_seqlens: Tensor
    ) -> CorrectionResult:
        """Correct whole sequences, of a micro-batch or of more.

        Args:
            old_logprobs: float `[M]`, the trainer's, of the policy before the step.
            rollout_logprobs: float `[M]`, the engine's, of the tokens that it sampled.
            cu_seqlens: integer `[B+1]`; on an accelerator its contents are not checked.

        Raises:
            InputError: a shape does not fit.
        """
        # On an accelerator the check would make the host wait for the device once per micro-batch.
        on_host = cu_seqlens.device.type == "cpu"
        check_cu_seqlens(cu_seqlens, contents=on_host)
        size = int(cu_seqlens[-1]) if on_host else old_logprobs.numel()
        for name, value in (("old_logprobs", old_logprobs), ("rollout_logprobs", rollout_logprobs)):
            if tuple(value.shape) != (size,) or not value.is_floating_point():
                raise InputError(
                    f"correction: {name}: expected floating numbers [M] = [{size}], got"
                    f" {value.dtype} {list(value.shape)}"
                )
        token_log_ratio = old_logprobs.double() - rollout_logprobs.double()
        vetoed = ~rollout_logprobs.isfinite()
        if self.veto is not None:
            vetoed = vetoed | (token_log_ratio < math.log(self.veto))
        rejected = segment_sum(vetoed.double(), cu_seqlens) > 0
        keep = ~expand_to_tokens(rejected, cu_seqlens, vetoed.numel())

        # log w of each token, not clamped
        log_ratio = token_log_ratio
        if self.level != "token":
            reduce = segment_sum if self.level == "sequence" else segment_mean
            per_sequence = reduce(token_log_ratio, cu_seqlens)
            log_ratio = expand_to_tokens(per_sequence, cu_seqlens, vetoed.numel())
        ratio = clamp_log_ratio(log_ratio).exp()
        lower, upper = self.bounds
        outside = (log_ratio < (math.log(lower) if lower else -math.inf)) | (
            log_ratio > math.log(upper)
        )
        if self.name == "tis":
            used = keep
            weights = ratio.clamp(lower, upper)
            changed = {"correction_clipped": outside & keep}
        else:
            used = keep & ~outside
            weights = ratio
            changed = {}
        if self.name == "mis":
            keep = used
        weights = torch.where(used, weights, 0.0).to(old_logprobs.dtype)
        metrics = {
            "correction_weight": weights,
            **changed,
            "correction_masked": ~used,
            "correction_vetoed": rejected,
        }
        return CorrectionResult(weights, keep, metrics)


@without_gradient
def mismatch_vectors(logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Return the vectors of `rollout/train_rollout_logprob_diff*` and `rollout/ess`, float64 `[M]`.

        engine_gap    |logprobs - rollout_logprobs|
        engine_kl     w - 1 - log w, the k3 estimate of KL(engine || trainer)
        engine_ratio  w = exp(logprobs - rollout_logprobs), the log-ratio clamped to +-20

    Args:
        logprobs: float `[M]`, the trainer's, of the policy before the step.
        rollout_logprobs: float `[M]`, the engine's. Where they are not finite the metrics are not,
            and should not be.
    """
    trainer = logprobs.double()
    engine = rollout_logprobs.double()
    return {
        "engine_gap": (trainer - engine).abs(),
        "engine_kl": approx_kl(engine, trainer, "k3"),
        "engine_ratio": clamped_log_ratio(trainer, engine).exp(),
    }


def stale_tokens(versions: Tensor, current_version: int, max_staleness: int) -> Tensor:
    """Return where `current_version - versions > max_staleness`, bool `[M]`.

    Args:
        versions: integer `[M]`, the policy version that made each token; tokens of one sequence may
            differ.
        current_version: the version that is about to be trained, from which they are counted.
        max_staleness: a token may be this many versions old, >= 0.

    Raises:
        InputError: a token is newer than the policy: versions only ever grow, so one of the two is
            wrong.
        ValueError: `max_staleness` is negative.
    """
    if max_staleness < 0:
        raise ValueError(f"max_staleness: expected a number of versions >= 0, got {max_staleness}")
    if versions.is_floating_point() or versions.dtype == torch.bool:
        raise InputError(f"versions: expected an integer dtype, got {versions.dtype}")
    age = current_version - versions
    if age.numel() and int(age.min()) < 0:
        raise InputError(
            f"versions: expected none above the current version {current_version}, got"
            f" {int(versions.max())}"
        )
    return age > max_staleness


def mask_weights(weights: Tensor, dropped: Tensor) -> Tensor:
    """Return `weights` (`[M]`) with 0 where `dropped`: those tokens lose every term of the loss.

    Call it after `loss_weights`: the other tokens keep their weight, since a denominator that
    shrank with the dropped tokens would make each that is left count for more the more are dropped.
    """
    if weights.shape != dropped.shape or dropped.dtype != torch.bool:
        raise InputError(
            f"dropped: expected bool of shape {list(weights.shape)}, got {dropped.dtype}"
            f" {list(dropped.shape)}"
        )
    return weights.masked_fill(dropped, 0.0)
