"""The visible side of a whole run: terminal, TensorBoard, wandb, the pushed model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from workspace import LEARNING, Run, Workspace

from rlcore.runs.checkpoints import read_checkpoint
from rlcore.tracking.format import number

URL = "https://wandb.ai/me/rlcore/runs/abc123"


@pytest.fixture
def offline_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    yield wandb
    wandb.teardown()  # ends the service process


@pytest.mark.everyday
def test_a_resumed_run_goes_on_in_wandb_and_tensorboard(
    workspace: Workspace, offline_wandb: Any
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    tracking = ("tracking.wandb={enabled: true, mode: offline}", "tracking.tensorboard=true",
                "tracking.show_samples=2", "tracking.show_every=2",
                "checkpoint.export_hf=false")  # fmt: skip
    first = workspace.train("tracked", *LEARNING, *tracking, "training.steps=2")
    assert first.code == 0, first.err
    state = read_checkpoint(first.checkpoint(2)).state["tracker"]["wandb"]
    (first.folder / "wandb_run_id").unlink()  # the checkpoint alone tells
    resumed = workspace.train("tracked", *LEARNING, *tracking, "training.steps=4", "--resume")
    assert resumed.code == 0, resumed.err
    assert read_checkpoint(resumed.checkpoint(4)).state["tracker"]["wandb"] == state

    folders = sorted((resumed.folder / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(state["id"] in folder.name for folder in folders)
    content = [next(folder.glob("*.wandb")).read_bytes() for folder in folders]
    assert [b"data/prompt_lengths" in c for c in content] == [True, False], "shown once"
    tables = [path.read_text() for path in (resumed.folder / "wandb").rglob("samples_*.table.json")]
    assert len(tables) == 2
    assert all('"response"' in table for table in tables)

    events = EventAccumulator(str(resumed.folder / "tensorboard"))
    events.Reload()
    for name in ("rollout/reward", "loss/policy_avg", "time/step"):
        scalars = {event.step: event.value for event in events.Scalars(name)}
        assert scalars == {
            step: pytest.approx(row[name], rel=1e-6) for step, row in resumed.rows.items()
        }
    assert sorted(resumed.rows) == [1, 2, 3, 4]
    assert events.Histograms("data/prompt_lengths")[-1].histogram_value.num == 9500


def test_plain_output_of_quick_steps_is_short_and_ends_with_a_report(workspace: Workspace) -> None:
    run = workspace.sft(
        "quick", "training.steps=150", "training.batch_size=2", "checkpoint.export_hf=false"
    )
    assert run.code == 0, run.err
    assert len(run.metrics) == 150
    shown = [
        int(match[1]) for match in re.finditer(r"^step +(\d+)/150 \| loss ", run.out, re.MULTILINE)
    ]
    assert (shown[0], shown[-1]) == (1, 150)
    # one in two seconds, beside those with a note below, as of a slow step
    quiet = re.findall(r"^step +\d+/150 \| loss .*\n(?=step )", run.out, re.MULTILINE)
    assert len(quiet) <= 2 + run.result["seconds"] / 2
    report = run.out[run.out.index("-----") :]
    for line in (
        r"status +completed",
        r"steps +150",
        r"loss +\d.* -> \d",
        r"  training +\S+ s +\d+%",
    ):
        assert re.search(line, report), line
    assert run.out.rstrip().splitlines()[-1].startswith("run quick: completed after step 150/150")


# --- the hub --------------------------------------------------------------------------------------


class StubHub:
    """The contents of a hub. `refuses`: the calls that fail."""

    def __init__(self, *refuses: str) -> None:
        self.refuses = refuses
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: bool | None = None

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        if "create_repo" in self.refuses:
            raise OSError("401 Client Error.\n\nInvalid token")
        assert exist_ok
        self.private = private
        self.repos.setdefault(repo_id, {})
        return f"https://hub.test/{repo_id}"

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        if "upload_folder" in self.refuses:
            raise OSError("connection reset")
        self.repos[repo_id] = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}


def pushed(
    workspace: Workspace, name: str, hub: StubHub, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> Run:
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    return workspace.train(
        name, *LEARNING, "tracking.hub.repo=me/addition", "training.steps=2", *arguments
    )


def test_the_final_model_is_pushed_with_a_link_to_the_tracked_run(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = StubHub()
    # stands for a tracker with a page
    monkeypatch.setattr("rlcore.tracking.progress.Progress.url", URL)
    run = pushed(workspace, "pushed", hub, monkeypatch, "tracking.hub.private=false")
    assert run.code == 0, run.err
    files = hub.repos["me/addition"]
    assert hub.private is False
    assert files["model.safetensors"] == run.exported.read_bytes()
    card = files["README.md"].decode()
    assert f"[pushed]({URL})" in card
    assert f"| `rollout/reward` | {number(run.rows[2]['rollout/reward'])} |" in card
    assert run.result["hub"] == "https://hub.test/me/addition"
    assert run.result["status"] == "completed"
    assert len(run.lines("pushed")) >= 1


def test_a_hub_that_refuses_is_seen_before_the_run_begins(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pushed(workspace, "no token", StubHub("create_repo"), monkeypatch)
    assert run.code == 2
    (line,) = run.err.strip().splitlines()
    assert "tracking.hub.repo" in line
    assert "hf auth login" in line
    assert not run.folder.exists()


def test_a_failed_upload_does_not_undo_the_run(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pushed(workspace, "lost", StubHub("upload_folder"), monkeypatch)
    assert (run.code, run.result["status"]) == (0, "completed")
    assert "connection reset" in run.result["hub_error"]
    assert len(run.lines("hf upload me/addition")) == 1
    assert run.exported.is_file()


def test_without_a_repository_no_hub_is_asked(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> Any:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.HfApi", asked)
    assert workspace.train("no hub", "training.steps=1").code == 0
