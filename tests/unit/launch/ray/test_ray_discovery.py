"""Only clusters of this user are joined unasked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlcore.config import Config
from rlcore.errors import UserError
from rlcore.launch.ray import cluster, discovery
from rlcore.launch.ray.discovery import AUTO, clusters_of_others, find_cluster


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(discovery, "read_ray_address", lambda: None)


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
    monkeypatch.setattr(discovery, "read_ray_address", lambda: "10.0.0.1:6379")
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert find_cluster(proc) is None
    assert clusters_of_others(proc) == {"10.0.0.1:6379"}
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert find_cluster(proc) == AUTO, "the user says so"


def test_of_several_the_newest_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = processes(tmp_path, raylet("10.0.0.1:6379"), raylet("10.0.0.2:6379"))
    with pytest.raises(UserError, match=r"10\.0\.0\.1:6379, 10\.0\.0\.2:6379: name one"):
        find_cluster(proc)
    monkeypatch.setattr(discovery, "read_ray_address", lambda: "10.0.0.2:6379")
    assert find_cluster(proc) == "10.0.0.2:6379"


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The clusters that Ray is told to join; none is."""
    asked: list[str] = []
    monkeypatch.setattr(cluster.ray, "init", lambda *, address, **_: asked.append(address))
    return asked


def config() -> Config:
    return Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": "m"},
            "data": {"paths": ["p"]},
            "training": {"steps": 1},
            "cluster": {"launcher": "ray"},
        }
    )


def test_a_cluster_that_is_passed_by_is_named(
    joined: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "find_cluster", lambda: None)
    monkeypatch.setattr(cluster, "clusters_of_others", lambda: {"10.0.0.1:6379"})
    cluster._connect(None, config())
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
    cluster._connect(None, config())
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
    cluster._connect(named, config())
    assert joined == [named]
