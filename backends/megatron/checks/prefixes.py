"""The choice whether a run computes shared prefixes once, and its reason."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.config import Config
from rlcore.errors import ConfigError

_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")


@dataclass(frozen=True)
class PrefixSharing:
    """The choice and its reason; both are printed when a run starts."""

    on: bool
    reason: str

    def __str__(self) -> str:
        return f"{'computed once' if self.on else 'in every sequence'} ({self.reason})"


def choose_prefix_sharing(config: Config, *, transformer_engine: bool) -> PrefixSharing:
    """Choose whether shared prefixes are computed once.

    Args:
        transformer_engine: the layers are Transformer Engine's.

    Raises:
        ConfigError: `policy.share_prefixes` is `on`, but the run does not support it.
    """
    wanted = config.policy.share_prefixes
    if wanted == "off":
        return PrefixSharing(False, "policy.share_prefixes: off")
    why_not = None
    if transformer_engine:
        why_not = (
            "the attention of Transformer Engine's layers has no mask for it"
            " (policy.transformer_engine: off takes megatron-core's own layers)"
        )
    elif losses := [name for name in _LOSSES if config.policy.megatron.get(name)]:
        why_not = f"policy.megatron.{losses[0]}: a router's loss would count a shared token once"
    if why_not is None:
        return PrefixSharing(True, f"policy.share_prefixes: {wanted}")
    if wanted == "on":
        raise ConfigError(
            f"policy.share_prefixes: on, but {why_not}; set it to auto or off, or change that"
        )
    return PrefixSharing(False, why_not)
