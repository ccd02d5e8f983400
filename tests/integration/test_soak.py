"""scripts/soak.sh: engine, rank, service and raylet killed at seeded moments, a launcher each."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.network.cluster import why_not
from tests.soak.launchers import LAUNCHERS, NETWORK
from tests.soak.soak import Soak

LIMIT_S = 400.0


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Soak:
    """One undisturbed run for all: the launchers' bits are the same."""
    return Soak(tmp_path_factory.mktemp("soak"), limit_s=LIMIT_S, reference=LAUNCHERS["local"])


# an undisturbed run, a killed one and its next life, each with interpreters of its own
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize(
    ("launcher", "kind", "seed"),
    [
        # an engine is killed in every third step of test_chaos.py, too
        pytest.param("local", "engine", 3, marks=pytest.mark.full),
        ("torchrun", "rank", 2),
        pytest.param("ray", "service", 1, marks=pytest.mark.full),
        pytest.param("ray-nodes", "raylet", 4, marks=pytest.mark.full),
    ],
)
def test_a_run_with_a_kill_is_the_run_without_it(
    soak: Soak, launcher: str, kind: str, seed: int
) -> None:
    survivor = soak.one(f"{kind}_{seed}", LAUNCHERS[launcher], kind, random.Random(seed))
    assert survivor.faults == [], survivor
    assert survivor.kind.split()[0] == kind


@pytest.mark.full
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.skipif(bool(why_not()), reason=f"no nodes on this machine: {why_not()}")
def test_a_run_with_a_kill_and_a_cut_cable_is_the_run_without_them(tmp_path: Path) -> None:
    soak = Soak(tmp_path, limit_s=LIMIT_S, network=True)
    survivor = soak.one("cut", NETWORK["torchrun"], "rank", random.Random(7))
    assert survivor.faults == [], survivor
    assert survivor.link.startswith("cut for 10 s")
