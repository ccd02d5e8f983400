"""The package in examples/plugin: its tests pass, its entry points work, docs show its code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.algorithms import EstimatorInputs, build_estimator, build_policy_loss, expand_to_tokens
from rlcore.algorithms.testing import ContractError, check_estimator
from rlcore.algorithms.testing import estimator as estimator_rules
from rlcore.algorithms.testing import policy_loss as policy_loss_rules
from rlcore.algorithms.types import Advantages
from tests.pages import blocks

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "plugin"
PAGE = ROOT / "docs" / "plugins.md"


@pytest.mark.rest
def test_its_own_tests_pass() -> None:
    """As its author runs them."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(EXAMPLE), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(EXAMPLE),
        "tests",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=EXAMPLE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_its_entry_points_lead_to_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    points = dict(
        re.findall(r'^(\w+) = "(\S+:\w+)"$', (EXAMPLE / "pyproject.toml").read_text(), re.MULTILINE)
    )
    assert set(points) == {"pairwise", "hopeful"}
    assert build_estimator(points["pairwise"], scale=2.0).needs == frozenset()
    assert build_policy_loss(points["hopeful"], failure_weight=0.1).needs == frozenset()


def test_the_page_shows_its_code() -> None:
    shown = [block.text for block in blocks(PAGE)]
    for name in ("estimator", "loss"):
        assert (
            f"# pairwise_rl/{name}.py\n" + (EXAMPLE / "pairwise_rl" / f"{name}.py").read_text()
            in shown
        )
    toml = next(text for text in shown if "entry-points" in text)
    assert toml in (EXAMPLE / "pyproject.toml").read_text()


def test_the_page_lists_every_rule_in_order() -> None:
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    estimator = [(rule.name, rule.sentence) for rule in estimator_rules._RULES]
    assert rows[: len(estimator)] == estimator
    own = [(rule.name, rule.sentence) for rule in policy_loss_rules._RULES]
    assert set(rows[len(estimator) :]) <= set(own)
    assert {name for name, _ in own} <= set(
        re.findall(r"`([a-z0-9-]+)`", PAGE.read_text().partition("## A policy loss")[2])
    )


def test_the_page_shows_the_message() -> None:
    def neighbours(inputs: EstimatorInputs) -> Advantages:
        rewards = inputs.rewards.view(-1, 2)
        return Advantages(
            expand_to_tokens((rewards - rewards.mean(1, keepdim=True)).flatten(), inputs.cu_seqlens)
        )

    neighbours.__qualname__ = "Neighbours"
    with pytest.raises(ContractError) as caught:
        check_estimator(neighbours)
    shown = "\n".join("    " + line for line in str(caught.value).splitlines())
    assert shown in PAGE.read_text(), shown
