"""The layers of each pipeline stage: all alike, or with given numbers in the first and the last."""

from __future__ import annotations

from rlcore.config.sections.policy import ParallelConfig
from rlcore.errors import ConfigError


def layers_of_stages(layers: int, parallel: ParallelConfig) -> list[int]:
    """The number of layers of each pipeline stage, over all its model chunks.

    Raises ConfigError where they do not divide, naming the keys and the nearest split that fits.
    """
    pp = parallel.pipeline
    vpp = parallel.virtual_pipeline
    first = parallel.first_stage_layers
    last = parallel.last_stage_layers
    if pp == 1 and (first or last):
        key = "first_stage_layers" if first else "last_stage_layers"
        raise ConfigError(f"policy.parallel.{key}: needs pipeline > 1; leave it out")
    middle = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if rest < middle or (rest > 0 and not middle) or (middle and rest % middle):
        left = (
            f"{rest} are left for {middle} stages" if rest >= 0 else f"{-rest} too many are given"
        )
        raise ConfigError(
            f"policy.parallel: pipeline {pp}{_given(first, last)} does not divide the model's"
            f" {layers} layers: {left}; {_advice(layers, pp)}"
        )
    each = rest // middle if middle else 0
    stages = [*([first] if first else []), *[each] * middle, *([last] if last else [])]
    if any(n % vpp for n in stages):
        raise ConfigError(
            f"policy.parallel: virtual_pipeline {vpp} does not divide the layers of every stage,"
            f" {stages} of {layers} layers; set it to 1, or first_stage_layers and"
            " last_stage_layers so that it does"
        )
    return stages


def nearest_divisor(wanted: int, *sizes: int) -> int:
    """The largest number up to `wanted` that divides all of `sizes`."""
    return next(n for n in range(wanted, 0, -1) if not any(size % n for size in sizes))


def _given(first: int | None, last: int | None) -> str:
    return "".join(
        f", {key} {size}"
        for key, size in (("first_stage_layers", first), ("last_stage_layers", last))
        if size is not None
    )


def _advice(layers: int, pp: int) -> str:
    if pp > layers:
        return f"choose at most {layers} stages"
    if layers % pp == 0:
        return f"leave first_stage_layers and last_stage_layers out for {layers // pp} in each"
    each = -(-layers // pp)
    short = layers - each * (pp - 1)
    if short > 0:
        return (
            f"set last_stage_layers={short} alone for {pp - 1} stages of {each} and a short"
            " last one"
        )
    each = layers // pp
    return (
        f"set last_stage_layers={layers - each * (pp - 1)} alone for {pp - 1} stages of {each} and"
        " a long last one"
    )
