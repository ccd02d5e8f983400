"""Ranks that meet while one of them is lost: the others name it, and print no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlcore.config.sections.training import ClusterConfig
from rlcore.errors import RunFailed
from rlcore.launch import process
from rlcore.launch.environment import STORE_FOLDER
from rlcore.stores import FolderStore
from rlcore.trainer import rank_sync
from rlcore.trainer.rank_sync import Failure, PeerFailed, post_failure

ATTEMPT = process.Attempt(number=1, resumes=False)
# As gloo and torch's store say it. The first is a plain RuntimeError.
LOST = [
    RuntimeError("[gloo/transport/tcp/pair.cc:144] no error\nConnection closed by peer"),
    dist.DistNetworkError("The client socket has failed to connect"),
    dist.DistBackendError("Gloo connectFullMesh failed with a timeout"),
]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderStore:
    """The store of two ranks, of which this is the first; the other one does not come."""
    environment = {STORE_FOLDER: str(tmp_path), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_sync, "BLAME_S", 0.5)
    monkeypatch.setattr(process, "join_attempt", lambda *_, **__: ATTEMPT)
    return FolderStore(tmp_path)


def meet() -> None:
    cluster = ClusterConfig(start_timeout_s=5.0, collective_timeout_s=5.0)
    process._rendezvous(torch.device("cpu"), cluster)


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
def test_a_peer_that_is_killed_meanwhile_is_named(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def lose_the_peer(*_: object, **__: object) -> None:
        keys = process.keys_under(ATTEMPT.prefix, store)
        post_failure(keys, Failure(1, "it was killed by SIGKILL"))
        raise error

    monkeypatch.setattr(dist, "init_process_group", lose_the_peer)
    with pytest.raises(PeerFailed, match="rank 1 failed: it was killed by SIGKILL"):
        meet()


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
def test_a_peer_that_does_not_come_is_an_error_of_one_line(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(RunFailed, match=f"rank 0 cannot join the other ranks at {store.folder}: "):
        meet()
