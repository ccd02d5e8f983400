"""Learning from preferences: DPO and its relatives as estimators.

A preference loss is a function of the log-probs of whole answers. With weights 1/B on the tokens of
B answers, the gradient of `-A_t * logprobs_t` is the loss's own where

    A_t = -n * d(mean loss of its group) / d(log-prob of the answer that token t is in)

and n is the number of the group's answers. So a pair may be cut apart by micro-batches, replicas
and pipeline stages. The derivative is taken at the log-probs before the step: the gradient is exact
for one optimizer step a batch.

A pair is two answers of one group, of which the chosen one has the higher reward.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from rlcore.algorithms.ragged import expand_to_tokens, group_index, segment_lengths, segment_sum
from rlcore.algorithms.registry import register_estimator
from rlcore.algorithms.rollouts import Rollouts
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

    @abstractmethod
    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """Return the losses of pairs, [P]."""

    @abstractmethod
    def rewards(self, answers: Answers) -> Tensor:
        """Return the reward that the policy implies for each answer, [N]."""

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        """Compute advantages; 0 in a group whose rewards are equal."""
        answers = GroupedAnswers(inputs)
        chosen, rejected = answers.pairs()
        with torch.inference_mode(False), torch.enable_grad():
            known = answers.with_gradient()
            losses = self.losses(known.take(chosen), known.take(rejected))
            of_group = torch.bincount(answers.groups[chosen], minlength=len(known.lengths))
            shares = (answers.sizes.double() / of_group.clamp(min=1))[answers.groups[chosen]]
            (gradient,) = torch.autograd.grad((shares * losses).sum(), known.logprobs)
        rewards = self.rewards(known).detach()
        margins = rewards[chosen] - rewards[rejected]
        found = {
            "loss": losses.detach(),
            "margin": margins,
            "accuracy": (margins > 0).double(),
            **described(rewards, known, chosen, rejected),
        }
        return answers.advantages(-gradient, found)


class GroupedAnswers:
    """The N answers of a batch that have a trainable token.

    An answer is a rollout: its segments, if it has several, count together.
    """

    logprobs: Tensor  # float64 [N]
    lengths: Tensor  # float64 [N], trainable tokens
    rewards: Tensor  # float64 [N]
    groups: Tensor  # int64 [N], numbered from 0
    sizes: Tensor  # int64 [N], of each group number its answers; 0 beyond the last group

    def __init__(self, inputs: EstimatorInputs) -> None:
        self._inputs = inputs
        lengths = segment_lengths(inputs.cu_seqlens)
        self._member = member = lengths > 0
        ids = None if inputs.rollout_ids is None else inputs.rollout_ids[member]
        self._rollouts = rollouts = Rollouts.of(ids)

        def total(tokens: Tensor | None) -> Tensor:
            assert tokens is not None
            sums = segment_sum(tokens.double(), inputs.cu_seqlens)[member]
            return sums if rollouts is None else rollouts.total(sums)

        def shared(values: Tensor, name: str) -> Tensor:
            return values[member] if rollouts is None else rollouts.shared(values[member], name)

        self.logprobs = total(inputs.logprobs)
        self.lengths = total(torch.ones_like(inputs.logprobs))  # type: ignore[arg-type]
        self.rewards = shared(inputs.rewards, "rewards").double()
        self.groups, _ = group_index(shared(inputs.group_ids, "group_ids"))
        self.sizes = torch.bincount(self.groups, minlength=len(self.groups))
        self._reference = None if inputs.ref_logprobs is None else total(inputs.ref_logprobs)

    def with_gradient(self) -> Answers:
        """The answers, by whose log-probs a loss may be differentiated."""
        return Answers(self.logprobs.clone().requires_grad_(), self.lengths, self._reference)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """The chosen and the rejected answer of each pair, int64 [P]."""
        order = torch.argsort(self.groups, stable=True)
        chosen = []
        rejected = []
        for rows in order.split(self.sizes[self.sizes > 0].tolist()):
            better = self.rewards[rows][:, None] > self.rewards[rows]
            first, second = better.nonzero(as_tuple=True)
            chosen.append(rows[first])
            rejected.append(rows[second])
        none = order[:0]
        return torch.cat([none, *chosen]), torch.cat([none, *rejected])

    def advantages(self, of_answers: Tensor, metrics: Mapping[str, Tensor]) -> Advantages:
        """Give the number of an answer, [N], to each of its tokens; leave out empty metrics."""
        of_sequences = of_answers if self._rollouts is None else of_answers[self._rollouts.index]
        each = of_sequences.new_zeros(len(self._member))
        each[self._member] = of_sequences
        found = {f"preference/{name}": value for name, value in metrics.items() if len(value)}
        assert self._inputs.logprobs is not None
        tokens = expand_to_tokens(each, self._inputs.cu_seqlens)
        return Advantages(tokens.to(self._inputs.logprobs.dtype), metrics=found)


def described(
    rewards: Tensor, answers: Answers, chosen: Tensor, rejected: Tensor
) -> dict[str, Tensor]:
    """The implicit rewards, [N], and log-probs of chosen and of rejected answers."""
    means = answers.means.detach()
    return {
        "chosen_reward": rewards[chosen],
        "rejected_reward": rewards[rejected],
        "chosen_logprob": means[chosen],
        "rejected_logprob": means[rejected],
    }


def _log_sigmoid(x: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(x)


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
    right = _log_sigmoid(margins)
    wrong = _log_sigmoid(-margins)
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
        return -_log_sigmoid(chosen) - 0.5 * _log_sigmoid(-chosen) - 0.5 * _log_sigmoid(-rejected)
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
        return -_log_sigmoid(self.rewards(chosen) - self.rewards(rejected) - self.gamma)


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
        return -chosen.means - self.beta * _log_sigmoid(ratio)


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
class KTO:
    """Kahneman-Tversky optimization: answers are good or bad by themselves; nothing needs a pair.

        r    = beta * (log-prob - reference's log-prob of an answer)
        z    = beta * max(0, mean log-ratio of the step's answers), without gradient
        loss = desirable_weight * (1 - sigmoid(r - z))      of an answer with a reward above 0.5
               undesirable_weight * (1 - sigmoid(z - r))    of another

    z stands for the KL to the reference. The paper and TRL estimate it from answers given to other
    prompts, which costs a third pass over as many tokens; here the step's own answers are the
    estimate.

    K. Ethayarajh et al., arXiv:2402.01306.
    """

    def __init__(
        self, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
    ) -> None:
        _check_beta(beta)
        _check_coefficient("desirable_weight", desirable_weight)
        _check_coefficient("undesirable_weight", undesirable_weight)
        self.beta = beta
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        """Compute advantages; metrics are those of `PreferenceEstimator` without pairs'."""
        answers = GroupedAnswers(inputs)
        good = answers.rewards > 0.5
        with torch.inference_mode(False), torch.enable_grad():
            known = answers.with_gradient()
            rewards = self.beta * known.ratios
            z = rewards.detach().mean().clamp(min=0) if len(rewards) else 0.0
            losses = torch.where(
                good,
                self.desirable_weight * (z - rewards).sigmoid(),
                self.undesirable_weight * (rewards - z).sigmoid(),
            )
            (gradient,) = torch.autograd.grad(losses.sum(), known.logprobs)
        found = described(rewards.detach(), known, good, ~good)
        return answers.advantages(-gradient, {"loss": losses.detach(), **found})
