"""The loader of import paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcore.import_paths import NoSuchName, import_object


def test_a_name_may_have_dots() -> None:
    assert import_object("json:dumps") is json.dumps
    assert import_object("json:JSONDecoder.decode") is json.JSONDecoder.decode


def test_a_missing_name_is_no_error_of_the_module() -> None:
    with pytest.raises(NoSuchName, match="no attribute 'dump_s'") as caught:
        import_object("json:dump_s")
    assert caught.value.module is json


def test_an_error_of_the_module_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raises_at_import.py").write_text("import json\njson.nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AttributeError, match="nothing"):
        import_object("raises_at_import:anything")
