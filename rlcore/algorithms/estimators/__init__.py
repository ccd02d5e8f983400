"""The estimators that ship with rlcore; importing this package registers them."""

from rlcore.algorithms.estimators import gdpo, grpo, ppo, preferences, reinforce_pp  # noqa: F401
