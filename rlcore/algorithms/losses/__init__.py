"""The losses of rlcore; importing this package registers the policy losses."""

from rlcore.algorithms.losses import (  # noqa: F401
    cispo,
    covariance,
    decoupled_ppo,
    geo_mean,
    gspo,
    ppo_clip,
    reinforce,
    sapo,
    sft,
    value,
)
