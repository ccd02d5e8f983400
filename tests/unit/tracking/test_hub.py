from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import yaml

from rlcore.config.sections.training import HubConfig
from rlcore.errors import UserError
from rlcore.runs.directory import RunDirectory
from rlcore.runs.metrics import MetricsFile
from rlcore.tracking.hub import BEGIN, push_run, reach_hub, write_card

URL = "https://wandb.ai/me/rlcore/runs/abc123"
CONFIG = HubConfig(repo="me/addition")


class StubHub:
    """Keeps what it is given, as the hub would."""

    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self.repos: dict[str, dict[str, Any]] = {}

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        if self.refusal:
            raise self.refusal
        assert exist_ok
        self.repos.setdefault(repo_id, {"private": private, "files": {}})
        return f"https://hub.test/{repo_id}"

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        self.repos[repo_id]["message"] = commit_message
        self.repos[repo_id]["files"] = {
            path.name: path.read_text() for path in Path(folder_path).iterdir()
        }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> StubHub:
    stub = StubHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: stub)
    return stub


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return folder


def push(model: Path) -> tuple[dict[str, Any], list[str]]:
    """Push the model of a run that ended. Returns its result and the notes of its tracker."""
    run = RunDirectory(model.parent / "quickstart")
    run.path.mkdir()
    row = {
        "eval/aime24/pass@8": 0.5,
        "eval/aime24/pass@8_low": 0.4,
        "eval/aime24/score": 0.3,
        "eval/accuracy": 0.8125,
        "time/step": 1.0,
    }
    MetricsFile(run.metrics_path).append(9, row)
    run.write_result("completed", 9)
    notes: list[str] = []
    tracker: Any = SimpleNamespace(url=URL, note=notes.append)
    push_run(CONFIG, model, run, tracker)
    return run.read_result() or {}, notes


def front_and_body(card: str) -> tuple[dict[str, Any], str]:
    _, front, body = card.split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_pushed_card_links_the_run(model: Path, hub: StubHub) -> None:
    result, notes = push(model)
    assert result["hub"] == "https://hub.test/me/addition"
    assert notes == [f"pushed {model} to https://hub.test/me/addition"]
    repo = hub.repos["me/addition"]
    assert repo["private"] is True
    assert repo["message"] == "Trained by rlcore run quickstart"
    assert set(repo["files"]) == {"config.json", "model.safetensors", "README.md"}
    front, body = front_and_body(repo["files"]["README.md"])
    assert front == {"tags": ["rlcore", "reinforcement-learning"], "library_name": "transformers"}
    assert f"[quickstart]({URL})" in body
    quoted = [line.split("`")[1] for line in body.splitlines() if line.startswith("| `")]
    assert quoted == ["step", "eval/accuracy", "eval/aime24/pass@8", "eval/aime24/score"]
    assert "| `eval/accuracy` | 0.812 |" in body


def test_an_existing_card_is_kept_and_pushed_twice_gets_one_section(model: Path) -> None:
    (model / "README.md").write_text(
        "---\nlicense: mit\ntags:\n- math\n- rlcore\n---\n# Mine\n\nAbout it.\n"
    )
    write_card(model, run_name="first", run_url=URL, metrics={})
    write_card(model, run_name="second", run_url=None, metrics={})
    front, body = front_and_body((model / "README.md").read_text())
    assert front["license"] == "mit"
    assert front["tags"] == ["math", "rlcore", "reinforcement-learning"]
    assert body.startswith("# Mine\n\nAbout it.\n")
    assert body.count(BEGIN) == 1
    assert "`second`" in body
    assert "first" not in body


@pytest.mark.parametrize("front", ["{a: [", "- a"])
def test_a_card_that_is_not_yaml_is_named(model: Path, hub: StubHub, front: str) -> None:
    (model / "README.md").write_text(f"---\n{front}\n---\n# Mine\n")
    assert "README.md: the front matter of" in push(model)[0]["hub_error"]


@pytest.mark.parametrize(
    "refusal", [OSError("401 unauthorized"), RuntimeError("connection refused")]
)
def test_a_refusal_says_how_to_push_later(model: Path, hub: StubHub, refusal: Exception) -> None:
    hub.refusal = refusal
    result, notes = push(model)
    assert notes == [result["hub_error"]]
    assert f"{refusal}; the model is whole in {model}: log in with `hf auth login`" in notes[0]
    assert f"`hf upload me/addition {model}`" in notes[0]
    with pytest.raises(UserError, match=rf"'me/addition' cannot be reached: {refusal}"):
        reach_hub(CONFIG)


def test_the_real_client_takes_the_same_calls() -> None:
    """The stub has the signature of huggingface_hub.HfApi."""
    inspect.signature(huggingface_hub.HfApi.create_repo).bind(
        None, "a/b", private=True, exist_ok=True
    )
    inspect.signature(huggingface_hub.HfApi.upload_folder).bind(
        None, repo_id="a/b", folder_path=".", commit_message="m"
    )
