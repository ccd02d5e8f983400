"""What a dry run counts, and that it leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from backends.megatron.cpu.shim import replaced
from backends.megatron.dryrun.usage import Usage


def test_collectives_are_counted_by_group_and_phase() -> None:
    usage = Usage()
    with usage.phase("step"):
        usage.add_collective("tensor", "all_reduce", 8)
        usage.add_collective("tensor", "all_reduce", 4)
        usage.add_collective("data", "all_gather", 2)
    with usage.phase("publication"):
        usage.add_collective("tensor", "all_reduce", 1)
    assert usage.phases["step"].collectives == {
        ("tensor", "all_reduce"): [2, 12],
        ("data", "all_gather"): [1, 2],
    }
    assert usage.phases["publication"].collectives == {("tensor", "all_reduce"): [1, 1]}


def test_stubs_are_gone_afterwards() -> None:
    owner = SimpleNamespace(size=1)
    with replaced(owner, "size", 2):
        assert owner.size == 2
    assert owner.size == 1
    with pytest.raises(ZeroDivisionError), replaced(owner, "size", 3):
        raise ZeroDivisionError
    assert owner.size == 1
