"""Placement on a Ray cluster, without one: bundles, ranks' places, missing resources."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from rlcore.config import Config
from rlcore.config.checks.all_checks import check
from rlcore.config.checks.all_checks import warnings_of as notes
from rlcore.errors import UserError
from rlcore.launch.ray.placement import Placement, bundles, lacking, place
from tests.configs import small_config


def config(
    *, nodes: int = 1, per_node: int = 1, ray: dict[str, Any] | None = None, **engine: Any
) -> Config:
    cluster = {"launcher": "ray", "nodes": nodes, "processes_per_node": per_node, "ray": ray or {}}
    reward = {"parts": {"a": {"function": "exact_match"}}}
    return small_config(reward=reward, rollout={"engine": engine}, cluster=cluster)


def placed(*, has_gpus: bool = False, **given: Any) -> Placement:
    return place(config(**given), has_gpus=has_gpus)


def test_a_node_of_the_trainer_is_one_bundle_and_an_engine_another() -> None:
    found = placed(nodes=2, per_node=8, has_gpus=True, kind="sglang", count=3, tensor_parallel=4)
    assert found.trainer == ({"CPU": 8.0, "GPU": 8.0},) * 2
    assert found.engines == ({"CPU": 1.0, "GPU": 4.0},) * 3
    assert found.hosts == (0, 1, 2)
    assert found.total == {"CPU": 19.0, "GPU": 28.0}
    assert not found.shares_gpus


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
    assert bundles([{"CPU": 0.0}]) == [{"CPU": 0.001}]  # Ray refuses an empty bundle


@pytest.mark.parametrize(
    ("share", "ranks", "gpus"),
    [(0.6, 2, 2.0), (0.4, 3, 1.4), (0.5, 3, 1.5), (0.3, 5, 1.6), (0.1, 10, 1.0), (1, 3, 3.0)],
)
def test_a_share_is_of_one_gpu(share: float, ranks: int, gpus: float) -> None:
    """Two ranks with 0.6 each have no room on 1.2."""
    (bundle,) = placed(has_gpus=True, per_node=ranks, ray={"rank_gpus": share}).trainer
    assert bundle["GPU"] == pytest.approx(gpus)


def test_engines_that_take_turns_are_in_the_trainers_bundle() -> None:
    found = placed(
        has_gpus=True, per_node=4, kind="sglang", count=2, tensor_parallel=2, colocated=True
    )
    assert found.engines == ()
    assert found.hosts == (0, 0)
    assert found.trainer == ({"CPU": 6.0, "GPU": 4.0},)
    assert found.engine == {"CPU": 1.0}
    assert found.shares_gpus


def test_engines_that_take_turns_on_several_nodes_are_divided_among_their_bundles() -> None:
    turns = {"kind": "sglang", "tensor_parallel": 2, "colocated": True}
    found = placed(has_gpus=True, nodes=3, per_node=4, count=6, **turns)
    assert found.hosts == (0, 0, 1, 1, 2, 2)
    assert found.trainer == ({"CPU": 6.0, "GPU": 4.0},) * 3
    assert found.engines == ()
    assert found.total == {"CPU": 18.0, "GPU": 12.0}


def test_a_critic_is_in_the_ranks_of_its_actor() -> None:
    ppo = config(per_node=2)
    ppo.algorithm.estimator.name = "ppo"
    assert place(ppo, has_gpus=True) == placed(per_node=2, has_gpus=True)


def test_engines_given_by_url_need_no_place() -> None:
    found = placed(kind="sglang", urls=["http://a:1", "http://b:1"])
    assert found.engines == found.hosts == ()
    assert not found.shares_gpus


def test_a_run_that_generates_nothing_has_no_engines() -> None:
    sft = config()
    sft.algorithm.loss.name = "sft"
    found = place(sft, has_gpus=False)
    assert found.hosts == ()
    assert found.total == {"CPU": 1.0}


def test_missing_resources_are_named_with_the_numbers() -> None:
    found = placed(per_node=2)
    assert lacking(found, {"CPU": 3.0}) is None
    assert lacking(found, {"CPU": 2.5}) == "3 CPU (the cluster has 2.5)"
    assert lacking(placed(has_gpus=True), {"CPU": 64.0}) == "2 GPU (the cluster has 0)"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"ray": {"address": "ray://head:10001"}},
            "cluster.ray.address: got 'ray://head:10001', expected HOST:PORT",
        ),
        ({"kind": "sglang", "gpus": [0]}, "rollout.engine.gpus: got [0], but Ray chooses GPUs"),
        (
            {"colocated": True, "nodes": 2, "count": 3, "per_node": 2},
            "rollout.engine.count: got 3, but rollout.engine.colocated engines are divided evenly"
            " among cluster.nodes (2)",
        ),
        (
            {"kind": "sglang", "colocated": True, "count": 4, "tensor_parallel": 2, "per_node": 3}
            | {"nodes": 2},
            "rollout.engine.count: 2 x rollout.engine.tensor_parallel 2 need 4 GPUs of each of 2"
            " nodes, but the ranks, whose GPUs they share, have 3",
        ),
        (
            # as many GPUs as the ranks have in all, but no engine spans nodes
            {"kind": "sglang", "colocated": True, "count": 2, "tensor_parallel": 4, "per_node": 3}
            | {"nodes": 2},
            "rollout.engine.count: 1 x rollout.engine.tensor_parallel 4 need 4 GPUs of each of 2",
        ),
        (
            {"ray": {"rank_gpus": 1.5}},
            "cluster.ray.rank_gpus: got 1.5, but Ray gives a share of one GPU or a whole number",
        ),
        (
            {"kind": "sglang", "tensor_parallel": 3, "ray": {"engine_gpus": 0.5}},
            "cluster.ray.engine_gpus: got 0.5, but",
        ),
        (
            {"ray": {"engine_gpus": 1.5}},
            "cluster.ray.engine_gpus: got 1.5, but Ray gives a share of one GPU or a whole number",
        ),
        (
            {"kind": "sglang", "colocated": True, "count": 2, "tensor_parallel": 2, "per_node": 3},
            "rollout.engine.count: 2 x rollout.engine.tensor_parallel 2 need 4 GPUs, but the ranks,"
            " whose GPUs they share",
        ),
        (
            {"colocated": True, "count": 2, "per_node": 2, "ray": {"rank_gpus": 0.5}},
            "rollout.engine.count: 2 x rollout.engine.tensor_parallel 1 need 2 GPUs, but the ranks,"
            " whose GPUs they share",
        ),
    ],
)
def test_settings_that_do_not_fit_ray_are_refused(given: dict[str, Any], said: str) -> None:
    (problem,) = check(config(**given))
    assert str(problem).startswith(said)


@pytest.mark.parametrize(
    "given",
    [
        {"ray": {"rank_gpus": 2, "engine_gpus": 0.5}},
        {"kind": "sglang", "tensor_parallel": 2, "ray": {"engine_gpus": 2}},
        {"kind": "sglang", "tensor_parallel": 2, "device": "cpu", "ray": {"engine_gpus": 0.5}},
        {"colocated": True, "count": 2, "per_node": 2},
        {"colocated": True, "count": 4, "per_node": 2, "nodes": 2},
        {"colocated": True, "count": 2, "ray": {"rank_gpus": 0}},  # on CPUs
        {"colocated": True, "count": 2, "device": "cpu"},
    ],
)
def test_shares_that_ray_can_give(given: dict[str, Any]) -> None:
    assert list(check(config(**given))) == []


def test_too_few_processes_for_the_layout_are_refused() -> None:
    given = config(per_node=2)
    given.policy.parallel.tensor = 4
    (problem,) = check(given)
    assert str(problem).startswith(
        "policy.parallel.tensor: the layout needs 4 processes and the ray launcher starts 2: set "
    )


def test_keys_that_only_ray_reads_are_noted_elsewhere() -> None:
    given = config(ray={"rank_cpus": 2})
    assert not list(notes(given))
    given.cluster.launcher = "local"
    assert [str(note) for note in notes(given)] == [
        "cluster.ray: is ignored: cluster.launcher is local"
    ]


def test_the_users_runtime_environment_is_passed_on_with_this_checkout_on_the_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rlcore.launch.ray.cluster import ROOT, runtime_env

    monkeypatch.setenv("PYTHONPATH", "/plugins")
    given = runtime_env({"env_vars": {"NCCL_DEBUG": "INFO"}, "pip": ["x"]})
    assert given == {
        "pip": ["x"],
        "env_vars": {"NCCL_DEBUG": "INFO", "PYTHONPATH": f"{ROOT}:/plugins"},
    }
    own = runtime_env({"env_vars": {"PYTHONPATH": "/mine"}})
    assert own["env_vars"]["PYTHONPATH"] == "/mine"


def test_placement_needs_neither_ray_nor_torch() -> None:
    code = (
        "import sys, rlcore.launch.ray.placement; print(sorted({'ray', 'torch'} &"
        " set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_variables_of_the_shell_reach_the_actors_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no secret stands in a file or a command line."""
    from rlcore.launch.ray.cluster import runtime_env

    monkeypatch.setenv("A_KEY", "hidden")
    given = {"env_vars": {"NCCL_DEBUG": "INFO"}}
    found = runtime_env(given, ["A_KEY"])["env_vars"]
    assert (found["A_KEY"], found["NCCL_DEBUG"]) == ("hidden", "INFO")
    assert given == {"env_vars": {"NCCL_DEBUG": "INFO"}}, "which is written to config.yaml"
    monkeypatch.delenv("A_KEY")
    with pytest.raises(UserError, match=r"env_from_shell: A_KEY is not set"):
        runtime_env(given, ["A_KEY"])
