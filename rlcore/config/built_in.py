"""The declarations of built-in estimators and policy losses, without importing torch.

`tests/unit/config/test_built_in_algorithms.py` compares the tables with the registrations. Plugins
are imported instead (`rlcore.launch.input_checks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Declared:
    """The declarations of an algorithm that checks and plans read."""

    needs: frozenset[str] = frozenset()
    shaped_rewards: bool = False
    compares_group: bool = False
    # The policy loss reads the whole optimizer step before it is split.
    batch_stats: bool = False
    # The estimator learns from rows of chosen and rejected answers.
    preferences: bool = False


_GROUP = Declared(compares_group=True)
_WITH_VALUES = Declared(frozenset({"values"}), shaped_rewards=True)
_WITH_REFERENCE = frozenset({"logprobs", "ref_logprobs"})
_PAIRS = Declared(_WITH_REFERENCE, compares_group=True, preferences=True)
_PAIRS_ALONE = Declared(frozenset({"logprobs"}), compares_group=True, preferences=True)
_COVARIANCE = Declared(frozenset({"sequence_ids"}), batch_stats=True)

ESTIMATORS: Mapping[str, Declared] = {
    "dpo": _PAIRS,
    "dr_grpo": _GROUP,
    "gdpo": Declared(frozenset({"reward_parts"}), compares_group=True),
    "gpg": _GROUP,
    "grpo": _GROUP,
    "ipo": _PAIRS,
    "kto": Declared(_WITH_REFERENCE, preferences=True),
    "max_rl": _GROUP,
    "opo": _GROUP,
    "orpo": _PAIRS_ALONE,
    "ppo": _WITH_VALUES,
    "reinforce++": Declared(shaped_rewards=True),
    "reinforce++_baseline": Declared(shaped_rewards=True, compares_group=True),
    "remax": Declared(frozenset({"baseline_rewards"}), shaped_rewards=True),
    "rloo": Declared(shaped_rewards=True, compares_group=True),
    "simpo": _PAIRS_ALONE,
    "vapo": _WITH_VALUES,
}
LOSSES: Mapping[str, Declared] = {
    "cispo": Declared(),
    "clip_cov": _COVARIANCE,
    "decoupled_ppo": Declared(frozenset({"rollout_logprobs"})),
    "geo_mean": Declared(),
    "gspo": Declared(),
    "gspo_token": Declared(),
    "kl_cov": _COVARIANCE,
    "ppo_clip": Declared(),
    "reinforce": Declared(),
    "sapo": Declared(),
    "sft": Declared(),
}
