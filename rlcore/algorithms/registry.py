"""The algorithms by name: register one, build one, list them.

An estimator or policy loss comes from a decorator here, from an entry point of an installed package
(groups `rlcore.estimators` and `rlcore.policy_losses`) or from an import path `package.module:Name`
in the config.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from rlcore.algorithms.errors import AlgorithmError
from rlcore.algorithms.guard import (
    ESTIMATOR_ALWAYS,
    ESTIMATOR_OPTIONAL,
    ESTIMATOR_WHERE_GIVEN,
    POLICY_LOSS_ALWAYS,
    POLICY_LOSS_OPTIONAL,
    GuardedEstimator,
    GuardedPolicyLoss,
)
from rlcore.algorithms.keywords import Keyword, constructor_keywords
from rlcore.algorithms.plugins import Factory, Needs, Plugin, Registry
from rlcore.algorithms.ragged import NormalizationMode
from rlcore.algorithms.reward_shaping import shaping_needs

_ESTIMATORS = Registry(
    "estimator",
    "rlcore.estimators",
    (*ESTIMATOR_ALWAYS, *ESTIMATOR_WHERE_GIVEN, *ESTIMATOR_OPTIONAL),
    "algorithm.estimator.name",
)
_POLICY_LOSSES = Registry(
    "policy loss",
    "rlcore.policy_losses",
    (*POLICY_LOSS_ALWAYS, *POLICY_LOSS_OPTIONAL),
    "algorithm.loss.name",
)
_ESTIMATORS.others.append(_POLICY_LOSSES)
_POLICY_LOSSES.others.append(_ESTIMATORS)


def register_estimator(
    name: str,
    needs: Needs | None = None,
    *,
    optional: Needs | None = None,
    shaped_rewards: bool = False,
    compares_group: bool = False,
    normalization: NormalizationMode = "none",
    formula: str = "",
    source: str = "",
) -> Callable[[Factory], Factory]:
    """Register a class as estimator `name`; its constructor's keywords become its config keys.

    Args:
        name: unique; a name that is taken is refused.
        needs: the optional fields of `EstimatorInputs` that it must have, or a function of the
            built instance that returns them. Without it, a `needs` attribute of the class counts.
            All other fields are None for it.
        optional: fields that it takes where the batch has them, in the same form.
        shaped_rewards: it rewards single tokens, with attributes `kl_coef` and `distill_coef`. The
            fields that these read are needed too, and `token_rewards` are optional.
        compares_group: it compares the samples of one prompt, so a group of one teaches nothing.
        normalization: how advantages are normalised where `algorithm.normalize_advantages` is not
            set.
        formula: the algorithm in one line, for `rlcore algorithms`. Without it, a `formula`
            attribute counts.
        source: the paper or implementation it comes from, in the same way.

    `compares_group` and `normalization` hold for the registered name, not for import paths and
    subclasses. `rlcore.config.built_in` says the same of built-in estimators, since a configuration
    is checked without torch.
    """
    if normalization not in get_args(NormalizationMode):
        raise AlgorithmError(f"estimator {name!r}: unknown normalization {normalization!r}")
    if shaped_rewards:
        needs = _with_shaping(needs)
        optional = {"token_rewards"} if optional is None else optional
    return _ESTIMATORS.register(
        name,
        needs=needs,
        optional=optional,
        compares_group=compares_group,
        normalization=normalization,
        formula=formula,
        source=source,
    )


def _with_shaping(needs: Needs | None) -> Needs:
    """Add the fields that the instance's coefficients of the reward read."""

    def fields(instance: Any) -> set[str]:
        own = needs(instance) if callable(needs) else needs or ()
        return {*own, *shaping_needs(instance.kl_coef, instance.distill_coef)}

    return fields


def register_policy_loss(
    name: str,
    needs: Needs | None = None,
    *,
    optional: Needs | None = None,
    formula: str = "",
    source: str = "",
) -> Callable[[Factory], Factory]:
    """Register a class as policy loss `name`, like `register_estimator`.

    The class may define `batch_stats(inputs) -> dict[str, Tensor]`, which is called on the whole
    optimizer step before it is split and comes back in `inputs.batch_stats`.
    """
    return _POLICY_LOSSES.register(
        name, needs=needs, optional=optional, formula=formula, source=source
    )


def build_estimator(name: str | Callable[..., Any], **kwargs: Any) -> GuardedEstimator:
    """Build an estimator by name, import path or class, with checked keywords and guard."""
    return GuardedEstimator(*_ESTIMATORS.build(name, kwargs))


def guard_estimator(instance: Callable[..., Any]) -> GuardedEstimator:
    """Put an estimator that is built already, or a bare function, behind its guard."""
    return GuardedEstimator(*_ESTIMATORS.describe(instance))


def build_policy_loss(name: str | Callable[..., Any], **kwargs: Any) -> GuardedPolicyLoss:
    """Build a policy loss by name, import path or class, with checked keywords and guard."""
    return GuardedPolicyLoss(*_POLICY_LOSSES.build(name, kwargs))


def guard_policy_loss(instance: Callable[..., Any]) -> GuardedPolicyLoss:
    """Put a policy loss that is built already, or a bare function, behind its guard."""
    return GuardedPolicyLoss(*_POLICY_LOSSES.describe(instance))


def estimator_plugin(name: str) -> Plugin:
    """Return how estimator `name` was entered: its factory, needs, formula and source."""
    return _ESTIMATORS.resolve(name)


def policy_loss_plugin(name: str) -> Plugin:
    """Return how policy loss `name` was entered: its factory, needs, formula and source."""
    return _POLICY_LOSSES.resolve(name)


def estimator_names() -> list[str]:
    """Return the estimators that are registered or announced by an installed package, sorted."""
    return _ESTIMATORS.names()


def policy_loss_names() -> list[str]:
    """Return the policy losses that are registered or announced by an installed package, sorted."""
    return _POLICY_LOSSES.names()


def estimator_keywords(name: str) -> dict[str, Keyword]:
    """Return the config keys of an estimator: name, annotation and default of each."""
    return constructor_keywords(_ESTIMATORS.resolve(name).factory, f"estimator {name!r}")


def policy_loss_keywords(name: str) -> dict[str, Keyword]:
    """Return the config keys of a policy loss: name, annotation and default of each."""
    return constructor_keywords(_POLICY_LOSSES.resolve(name).factory, f"policy loss {name!r}")
