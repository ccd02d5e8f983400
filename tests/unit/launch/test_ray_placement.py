"""What a run asks a Ray cluster for, without a cluster: bundles, ranks' places, what is lacking."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from rlcore.config import Config
from rlcore.config.checks import check
from rlcore.config.checks import notes_on as notes
from rlcore.launch.ray.placement import Place, Placement, bundles, lacking, place


def config(*, nodes: int = 1, per_node: int = 1, ray: dict[str, Any] | None = None, **engine: Any) -> Config:
    return Config.model_validate({
        "run": {"name": "x"}, "model": {"path": "m"}, "data": {"paths": ["p"]}, "training": {"steps": 1},
        "reward": {"parts": {"a": {"function": "exact_match"}}}, "rollout": {"engine": engine},
        "cluster": {"launcher": "ray", "nodes": nodes, "processes_per_node": per_node, "ray": ray or {}},
    })  # fmt: skip


def placed(*, has_gpus: bool = False, **given: Any) -> Placement:
    return place(config(**given), has_gpus=has_gpus)


def test_a_node_of_the_trainer_is_one_bundle_and_an_engine_another() -> None:
    found = placed(nodes=2, per_node=8, has_gpus=True, kind="sglang", count=3, tensor_parallel=4)
    assert found.trainer == ({"CPU": 8.0, "GPU": 8.0},) * 2
    assert found.engines == ({"CPU": 1.0, "GPU": 4.0},) * 3
    assert found.hosts == (0, 1, 2)
    assert found.service == {"CPU": 1.0}
    assert found.total == {"CPU": 20.0, "GPU": 28.0}
    assert not found.shares_gpus


def test_ranks_fill_one_node_after_the_other() -> None:
    assert placed(nodes=2, per_node=2).ranks == (Place(0, 0, 0), Place(1, 0, 1), Place(2, 1, 0), Place(3, 1, 1))


@pytest.mark.parametrize(("has_gpus", "device"), [(False, None), (True, "cpu")])
def test_engines_on_cpus_ask_for_no_gpu(has_gpus: bool, device: str | None) -> None:
    found = placed(has_gpus=has_gpus, kind="sglang", device=device, count=2)
    assert found.engines == ({"CPU": 1.0},) * 2
    assert found.rank == ({"CPU": 1.0, "GPU": 1.0} if has_gpus else {"CPU": 1.0})


def test_shares_may_be_fractions_or_nothing() -> None:
    shares = {"rank_cpus": 0.25, "rank_gpus": 0.5, "engine_cpus": 0, "engine_gpus": 0.5}
    found = placed(has_gpus=True, per_node=2, count=2, ray=shares)
    assert found.trainer == ({"CPU": 0.5, "GPU": 1.0},)
    assert bundles(found.engines) == [{"GPU": 0.5}] * 2
    assert bundles([{"CPU": 0.0}]) == [{"CPU": 0.001}]      # Ray refuses an empty bundle


def test_engines_that_take_turns_are_in_the_trainers_bundles() -> None:
    found = placed(has_gpus=True, nodes=2, per_node=4, kind="sglang", count=4, tensor_parallel=2, colocated=True)
    assert found.engines == ()
    assert found.hosts == (0, 1, 0, 1)
    assert found.trainer == ({"CPU": 6.0, "GPU": 4.0},) * 2
    assert found.engine == {"CPU": 1.0}
    assert found.shares_gpus


def test_a_critic_is_in_the_ranks_of_its_actor() -> None:
    ppo = config(per_node=2)
    ppo.algorithm.estimator.name = "ppo"
    assert place(ppo, has_gpus=True) == placed(per_node=2, has_gpus=True)


def test_engines_given_by_url_need_no_place() -> None:
    found = placed(kind="sglang", urls=["http://a:1", "http://b:1"])
    assert found.engines == found.hosts == ()
    assert not found.shares_gpus


def test_what_generates_nothing_has_no_service() -> None:
    sft = config()
    sft.algorithm.loss.name = "sft"
    found = place(sft, has_gpus=False)
    assert found.service == {}
    assert found.hosts == ()
    assert found.total == {"CPU": 1.0}


def test_what_a_cluster_lacks_is_said_with_the_numbers() -> None:
    found = placed(per_node=2)
    assert lacking(found, {"CPU": 4.0}) is None
    assert lacking(found, {"CPU": 3.5}) == "4 CPU (the cluster has 3.5)"
    assert lacking(placed(has_gpus=True), {"CPU": 64.0}) == "2 GPU (the cluster has 0)"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ray": {"address": "ray://head:10001"}}, "cluster.ray.address: got 'ray://head:10001', expected HOST:PORT"),
        ({"in_process": True}, "rollout.engine.in_process: got true, but under Ray every engine is an actor"),
        ({"kind": "sglang", "gpus": [0]}, "rollout.engine.gpus: got [0], but Ray chooses GPUs"),
        ({"colocated": True, "nodes": 2}, "rollout.engine.colocated: got true, but engines that share the trainer's GPUs take"),
    ],
)
def test_what_ray_places_is_left_to_ray(given: dict[str, Any], said: str) -> None:
    assert any(str(problem).startswith(said) for problem in check(config(**given)))


def test_too_few_processes_for_the_layout_are_refused() -> None:
    given = config(per_node=2)
    given.policy.parallel.tensor = 4
    (problem,) = check(given)
    assert str(problem).startswith("policy.parallel.tensor: the layout needs 4 processes and the ray launcher starts 2: set ")


def test_what_only_ray_reads_is_noted_elsewhere() -> None:
    given = config(ray={"rank_cpus": 2})
    assert not list(notes(given))
    given.cluster.launcher = "local"
    assert [str(note) for note in notes(given)] == ["cluster.ray: is ignored: cluster.launcher is local"]


def test_the_users_runtime_environment_is_passed_on_with_this_checkout_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlcore.launch.ray.cluster import ROOT, runtime_env

    monkeypatch.setenv("PYTHONPATH", "/plugins")
    given = runtime_env({"env_vars": {"NCCL_DEBUG": "INFO"}, "pip": ["x"]})
    assert given == {"pip": ["x"], "env_vars": {"NCCL_DEBUG": "INFO", "PYTHONPATH": f"{ROOT}:/plugins"}}
    own = runtime_env({"env_vars": {"PYTHONPATH": "/mine"}})
    assert own["env_vars"]["PYTHONPATH"] == "/mine"


def test_placement_needs_neither_ray_nor_torch() -> None:
    code = "import sys, rlcore.launch.ray.placement; print(sorted({'ray', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
