"""What our patches do to SGLang's schedulers. SGLang itself is a stand-in here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rollout.engines.sglang import entry
from rollout.engines.sglang.patches import DIGESTS, ORDERED, ReceivingStream
from rollout.weight_sync.digests import Digest, new_order

PARTS = {
    "managers.io_struct": "UpdateWeightsFromDistributedReqOutput",
    "managers.scheduler_components.internal_state": "SchedulerInternalStateController",
    "managers.scheduler_components.weight_updater": "SchedulerWeightUpdaterManager",
    "model_executor.model_runner_components.weight_updater": "WeightUpdater",
}


class Updater:
    device = "cpu"

    def _receive_bucketed_weights_from_distributed(self, flat: torch.Tensor) -> Any:
        if not len(flat):
            raise ValueError("no bucket")
        return [("a", flat[:4]), ("b", flat[4:])]


class Manager:
    """Receives and loads; looks at the model before."""

    tp_cpu_group = None

    def __init__(self) -> None:
        self.updater = sys.modules[f"sglang.srt.{[*PARTS][3]}"].WeightUpdater()  # type: ignore[attr-defined]
        self.formats: list[str | None] = []
        self.loaded: list[Any] = []
        self.fails = ""

    def begin_weight_update(self, request: Any) -> str:
        return "begun"

    def update_weights_from_distributed(self, request: Any) -> Any:
        self.formats.append(request.load_format)
        look = sys.modules[f"sglang.srt.{[*PARTS][3]}"]._unsupported_derived_weight_cache_error  # type: ignore[attr-defined]
        tensors = self.updater._receive_bucketed_weights_from_distributed(flat=request.flat)
        self.loaded.append((look("model"), tensors))
        if self.fails:
            return SimpleNamespace(success=False, message=self.fails)
        return SimpleNamespace(success=True, message="loaded")


class State:
    def _add_topology(self, state: dict[str, Any]) -> None:
        state["topology"] = 1


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins for SGLang's modules; the models that were looked at."""
    looked: list[str] = []

    def look(model: str) -> str:
        looked.append(model)
        return f"{model} {len(looked)}"

    for (place, name), kind in zip(PARTS.items(), (SimpleNamespace, State, Manager, Updater)):
        parts = f"sglang.srt.{place}".split(".")
        for count in range(1, len(parts) + 1):
            module = ".".join(parts[:count])
            if module not in sys.modules or count == len(parts):
                monkeypatch.setitem(sys.modules, module, ModuleType(module))
            if count > 1:
                parent = sys.modules[".".join(parts[: count - 1])]
                monkeypatch.setattr(parent, parts[count - 1], sys.modules[module], raising=False)
        own: Any = kind if kind is SimpleNamespace else type(name, (kind,), {**vars(kind)})
        vars(sys.modules[".".join(parts)]).update(
            {name: own, "_unsupported_derived_weight_cache_error": look}
        )
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    return looked


def manager(module: Any = None) -> Any:
    """A scheduler's part, patched as `run_scheduler` does."""
    module = module or entry.load_beside("patches")
    module.install_in_scheduler(
        entry.load_beside("../../weight_sync/digests"), [module.HAS_DIGESTS, "another"]
    )
    return sys.modules[f"sglang.srt.{[*PARTS][2]}"].SchedulerWeightUpdaterManager()  # type: ignore[attr-defined]


def bucket(seed: int, order: str | None, size: int = 9) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return SimpleNamespace(
        flat=flat, load_format="flattened_bucket" if order is None else ORDERED + order
    )


def told(one: Any) -> list[str]:
    answer = one.update_weights_from_distributed(SimpleNamespace(load_format=DIGESTS))
    assert answer.success
    found: list[str] = json.loads(answer.message)
    return found


def digest(order: str, *seeds: int) -> str:
    made = Digest(order)
    for seed in seeds:
        made.add(bucket(seed, None).flat)
    return made.read()


