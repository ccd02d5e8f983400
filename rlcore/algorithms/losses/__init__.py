"""The losses that ship with rlcore, one file each; importing this package registers the policy losses."""

from rlcore.algorithms.losses import ppo_clip, sft, value  # noqa: F401
