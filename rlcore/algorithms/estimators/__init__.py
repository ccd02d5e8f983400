"""The estimators that ship with rlcore, one file each; importing this package registers them."""

from rlcore.algorithms.estimators import grpo, ppo, reinforce_pp  # noqa: F401
