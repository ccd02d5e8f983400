from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlcore.config import Config
from rlcore.data.sample import Sample
from rlcore.errors import UserError
from rlcore.runs.directory import RunDirectory
from rlcore.runs.metrics import MetricsFile, read_metrics
from rlcore.tracking import BaseTracker, Trackers, build_trackers, pick_samples
from rlcore.tracking import tensorboard as tensorboard_module
from rlcore.tracking.tensorboard import TensorboardTracker
from rlcore.tracking.wandb import WandbTracker

MakeSample = Callable[..., Sample]


def configured(**tracking: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "a"},
            "model": {"path": "model"},
            "data": {"paths": "train.jsonl"},
            "training": {"steps": 3},
            "tracking": tracking,
        }
    )


def test_always_metrics_and_progress_and_nothing_heavy(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "a")
    stream = io.StringIO()
    trackers = build_trackers(configured(), directory, total_steps=3, stream=stream)
    assert trackers.optional == {}
    trackers.log(1, {"rollout/reward": 0.5})
    trackers.close("completed")
    assert read_metrics(directory.metrics_path) == [{"step": 1, "rollout/reward": 0.5}]
    assert "reward 0.500" in stream.getvalue()
    assert trackers.state() == {}
    assert trackers.url is None


@pytest.mark.parametrize("old_logprobs", ["auto", "rollout"])
@pytest.mark.parametrize(("metric", "said"), [("step_kl", True), ("approxkl_avg", False)])
def test_a_policy_that_is_far_from_older_weights_has_not_moved_in_one_step(
    tmp_path: Path, old_logprobs: str, metric: str, said: bool
) -> None:
    config = configured()
    config.algorithm.old_logprobs = old_logprobs  # type: ignore[assignment]
    stream = io.StringIO()
    directory = RunDirectory.create(tmp_path, "a")
    trackers = build_trackers(config, directory, total_steps=3, stream=stream)
    for step in (1, 2, 3):
        trackers.log(step, {f"policy/{metric}": 0.3})
    assert ("one step moves the policy far" in stream.getvalue()) == said


