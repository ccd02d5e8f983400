"""Small programs, right and wrong, for test_nccl_rules.py. Three ranks run each on new groups."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import nccl_rules

LIMIT = timedelta(seconds=3)  # of groups that get stuck on purpose
LONGER = timedelta(seconds=8)  # likewise, where something has to come in time on a busy machine
PATIENCE = timedelta(seconds=60)  # of the others
Group = dist.ProcessGroup
CASES: dict[str, tuple[Callable[..., Any], int, timedelta]] = {}  # name -> program, ranks, limit
spare: list[Group] = []  # a second group of ranks 0 and 1


def case(
    ranks: int = 2, limit: timedelta = PATIENCE
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A program of the first ranks; `program(group, rank)`."""

    def add(program: Callable[..., Any]) -> Callable[..., Any]:
        CASES[program.__name__] = (program, ranks, limit)
        return program

    return add


def transfer(tensor: Tensor, group: Group, rank: int, tag: int = 0) -> dist.Work:
    """Rank 0 sends it to rank 1, in a batch."""
    op = dist.P2POp(dist.isend if rank == 0 else dist.irecv, tensor, 1 - rank, group, tag)
    return dist.batch_isend_irecv([op])[0]


def bucket(rank: int) -> Tensor:
    return torch.arange(4.0) if rank == 0 else torch.zeros(4)


# --- communicators --------------------------------------------------------------------------------


@case(3, LIMIT)
def subset_batch_first(group: Group, rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank < 2:
        try:
            transfer(bucket(rank), group, rank).wait()
        finally:
            store.set(f"stuck/{rank}", "")
    while not store.check(["stuck/0", "stuck/1"]):  # rank 2 answers where it is
        time.sleep(0.05)


@case(3)
def subset_batch_after_a_collective(group: Group, rank: int) -> list[float]:
    dist.all_reduce(torch.ones(1), group=group)
    tensor = bucket(rank)
    if rank < 2:
        transfer(tensor, group, rank).wait()
    return tensor.tolist()


@case(3)
def single_send_first(group: Group, rank: int) -> None:
    if rank == 0:
        dist.send(bucket(rank), 1, group=group)
    if rank == 1:
        dist.recv(bucket(rank), 0, group=group)


@case(3, LIMIT)
def ring_of_single_sends(group: Group, rank: int) -> None:
    works = [dist.isend(torch.ones(1), (rank + 1) % 3, group)]
    works.append(dist.irecv(torch.ones(1), (rank - 1) % 3, group))
    for work in works:
        work.wait()


@case(3)
def ring_in_a_batch(group: Group, rank: int) -> float:
    got = torch.zeros(1)
    send = dist.P2POp(dist.isend, torch.full((1,), float(rank)), (rank + 1) % 3, group)
    receive = dist.P2POp(dist.irecv, got, (rank - 1) % 3, group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return got.item()


@case()
def call_on_an_aborted_group(group: Group, rank: int) -> None:
    dist.all_reduce(torch.ones(1), group=group)
    group.abort()
    dist.all_reduce(torch.ones(1), group=group)


# --- buffers --------------------------------------------------------------------------------------


@case()
def send_buffer_overwritten(group: Group, rank: int) -> None:
    tensor = bucket(rank)
    work = transfer(tensor, group, rank)
    if rank == 0:
        tensor.zero_()
    work.wait()


@case()
def receive_buffer_written(group: Group, rank: int) -> None:
    tensor = bucket(rank)
    work = transfer(tensor, group, rank)
    if rank == 1:
        tensor.zero_()
    work.wait()


@case()
def receive_buffer_read(group: Group, rank: int) -> str:
    tensor = bucket(rank)
    work = transfer(tensor, group, rank)
    early = str((tensor * 2).tolist())
    work.wait()
    return early


@case()
def waits_first(group: Group, rank: int) -> list[float]:
    tensor = bucket(rank)
    transfer(tensor, group, rank).wait()
    doubled = tensor * 2
    tensor.zero_()
    return doubled.tolist()


@case()
def one_buffer_on_two_groups(group: Group, rank: int) -> None:
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group, async_op=True)
    dist.all_reduce(tensor, group=spare[0], async_op=True)


@case()
def one_buffer_twice_on_a_group(group: Group, rank: int) -> list[float]:
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group, async_op=True)
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    return tensor.tolist()


@case()
def guarded_send_buffer_overwritten(group: Group, rank: int) -> None:
    with nccl_rules.guard():
        send_buffer_overwritten(group, rank)


@case()
def guarded_receive_buffer_read(group: Group, rank: int) -> None:
    with nccl_rules.guard():
        receive_buffer_read(group, rank)


@case()
def guarded_waits_first(group: Group, rank: int) -> list[float]:
    with nccl_rules.guard():
        return waits_first(group, rank)


@case()
def looks_past_the_stream(group: Group, rank: int) -> dict[str, str]:
    """What another process sees, which knows nothing of our streams."""
    found = {}
    for name, guard in (("plain", nullcontext()), ("guarded", nccl_rules.guard())):
        tensor = bucket(rank)
        memory = tensor.numpy()
        with guard:
            transfer(tensor, group, rank).wait()
            found[name] = str(memory.tolist())
            nccl_rules.synchronize()
            found[f"{name}, synchronized"] = str(memory.tolist())
    return found


# --- time -----------------------------------------------------------------------------------------


