"""What requests hold is not kept behind them: caches of texts are bounded in bytes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from rollout.conversation.tool_schemas import check_tools
from rollout.gateway.matching import key_of


def match(number: int, size: int) -> None:
    arguments = f'{{"path": "{number}{"x" * size}"}}'
    call = {"id": "1", "function": {"name": "write", "arguments": arguments}}
    key_of({"role": "assistant", "tool_calls": [call]}, {})


def check(number: int, size: int) -> None:
    parameters = {"type": "object", "description": f"{number}{'x' * size}"}
    check_tools([{"type": "function", "function": {"name": "write", "parameters": parameters}}])


def name(number: int, size: int) -> None:
    check_tools([{"type": "function", "function": {"name": f"{number}{'x' * size}"}}])


@pytest.mark.parametrize("use", [match, check, name])
def test_what_a_request_holds_is_not_kept(use: Callable[[int, int], None]) -> None:
    use(-1, 1)
    tracemalloc.start()
    try:
        for number in range(24):
            use(number, 1 << 20)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak > 1 << 20
    assert kept < 1 << 20


def test_numbers_are_not_written_out_without_a_bound() -> None:
    arguments = "[" + "1e308," * 10_000 + "1]"
    call = {"id": "1", "function": {"name": "add", "arguments": arguments}}
    key = key_of({"role": "assistant", "tool_calls": [call]}, {})
    assert len(str(key)) < 3 * len(arguments)
