"""Three runs of scripts/soak.sh: an engine, a rank and the rollout service killed, each at a moment drawn from a seed."""

from __future__ import annotations

import random

import pytest

from tests.soak.launchers import LAUNCHERS
from tests.soak.soak import Soak


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Soak:
    return Soak(tmp_path_factory.mktemp("soak"))


@pytest.mark.timeout(900)       # an undisturbed run, a killed one and its next life, each with interpreters of its own
@pytest.mark.parametrize(("launcher", "kind", "seed"), [("local", "engine", 3), ("local", "rank", 2), ("ray", "service", 1)])
def test_a_run_with_a_kill_is_the_run_without_it(soak: Soak, launcher: str, kind: str, seed: int) -> None:
    survivor = soak.one(f"{kind}_{seed}", LAUNCHERS[launcher], kind, random.Random(seed))
    assert survivor.faults == [], survivor
    assert survivor.kind.split()[0] == kind
