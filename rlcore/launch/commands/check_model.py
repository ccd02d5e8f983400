"""`rlcore check-model`: compares a folder's model with transformers', layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from backends.megatron.model_check.check import Leftover, Setting, StageReport, check_model
from rlcore.errors import FAILED

# Names on one line; a layer may have hundreds of experts.
_NAMES = 6
_FOOT = """\
output: a token's largest relative difference. inside: that of attention, MLP and norms.
gradient: that of the input's and each weight's. tensors: read, converted and back, bit for bit."""


def check_folder(folder: Path, layers: int | None) -> int:
    """Print where the folder's model parts from transformers'; exit code 1 if it does anywhere.

    Args:
        layers: check the first ones; None: all.

    Raises UserError or ModelError as `check_model`.
    """
    import sys

    found: list[StageReport] = []

    def report(stage: StageReport) -> None:
        found.append(stage)
        _print(_stage_lines(stage))

    leftover = check_model(folder, layers, lambda setting: _print(_head_lines(setting)), report)
    _print(_end_lines(leftover))
    apart = [_summary(stage) for stage in found if not stage.agrees]
    if leftover.used:
        apart.append(f"not converted, though transformers uses it: {_names(leftover.used)}")
    if not apart:
        print(f"{folder}: all of it agrees with transformers")
        return 0
    for line in apart:
        print(f"rlcore: {folder}: {line}", file=sys.stderr)
    return FAILED


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _head_lines(setting: Setting) -> list[str]:
    arch = setting.arch
    counts = ", ".join(map(str, setting.lengths))
    return [
        f"{arch.folder}: {arch.family}, layers {setting.layers} of {arch.num_layers},"
        f" against {setting.model} of transformers, in fp32",
        f"sequences of {counts} tokens: one pack here, padded rows there",
        "",
        f"{'':<18}{'output':>9}{'inside':>9}{'gradient':>10}{'tensors':>9}",
    ]


def _stage_lines(stage: StageReport) -> list[str]:
    inside = _number(stage.inside if stage.name.startswith("layer") else None)
    gradient = _number(stage.gradient)
    lines = [
        f"{stage.name:<18}{_number(stage.output):>9}{inside:>9}{gradient:>10}{stage.tensors:>9}"
        + ("" if stage.agrees else "  PARTS")
    ]
    if stage.ties:
        lines.append(f"    {stage.ties} tokens left out: their experts tie")
    for part in stage.parts:
        apart = part.distance > stage.tolerance
        line = f"{'    ' + '  ' * part.depth}{part.name:<44}{_number(part.distance):>9}"
        if apart and (part is stage.culprit or part.depth):
            line += f"  {_names(part.tensors)}"
        lines.append(line + ("  <- first" if part is stage.culprit else ""))
    lines += [f"    gradient of {name}: {_number(d)}" for name, d in stage.gradients.items()]
    if stage.changed:
        lines.append(f"    does not come back bit for bit: {_names(stage.changed)}")
    return lines


def _end_lines(leftover: Leftover) -> list[str]:
    lines = ["", _FOOT]
    for names, whose in (
        (leftover.used, "that transformers uses"),
        (leftover.carried, "that an export copies, which are not trained"),
        (leftover.ignored, "that transformers does not use either"),
    ):
        if names:
            lines.append(f"not converted ({len(names)} tensors {whose}): {_names(names)}")
    return lines


def _summary(stage: StageReport) -> str:
    if stage.culprit is not None:
        names = f" ({_names(stage.culprit.tensors)})" if stage.culprit.tensors else ""
        return f"{stage.name} parts first at {stage.culprit.name}{names}"
    if stage.changed:
        return f"{stage.name}: does not come back bit for bit: {_names(stage.changed)}"
    if stage.gradients:
        return f"{stage.name}: the gradients of {_names(sorted(stage.gradients))} part"
    return f"{stage.name} parts, and none of its submodules does: look at its residual connections"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES])
    return shown if len(names) <= _NAMES else f"{shown} and {len(names) - _NAMES} more"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
