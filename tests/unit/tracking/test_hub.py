from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from rlcore.errors import RunFailed, UserError
from rlcore.tracking.hub import BEGIN, card_metrics, push_to_hub, write_card

URL = "https://wandb.ai/me/rlcore/runs/abc123"


class StubHub:
    """Keeps what it is given, as the hub would."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
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
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return folder


def front_and_body(card: str) -> tuple[dict[str, Any], str]:
    _, front, body = card.split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_pushed_card_links_the_run(model: Path) -> None:
    hub = StubHub()
    address = push_to_hub(
        model,
        "me/addition",
        run_name="quickstart",
        run_url=URL,
        metrics={"eval/accuracy": 0.8125},
        client=hub,
    )
    assert address == "https://hub.test/me/addition"
    repo = hub.repos["me/addition"]
    assert repo["private"] is True
    assert repo["message"] == "Trained by rlcore run quickstart"
    assert set(repo["files"]) == {"config.json", "model.safetensors", "README.md"}
    front, body = front_and_body(repo["files"]["README.md"])
    assert front == {"tags": ["rlcore", "reinforcement-learning"], "library_name": "transformers"}
    assert f"[quickstart]({URL})" in body
    assert "| `eval/accuracy` | 0.812 |" in body


def test_an_existing_card_is_kept_and_pushed_twice_gets_one_section(model: Path) -> None:
    (model / "README.md").write_text(
        "---\nlicense: mit\ntags:\n- math\n- rlcore\n---\n# Mine\n\nAbout it.\n"
    )
    write_card(model, run_name="first", run_url=URL)
    write_card(model, run_name="second")
    front, body = front_and_body((model / "README.md").read_text())
    assert front["license"] == "mit"
    assert front["tags"] == ["math", "rlcore", "reinforcement-learning"]
    assert body.startswith("# Mine\n\nAbout it.\n")
    assert body.count(BEGIN) == 1
    assert "`second`" in body
    assert "first" not in body


@pytest.mark.parametrize("front", ["{a: [", "- a"])
def test_a_card_that_is_not_yaml_is_named(model: Path, front: str) -> None:
    (model / "README.md").write_text(f"---\n{front}\n---\n# Mine\n")
    with pytest.raises(UserError, match=r"README\.md: the front matter .* is not a YAML mapping"):
        write_card(model, run_name="a")


@pytest.mark.parametrize(
    "refusal", [OSError("401 unauthorized"), RuntimeError("connection refused")]
)
def test_a_refusal_says_how_to_push_later(model: Path, refusal: Exception) -> None:
    with pytest.raises(
        RunFailed, match=rf"{refusal}; the model is whole in .*hf auth login.*hf upload me/addition"
    ):
        push_to_hub(model, "me/addition", run_name="a", client=StubHub(refusal))


def test_no_model_is_no_push(tmp_path: Path) -> None:
    hub = StubHub()
    with pytest.raises(UserError, match="not a Hugging Face folder"):
        push_to_hub(tmp_path, "me/addition", run_name="a", client=hub)
    assert hub.repos == {}


def test_the_real_client_takes_the_same_calls() -> None:
    """The stub has the signature of huggingface_hub.HfApi."""
    inspect.signature(huggingface_hub.HfApi.create_repo).bind(
        None, "a/b", private=True, exist_ok=True
    )
    inspect.signature(huggingface_hub.HfApi.upload_folder).bind(
        None, repo_id="a/b", folder_path=".", commit_message="m"
    )


def test_the_card_shows_what_people_quote_of_named_sets() -> None:
    row = {
        "step": 9.0,
        "eval/aime24/pass@8": 0.5,
        "eval/aime24/pass@8_low": 0.4,
        "eval/aime24/score": 0.3,
        "eval/score": 0.2,
        "time/step": 1.0,
    }
    assert list(card_metrics(row)) == [
        "step",
        "eval/score",
        "eval/aime24/pass@8",
        "eval/aime24/score",
    ]
