"""Pushes a finished model to the Hugging Face hub, with a link to the tracked run in its card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rlcore.config.sections.training import HubConfig
from rlcore.errors import UserError
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
        # The hub's errors have no common base, see `push_run`.
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
    from huggingface_hub import HfApi

    result = directory.read_result()
    assert config.repo is not None
    assert result is not None
    row = read_metrics(directory.metrics_path)[-1]
    names = dict.fromkeys((*CARD_METRICS, *filter(_QUOTED.fullmatch, row)))
    metrics = {name: row[name] for name in names if name in row}
    try:
        write_card(folder, run_name=directory.name, run_url=tracker.url, metrics=metrics)
        client = HfApi()
        created = client.create_repo(config.repo, private=config.private, exist_ok=True)
        client.upload_folder(
            repo_id=config.repo,
            folder_path=str(folder),
            commit_message=f"Trained by rlcore run {directory.name}",
        )
        result["hub"] = str(created)
    # Errors of the hub, the connection and the file system have no common base.
    except Exception as error:  # noqa: BLE001 - recovery: the model is whole on disk
        result["hub_error"] = (
            f"tracking.hub: pushing to {config.repo!r} failed: {_one_line(error)}; the model is"
            f" whole in {folder}: log in with `hf auth login` and push it by `hf upload"
            f" {config.repo} {folder}`"
        )
        tracker.note(result["hub_error"])
    else:
        tracker.note(f"pushed {folder} to {created}")
    directory.write_result(**result)


def write_card(
    folder: Path, *, run_name: str, run_url: str | None, metrics: Mapping[str, float]
) -> None:
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
    where = f"[{run_name}]({run_url})" if run_url else f"`{run_name}`"
    lines = [
        _SECTION.sub("", card.text).rstrip("\n"),
        "",
        BEGIN,
        "## Training",
        "",
        f"Trained with reinforcement learning by rlcore; tracked run: {where}.",
    ]
    if metrics:
        lines += ["", "| metric | last value |", "|---|---|"]
        lines += [f"| `{name}` | {number(value)} |" for name, value in metrics.items()]
    card.text = "\n".join([*lines, END, ""])
    write_atomic(path, str(card).encode())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
