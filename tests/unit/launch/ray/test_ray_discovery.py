"""Only clusters of this user are joined unasked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlcore.errors import UserError
from rlcore.launch.ray import discovery
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
