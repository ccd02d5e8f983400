"""SGLang's server gives each bucket its turn. SGLang itself is a stand-in here."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollout.engines.sglang import entry
from rollout.engines.sglang.patches import TURN


class Manager:
    """Takes updates; a group "broken" fails."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    async def begin_weight_update(self, request: Any, http: Any = None) -> tuple[bool, str]:
        self.taken.append("begin")
        return True, ""

    async def update_weights_from_distributed(
        self, request: Any, http: Any = None
    ) -> tuple[bool, str]:
        await asyncio.sleep(0)
        self.taken.append(request.load_format)
        return request.group_name != "broken", request.group_name


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    own = type("Own", (Manager,), {**vars(Manager)})  # which `install` changes
    name = "sglang.srt.managers.tokenizer_control_mixin"
    module = ModuleType(name)
    vars(module)["TokenizerControlMixin"] = own
    parts = name.split(".")
    for count in range(1, len(parts)):
        package = ".".join(parts[:count])
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, name, module)
    entry.load_beside("patches").install_in_server(entry.load_beside("../bucket_turns"))
    return own()


def bucket(load_format: str | None, group: str = "weights") -> SimpleNamespace:
    return SimpleNamespace(load_format=load_format, group_name=group)


def test_buckets_come_in_their_order_and_sglang_sees_no_turn(manager: Any) -> None:
    async def use() -> None:
        await manager.begin_weight_update(None)
        update = manager.update_weights_from_distributed
        said = await asyncio.gather(
            update(bucket(f"c{TURN}2"), None), update(bucket(f"a{TURN}0"), None),
            update(bucket(f"b+digest:xxh3:7{TURN}1"), None), update(bucket(None), None),
        )  # fmt: skip
        assert said == [(True, "weights")] * 4
        assert manager.taken[0] == "begin"
        named = [one for one in manager.taken[1:] if one is not None]
        assert named == ["a", "b+digest:xxh3:7", "c"]

    asyncio.run(asyncio.wait_for(use(), 20))


def test_what_follows_a_bucket_that_failed_is_refused_until_the_next_update(manager: Any) -> None:
    async def use() -> None:
        update = manager.update_weights_from_distributed
        said = await asyncio.gather(
            update(bucket(f"b{TURN}1")), update(bucket(f"a{TURN}0", "broken"))
        )
        assert said == [
            (False, "bucket 1 cannot be taken: bucket 0 was not"), (False, "broken"),
        ]  # fmt: skip
        await manager.begin_weight_update(None)
        assert await update(bucket(f"a{TURN}0")) == (True, "weights")
        assert manager.taken == ["a", "begin", "a"]

    asyncio.run(asyncio.wait_for(use(), 20))


@pytest.mark.parametrize(("workers", "turns"), [(1, True), (2, False)])
def test_there_are_turns_where_one_process_hears_all_calls(workers: int, turns: bool) -> None:
    assert entry.in_turn(SimpleNamespace(tokenizer_worker_num=workers)) is turns
