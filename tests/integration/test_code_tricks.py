"""The reward `code` cannot be had without solving the task, whatever form its tests have.

Bubblewrap and unshare are both needed; `scripts/install_debian.sh` brings the first. What tests
compare is tried in more forms in `tests/unit/rollout/rewards/graders/test_code_harness.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.code_tricks import ATTACKS, HELPERS, HONEST, VALUES
from tests.integration.test_code_reward import sample, score

CHECK = """
from statistics import mean

METADATA = {"author": "x"}


def check(candidate):
    assert mean([candidate(4), 0]) == 8, "the first"
    assert mean([candidate(x) for x in (2, 3)]) == 6.5


check(f)
"""
FORMS: dict[str, Any] = {
    "program": {"inputs": ["4\n"], "outputs": ["16\n"]},
    "function": {"fn_name": "f", "inputs": [[4]], "outputs": [16]},
    "assertion": ["assert f(4) == 16"],
    "check": CHECK,
}
TRICKS = {**VALUES, **ATTACKS}


@pytest.mark.parametrize("kind", ["bubblewrap", "unshare"])
@pytest.mark.parametrize("form", FORMS)
def test_no_trick_scores(form: str, kind: str) -> None:
    batch = [written(code, form, at) for at, code in enumerate(TRICKS.values())]
    found = score(*batch, sandbox={"kind": kind})
    assert {name: points for name, points in zip(TRICKS, found) if points != 0} == {}


@pytest.mark.parametrize("form", FORMS)
def test_honest_solutions_score(form: str) -> None:
    batch = [written(code, form, at, helpers="") for at, code in enumerate(HONEST.values())]
    if form == "program":
        # all that it prints counts
        batch = [one for one in batch if "start" not in one.response_text]
    assert score(*batch) == [1.0] * len(batch)


def written(code: str, form: str, at: int, helpers: str = HELPERS) -> Any:
    """A sample; a program reads the argument and prints the result."""
    future, code = ("", code) if "__future__" not in code else code.split("\n", 1)
    ending = "\nprint(f(int(input())))" if form == "program" else ""
    return sample(f"{future}\n{helpers}\n{code}{ending}", FORMS[form], at)
