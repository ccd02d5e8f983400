from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlcore.config.load import load_config
from rlcore.launch.plugin_checks import check_plugins

REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((REPOSITORY / "examples").rglob("*.yaml"))
ON_TOP = re.compile(r"^#.*goes on top of (\S+\.yaml)", re.IGNORECASE | re.MULTILINE)


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=[str(path.relative_to(REPOSITORY)) for path in EXAMPLES]
)
def test_a_shipped_configuration_is_valid(example, monkeypatch):
    """A configuration is valid alone, or over the file that its comment names.

    base.yaml files are parts of others and name no run.
    """
    monkeypatch.syspath_prepend(str(REPOSITORY))
    below = [example.parent / name for name in ON_TOP.findall(example.read_text())]
    loaded = load_config(
        [*below, example], ["run.name=base"] if example.name == "base.yaml" else []
    )
    assert check_plugins(loaded) == []
    assert loaded.notes == ()


def test_there_are_examples():
    assert EXAMPLES
