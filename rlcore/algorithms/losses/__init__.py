"""The losses of rlcore, one file each; importing this package registers the policy losses."""

from rlcore.algorithms.losses import (  # noqa: F401
    cispo,
    clip_cov,
    decoupled_ppo,
    geo_mean,
    gspo,
    gspo_token,
    kl_cov,
    ppo_clip,
    reinforce,
    sapo,
    sft,
    value,
)
