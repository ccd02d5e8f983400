"""Pushes a finished model to the Hugging Face hub, with a link to the tracked run in its card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlcore.config.sections.training import HubConfig
from rlcore.errors import RunFailed, UserError
from rlcore.runs.directory import RunDirectory
from rlcore.runs.files import write_atomic
from rlcore.runs.metrics import read_metrics
from rlcore.tracking.format import number

if TYPE_CHECKING:
    from rlcore.tracking.base import BaseTracker

CARD = "README.md"
BEGIN = "<!-- rlcore: begin -->"
END = "<!-- rlcore: end -->"
TAGS = ("rlcore", "reinforcement-learning")
CARD_METRICS = (
    "step",
    "eval/accuracy",
    "eval/score",
    "rollout/reward",
    "objective/kl",
    "loss/policy_avg",
)
_QUOTED = re.compile(r"eval/.*(/score|/accuracy|@[0-9]+)")
_SECTION = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END) + r"\n?", re.DOTALL)


def reach_hub(config: HubConfig) -> None:
    """Make the repository unless it exists, so that a wrong name shows before the run begins.

    Raises:
        UserError: the hub rejects the request.
    """
    from huggingface_hub import HfApi

    assert config.repo is not None
    try:
        HfApi().create_repo(config.repo, private=config.private, exist_ok=True)
    except Exception as error:
        # The hub's errors have no common base, see push_to_hub.
        raise UserError(
            f"tracking.hub.repo: {config.repo!r} cannot be reached: {_one_line(error)}; log in with"
            " `hf auth login`, or unset it and push the run's hf/ folder later"
        ) from error


def push_run(
    config: HubConfig, folder: Path, directory: RunDirectory, tracker: BaseTracker
) -> None:
    """Upload the final model of a run, with a link to the tracked run in its card.

    An error of the hub does not fail the run; `result.json` and the terminal report it.
    """
    result = directory.read_result()
    assert config.repo is not None
    assert result is not None
    last = read_metrics(directory.metrics_path)[-1]
    try:
        result["hub"] = push_to_hub(
            folder,
            config.repo,
            private=config.private,
            run_name=directory.name,
            run_url=tracker.url,
            metrics=card_metrics(last),
        )
        tracker.note(f"pushed {folder} to {result['hub']}")
    except RunFailed as error:
        result["hub_error"] = str(error)
        tracker.note(str(error))
    directory.write_result(**result)


def card_metrics(row: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a row for the card, with those of named evaluation sets."""
    names = dict.fromkeys((*CARD_METRICS, *filter(_QUOTED.fullmatch, row)))
    return {name: row[name] for name in names if name in row}


def push_to_hub(
    folder: Path,
    repo: str,
    *,
    run_name: str,
    private: bool = True,
    run_url: str | None = None,
    metrics: Mapping[str, float] | None = None,
    client: Any = None,
) -> str:
    """Upload the Hugging Face folder `folder` to `repo` and return the address of the repository.

    This first adds a section on the run to the card in the folder, see `write_card`.

    Args:
        client: default: a `huggingface_hub.HfApi`.

    Raises:
        UserError: there is no model in `folder`.
        RunFailed: the hub rejects the upload; the folder is unchanged.
    """
    from huggingface_hub import HfApi

    if not (folder / "config.json").exists():
        raise UserError(
            f"nothing to push: {folder} is not a Hugging Face folder (no config.json); set"
            " checkpoint.export_hf"
        )
    client = client or HfApi()
    write_card(folder, run_name=run_name, run_url=run_url, metrics=metrics)
    try:
        created = client.create_repo(repo, private=private, exist_ok=True)
        client.upload_folder(
            repo_id=repo,
            folder_path=str(folder),
            commit_message=f"Trained by rlcore run {run_name}",
        )
    # Errors of the hub, the connection and the file system have no common base.
    except Exception as error:
        raise RunFailed(
            f"tracking.hub: pushing to {repo!r} failed: {_one_line(error)}; the model is whole in"
            f" {folder}: log in with `hf auth login` and push it by `hf upload {repo} {folder}`"
        ) from error
    return str(created)


def write_card(
    folder: Path,
    *,
    run_name: str,
    run_url: str | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Path:
    """Write a section on the run into the model card: the link, the last metrics, our tags.

    It replaces the section of an earlier push and keeps other text unchanged.
    """
    from huggingface_hub import ModelCard

    path = folder / CARD
    known = path.read_text(encoding="utf-8") if path.exists() else f"---\n{{}}\n---\n# {run_name}\n"
    try:
        card = ModelCard(known, ignore_metadata_errors=False)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"{path}: the front matter of the model card is not a YAML mapping: {error}"
        ) from error
    tags = card.data.tags or []
    card.data.tags = [*tags, *(tag for tag in TAGS if tag not in tags)]
    card.data.library_name = card.data.library_name or "transformers"
    body = _SECTION.sub("", card.text).rstrip("\n")
    card.text = f"{body}\n\n{_section(run_name, run_url, metrics or {})}\n"
    write_atomic(path, str(card).encode())
    return path


def _section(run_name: str, run_url: str | None, metrics: Mapping[str, float]) -> str:
    where = f"[{run_name}]({run_url})" if run_url else f"`{run_name}`"
    lines = [
        BEGIN,
        "## Training",
        "",
        f"Trained with reinforcement learning by rlcore; tracked run: {where}.",
    ]
    if metrics:
        lines += ["", "| metric | last value |", "|---|---|"]
        lines += [f"| `{name}` | {number(value)} |" for name, value in metrics.items()]
    return "\n".join([*lines, END])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
