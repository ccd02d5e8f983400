"""`rlcore plan` of the models in examples, and of changed copies of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlcore.config.load import load_config
from rlcore.config.yaml_settings import render_config

EXAMPLES = Path(__file__).parents[4] / "examples/models"
CONFIG = str(EXAMPLES / "grpo.yaml")
ALONE = "policy.parallel={tensor: 1, sequence: false}"


def changed(folder: Path, *dropped: str, model: str = "Qwen2.5-7B", **values: Any) -> Path:
    """A copy of an example's config.json with other values."""
    given = json.loads((EXAMPLES / model / "config.json").read_text())
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in {**given, **values}.items() if k not in dropped})
    )
    return folder


def first_line(out: str) -> str:
    """Return the line of the fastest layout, with its mark."""
    lines = out.splitlines()
    return lines[next(i for i, line in enumerate(lines) if "peak of the fullest" in line) + 1]


def first_layout(out: str) -> str:
    return first_line(out).strip()


def validated(folder: Path, model: str) -> list[str]:
    """Overrides with which `validate` finds a model's folder and a file of data."""
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (folder / "rows.jsonl").write_text("{}\n")
    return [f"model.path={changed(folder, model=model)}", f"data.paths={folder / 'rows.jsonl'}"]


def rendered(files: list[Path], overrides: list[str]) -> str:
    """Return a configuration as one file."""
    return render_config(load_config(files, overrides).config.model_dump(exclude_defaults=True), {})
