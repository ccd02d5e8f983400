"""The estimators that ship with rlcore; importing this package registers them."""

from rlcore.algorithms.estimators import (  # noqa: F401
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    max_rl,
    opo,
    ppo,
    reinforce_pp,
    remax,
    rloo,
    vapo,
)
