"""A small valid configuration, to which a test adds what it is about."""

from __future__ import annotations

from typing import Any

from rlcore.config import Config

SECTIONS: dict[str, dict[str, Any]] = {
    "run": {"name": "test"},
    "model": {"path": "model"},
    "data": {"paths": "train.jsonl"},
    "training": {"steps": 1},
}


def small_config(**sections: Any) -> Config:
    """A configuration with these sections, whose keys come on top of SECTIONS."""
    given = {name: SECTIONS.get(name, {}) | section for name, section in sections.items()}
    return Config.model_validate(SECTIONS | given)
