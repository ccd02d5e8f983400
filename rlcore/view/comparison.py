"""Two steps side by side."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlcore.errors import DataError
from rlcore.runs.rollouts import Record, read_table
from rlcore.view.detail import EXCERPT_COLUMNS, excerpt_of
from rlcore.view.evaluations import mean_of, rewards_of
from rlcore.view.run import RunView

MAX_PROMPTS = 200
BINS = 20
COMPARED = (*EXCERPT_COLUMNS, "draw", "index", "reward")
Side = tuple[RunView, int]


def side_by_side(one: Side, other: Side) -> dict[str, Any]:
    """Return metrics, rewards and shared prompts of two steps, of one run or of two.

    `missing` says why there are no prompts, where a step's samples cannot be read.
    """
    sides = [one, other]
    metrics = [run.metrics.rows([step])[0] for run, step in sides]
    names = sorted({*metrics[0], *metrics[1]} - {"step"})
    rewards = [run.samples.rewards(step) for run, step in sides]
    everything = np.concatenate(rewards)
    low, high = (everything.min(), everything.max()) if len(everything) else (0.0, 1.0)
    edges = np.linspace(low, high if high > low else low + 1.0, BINS + 1)
    missing = ""
    try:
        prompts = _prompts(one, other)
    # recovery: the page shows all that the index and the metrics still tell of the step
    except DataError as error:
        prompts = []
        missing = str(error)
    return {
        "metrics": [[name, metrics[0].get(name), metrics[1].get(name)] for name in names],
        "edges": edges,
        "histograms": [np.histogram(values, edges)[0] for values in rewards],
        "prompts": prompts,
        "missing": missing,
    }


def _prompts(one: Side, other: Side) -> list[dict[str, Any]]:
    """Return the prompts that both steps trained on, with a sample of each."""
    if not all(step in run.samples.steps() for run, step in (one, other)):
        return []
    first = _by_prompt(one)
    second = _by_prompt(other)
    shared = [prompt for prompt in first if prompt in second][:MAX_PROMPTS]
    return [
        {"prompt_id": prompt, "a": _told(first[prompt]), "b": _told(second[prompt])}
        for prompt in shared
    ]


def _by_prompt(side: Side) -> dict[str, list[Record]]:
    run, step = side
    found: dict[str, list[Record]] = {}
    for _, record in read_table(run.recording(step), columns=COMPARED):
        found.setdefault(str(record.get("prompt_id")), []).append(record)
    return found


def _told(records: list[Record]) -> dict[str, Any]:
    first = records[0]
    return excerpt_of(first) | {
        "reward": mean_of(rewards_of(records)),
        "samples": len(records),
        "draw": first.get("draw"),
        "index": first.get("index"),
    }
