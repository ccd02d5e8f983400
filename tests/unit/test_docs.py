"""Pages that are made from code are current, and the code that pages show runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore import cli

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_metrics_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["metrics", "--markdown"]) == 0
    assert (DOCS / "metrics.md").read_text() == capsys.readouterr().out, "run: rlcore metrics --markdown > docs/metrics.md"


def test_the_page_of_algorithms_shows_code_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from rlcore.algorithms import EstimatorInputs, GuardedEstimator

    plugin, alone = re.findall(r"```python\n(.*?)```", (DOCS / "algorithms.md").read_text(), re.DOTALL)
    exec(alone, {})
    assert capsys.readouterr().out.startswith("tensor([ 0.7071,")
    names: dict[str, Any] = {}
    exec(plugin, names)
    estimator = GuardedEstimator("mine", names["MyCredit"](scale=2.0, kl_coef=0.5), names["MyCredit"].needs)
    one = torch.ones(1)
    inputs = EstimatorInputs(cu_seqlens=torch.tensor([0, 2]), rewards=one, group_ids=one.long(), kl=torch.tensor([0.0, 1.0]))
    assert estimator(inputs).advantages.tolist() == [2.0, 1.5]
