"""The record that defines a metric. Each definition stands beside the code that computes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MetricSpec:
    """One metric: name, meaning, what it is averaged over ("-": nothing), and unit.

    A name with `<...>` in it stands for a family.
    """

    name: str
    definition: str
    denominator: str
    unit: str