@pytest.mark.parametrize("kind", ["xxh3", "linear"])
def test_the_digest_is_of_all_that_was_ordered_in_this_update(kind: str, looks: list[str]) -> None:
    one = manager()
    assert one.begin_weight_update(None) == "begun"
    order = new_order(kind)
    for seed in range(3):
        answer = one.update_weights_from_distributed(bucket(seed, order))
        assert answer.message == "loaded"
    one.update_weights_from_distributed(bucket(7, None))  # another client's
    assert told(one) == [digest(order, 0, 1, 2)]
    assert told(one) == [digest(order, 0, 1, 2)]  # a second time, too
    # SGLang knows no other, and never saw the question
    assert one.formats == ["flattened_bucket"] * 4
    one.begin_weight_update(None)
    assert told(one) == [""]
    later = new_order(kind)
    one.update_weights_from_distributed(bucket(4, later))
    assert told(one) == [digest(later, 4)]


def test_a_bucket_that_did_not_come_leaves_no_order_behind(looks: list[str]) -> None:
    one = manager()
    one.begin_weight_update(None)
    order = new_order("xxh3")
    with pytest.raises(ValueError, match="no bucket"):
        one.update_weights_from_distributed(bucket(0, order, size=0))
    one.update_weights_from_distributed(bucket(1, None))
    one.update_weights_from_distributed(bucket(2, order))
    assert told(one) == [digest(order, 2)]


def test_each_rank_has_its_own_digest(looks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    order = new_order("xxh3")

    def gather(ranks: list[Any], own: Any, group: Any) -> None:
        ranks[:] = [own, "other", ""]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 3)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    one = manager()
    one.begin_weight_update(None)
    one.update_weights_from_distributed(bucket(0, order))
    assert told(one) == [digest(order, 0), "other", ""]


def test_a_rank_that_did_not_load_a_bucket_says_so(looks: list[str]) -> None:
    """SGLang sends the first rank's answer alone, which knows nothing of it."""
    one = manager()
    order = new_order("xxh3")
    one.begin_weight_update(None)
    one.update_weights_from_distributed(bucket(0, order))
    one.fails = "CUDA out of memory"
    assert not one.update_weights_from_distributed(bucket(1, order)).success
    one.fails = "another reason"
    one.update_weights_from_distributed(bucket(2, order))
    assert told(one) == ["not loaded: CUDA out of memory"]
    one.begin_weight_update(None)
    assert told(one) == [""]


def test_a_model_is_looked_at_once_an_update(looks: list[str]) -> None:
    one = manager()
    one.begin_weight_update(None)
    for seed in range(3):
        one.update_weights_from_distributed(bucket(seed, None))
    assert [answer for answer, _ in one.loaded] == ["model 1"] * 3
    one.begin_weight_update(None)
    one.update_weights_from_distributed(bucket(3, None))
    assert one.loaded[-1][0] == "model 2"
    assert looks == ["model"] * 2


def test_a_server_tells_what_it_can(looks: list[str]) -> None:
    manager()
    state: dict[str, Any] = {}
    sys.modules[f"sglang.srt.{[*PARTS][1]}"].SchedulerInternalStateController()._add_topology(state)  # type: ignore[attr-defined]
    assert state == {"topology": 1, "rlcore_digests_of_updates": True, "another": True}


def test_a_device_has_one_stream_for_all_that_it_receives(
    looks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = entry.load_beside("patches")
    made: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            made.append(device)

        def receive(self, receive: Any) -> Any:
            return receive()

    monkeypatch.setattr(module, "ReceivingStream", Stream)
    one = manager(module)
    one.begin_weight_update(None)
    for seed in range(3):
        one.update_weights_from_distributed(bucket(seed, None))
    assert made == [torch.device("cpu")]


def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls, with stand-ins for streams: nothing here runs on a GPU."""
    said: list[str] = []
    now = ["loading"]

    class Stream:
        device = torch.device("cuda")

        def __init__(self, name: Any = None) -> None:
            self.name = name if isinstance(name, str) else "receiving"

        def wait_stream(self, other: Stream) -> None:
            said.append(f"{self.name} waits for {other.name}")

    class Buffer:
        def record_stream(self, stream: Stream) -> None:
            said.append(f"kept until {stream.name} has used it")

    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        now.append(stream.name)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(now[-1]))

    def receive() -> Any:
        said.append(f"received on {now[-1]}")
        return [("a", Buffer())]

    assert len(ReceivingStream(torch.device("cuda", 1)).receive(receive)) == 1
    assert said == [
        "received on receiving",
        "loading waits for receiving",
        "kept until loading has used it",
    ]
    said.clear()
    ReceivingStream(torch.device("cpu")).receive(receive)
    assert said == ["received on loading"]