def test_importing_the_trackers_loads_neither_torch_nor_services() -> None:
    code = (
        "import sys, rlcore.tracking, rlcore.tracking.wandb, rlcore.tracking.tensorboard,"
        " rlcore.tracking.hub, rlcore.tracking.report,"
        " rlcore.runs.checkpoints, rlcore.runs.state_codec\nprint(sorted({'torch', 'wandb',"
        " 'tensorboard', 'matplotlib', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


class Recording(BaseTracker):
    def __init__(self, failing_step: int = -1) -> None:
        self.steps: list[int] = []
        self.failing_step = failing_step
        self.closed = ""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.failing_step:
            raise ConnectionError("the service is gone")
        self.steps.append(step)

    def close(self, status: str) -> None:
        self.closed = status


def test_an_optional_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sound = Recording()
    failing = Recording(failing_step=2)
    other = Recording()
    optional = {"failing": failing, "other": other}
    trackers = Trackers(MetricsFile(tmp_path / "metrics.jsonl"), sound, optional)
    for step in (1, 2, 3):
        trackers.log(step, {})
    trackers.close("completed")
    trackers.close("failed")
    assert sound.steps == other.steps == [1, 2, 3]
    assert failing.steps == [1]
    assert (sound.closed, other.closed, failing.closed) == ("completed", "completed", "")
    said = "failing failed and is left out from here on: ConnectionError: the service is gone"
    assert caplog.text.count(said) == 1


def test_metrics_that_cannot_be_written_end_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Trackers(MetricsFile(tmp_path / "gone" / "metrics.jsonl"), Recording()).log(1, {})


def test_picked_samples_run_from_best_to_worst(make_sample: MakeSample) -> None:
    samples = [
        make_sample(draw, reward=reward) for draw, reward in enumerate([0.0, 0.5, 1.0, 0.2, 0.9])
    ]
    rewards = {
        count: [sample.reward for sample in pick_samples(samples, count)]
        for count in (0, 1, 2, 3, 9)
    }
    assert rewards == {
        0: [],
        1: [1.0],
        2: [1.0, 0.0],
        3: [1.0, 0.5, 0.0],
        9: [1.0, 0.9, 0.5, 0.2, 0.0],
    }
    assert pick_samples([], 2) == []


def test_tensorboard_files_read_back(tmp_path: Path, make_sample: MakeSample) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    first = TensorboardTracker(tmp_path, {"run": {"name": "a"}})
    first.show_prompt_lengths(np.array([3, 4, 4, 9]))
    for step in range(1, 6):
        first.log(step, {"rollout/reward": step / 10})
    first.close("interrupted")
    TensorboardTracker(tmp_path, {}).close("failed")  # a process that got to no step
    resumed = TensorboardTracker(tmp_path, {"run": {"name": "a"}})
    resumed.show_prompt_lengths(np.array([3, 4, 4, 9]))
    for step in (4, 5, 6):
        resumed.log(step, {"rollout/reward": step / 100, "eval/aime24/pass@8": 0.75})
    resumed.show_samples(6, [make_sample(response_text="forty-six")])
    half = make_sample(response_text="sixty \ud83d")
    resumed.show_samples(6, [half], "held-out sample (aime24)")
    resumed.close("completed")

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = [(event.step, round(event.value, 4)) for event in events.Scalars("rollout/reward")]
    assert scalars == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.04), (5, 0.05), (6, 0.06)]
    texts = {
        tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
    }
    assert "forty-six" in texts["samples/text_summary"]
    assert "sixty" in texts["held-out_sample_(aime24)/text_summary"]
    assert r"\ud83d" in texts["held-out_sample_(aime24)/text_summary"]
    assert "eval/aime24/pass@8" in events.Tags()["scalars"]
    assert '"name": "a"' in texts["config/text_summary"]
    assert texts["status/text_summary"] == "completed"
    histogram = events.Histograms("data/prompt_lengths")[-1].histogram_value
    assert (histogram.num, histogram.sum) == (4, 20)


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory.create(tmp_path, "a")
    monkeypatch.setattr(tensorboard_module, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"rlcore\[tensorboard\]"):
        build_trackers(configured(tensorboard=True), directory, total_steps=3)
    with pytest.raises(UserError, match=r"rlcore\[wandb\]"):
        build_trackers(configured(wandb={"enabled": True}), directory, total_steps=3)


# --- wandb, really run without a network ----------------------------------------------------------


@pytest.fixture
def offline_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    yield wandb
    wandb.teardown()  # ends the service process


