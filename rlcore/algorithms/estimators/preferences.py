"""Learning from preferences: DPO and its relatives as estimators.

A preference loss is a function of the log-probs of whole answers. With weights 1/B on the tokens of
B answers, the gradient of `-A_t * logprobs_t` is the loss's own where

    A_t = -B * d(mean loss) / d(log-prob of the answer that token t is in)

so a pair may be cut apart by micro-batches, replicas and pipeline stages. The derivative is taken
at the log-probs before the step: the gradient is exact for one optimizer step a batch.

A chosen answer has reward 1, a rejected one 0; a pair is a group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch.nn.functional import logsigmoid

from rlcore.algorithms.errors import InputError
from rlcore.algorithms.ragged import expand_to_tokens, segment_lengths, segment_sum
from rlcore.algorithms.registry import register_estimator
from rlcore.algorithms.types import Advantages, EstimatorInputs

if TYPE_CHECKING:
    from torch import Tensor

_WITH_REFERENCE = frozenset({"logprobs", "ref_logprobs"})


@dataclass(frozen=True)
class Answers:
    """Some answers of a step: the log-prob of each, float64 [N], and its length in tokens."""

    logprobs: Tensor
    lengths: Tensor
    ref_logprobs: Tensor | None = None  # float64 [N]

    @property
    def ratios(self) -> Tensor:
        """The log-ratio to the reference, [N]."""
        assert self.ref_logprobs is not None
        return self.logprobs - self.ref_logprobs

    @property
    def means(self) -> Tensor:
        """The log-prob of an answer divided by its length, [N]."""
        return self.logprobs / self.lengths

    def take(self, rows: Tensor) -> Answers:
        """Return some answers, int64 [n]."""
        reference = None if self.ref_logprobs is None else self.ref_logprobs[rows]
        return Answers(self.logprobs[rows], self.lengths[rows], reference)


class PreferenceEstimator(ABC):
    """An estimator whose advantages are the gradient of a loss of chosen and rejected answers.

    Metrics: the loss; the mean log-prob of a token of chosen and of rejected answers; the implicit
    rewards of both, the share of pairs in which the chosen answer has the larger one, and by how
    much.
    """

    paired: ClassVar[bool] = True  # every row has both answers

    @abstractmethod
    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """Return the losses whose mean is minimised, [N].

        With `paired`, `chosen` and `rejected` have the same length, pair by pair.
        """

    @abstractmethod
    def rewards(self, answers: Answers) -> Tensor:
        """Return the reward that the policy implies for each answer, [N]."""

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        """Compute advantages. Raises InputError if pairs are compared and a group is none."""
        chosen, rejected = self._rows(inputs)
        lengths = segment_lengths(inputs.cu_seqlens)
        with torch.inference_mode(False), torch.enable_grad():
            answers = Answers(
                _per_answer(inputs, inputs.logprobs).clone().requires_grad_(),
                lengths.double(),
                None if inputs.ref_logprobs is None else _per_answer(inputs, inputs.ref_logprobs),
            )
            losses = self.losses(answers.take(chosen), answers.take(rejected))
            (gradient,) = torch.autograd.grad(losses.mean(), answers.logprobs)
        advantages = expand_to_tokens(-len(lengths) * gradient, inputs.cu_seqlens)
        metrics = {"loss": losses.detach(), **self._metrics(answers, chosen, rejected)}
        found = {f"preference/{name}": value for name, value in metrics.items() if len(value)}
        assert inputs.logprobs is not None
        return Advantages(advantages.to(inputs.logprobs.dtype), metrics=found)

    @torch.no_grad()
    def _metrics(self, answers: Answers, chosen: Tensor, rejected: Tensor) -> Mapping[str, Tensor]:
        rewards = self.rewards(answers)
        found = {
            "chosen_reward": rewards[chosen],
            "rejected_reward": rewards[rejected],
            "chosen_logprob": answers.means[chosen].detach(),
            "rejected_logprob": answers.means[rejected].detach(),
        }
        if self.paired:
            margins = rewards[chosen] - rewards[rejected]
            found |= {"margin": margins, "accuracy": (margins > 0).double()}
        return found

    def _rows(self, inputs: EstimatorInputs) -> tuple[Tensor, Tensor]:
        """Return the chosen and the rejected answers, int64 [N]; with `paired` in pairs."""
        right = inputs.rewards > 0.5
        if not self.paired:
            return right.nonzero()[:, 0], (~right).nonzero()[:, 0]
        # Chosen before rejected in every group.
        order = torch.argsort(inputs.group_ids * 2 + (~right).long(), stable=True)
        groups = inputs.group_ids[order]
        pairs = order.view(-1, 2) if len(order) % 2 == 0 else None
        if (
            pairs is None
            or bool((groups[::2] != groups[1::2]).any())
            or not bool((right[pairs[:, 0]] & ~right[pairs[:, 1]]).all())
        ):
            raise InputError(
                f"{type(self).__name__}: expected a chosen answer (reward 1) and a rejected one"
                " (reward 0) in every group"
            )
        return pairs[:, 0], pairs[:, 1]


def _per_answer(inputs: EstimatorInputs, logprobs: Tensor | None) -> Tensor:
    """Sum the log-probs of each answer in float64, [B]."""
    assert logprobs is not None
    return segment_sum(logprobs.double(), inputs.cu_seqlens)


def _check_beta(beta: float) -> None:
    if not 0.0 < beta < float("inf"):
        raise ValueError(f"beta: expected a number > 0, got {beta}")


def _check_coefficient(name: str, value: float) -> None:
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"{name}: expected a number >= 0, got {value}")


# --- the losses -----------------------------------------------------------------------------------

DPOKind = Literal["sigmoid", "robust", "hinge", "exo", "nca", "apo_zero", "apo_down"]


def _dpo_losses(kind: DPOKind, chosen: Tensor, rejected: Tensor, smoothing: float) -> Tensor:
    """The losses of pairs, [P], by the rewards of their answers, [P] each."""
    margins = chosen - rejected
    # Log-probability that the chosen answer is the better one, and that it is not.
    right, wrong = logsigmoid(margins), logsigmoid(-margins)
    if kind == "sigmoid":
        return -(1 - smoothing) * right - smoothing * wrong
    if kind == "robust":
        return (smoothing * wrong - (1 - smoothing) * right) / (1 - 2 * smoothing)
    if kind == "hinge":
        return (1 - margins).relu()
    if kind == "exo":
        return right.exp() * (right - math.log1p(-smoothing)) + wrong.exp() * (
            wrong - math.log(smoothing)
        )
    if kind == "nca":
        return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)
    if kind == "apo_zero":
        return (-chosen).sigmoid() + rejected.sigmoid()
    return chosen.sigmoid() + (-margins).sigmoid()


@register_estimator(
    "dpo",
    needs=_WITH_REFERENCE,
    compares_group=True,
    formula="-log sigmoid(r_w - r_l) of pairs;  r = beta * (logprob - ref_logprob of the answer)",
    source="Rafailov et al., arXiv:2305.18290",
)
class DPO(PreferenceEstimator):
    """Direct preference optimization.

        r      = beta * (log-prob - reference's log-prob of an answer)
        sigmoid   -(1 - s) log sigmoid(r_w - r_l) - s log sigmoid(r_l - r_w)   cDPO where s > 0
        robust    (-(1 - s) log sigmoid(r_w - r_l) + s log sigmoid(r_l - r_w)) / (1 - 2 s)
        hinge     max(0, 1 - (r_w - r_l))
        exo       KL of sigmoid(+-(r_w - r_l)) against (1 - s, s)
        nca       -log sigmoid(r_w) - (log sigmoid(-r_w) + log sigmoid(-r_l)) / 2
        apo_zero  sigmoid(-r_w) + sigmoid(r_l)
        apo_down  sigmoid(r_w) + sigmoid(r_l - r_w)

    s is `label_smoothing`, the probability that a pair is the wrong way round; kinds whose line has
    no s ignore it. `sft_coef` adds the negative log-likelihood of a chosen token (RPO,
    arXiv:2404.19733).

    R. Rafailov et al., arXiv:2305.18290; cDPO: E. Mitchell, 2023; robust: arXiv:2403.00409; hinge
    (SLiC-HF): arXiv:2305.10425; EXO: arXiv:2402.00856; NCA: arXiv:2402.05369; APO:
    arXiv:2408.06266.
    """

    def __init__(
        self,
        *,
        beta: float = 0.1,
        kind: DPOKind = "sigmoid",
        label_smoothing: float = 0.0,
        sft_coef: float = 0.0,
    ) -> None:
        _check_beta(beta)
        _check_coefficient("sft_coef", sft_coef)
        lowest = 0.0 if kind != "exo" else 1e-12
        if not lowest <= label_smoothing < 0.5:
            above = " above 0, as exo divides by it," if kind == "exo" else ""
            raise ValueError(
                f"label_smoothing: expected a probability{above} below 0.5, got {label_smoothing}"
            )
        self.beta = beta
        self.kind = kind
        self.label_smoothing = label_smoothing
        self.sft_coef = sft_coef

    def rewards(self, answers: Answers) -> Tensor:
        """`r`, [N]."""
        return self.beta * answers.ratios

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """The losses of pairs, [P]."""
        rewards = self.rewards(chosen), self.rewards(rejected)
        found = _dpo_losses(self.kind, *rewards, self.label_smoothing)
        return found - self.sft_coef * chosen.means if self.sft_coef else found


@register_estimator(
    "ipo",
    needs=_WITH_REFERENCE,
    compares_group=True,
    formula="(d_w - d_l - 1 / (2 beta))^2 of pairs;  d = mean log-ratio of the answer's tokens",
    source="Azar et al., arXiv:2310.12036",
)
class IPO(PreferenceEstimator):
    """Identity preference optimization: the margin of a pair is pulled to a number, not beyond.

        d    = (log-prob - reference's log-prob of an answer) / its tokens
        loss = (d_w - d_l - 1 / (2 beta))^2

    The division by the length is not in the paper; TRL has it by agreement with the authors.

    M. Azar et al., arXiv:2310.12036, equation 17.
    """

    def __init__(self, *, beta: float = 0.1) -> None:
        _check_beta(beta)
        self.beta = beta

    def rewards(self, answers: Answers) -> Tensor:
        """`beta * d`, [N]."""
        return self.beta * answers.ratios / answers.lengths

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """The losses of pairs, [P]."""
        margins = (self.rewards(chosen) - self.rewards(rejected)) / self.beta
        return (margins - 1 / (2 * self.beta)) ** 2


@register_estimator(
    "simpo",
    needs={"logprobs"},
    compares_group=True,
    formula="-log sigmoid(r_w - r_l - gamma) of pairs;  r = beta * mean log-prob of a token",
    source="Meng et al., arXiv:2405.14734",
)
class SimPO(PreferenceEstimator):
    """Simple preference optimization: the mean log-prob of a token is the reward, without a
    reference.

        r    = beta * log-prob of an answer / its tokens
        loss = -log sigmoid(r_w - r_l - gamma)

    Y. Meng et al., arXiv:2405.14734.
    """

    def __init__(self, *, beta: float = 2.0, gamma: float = 1.0) -> None:
        _check_beta(beta)
        _check_coefficient("gamma", gamma)
        self.beta = beta
        self.gamma = gamma

    def rewards(self, answers: Answers) -> Tensor:
        """`r`, [N]."""
        return self.beta * answers.means

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """The losses of pairs, [P]."""
        return -logsigmoid(self.rewards(chosen) - self.rewards(rejected) - self.gamma)


@register_estimator(
    "orpo",
    needs={"logprobs"},
    compares_group=True,
    formula="NLL of a chosen token - beta * log sigmoid(log odds ratio) of pairs",
    source="Hong et al., arXiv:2403.07691",
)
class ORPO(PreferenceEstimator):
    """Odds-ratio preference optimization: supervised fine-tuning on the chosen answers, and an
    odds ratio in place of a reference.

        p    = exp(log-prob of an answer / its tokens)
        loss = -log p_w - beta * log sigmoid(log(p_w / (1 - p_w)) - log(p_l / (1 - p_l)))

    J. Hong et al., arXiv:2403.07691, equations 6 and 7; beta is their lambda.
    """

    def __init__(self, *, beta: float = 0.1) -> None:
        _check_beta(beta)
        self.beta = beta

    def rewards(self, answers: Answers) -> Tensor:
        """`beta * log p`, [N]."""
        return self.beta * answers.means

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """The losses of pairs, [P]."""
        ratio = _log_odds(chosen.means) - _log_odds(rejected.means)
        return -chosen.means - self.beta * logsigmoid(ratio)


def _log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)), [N]; the log-prob of a certain answer counts as -1e-12."""
    logprobs = logprobs.clamp(max=-1e-12)
    return logprobs - torch.log(-torch.expm1(logprobs))


@register_estimator(
    "kto",
    needs=_WITH_REFERENCE,
    formula="w * (1 - sigmoid(+-(r - z)));  r = beta * log-ratio, z = beta * the step's mean",
    source="Ethayarajh et al., arXiv:2402.01306",
)
class KTO(PreferenceEstimator):
    """Kahneman-Tversky optimization: answers are good or bad by themselves; nothing needs a pair.

        r    = beta * (log-prob - reference's log-prob of an answer)
        z    = beta * max(0, mean log-ratio of the step's answers), without gradient
        loss = desirable_weight * (1 - sigmoid(r - z))      of a chosen answer
               undesirable_weight * (1 - sigmoid(z - r))    of a rejected one

    z stands for the KL to the reference. The paper and TRL estimate it from answers given to other
    prompts, which costs a third pass over as many tokens; here the step's own answers are the
    estimate.

    K. Ethayarajh et al., arXiv:2402.01306.
    """

    paired = False

    def __init__(
        self, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
    ) -> None:
        _check_beta(beta)
        _check_coefficient("desirable_weight", desirable_weight)
        _check_coefficient("undesirable_weight", undesirable_weight)
        self.beta = beta
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight

    def rewards(self, answers: Answers) -> Tensor:
        """`r`, [N]."""
        return self.beta * answers.ratios

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """The losses of chosen answers, then of rejected ones, [N]."""
        good, bad = self.rewards(chosen), self.rewards(rejected)
        z = torch.cat([good, bad]).detach().mean().clamp(min=0)
        return torch.cat(
            [
                self.desirable_weight * (z - good).sigmoid(),
                self.undesirable_weight * (bad - z).sigmoid(),
            ]
        )
