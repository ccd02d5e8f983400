"""The walk of one prompt in docs/concepts.md names files that exist, and does not grow."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
TITLE = "## One prompt, from its row to a gradient\n"

MOST_FILES = 61
MOST_CROSSINGS = 11  # from one of rlcore, rollout and backends to another


def stops() -> list[str]:
    """The files in the order in which the walk names them."""
    text = (ROOT / "docs" / "concepts.md").read_text()
    walk = text.partition(TITLE)[2].partition("\n## ")[0]
    return re.findall(r"`((?:rlcore|rollout|backends)/\S+\.py)`", walk)


def test_the_walk_names_files_that_exist() -> None:
    named = stops()
    assert named, "docs/concepts.md has no walk"
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_one_prompt_passes_few_files_and_packages() -> None:
    named = stops()
    assert len(set(named)) <= MOST_FILES
    packages = [name.partition("/")[0] for name in named]
    assert sum(before != after for before, after in pairwise(packages)) <= MOST_CROSSINGS
