"""Two steps side by side, and two evaluations of a set."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.config.evaluation_sets import SET_KEY
from rlcore.data.sample import joint_verdict, verdict_in, verdict_word
from rlcore.errors import DataError
from rlcore.runs.rollouts import Record, read_table
from rlcore.view.detail import EXCERPT_COLUMNS, excerpt_of
from rlcore.view.run import RunView

MAX_PROMPTS = 200
BINS = 20
COMPARED = (*EXCERPT_COLUMNS, "draw", "index", "reward")
Side = tuple[RunView, int]


def side_by_side(one: Side, other: Side) -> dict[str, Any]:
    """Return metrics, rewards and shared prompts of two steps, of one run or of two.

    `missing` has the reason if a step's samples cannot be read.
    """
    sides = [one, other]
    metrics = [run.metrics.rows([step])[0] for run, step in sides]
    names = sorted({*metrics[0], *metrics[1]} - {"step"})
    rewards = [run.samples.rewards(step) for run, step in sides]
    everything = np.concatenate(rewards)
    low, high = (everything.min(), everything.max()) if len(everything) else (0.0, 1.0)
    edges = np.linspace(low, high if high > low else low + 1.0, BINS + 1)
    prompts: list[dict[str, Any]] = []
    missing = ""
    try:
        if all(step in run.samples.steps() for run, step in sides):
            first, second = map(_by_prompt, sides)
            shared = [prompt for prompt in first if prompt in second][:MAX_PROMPTS]
            prompts = [
                {"prompt_id": prompt, "a": _summary(first[prompt]), "b": _summary(second[prompt])}
                for prompt in shared
            ]
    # Recovery: the page shows the data in the index and the metrics.
    except DataError as error:
        missing = str(error)
    return {
        "metrics": [[name, metrics[0].get(name), metrics[1].get(name)] for name in names],
        "edges": edges,
        "histograms": [np.histogram(values, edges)[0] for values in rewards],
        "prompts": prompts,
        "missing": missing,
    }


def _by_prompt(side: Side) -> dict[str, list[Record]]:
    run, step = side
    found: dict[str, list[Record]] = {}
    for _, record in read_table(run.recording(step), columns=COMPARED):
        found.setdefault(str(record.get("prompt_id")), []).append(record)
    return found


def _summary(records: list[Record]) -> dict[str, Any]:
    first = records[0]
    counts = {"reward": _mean_reward(records), "samples": len(records)}
    return excerpt_of(first) | counts | {name: first.get(name) for name in ("draw", "index")}


# --- evaluations ----------------------------------------------------------------------------------

MAX_ANSWERS = 2000
NEWEST = 50  # evaluations that a page shows
# Tokens are most of a recording, and are not needed here.
JUDGED = ("prompt_id", "rollout_id", "index", "reward", "metadata")
SHOWN = tuple({*JUDGED, *EXCERPT_COLUMNS, "finish_reason", "rollout_logprobs"})
# The prompt id and the rollout_id.
Key = tuple[str, int]
# The samples of a rollout.
Rollout = list[Record]


def sets_of(run: RunView) -> list[dict[str, Any]]:
    """Return each set of each evaluation, newest first, with the flips since the previous one."""
    found: list[dict[str, Any]] = []
    before: dict[str, tuple[int | None, dict[Key, Rollout]]] = {}
    for step, path in list(run.evaluated().items())[-NEWEST:]:
        for name, answers in _by_set(path, JUDGED).items():
            earlier, known = before.get(name, (None, {}))
            flips = Counter(_flip(answers[k], known[k]) for k in answers.keys() & known.keys())
            verdicts = [v for one in answers.values() if (v := _verdict(one)) is not None]
            found.append(
                {"step": step, "set": name, "answers": len(answers), "before": earlier}
                | {"reward": _mean_reward(one[0] for one in answers.values())}
                | {"better": flips["better"], "worse": flips["worse"]}
                | {"right": sum(verdicts) if verdicts else None}
            )
            before[name] = (step, answers)
    return found[::-1]


def answers_of(run: RunView, name: str, step: int, before: int) -> dict[str, Any]:
    """Return the answers of a set at two steps side by side, flipped answers first."""
    now = _answers(run, name, step)
    then = _answers(run, name, before) if before != step else {}
    rows: list[dict[str, Any]] = [
        {
            "prompt_id": key[0],
            "index": now[key][0].get("index"),
            "flip": _flip(now[key], then.get(key)),
            "now": _answer(now[key]),
            "then": _answer(then[key]) if key in then else None,
        }
        for key in now
    ]
    rows.sort(key=lambda row: {"worse": 0, "better": 1}.get(row["flip"], 2))
    return {"set": name, "step": step, "before": before, "rows": rows[:MAX_ANSWERS]}


def _answers(run: RunView, name: str, step: int) -> dict[Key, Rollout]:
    path = run.evaluated().get(step)
    found = {} if path is None else _by_set(path, SHOWN)
    if name not in found:
        raise DataError(f"no answers of the set {name or 'without a name'} after step {step}")
    return found[name]


def _by_set(path: Path, columns: Sequence[str]) -> dict[str, dict[Key, Rollout]]:
    found: dict[str, dict[Key, Rollout]] = {}
    for _, record in read_table(path, columns=columns):
        metadata = record.get("metadata") or {}
        key = (str(record.get("prompt_id")), int(record.get("rollout_id") or 0))
        answers = found.setdefault(str(metadata.get(SET_KEY, "")), {})
        answers.setdefault(key, []).append(record)
    return found


def _mean_reward(records: Iterable[Record]) -> float | None:
    """Return the mean reward, without failed rewards; None without any."""
    rewards = (float(record.get("reward") or 0.0) for record in records)
    known = [reward for reward in rewards if not math.isnan(reward)]
    return sum(known) / len(known) if known else None


def _verdict(rollout: Rollout) -> bool | None:
    return joint_verdict(
        verdict_in(record.get("metadata") or {}, float(record.get("reward") or 0.0))
        for record in rollout
    )


def _flip(now: Rollout, then: Rollout | None) -> str:
    right = _verdict(now)
    was_right = None if then is None else _verdict(then)
    if right is None or was_right is None or right == was_right:
        return ""
    return "better" if right else "worse"


def _answer(rollout: Rollout) -> dict[str, Any]:
    """Return the answer of a rollout: the text of its last branch, as for voting."""
    last = rollout[-1]
    return excerpt_of(last) | {
        "reward": rollout[0].get("reward"),
        "verdict": verdict_word(_verdict(rollout)),
        "finish": last.get("finish_reason"),
        "length": sum(len(record.get("rollout_logprobs") or ()) for record in rollout),
        "branches": len(rollout),
    }
