"""What the definition of a metric consists of. The definitions stand beside the code that computes
them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MetricSpec:
    """One metric: its name, what it is, over what it is averaged ("-" where over nothing), and its
    unit.

    A name with `<...>` in it stands for a family.
    """

    name: str
    definition: str
    denominator: str
    unit: str
