"""The curves of a run as a PNG: reward, evaluation, KL; or the loss of a run without a reward."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.errors import UserError
from rlcore.runs.metrics import read_metrics
from rlcore.tracking.format import KL, LOSS, REWARD, curve, evaluated_sets, of_set

INK = "#1f2430"
MUTED = "#6b7280"
GRID = "#e5e7eb"


@dataclass(frozen=True)
class Panel:
    """One curve of the plot."""

    title: str
    names: tuple[str, ...]
    color: str
    sparse: bool = False  # a few points: mark each, smooth nothing


REWARD_PANEL = Panel("reward, mean of the step's samples", REWARD, "#2563eb")
KL_PANEL = Panel("KL(policy || reference), sum over a response", KL, "#d97706")
CALLS_PANEL = Panel(
    "calls of tools that failed, a rollout", ("conversation/tool_errors",), "#dc2626"
)
LOSS_PANEL = Panel("loss", LOSS, "#2563eb")


def plot_run(metrics_path: Path, out: Path, *, title: str = "") -> Path:
    """Write a PNG of the curves in `metrics_path` to `out` and return its path.

    Raises:
        UserError: matplotlib is missing, or there is nothing to draw.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise UserError("plots need the package matplotlib: pip install 'rlcore[plot]'") from None
    rows = read_metrics(metrics_path)
    sets = dict.fromkeys(name for row in rows for name in evaluated_sets(row))
    evaluations = [
        Panel(
            f"evaluation score, {name or 'held-out prompts'}",
            (of_set(name, "score"),),
            "#059669",
            sparse=True,
        )
        for name in sets
    ]
    called = any(curve(rows, ("conversation/tool_calls",))[1])
    panels = (REWARD_PANEL, *evaluations, *([CALLS_PANEL] if called else ()), KL_PANEL)
    drawn = [(panel, *curve(rows, panel.names)) for panel in panels]
    drawn = [entry for entry in drawn if entry[1]] or [(LOSS_PANEL, *curve(rows, LOSS_PANEL.names))]
    if not drawn[0][1]:
        raise UserError(
            f"{metrics_path}: no reward, evaluation, KL or loss in it yet, nothing to draw"
        )

    spacing = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.10)
    figure = Figure(figsize=(8, 0.7 + 2.3 * len(drawn)), dpi=150, layout=spacing)
    FigureCanvasAgg(figure)  # no pyplot: nothing global, no display
    if title:
        figure.suptitle(title, x=0.015, ha="left", fontsize=13, fontweight="bold", color=INK)
    axes = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (panel, steps, values) in zip(axes, drawn):
        _draw(axis, panel, steps, values)
    axes[-1].set_xlabel("step", color=MUTED)
    aside = out.with_name(f".{out.name}.tmp")
    figure.savefig(aside, format="png")
    os.replace(aside, out)
    return out


def smoothed(values: Sequence[float], window: int) -> NDArray[np.float64]:
    """Return the mean of each value and up to `window - 1` before it; only finite values count."""
    padded = np.asarray(values, dtype=np.float64)
    good = np.isfinite(padded)
    totals = np.concatenate([[0.0], np.where(good, padded, 0.0).cumsum()])
    counts = np.concatenate([[0], good.cumsum()])
    ends = np.arange(1, len(padded) + 1)
    starts = np.maximum(ends - window, 0)
    number = counts[ends] - counts[starts]
    return np.where(number > 0, (totals[ends] - totals[starts]) / np.maximum(number, 1), np.nan)


def _draw(axis: Any, panel: Panel, steps: list[int], values: list[float]) -> None:
    axis.set_title(panel.title, loc="left", fontsize=10, color=INK)
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(GRID)
    axis.tick_params(colors=MUTED, labelsize=9, length=0)
    axis.xaxis.get_major_locator().set_params(integer=True)
    window = len(values) // 15
    if panel.sparse or window < 2:
        axis.plot(steps, values, color=panel.color, linewidth=1.8, marker="o", markersize=4)
        last = values[-1]
    else:
        axis.plot(steps, values, color=panel.color, linewidth=0.9, alpha=0.35)
        line = smoothed(values, window)
        axis.plot(steps, line, color=panel.color, linewidth=2.2)
        axis.set_title(f"bold: mean of {window} steps", loc="right", fontsize=8, color=MUTED)
        last = float(line[-1])
    if np.isfinite(last):
        axis.annotate(
            f"{last:.3g}",
            (steps[-1], last),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=panel.color,
            fontweight="bold",
            annotation_clip=False,
        )
