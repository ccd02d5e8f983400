from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.addition.plot import plot_run, smoothed
from rlcore.errors import UserError
from rlcore.runs.metrics import MetricsFile, read_metrics
from rlcore.tracking.format import REWARD, curve
from rlcore.tracking.report import format_report


@pytest.fixture
def metrics_path(tmp_path: Path) -> Path:
    """40 steps of a run that learns, evaluated at the start and the end."""
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.append(0, {"eval/score": 0.5, "eval/accuracy": 0.375, "time/evaluation": 10.0})
    for step in range(1, 41):
        row = {
            "rollout/reward": step / 50,
            "objective/kl": math.nan if step == 7 else step / 1000,
            "time/generation": 1.5,
            "time/training": 0.5,
            "time/step": 2.0,
            "time/from_scratch": 2.0 * step,
            "perf/tokens_per_second": 1000.0 + step,
        }
        evaluated = {"eval/score": 0.75, "eval/accuracy": 0.75, "time/evaluation": 10.0}
        metrics.append(step, row | (evaluated if step == 40 else {}))
    return path


def test_failed_rewards_are_in_the_closing_table() -> None:
    rows = [
        {"step": 1, "rollout/scored_samples": 64, "rollout/reward_errors": 3},
        {"step": 2, "rollout/scored_samples": 64, "rollout/reward_timeouts": 1},
    ]
    report = format_report(rows)
    assert "reward failed  4 of 128 samples (3.12%), see reward.on_error" in report
    fine = [{"step": 1, "rollout/scored_samples": 64, "rollout/reward_errors": 0}]
    assert "reward failed" not in format_report(fine)
    old = [{"step": 1, "rollout/reward_errors": 3}]
    assert "reward failed  3\n" in format_report(old)


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def test_each_curve_tells_its_last_value(
    metrics_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []

    class Kept(figure.Figure):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            drawn.append(self)

    monkeypatch.setattr(figure, "Figure", Kept)
    plot_run(metrics_path, tmp_path / "curves.png")
    texts = [{text.get_text() for text in axis.texts} for axis in drawn[0].axes]
    assert texts == [{"0.79"}, {"0.75"}, {"0.0395"}], "reward and KL are means of two steps"


def test_one_panel_for_each_curve_there_is(metrics_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pyplot = "matplotlib.pyplot" in sys.modules
    width, height = png_size(plot_run(metrics_path, tmp_path / "curves.png", title="addition"))
    assert (width, height) == (1200, 1140)
    alone = tmp_path / "alone.jsonl"
    MetricsFile(alone).append(1, {"rollout/reward": 0.5})
    assert png_size(plot_run(alone, tmp_path / "one.png"))[1] == 450
    calls = {"conversation/tool_calls": 1.5, "conversation/tool_errors": 0.5}
    MetricsFile(alone).append(2, {"rollout/reward": 0.5, **calls})
    assert png_size(plot_run(alone, tmp_path / "two.png"))[1] == 795
    loss = tmp_path / "loss.jsonl"
    MetricsFile(loss).append(1, {"loss/policy_avg": 0.5})
    assert png_size(plot_run(loss, tmp_path / "loss.png"))[1] == 450
    assert ("matplotlib.pyplot" in sys.modules) == pyplot, "a figure of its own, nothing global"


def test_nothing_to_draw_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl: no reward, evaluation, KL or loss"):
        plot_run(tmp_path / "metrics.jsonl", tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"rlcore\[plot\]"):
        plot_run(tmp_path / "metrics.jsonl", tmp_path / "a.png")


def test_smoothing_is_a_mean_over_the_past() -> None:
    np.testing.assert_allclose(smoothed([1, 2, 3, 4], 2), [1, 1.5, 2.5, 3.5])
    np.testing.assert_allclose(smoothed([1, 2, 3, 4], 1), [1, 2, 3, 4])
    np.testing.assert_allclose(smoothed([math.nan, 2, math.inf, 4], 2), [math.nan, 2, 2, 4])


def test_the_first_name_present_counts() -> None:
    both = {"objective/scores": 3.0, "rollout/reward": 2.0}
    fallback = {"objective/scores": 4.0}
    rows = [{"step": 0, "x": 1.0}, {"step": 1, **both}, {"step": 2, **fallback}]
    assert curve(rows, REWARD) == ([1, 2], [2.0, 4.0])


def test_report_is_a_table(metrics_path: Path) -> None:
    result = {"status": "early_stopped", "reason": "objective/kl 0.3 above 0.2"}
    text = format_report(read_metrics(metrics_path), result=result)
    assert text.splitlines() == [
        "-" * 60,
        "status            early_stopped (objective/kl 0.3 above 0.2)",
        "steps             40",
        "eval score        0.500 -> 0.750  (+0.250)",
        "eval accuracy     0.375 -> 0.750  (+0.375)",
        "reward            0.0200 -> 0.800  (+0.780)",
        "tokens/s, median  1.02k",
        "time              1m40s",
        "  generation         1m00s   60%",
        "  evaluation          20 s   20%",
        "  training            20 s   20%",
        "-" * 60,
    ]


def test_report_of_a_run_that_did_nothing() -> None:
    assert "steps  0" in format_report([])
