from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore import cli
from rlcore.runs.directory import RunDirectory
from rlcore.runs.environment import describe_start
from rlcore.runs.files import append_json_line, read_json_lines

CONFIG = {"run": {"name": "a", "seed": 1}, "policy": {"optimizer": {"lr": 1e-6}}, "data": ["x"]}
ROW = {"rollout/reward": 0.5, "objective/kl": 0.25, "time/step": 2.0, "conversation/tool_s": 0.4}


def make(
    root: Path,
    name: str,
    rows: list[dict[str, float]],
    *,
    config: dict[str, Any] | None = None,
    **start: Any,
) -> Path:
    run = RunDirectory(root / name)
    run.path.mkdir()
    origins = {"policy.optimizer.lr": "override", "run.seed": "default"}
    run.write_config({**CONFIG, "run": {"name": name, "seed": 1}, **(config or {})}, origins)
    told = describe_start(0, {"stream": {"size": 9, "fingerprint": "f0"}}, gpus=[])
    append_json_line(run.environment_path, told | start)
    lines = [json.dumps({"step": step, **row}) for step, row in enumerate(rows, 1)]
    run.metrics_path.write_text("".join(f"{line}\n" for line in lines))
    return run.path


def test_equal_runs_are_equal_whatever_the_time(tmp_path: Path, compare) -> None:
    nan = ROW | {"objective/kl": float("nan")}
    slow = {"time/step": 9.0, "conversation/tool_s": 7.0}
    a = make(tmp_path, "a", [ROW, nan])
    b = make(tmp_path, "b", [ROW | slow, nan | slow], time="later", host="elsewhere")
    code, out = compare(a, b)
    assert code == 0, out
    assert "configuration: the same" in out
    assert "exactly: the same in all 2 steps of both" in out


def test_a_value_that_looks_like_one_with_an_origin_is_compared_whole(
    tmp_path: Path, compare
) -> None:
    a = make(tmp_path, "a", [ROW], config={"data": ["x  (one)"]})
    b = make(tmp_path, "b", [ROW], config={"data": ["x  (other)"]})
    code, out = compare(a, b)
    assert code == 1
    assert "configuration: 1 differ" in out
    assert '    B  ["x  (other)"]' in out


def test_what_differs_is_named_with_its_origin_and_its_step(tmp_path: Path, compare) -> None:
    near = ROW | {"rollout/reward": 0.5000001}
    far = near | {"objective/kl": 0.3, "policy/entropy_avg": 1.0}
    packages = {"torch": "2.0", "numpy": "1.0"}
    a = make(tmp_path, "a", [ROW, ROW, ROW], packages=packages)
    b = make(
        tmp_path,
        "b",
        [ROW, near, far, far],
        config={"policy": {"optimizer": {"lr": 2e-6}}},
        packages=packages | {"torch": "2.1"},
        data={"size": 9, "fingerprint": "f1"},
    )
    code, out = compare(a, b)
    assert code == 1
    lines = out.splitlines()
    at = lines.index("  policy.optimizer.lr")
    assert lines[at + 1 : at + 3] == ["    A  1e-06  (override)", "    B  2e-06  (override)"]
    assert lines[lines.index("  packages.torch") + 2] == "    B  2.1"
    assert "  packages.numpy" not in lines
    assert lines[lines.index("  fingerprint") + 1] == "    A  f0"
    assert "metrics, exactly: they diverge at step 2, 1 of them" in lines
    assert "  rollout/reward  0.5  0.5000001" in lines
    at = lines.index("metrics, beyond 0.001 of their size: they diverge at step 3, 2 of them")
    assert lines[at + 1 :] == [
        "  policy/entropy_avg  (absent)  1.0",
        "  objective/kl        0.250  0.300",
    ]
    _, out = compare(a, b, "--tolerance", "0.5")
    lines = out.splitlines()
    at = lines.index("metrics, beyond 0.5 of their size: they diverge at step 3, 1 of them")
    assert lines[at + 1 :] == ["  policy/entropy_avg  (absent)  1.0"]


def test_runs_without_a_record_or_a_step_can_be_compared(tmp_path: Path, compare) -> None:
    a = make(tmp_path, "a", [ROW])
    b = make(tmp_path, "b", [])
    (b / "environment.jsonl").unlink()
    code, out = compare(a, b)
    assert code == 1
    assert f"no record of packages and data: {b}" in out
    assert "metrics: no step is in both" in out


def test_what_is_no_run_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["compare", str(make(tmp_path, "a", [])), str(tmp_path / "gone")])
    assert code == 2
    assert "gone is not a run" in capsys.readouterr().err


def test_a_start_tells_packages_and_commit(tmp_path: Path) -> None:
    path = tmp_path / "environment.jsonl"
    for step in (0, 4):
        append_json_line(path, describe_start(step, {}, gpus=["H100"]))
    first, second = read_json_lines(path)
    assert (first["after"], second["after"]) == (0, 4)
    assert first["packages"]["torch"]
    assert first["gpus"] == ["H100"]
    assert len(first["commit"] or "0" * 40) == 40
