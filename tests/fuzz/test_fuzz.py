"""Every door, with a few broken inputs in each run, and a minute of them with --full."""

from __future__ import annotations

import os

import pytest

from tests.fuzz.harness import Report, run
from tests.fuzz.targets import TARGETS

QUICK = 10  # cases of a target
MINUTE_S = 60.0


def check(report: Report) -> None:
    assert not report.findings, f"{report}\n" + "\n".join(
        f"{finding.replay}\n{finding.brief()}" for finding in report.findings
    )


@pytest.mark.everyday
@pytest.mark.filterwarnings("ignore")  # numpy's, of values that are refused right after
@pytest.mark.parametrize("name", TARGETS)
def test_a_few_broken_inputs(name: str) -> None:
    check(run(TARGETS[name], seed=1, cases=QUICK))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TARGETS)
def test_a_minute_of_broken_inputs(name: str) -> None:
    """`SEED` chooses others."""
    check(run(TARGETS[name], seed=int(os.environ.get("SEED", "0")), seconds=MINUTE_S))
