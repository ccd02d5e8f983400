"""Metrics of conversations, from the measurements of each rollout. See `METRICS`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlcore.algorithms.moments import MetricSpec

PREFIX = "conversation/"
UNTRAINED = "untrained_"  # prefix of the counts of untrained tokens; their reason follows it

CONVERSATION_METRICS = tuple(MetricSpec(PREFIX + name, *row) for name, *row in (
    ("turns", "turns of the model", "rollouts", "turns"),
    ("branches", "branches besides the first", "rollouts", "branches"),
    ("tool_calls", "calls of tools", "rollouts", "calls"),
    ("tool_errors", "calls that were answered with an error", "rollouts", "calls"),
    ("generated_tokens", "tokens that the model wrote", "rollouts", "tokens"),
    ("trained_tokens", "of these, tokens that are trainable in a sample", "rollouts", "tokens"),
    (UNTRAINED + "<reason>", "of these, tokens that are trainable in none, for this reason",
     "rollouts", "tokens"),
    ("merge_ratio", "trained_tokens / generated_tokens", "generated tokens", "share"),
    ("context_tokens", "tokens of prompts, results of tools and other messages", "rollouts",
     "tokens"),
    ("engine_s", "waiting for turns, those of branches added up", "rollouts", "s"),
    ("tool_s", "waiting for tools", "rollouts", "s"),
    ("cached_tokens", "tokens of prompts that the engine had cached; absent if not reported",
     "rollouts", "tokens"),
    ("prefilled_tokens", "tokens of prompts that it computed; likewise", "rollouts", "tokens"),
    ("<name>", "any number that a workflow gave to `Conversation.measure`", "rollouts that have it",
     "as given"),
))  # fmt: skip


def conversation_metrics(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return means over rollouts, by published names; {} where no rollout has measurements.

    Args:
        measured: the measurements of each rollout, by name.
    """
    rows = [row for row in measured if row]
    found: dict[str, float] = {}
    for name in sorted({name for row in rows for name in row}):
        values = [row[name] for row in rows if name in row]
        count = len(rows) if name.startswith(UNTRAINED) else len(values)
        found[PREFIX + name] = math.fsum(values) / count
    generated = math.fsum(row.get("generated_tokens", 0.0) for row in rows)
    if generated:
        trained = math.fsum(row.get("trained_tokens", 0.0) for row in rows)
        found[PREFIX + "merge_ratio"] = trained / generated
    return found
