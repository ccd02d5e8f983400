"""The maths of reinforcement learning on ragged vectors, and how to add your own.

Imports torch and the standard library. Nothing here knows of ranks, meshes or collectives.
"""

from rlcore.algorithms import estimators as _estimators  # noqa: F401  (registers ours)
from rlcore.algorithms import losses as _losses  # noqa: F401
from rlcore.algorithms.aggregation import AggregationMode, loss_weights
from rlcore.algorithms.corrections import (
    CORRECTIONS,
    Correction,
    CorrectionLevel,
    CorrectionName,
    CorrectionResult,
    CorrectionSpec,
    mask_weights,
    mismatch_vectors,
    stale_tokens,
)
from rlcore.algorithms.errors import (
    AlgorithmError,
    DuplicateNameError,
    EstimatorMutationError,
    InputError,
    KeywordError,
    MissingInputError,
    OutputError,
    UndeclaredInputError,
    UnknownNameError,
)
from rlcore.algorithms.estimators.groups import GroupedReturns
from rlcore.algorithms.kl import KLKind, approx_kl, kl_clamped, loss_kl
from rlcore.algorithms.losses.value import value_clipped, value_loss
from rlcore.algorithms.metric_table import METRICS, metric_spec
from rlcore.algorithms.moments import MetricSpec, Moments
from rlcore.algorithms.normalization import NormalizationMode, normalize_advantages, whiten
from rlcore.algorithms.plugin_guard import GuardedEstimator, GuardedPolicyLoss
from rlcore.algorithms.plugins import Keyword
from rlcore.algorithms.ragged import (
    expand_to_tokens,
    group_count,
    group_index,
    group_mean_std,
    last_token_index,
    segment_index,
    segment_lengths,
    segment_mean,
    segment_sum,
)
from rlcore.algorithms.registry import (
    build_estimator,
    build_policy_loss,
    estimator_keywords,
    estimator_names,
    estimator_plugin,
    policy_loss_keywords,
    policy_loss_names,
    policy_loss_plugin,
    register_estimator,
    register_policy_loss,
)
from rlcore.algorithms.rollout_metrics import (
    conversation_metrics,
    explained_variance,
    rollout_metrics,
    staleness_metrics,
)
from rlcore.algorithms.scan import discounted_suffix_sum
from rlcore.algorithms.token_hash import prompt_overlap, token_uniform
from rlcore.algorithms.types import (
    Advantages,
    EstimatorInputs,
    PolicyLoss,
    PolicyLossInputs,
    check_cu_seqlens,
)

__all__ = [
    "Advantages", "AggregationMode", "AlgorithmError", "CORRECTIONS", "Correction",
    "CorrectionLevel", "CorrectionName", "CorrectionResult", "CorrectionSpec", "DuplicateNameError",
    "EstimatorInputs", "EstimatorMutationError", "GroupedReturns", "GuardedEstimator",
    "GuardedPolicyLoss", "InputError", "KLKind", "Keyword", "KeywordError", "METRICS", "MetricSpec",
    "MissingInputError", "Moments", "NormalizationMode", "OutputError", "PolicyLoss",
    "PolicyLossInputs", "UndeclaredInputError", "UnknownNameError", "approx_kl", "build_estimator",
    "build_policy_loss", "check_cu_seqlens", "conversation_metrics", "discounted_suffix_sum",
    "estimator_keywords", "estimator_names", "estimator_plugin", "expand_to_tokens",
    "explained_variance", "group_count", "group_index", "group_mean_std", "kl_clamped",
    "last_token_index", "loss_kl", "loss_weights", "mask_weights", "metric_spec",
    "mismatch_vectors", "normalize_advantages", "policy_loss_keywords", "policy_loss_names",
    "policy_loss_plugin", "register_estimator", "register_policy_loss", "prompt_overlap",
    "rollout_metrics", "segment_index", "segment_lengths", "segment_mean", "segment_sum",
    "stale_tokens", "staleness_metrics", "token_uniform", "value_clipped", "value_loss", "whiten",
]  # fmt: skip