@case(limit=LONGER)
def stuck_and_queued_behind(group: Group, rank: int) -> dict[str, Any]:
    """Rank 1 never makes the first call, but comes for the second."""
    dist.all_reduce(torch.ones(1), group=group)
    found: dict[str, Any] = {}
    if rank == 0:
        begun = time.monotonic()
        stuck = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        time.sleep(LONGER.total_seconds() / 2)
        behind = transfer(torch.ones(1), group, rank)
        for name, wait in (("stuck", stuck.wait), ("behind", behind.wait)):
            try:
                wait()
            except nccl_rules.NcclRuleError as error:
                found[name] = f"{type(error).__name__}: {error}"
        found["seconds"] = time.monotonic() - begun
    dist.all_reduce(torch.ones(1), group=spare[0])
    return found


# --- calls that differ ----------------------------------------------------------------------------


@case()
def sizes_differ(group: Group, rank: int) -> None:
    dist.all_reduce(torch.ones(3 + rank), group=group)


@case()
def dtypes_differ(group: Group, rank: int) -> None:
    dist.broadcast(torch.ones(4, dtype=[torch.bfloat16, torch.float32][rank]), 0, group)


@case()
def kinds_differ(group: Group, rank: int) -> None:
    if rank == 0:
        dist.barrier(group)
    else:
        dist.all_reduce(torch.ones(1), group=group)


@case()
def roots_differ(group: Group, rank: int) -> None:
    dist.broadcast(torch.ones(4), rank, group)


@case()
def splits_differ(group: Group, rank: int) -> None:
    sends = [1, 3] if rank == 0 else [2, 2]
    dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], sends, group)


@case()
def transfers_differ_in_size(group: Group, rank: int) -> None:
    transfer(torch.ones(4 + rank), group, rank).wait()


@case()
def transfers_differ_in_tag(group: Group, rank: int) -> None:
    transfer(torch.ones(4), group, rank, tag=rank).wait()


# --- what NCCL has not ----------------------------------------------------------------------------


@case()
def refused(group: Group, rank: int) -> dict[str, str]:
    ones = torch.ones(4)
    integers = torch.ones(2, dtype=torch.int32)
    found = {}
    for name, call in {
        "int16": lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16), group=group),
        "not contiguous": lambda: dist.all_reduce(torch.ones(4, 4).t()[1:], group=group),
        "sparse": lambda: dist.all_reduce(torch.eye(2).to_sparse(), group=group),
        "bitwise and": lambda: dist.all_reduce(integers, dist.ReduceOp.BAND, group),
        "average of integers": lambda: dist.all_reduce(integers, dist.ReduceOp.AVG, group),
        "from any rank": lambda: dist.recv(ones, group=group),
        "to itself": lambda: dist.isend(ones, rank, group),
        "unequal": lambda: dist.all_gather_into_tensor(torch.ones(5), torch.ones(2), group),
    }.items():
        try:
            call()
            found[name] = "allowed"
        except (nccl_rules.Refused, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


# --- right programs -------------------------------------------------------------------------------


@case(3)
def all_collectives_as_gloo(group: Group, rank: int) -> dict[str, bool]:
    """Every collective on this group and on one of gloo's, compared to the bit."""
    gloo = dist.new_group([0, 1, 2], backend="gloo")
    ours = collectives(group, rank)
    theirs = collectives(gloo, rank)
    return {name: torch.equal(value, theirs[name]) for name, value in ours.items()}


def collectives(group: Group, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    own = torch.randn(6, 5, generator=generator)
    results = {name: own.clone() for name in ("sum", "max", "broadcast", "reduce", "async")}
    dist.all_reduce(results["sum"], group=group)
    dist.all_reduce(results["max"], dist.ReduceOp.MAX, group)
    dist.broadcast(results["broadcast"], 1, group)
    dist.reduce(results["reduce"], 2, group=group)
    if rank != 2:  # gloo leaves partial sums there, NCCL leaves it alone
        del results["reduce"]
    work = dist.all_reduce(results["async"], group=group, async_op=True)
    assert work is not None
    work.wait()
    results["gathered"] = torch.empty(18, 5)
    dist.all_gather_into_tensor(results["gathered"], own, group)
    results["scattered"] = torch.empty(2, 5)
    dist.reduce_scatter_tensor(results["scattered"], own, group=group)
    results["list scattered"] = torch.empty(2, 5)
    dist.reduce_scatter(results["list scattered"], list(own.split(2)), group=group)
    everyone = [torch.empty_like(own) for _ in range(3)]
    dist.all_gather(everyone, own, group)
    results["list"] = torch.stack(everyone)
    results["exchanged"] = torch.empty(3 * (rank + 1), 5)
    dist.all_to_all_single(results["exchanged"], own, [rank + 1] * 3, [1, 2, 3], group)
    into = [torch.empty_like(own) for _ in range(3)] if rank == 0 else None
    dist.gather(own, into, 0, group)
    results["on the root"] = torch.stack(into or [own])
    results["from the root"] = torch.empty(2, 5)
    chunks = list(own.clone().split(2)) if rank == 1 else None
    dist.scatter(results["from the root"], chunks, 1, group)
    words: list[Any] = [None] * 3
    dist.all_gather_object(words, rank, group)
    results["objects"] = torch.tensor(words)
    dist.barrier(group)
    return results


@case(3)
def coalesced(group: Group, rank: int) -> list[float]:
    tensors = [torch.ones(2) * rank, torch.ones(3)]
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    return torch.cat(tensors).tolist()


@case(3)
def uneven_lists(group: Group, rank: int) -> list[float]:
    """NCCL gathers and scatters lists of different sizes; gloo refuses them."""
    everyone = [torch.zeros(i + 1) for i in range(3)]
    dist.all_gather(everyone, torch.full((rank + 1,), float(rank)), group)
    own = torch.zeros(rank + 1)
    dist.reduce_scatter(own, everyone, group=group)
    return torch.cat([*everyone, own]).tolist()
