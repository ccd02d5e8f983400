from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlcore.config.load import load_config
from rlcore.launch.input_checks import check_plugins

REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((REPOSITORY / "examples").rglob("*.yaml"))
ON_TOP = re.compile(r"^#.*goes on top of (\S+\.yaml)", re.IGNORECASE | re.MULTILINE)


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=[str(path.relative_to(REPOSITORY)) for path in EXAMPLES]
)
def test_a_shipped_configuration_is_valid(example, monkeypatch):
    """A configuration is valid alone, or over the file that its comment names.

    base.yaml and data.yaml files are parts of others and name no run.
    """
    monkeypatch.syspath_prepend(str(REPOSITORY))
    monkeypatch.syspath_prepend(str(example.parent))  # as its page puts it into PYTHONPATH
    below = [example.parent / name for name in ON_TOP.findall(example.read_text())]
    part = example.name in ("base.yaml", "data.yaml")
    given = ["run.name=part", "data.paths=rows.jsonl", "training.steps=1"]
    loaded = load_config([*below, example], given if part else [])
    assert check_plugins(loaded) == []
    assert loaded.warnings == ()
    threads = loaded.config.run.threads
    assert threads in (None, 1), "two are five times slower where a core is shared"
