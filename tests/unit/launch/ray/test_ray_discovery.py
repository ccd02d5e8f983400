"""Only clusters of this user are joined unasked."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rlcore.errors import UserError
from rlcore.launch.ray import cluster, status
from rlcore.launch.ray.cluster import AUTO, clusters_of_others, find_cluster
from tests.configs import small_config


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "read_ray_address", lambda: None)


def processes(folder: Path, *commands: list[str]) -> Path:
    """A /proc with these command lines, all of this user."""
    (folder / "self").mkdir()
    for pid, words in enumerate(commands, 100):
        (folder / str(pid)).mkdir()
        (folder / str(pid) / "cmdline").write_bytes("\0".join(words).encode() + b"\0")
    (folder / "999").mkdir()  # it has ended
    return folder


def raylet(address: str) -> list[str]:
    return ["/opt/ray/raylet", "--store=x", f"--gcs-address={address}"]


def test_the_cluster_of_this_user_is_found(tmp_path: Path) -> None:
    proc = processes(
        tmp_path, ["python", "--gcs-address=10.0.0.9:1"], raylet("10.0.0.1:6379"), ["sh", "raylet"]
    )
    assert find_cluster(proc) == "10.0.0.1:6379"
    assert clusters_of_others(proc) == set()


def test_the_cluster_of_another_user_is_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = processes(tmp_path, raylet("10.0.0.1:6379"))
    monkeypatch.setattr(cluster, "read_ray_address", lambda: "10.0.0.1:6379")
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert find_cluster(proc) is None
    assert clusters_of_others(proc) == {"10.0.0.1:6379"}
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert find_cluster(proc) == AUTO, "the user says so"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert find_cluster(proc) == cluster.LOCAL


def test_of_several_the_newest_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = processes(tmp_path, raylet("10.0.0.1:6379"), raylet("10.0.0.2:6379"))
    with pytest.raises(UserError, match=r"10\.0\.0\.1:6379, 10\.0\.0\.2:6379: name one"):
        find_cluster(proc)
    monkeypatch.setattr(cluster, "read_ray_address", lambda: "10.0.0.2:6379")
    assert find_cluster(proc) == "10.0.0.2:6379"


@pytest.fixture
def inits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The clusters that Ray shall join, if they are reached; none is joined."""
    asked: list[str] = []
    monkeypatch.setattr(cluster.ray, "init", lambda *, address, **_: asked.append(address))
    return asked


@pytest.fixture
def joined(inits: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The clusters that Ray shall join, all of which can be reached."""
    monkeypatch.setattr(cluster, "check_reachable", lambda address: None)
    return inits


CONFIG = small_config(cluster={"launcher": "ray"})


def test_a_cluster_that_is_passed_by_is_named(
    joined: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "find_cluster", lambda: None)
    monkeypatch.setattr(cluster, "clusters_of_others", lambda: {"10.0.0.1:6379"})
    cluster._connect(None, CONFIG)
    assert joined == [cluster.LOCAL]
    assert "10.0.0.1:6379 on this machine is another user's" in capsys.readouterr().err


@pytest.mark.parametrize("asks", [True, False])
def test_a_cluster_that_asks_for_no_token_is_warned_of(
    joined: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asks: bool,
) -> None:
    monkeypatch.setattr(cluster, "find_cluster", lambda: "10.0.0.1:6379")
    monkeypatch.setattr(cluster, "is_token_auth_enabled", lambda: asks)
    cluster._connect(None, CONFIG)
    assert joined == ["10.0.0.1:6379"]
    said = capsys.readouterr()
    assert ("whoever reaches it runs code as its user" in said.err) is not asks
    assert ("which asks for a token" in said.out) is asks


@pytest.mark.parametrize("found", ["10.0.0.1:6379", None])
@pytest.mark.parametrize("named", ["10.0.0.9:6379", cluster.LOCAL])
def test_the_cluster_that_is_named_counts(
    joined: list[str], monkeypatch: pytest.MonkeyPatch, named: str, found: str | None
) -> None:
    monkeypatch.setattr(cluster, "find_cluster", lambda: found)
    cluster._connect(named, CONFIG)
    assert joined == [named]


@pytest.fixture
def dead() -> str:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


def test_a_cluster_of_the_user_that_does_not_answer_ends_the_run_at_once(
    inits: list[str], dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray tries for 14 minutes, and the run would go on on this machine alone."""
    monkeypatch.setenv("RAY_ADDRESS", dead)
    with pytest.raises(UserError, match=f"^RAY_ADDRESS: no Ray cluster at '{dead}': nobody answ"):
        cluster._connect(None, CONFIG)
    with pytest.raises(UserError, match=f"^cluster\\.ray\\.address: no Ray cluster at '{dead}': "):
        cluster._connect(dead, CONFIG)
    for address in (None, dead):
        with pytest.raises(UserError, match=r"no Ray cluster at .* nobody answers at"):
            next(status.status(address))
    assert inits == []


def test_a_cluster_that_was_found_and_does_not_answer_is_told(
    inits: list[str], dead: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "find_cluster", lambda: dead)
    cluster._connect(None, CONFIG)
    assert inits == [cluster.LOCAL]
    assert f"the Ray cluster {dead} on this machine is not joined" in capsys.readouterr().err


def test_what_is_no_port_is_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    for address in (AUTO, "ray://10.0.0.1:10001", "auto"):
        cluster.check_reachable(address)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        cluster.check_reachable(f"127.0.0.1:{listening.getsockname()[1]}")
