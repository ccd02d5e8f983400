"""Where the parts of a run are, on a cluster that claims to have GPUs; nobody uses them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlcore.config import Config
from rlcore.launch.ray.cluster import reserve, wait_for_room
from rlcore.launch.ray.placement import place
from tests.integration.workspace import Run, Workspace
from tests.ray.actors import Nobody
from tests.ray.clusters import add_node, connected_to, new_cluster
from tests.ray.ray_runs import TWO_RANKS, Going, RayRuns

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

SHARES = ("cluster.ray.rank_cpus=0.5", "cluster.ray.engine_cpus=0.5")


@pytest.fixture(scope="module")
def gpu_runs(workspace: Workspace) -> Iterator[RayRuns]:
    """A head without GPUs, two nodes with four each."""
    with new_cluster() as made:
        for _ in range(2):
            add_node(made, cpus=2, gpus=4)
        yield RayRuns(workspace, made.address)


def visible(actor: Any) -> list[str]:
    """The GPUs that its process sees."""
    found: str = ray.get(
        actor.__ray_call__.remote(lambda _: os.environ.get("CUDA_VISIBLE_DEVICES", "")), timeout=60
    )
    return [name for name in found.split(",") if name]


def node(actor: Any) -> str:
    found: str = ray.get(
        actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()), timeout=60
    )
    return found


def look(going: Going, engines: int) -> dict[str, Any]:
    """Nodes and GPUs of ranks and engines, and a variable of the rollout service."""
    hosts = [going.actor(f"engine-{index}") for index in range(engines)]
    return {
        "ranks": [(rank["node"], rank["gpus"]) for rank in going.ranks()],
        "engines": [(node(host), visible(host)) for host in hosts],
        "told": psutil.Process(going.service_pid()).environ().get("TOLD"),
    }


def placed(
    runs: RayRuns,
    name: str,
    *arguments: str,
    engines: int,
    ask: Callable[[Going], None] = lambda going: None,
) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def act(going: Going) -> None:
        seen.update(look(going, engines))
        ask(going)

    run: Run = runs.train(
        name, *TWO_RANKS, *SHARES, "training.steps=2", *arguments, acts=[(1, act)], held_after=0
    )
    assert run.code == 0, run.err
    return seen


def test_ranks_share_a_node_and_engines_are_spread_with_gpus_of_their_own(
    gpu_runs: RayRuns,
) -> None:
    """With a critic, which is in the ranks."""
    seen = placed(
        gpu_runs,
        "spread",
        "rollout.engine.count=2",
        "algorithm.estimator.name=ppo",
        "critic.optimizer.lr=1e-3",
        engines=2,
    )
    (rank_node, first), (other_node, second) = seen["ranks"]
    assert rank_node == other_node
    assert len({*first, *second}) == 2
    (here, mine), (there, others) = seen["engines"]
    assert here != there, "engines are spread"
    assert [len(mine), len(others)] == [1, 1]
    beside = mine if here == rank_node else others
    assert not {*beside} & {*first, *second}, "an engine beside the ranks has a GPU of its own"


def test_the_trainer_has_whole_nodes_and_engines_what_is_left(gpu_runs: RayRuns) -> None:
    """Spread over both nodes, the engines would leave it none."""
    whole = ("cluster.ray.rank_gpus=2", "cluster.ray.engine_gpus=2", "cluster.start_timeout_s=60")
    seen = placed(gpu_runs, "whole nodes", *whole, "rollout.engine.count=2", engines=2)
    (rank_node, first), (other_node, second) = seen["ranks"]
    assert rank_node == other_node
    assert len({*first, *second}) == 4
    (here, mine), (there, others) = seen["engines"]
    assert here == there != rank_node
    assert len({*mine, *others}) == 4


def test_fractions_of_one_gpu(gpu_runs: RayRuns) -> None:
    """And the environment that the user asks for."""
    told = "cluster.ray.runtime_env={env_vars: {TOLD: by the user}}"
    seen = placed(
        gpu_runs,
        "fractions",
        "cluster.ray.rank_gpus=0.5",
        "cluster.ray.engine_gpus=0.25",
        told,
        engines=1,
    )
    assert seen["told"] == "by the user"
    assert seen["ranks"][0] == seen["ranks"][1], "both ranks are on one GPU"
    assert len(seen["ranks"][0][1]) == 1
    assert len(seen["engines"][0][1]) == 1


@pytest.mark.parametrize(("share", "ranks", "gpus"), [(0.6, 2, 2), (0.4, 3, 2), (0.3, 5, 2)])
def test_no_share_is_cut_over_two_gpus(
    gpu_runs: RayRuns, share: float, ranks: int, gpus: int
) -> None:
    """A bundle of the trainer has room for each of its ranks."""
    config = Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": "m"},
            "data": {"paths": ["p"]},
            "training": {"steps": 1},
            "reward": {"parts": {"a": {"function": "exact_match"}}},
            "cluster": {
                "launcher": "ray",
                "processes_per_node": ranks,
                "ray": {"rank_gpus": share, "rank_cpus": 0.1},
            },
        }
    )
    placement = place(config, has_gpus=True)
    with connected_to(gpu_runs.address), reserve(placement.trainer, "PACK") as group:
        wait_for_room(group, "the trainer", placement, limit_s=60, tick=lambda: None)
        inside = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=0
        )
        actors = [
            ray.remote(Nobody)
            .options(num_cpus=0.1, num_gpus=share, scheduling_strategy=inside)
            .remote()
            for _ in range(ranks)
        ]
        seen = [visible(actor) for actor in actors]
    assert [len(mine) for mine in seen] == [1] * ranks
    assert len({mine[0] for mine in seen}) == gpus


def test_engines_that_take_turns_on_two_nodes_are_on_their_ranks_gpus(gpu_runs: RayRuns) -> None:
    """The nodes number their GPUs alike, and an engine names its own as its ranks do."""
    named: list[tuple[str, ...]] = []

    def ask(going: Going) -> None:
        for index in range(4):
            named.append(ray.get(going.actor(f"engine-{index}").gpus.remote(), timeout=60))

    layout = ("cluster.nodes=2", "cluster.processes_per_node=2", "policy.parallel.tensor=4")
    seen = placed(
        gpu_runs,
        "turns on two nodes",
        *layout,
        "rollout.engine.colocated=true",
        "rollout.engine.count=4",
        engines=4,
        ask=ask,
    )
    assert seen["engines"] == [(place, gpus) for place, gpus in seen["ranks"]]
    assert [place for place, _ in seen["ranks"]][::2] == sorted_once(seen["ranks"])
    assert named == [(f"{place} {gpus[0]}",) for place, gpus in seen["ranks"]]
    assert len(set(named)) == 4


def sorted_once(ranks: list[tuple[str, list[str]]]) -> list[str]:
    """The nodes of the ranks in order, each once."""
    return list(dict.fromkeys(place for place, _ in ranks))


def test_engines_that_take_turns_are_on_the_ranks_gpus(gpu_runs: RayRuns) -> None:
    seen = placed(
        gpu_runs, "turns", "rollout.engine.colocated=true", "rollout.engine.count=2", engines=2
    )
    assert [gpus for _, gpus in seen["engines"]] == [gpus for _, gpus in seen["ranks"]]
    assert {place for place, _ in seen["engines"]} == {place for place, _ in seen["ranks"]}
