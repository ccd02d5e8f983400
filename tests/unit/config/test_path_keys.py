"""Every key that holds a path refuses what is not there by its own name, as the schema has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore import cli
from rlcore.config.load import load_config
from rlcore.config.path_keys import path_error, path_keys
from rlcore.config.reference import keys
from rlcore.config.schema import ANY, listed, sections
from rlcore.config.sections.base import LeadsTo
from rlcore.config.yaml_settings import KeyPath
from rlcore.errors import UserError
from rlcore.launch.input_checks import check_folders

KEYS = path_keys()
# What else a section needs so that a path in it can be given: its first keys -> overrides.
BESIDE = {
    "cluster.tls": ("ca_file=OTHER", "certificate_file=OTHER", "key_file=OTHER"),
    "data.sources": (),
    "reward.parts.NAME.judge": ("url=http://127.0.0.1:1", "model=judge"),
    "reward.parts.NAME.service": ("url=http://127.0.0.1:1", "format=sglang"),
    "evaluation.sets.NAME.reward.parts.NAME.judge": ("url=http://127.0.0.1:1", "model=judge"),
    "evaluation.sets.NAME.reward.parts.NAME.service": ("url=http://127.0.0.1:1", "format=sglang"),
    "evaluation.sets.NAME.reward": ("..paths=ROWS",),
    "rollout.policies": ("/policy.lora.rank=4",),
    "rollout.engine": ("kind=sglang", "transport=disk"),
    "training.replay": ("..debug=train_only",),
    "training.replay_from": ("..debug=train_only", "..replay=OTHER"),
}
FAULTS = ("missing", "other", "empty", "unreadable")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    (tmp_path / "other").write_text("other")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def given(key: KeyPath, value: str) -> list[str]:
    """Overrides that set `key`, and what its sections need."""
    dotted = ".".join(key)
    overrides = []
    for start, beside in BESIDE.items():
        if f"{dotted}.".startswith(f"{start}."):
            for item in beside:
                if item.startswith("/"):
                    overrides.append(item.removeprefix("/"))
                    continue
                up = item.startswith("..")
                section = start.rpartition(".")[0] if up else start
                overrides.append(f"{section}.{item.removeprefix('..')}")
    if key[:2] == ("data", "sources"):
        overrides.append("data.paths=[]")
    return [text.replace(ANY, "mine") for text in (*overrides, f"{dotted}={value}")]


def break_it(path: Path, leads_to: LeadsTo, fault: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put something else at `path` than what must be there; returns what the error says of it."""
    is_folder = leads_to.kind in ("folder", "checkpoint", "output")
    if fault == "missing":
        return "does not exist"
    if is_folder != (fault == "other"):
        path.mkdir()
        if fault == "unreadable":
            (path / "something").touch()
    else:
        path.write_text("something" if fault in ("other", "unreadable") else "")
        path.chmod(0o700)
    if fault == "unreadable":
        # the tests may run as a user who may read everything
        real = os.access
        monkeypatch.setattr(os, "access", lambda p, mode: Path(p) != path and real(p, mode))
        return "may not be"
    if fault == "other" and leads_to.kind == "rows":
        return "holds no files of rows"
    return {"empty": "is empty", "other": "is a file" if is_folder else "is a folder"}[fault]


def broken(
    key: KeyPath, fault: str, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], str]:
    """Overrides with a fault at `key`, and what the error says of it."""
    path = folder / "mine.jsonl"
    said = break_it(path, KEYS[key], fault, monkeypatch)
    value = f"[{path}]" if key[-1] in ("paths", "folders") else str(path)
    complete = [
        "run.name=test", f"model.path={model}", "model.dtype=fp32", "data.paths=rows.jsonl",
        "training.steps=1", "rollout.sampling.max_new_tokens=8", *given(key, value),
    ]  # fmt: skip
    overrides = [
        text.replace("OTHER", str(folder / "other")).replace("ROWS", "rows.jsonl")
        for text in complete
    ]
    return overrides, f"{'.'.join(key).replace(ANY, 'mine')}: {path} {said}"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("key", KEYS, ids=".".join)
def test_an_error_about_a_path_begins_with_its_key(
    key: KeyPath, fault: str, folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if KEYS[key].kind == "output" and fault in ("missing", "empty"):
        # a folder that a run writes need not be there, nor hold anything
        return
    if KEYS[key].kind == "list" and fault == "other":
        # both files and folders are right
        return
    overrides, said = broken(key, fault, folder, tiny_model, monkeypatch)
    config = load_config([], overrides).config
    with pytest.raises(UserError) as refused:
        check_folders(config, 1)
    assert said in str(refused.value)
    assert "; expected " in str(refused.value)


def test_validate_shows_it(
    folder: Path,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = ("cluster", "tls", "ca_file")
    overrides, said = broken(key, "missing", folder, tiny_model, monkeypatch)
    assert cli.main(["validate", *overrides]) == 2
    assert said in capsys.readouterr().err


def test_what_is_right_is_not_refused(folder: Path) -> None:
    (folder / "run" / "checkpoints").mkdir(parents=True)
    right: dict[str, Any] = {
        "file": "rows.jsonl", "folder": "run", "checkpoint": "run@3", "program": sys.executable,
        "output": "runs/of/mine", "list": "run",
    }  # fmt: skip
    assert {key.kind for key in KEYS.values()} == {*right, "rows"}
    for leads_to in KEYS.values():
        if leads_to.kind in right:
            assert path_error(right[leads_to.kind], leads_to) is None


def test_every_key_that_speaks_of_a_file_or_a_folder_is_marked() -> None:
    """A key of a new section is tried above by itself once it is marked; this asks for the mark."""
    words = {"path", "file", "folder", "interpreter", "checkpoint"}
    # `run.name` names a folder within `run.dir`, a split one of several files of a folder
    of_something_else = {"run.name", "data.split", "data.sources.NAME.split", "data.sources"}
    # which may come later: the run waits for its engines
    of_something_else.add("rollout.engine.urls_file")
    unmarked = set()
    for path in listed():
        for key in keys(sections()[path], path):
            names = {*key.path.split(".")[-1].split("_"), *key.meaning.lower().split()}
            is_text = key.type.removeprefix("list of ").startswith("text")
            marked = tuple(key.path.split(".")) in KEYS
            if is_text and not marked and words & {name.strip(".,;:`") for name in names}:
                unmarked.add(key.path)
    assert unmarked <= of_something_else


def test_a_data_set_by_name_is_not_fetched_or_imported(folder: Path, tiny_model: Path) -> None:
    """`datasets` takes seconds to import; it must find torch, though that is put off."""
    program = (
        "import sys; from importlib.util import find_spec; from rlcore.cli import main;"
        " code = main(sys.argv[1:]);"
        " sys.exit(code or 7 * ('datasets' in sys.modules) or 8 * (find_spec('torch') is None))"
    )
    command = [
        "validate", "run.name=test", f"model.path={tiny_model}", "data.paths=openai/gsm8k",
        "model.dtype=fp32", "training.steps=1", "rollout.sampling.max_new_tokens=8",
    ]  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
