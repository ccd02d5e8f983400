"""The losses of rlcore; importing this package registers the policy losses."""

from rlcore.algorithms.losses import covariance, gspo, reinforce, surrogate, value  # noqa: F401
