from __future__ import annotations

import math

import pytest

from rlcore.config.load import load_config
from rlcore.errors import ConfigError, RunFailed
from rlcore.trainer.rank0 import EarlyStopping

MINIMAL = ("run.name=test", "model.path=model", "data.paths=data.jsonl", "training.steps=1")


@pytest.mark.parametrize(
    ("kl", "trips"),
    [(math.nextafter(0.1, 1), True), (7.0, True), (math.inf, True), (0.1, False),
     (math.nextafter(0.1, 0), False), (0.0, False), (-3.0, False), (-math.inf, False),
     (None, False)],
)  # fmt: skip
def test_only_strictly_above_trips(kl: float | None, trips: bool) -> None:
    assert EarlyStopping(0.1).trips(kl) is trips


def test_a_kl_that_is_no_number_fails_the_run() -> None:
    with pytest.raises(RunFailed, match=r"objective/kl is NaN.*training\.target_kl \(0\.1\)"):
        EarlyStopping(0.1).trips(math.nan)


def test_it_says_at_the_start_that_it_is_armed() -> None:
    assert "0.05 ends the run after that step" in EarlyStopping(0.05).armed


OFF = ["False", "'false'", "'False'", "0", "'no'", "'off'", "false", "no", "off", "'0'", "'NO'"]
ON = ["True", "'true'", "'True'", "1", "'yes'", "'on'", "true", "yes", "on", "'1'", "'Yes'"]


@pytest.mark.parametrize("how", ["file", "override"])
@pytest.mark.parametrize(
    ("written", "armed"), [*((text, False) for text in OFF), *((text, True) for text in ON)]
)
def test_every_spelling_of_a_switch(how: str, written: str, armed: bool, tmp_path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"training: {{target_kl: 0.1, early_stopping: {written}}}\n")
    overrides = ["training.target_kl=0.1", f"training.early_stopping={written}"]
    loaded = (
        load_config([file], MINIMAL) if how == "file" else load_config([], [*MINIMAL, *overrides])
    )
    assert loaded.config.training.early_stopping is armed
    assert EarlyStopping.of(loaded.config.training) == (EarlyStopping(0.1) if armed else None)
    ignored = [
        note for note in loaded.warnings if note.startswith("training.target_kl: 0.1 is ignored")
    ]
    assert len(ignored) == (0 if armed else 1)


@pytest.mark.parametrize("written", ["maybe", "2", "0.5", "''", "null", "[true]"])
def test_anything_else_is_no_switch(written: str) -> None:
    with pytest.raises(ConfigError, match=r"training\.early_stopping"):
        load_config([], [*MINIMAL, "training.target_kl=0.1", f"training.early_stopping={written}"])


@pytest.mark.parametrize("target", ["null", "0", "0.0", "-0.1", ".nan", ".inf"])
def test_armed_without_a_positive_target_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=r"training\.target_kl"):
        load_config([], [*MINIMAL, "training.early_stopping=true", f"training.target_kl={target}"])


def test_no_target_and_no_switch_say_nothing() -> None:
    for overrides in ((), ("training.target_kl=0",), ("training.target_kl=null",)):
        loaded = load_config([], [*MINIMAL, *overrides])
        assert EarlyStopping.of(loaded.config.training) is None
        assert loaded.warnings == ()
