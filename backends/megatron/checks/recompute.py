"""Checks of activation recomputation: some choices would fail, be wrong or do nothing.

Imports no Megatron.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from backends.megatron.parallel.stages import layers_of_stages
from rlcore.config.sections.policy import ParallelConfig
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from backends.megatron.convert.architecture import Architecture

_OF_FULL = ("recompute_method", "recompute_num_layers", "distribute_saved_activations")
_OTHERS = (*_OF_FULL, "recompute_modules")
_MODULES = ("core_attn", "mlp", "moe", "shared_experts", "layernorm", "moe_act", "mla_up_proj")


def check_recompute(
    given: Mapping[str, Any],
    arch: Architecture,
    parallel: ParallelConfig,
    *,
    te_layers: bool | None = None,
) -> None:
    """Refuse a choice that changes the gradients or saves nothing.

    Args:
        given: `policy.megatron`; other fields are not looked at.
        te_layers: whether the layers are Transformer Engine's; None: not known here.

    Raises ConfigError naming the key, its value and values that work.
    """
    granularity = given.get("recompute_granularity")
    if given.get("moe_layer_recompute"):
        raise _refused(
            "moe_layer_recompute",
            "Megatron gives it up; set recompute_granularity=selective and recompute_modules=[moe]",
        )
    if granularity is None:
        for key in _OTHERS:
            if given.get(key):
                value = "selective" if key == "recompute_modules" else "full"
                raise _refused(
                    key, f"does nothing without recompute_granularity; set that to {value}"
                )
    elif granularity == "full":
        _check_full(given, arch, parallel)
    elif granularity == "selective":
        for key in _OF_FULL:
            if given.get(key):
                raise _refused(
                    key, "belongs to recompute_granularity=full; leave it out, or set that"
                )
        _check_modules(given.get("recompute_modules", ["core_attn"]), arch, te_layers)
    else:
        raise _refused("recompute_granularity", f"got {granularity!r}, expected full or selective")


def _check_full(given: Mapping[str, Any], arch: Architecture, parallel: ParallelConfig) -> None:
    """Check the recomputation of whole layers.

    `uniform` recomputes runs of so many layers, `block` only the first so many of each chunk.
    """
    method = given.get("recompute_method")
    count = given.get("recompute_num_layers")
    if given.get("recompute_modules"):
        raise _refused(
            "recompute_modules",
            "belongs to recompute_granularity=selective; leave it out, or set that",
        )
    if method not in ("uniform", "block"):
        raise _refused("recompute_method", f"got {method!r}, expected uniform or block")
    chunks = {
        layers // parallel.virtual_pipeline
        for layers in layers_of_stages(arch.transformer["num_layers"], parallel)
    }
    most = math.gcd(*chunks) if method == "uniform" else max(chunks)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= max(chunks):
        raise _refused("recompute_num_layers", f"got {count!r}, expected a number from 1 to {most}")
    if method == "uniform" and most % count:
        nearest = max(n for n in range(1, count) if most % n == 0)
        raise _refused(
            "recompute_num_layers",
            f"{count} does not divide the layers of a model chunk"
            f" ({', '.join(map(str, sorted(chunks)))}); set it to {nearest}",
        )
    losses = [key for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff") if given.get(key)]
    if method == "block" and losses and count < max(chunks):
        raise _refused(
            "recompute_method",
            f"block, with {losses[0]}: in layers that are not recomputed megatron-core then counts"
            " pads in the routers' losses; set it to uniform",
        )
    if given.get("distribute_saved_activations") and (parallel.tensor == 1 or parallel.sequence):
        reason = (
            "sequence parallelism does it already"
            if parallel.sequence
            else "there is no tensor parallelism to do it over"
        )
        raise _refused("distribute_saved_activations", f"{reason}; leave it out")


def _check_modules(modules: Any, arch: Architecture, te_layers: bool | None) -> None:
    works = [module for module in _MODULES if _reason(module, arch, te_layers) is None]
    expected = f"expected some of {', '.join(works)}"
    if not isinstance(modules, list) or not modules:
        raise _refused("recompute_modules", f"got {modules!r}, {expected}")
    for module in modules:
        if module not in _MODULES:
            near = difflib.get_close_matches(str(module), works, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise _refused("recompute_modules", f"got {module!r}, {expected}{hint}")
        if module not in works:
            raise _refused(
                "recompute_modules", f"{module}: {_reason(module, arch, te_layers)}; {expected}"
            )


def _reason(module: str, arch: Architecture, te_layers: bool | None) -> str | None:
    """The reason why a part of a layer cannot be recomputed alone; None where it can."""
    experts = bool(arch.num_experts)
    model = arch.transformer
    if module in ("moe", "moe_act") and not experts:
        return f"the {arch.family} model has no experts"
    if module == "mlp" and experts and all(arch.moe_layers):
        return f"every layer of the {arch.family} model has experts"
    if module == "shared_experts" and not model.get("moe_shared_expert_intermediate_size"):
        return f"the {arch.family} model has no shared experts"
    if module == "mla_up_proj":
        return "it has not been proven right"
    if module in ("layernorm", "moe_act") and te_layers is False:
        return "megatron-core needs Transformer Engine's layers for it"
    if module == "layernorm" and not experts:
        return "Transformer Engine's layers have their norms inside the matmuls"
    return None


def _refused(key: str, message: str) -> ConfigError:
    return ConfigError(f"policy.megatron.{key}: {message}")