def test_wandb_offline_keeps_its_run_across_processes(
    tmp_path: Path, make_sample: MakeSample, offline_wandb: Any
) -> None:
    config = configured(wandb={"enabled": True, "mode": "offline", "tags": ["test"]})
    directory = RunDirectory.create(tmp_path, "a")
    first = build_trackers(config, directory, total_steps=3, stream=io.StringIO())
    first.show_prompt_lengths(np.array([3, 4, 4, 9]))
    first.log(1, {"rollout/reward": 0.25, "eval/aime24/pass@8": 0.75})
    first.show_samples(1, [make_sample(response_text="forty-six")])
    state = json.loads(json.dumps(first.state()))
    assert first.url is None
    first.close("interrupted")
    offline_wandb.teardown()  # each process has a service of its own, which ends with it

    by_file = build_trackers(config, directory, total_steps=3, stream=io.StringIO())
    assert by_file.state() == state, "killed before its first checkpoint"
    by_file.show_prompt_lengths(np.array([3, 4, 4, 9]))
    by_file.close("interrupted")
    offline_wandb.teardown()
    (directory.path / "wandb_run_id").unlink()
    resumed = build_trackers(config, directory, state, total_steps=3, stream=io.StringIO())
    assert resumed.state() == state
    resumed.log(2, {"rollout/reward": 0.5})
    resumed.close("completed")
    offline_wandb.teardown()  # its service writes the last records when it ends

    folders = sorted((directory.path / "wandb").glob("offline-run-*"))
    assert len(folders) == 3
    assert all(state["wandb"]["id"] in folder.name for folder in folders)
    records = [record for folder in folders for record in _records(folder)]
    history = [
        {
            "/".join([item.key, *item.nested_key]).strip("/"): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [(row["step"], row["rollout/reward"]) for row in history if "rollout/reward" in row] == [
        (1, 0.25),
        (2, 0.5),
    ]
    lengths = [
        row["data/prompt_lengths/values"] for row in history if "data/prompt_lengths/values" in row
    ]
    assert [sum(counts) for counts in lengths] == [4], "shown once, though two processes asked"
    assert [row["eval/aime24/pass@8"] for row in history if "eval/aime24/pass@8" in row] == [0.75]
    assert [row["samples/nrows"] for row in history if "samples/nrows" in row] == [1]
    assert "forty-six" in next((directory.path / "wandb").rglob("samples_*.table.json")).read_text()
    exits = [
        record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"
    ]
    assert exits == [1, 1, 0]
    summaries = [
        item for record in records for item in record.summary.update if item.key == "status"
    ]
    assert [json.loads(item.value_json) for item in summaries] == [
        "interrupted",
        "interrupted",
        "completed",
    ]


def test_wandb_records_the_command_line_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline_wandb: Any
) -> None:
    """It sends the arguments of the process to its server with the first record of a run."""
    secret = "cluster.ray.runtime_env.env_vars.HF_TOKEN=hidden"
    given = ["rlcore", "train", "grpo.yaml", "training.steps=3", secret]
    monkeypatch.setattr(sys, "argv", given)
    config = configured(wandb={"enabled": True, "mode": "offline"})
    directory = RunDirectory.create(tmp_path, "a")
    trackers = build_trackers(config, directory, total_steps=3, stream=io.StringIO())
    trackers.close("completed")
    offline_wandb.teardown()
    (record,) = (directory.path / "wandb").glob("offline-run-*/*.wandb")
    content = record.read_bytes()
    assert b"training.steps=3" in content
    assert b"env_vars.HF_TOKEN=(masked)" in content
    assert b"hidden" not in content
    assert sys.argv is given


def test_the_page_of_an_online_run_is_told() -> None:
    tracker = object.__new__(WandbTracker)
    tracker.run = SimpleNamespace(url="https://wandb.ai/team/a")
    tracker._offline = False
    assert tracker.url == "https://wandb.ai/team/a"


def _records(folder: Path) -> list[Any]:
    """The records of an offline run's file: protobuf messages in the log format of LevelDB."""
    from wandb.proto import wandb_internal_pb2

    content = next(folder.glob("*.wandb")).read_bytes()
    header = 7
    block = 32768
    last_pieces = (1, 4)
    records = []
    parts = b""
    at = header
    while at + header <= len(content):
        # no room for a piece's head: the rest of the block is padding
        if block - at % block < header:
            at += block - at % block
            continue
        size = int.from_bytes(content[at + 4 : at + 6], "little")
        piece = content[at + 6]
        parts += content[at + header : at + header + size]
        at += header + size
        if piece in last_pieces:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


@pytest.mark.parametrize("which", ["tensorboard", "wandb"])
def test_trackers_get_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """wandb's server is not ours; TensorBoard's files are for every user to read."""
    given: dict[str, Any] = {}

    class Stub(BaseTracker):
        def __init__(self, *_: object, settings: Any = None, **__: object) -> None:
            given["settings"] = settings or _[-1]

    name = {"tensorboard": "TensorboardTracker", "wandb": "WandbTracker"}[which]
    monkeypatch.setattr(f"rlcore.tracking.{which}.{name}", Stub)
    config = configured(**{which: True if which == "tensorboard" else {"enabled": True}})
    config.cluster.ray.runtime_env = {"env_vars": {"WANDB_API_KEY": "hidden"}}
    build_trackers(config, RunDirectory.create(tmp_path, "a"), total_steps=1, stream=io.StringIO())
    assert given["settings"]["run"]["name"] == "a"
    assert "hidden" not in json.dumps(given["settings"])
