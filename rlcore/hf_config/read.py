"""Reading `config.json` of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlcore.errors import ModelError
from rlcore.hf_config.fields import NAME, Field, check_fields
from rlcore.hf_config.language import DEFAULT_SIZES


def read_config(folder: Path | str) -> dict[str, Any]:
    """Read `config.json` of a folder. Raises ModelError unless the file holds a JSON object."""
    folder = Path(folder)
    path = folder / NAME
    if not folder.is_dir():
        raise ModelError(
            f"{folder}: no such folder; expected a local Hugging Face folder (config.json,"
            " *.safetensors)"
        )
    if not path.is_file():
        raise ModelError(f"{folder}: no config.json; expected a Hugging Face model folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    # Bytes that are not UTF-8 and numbers of thousands of digits raise ValueError too.
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: got a JSON {type(config).__name__}, expected an object")
    return config


def text_model_size(folder: Path | str, key: str) -> int | None:
    """Read a size from `config.json`, or from its `text_config`; None where neither has it.

    A size of `DEFAULT_SIZES` may be left out.

    Raises ModelError like `read_config`, and for a value that is not a positive integer.
    """
    config = read_config(folder)
    fields = {
        key: Field("size", None, nullable=True),
        "text_config": Field("map", {}, nullable=True),
    }
    found = check_fields(folder, config, fields)
    within = found["text_config"] or {}
    inner = check_fields(folder, within, {key: fields[key]}, "text_config.")
    left_out = DEFAULT_SIZES.get(str(config.get("model_type")), {})
    sizes = (found[key], inner[key], left_out.get(key))
    return next((size for size in sizes if size is not None), None)
