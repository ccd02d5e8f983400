"""Real servers. They take long to start, so all tests of a session share one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # server_kit

import server_kit
from publication_kit import Client, client_of, folder_weights, publish
from server_kit import Served


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The servers need the other core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of `tiny_model`, in fp32, that every test leaves running, unpaused and without
    requests.

    Tests that publish may leave any weights in it. Without an engine environment the error says how
    to make one.
    """
    log = tmp_path_factory.mktemp("served") / "session.log"
    with server_kit.serving(tiny_model, log) as served:
        yield served


@pytest.fixture
def client(served: Served, tmp_path: Path) -> Iterator[Callable[..., Client]]:
    """`client(on_update=..., ...)` is one more client of the session's server. It is left running
    with its own weights.
    """
    made: list[Client] = []

    def make(**changes: Any) -> Client:
        made.append(client_of(served, tmp_path, **changes))
        return made[-1]

    yield make
    for one in made:
        one.sink.close()
    last = make()
    publish(last.sink, folder_weights(served.model), 1)
    last.sink.close()
    for one in made:
        served.call(one.engine.close())


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: Qwen3-MoE, untied, 31 symbols, 2 layers of 32, 4 experts of which 2
    are chosen.
    """
    from rlcore.launch.commands.init_model import ModelSpec, init_model

    folder = tmp_path_factory.mktemp("tiny_moe") / "model"
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 64}
    experts = {"experts": 4, "experts_per_token": 2}
    init_model(folder, ModelSpec(family="qwen3_moe", tied=False, **sizes, **experts))
    return folder


@pytest.fixture(scope="session")
def served_moe(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """As `served`, with `moe_model`; reports routed experts. Another half minute: only for what
    needs experts.
    """
    log = tmp_path_factory.mktemp("served_moe") / "session_moe.log"
    routed = {"enable_return_routed_experts": True}
    with server_kit.serving(moe_model, log, server=routed) as served:
        yield served
