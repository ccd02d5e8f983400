"""One communicator: made by the first call of all its members, then an in-order queue."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.nccl_rules.buffers import extent, overlap, unguarded
from tests.nccl_rules.errors import Aborted, BufferRace, Mismatch, NcclRuleError, Stuck
from tests.nccl_rules.operation import Operation, Work, in_flight, this_rank
from tests.nccl_rules.peers import Peers

DELAY = "NCCL_RULES_DELAY_MS"  # environment: each operation starts up to so late, at random
HEADER_BYTES = 4096
SIGNATURE_CHARS = 1000
LOOK_S = 0.3  # how often a stuck operation looks whether a peer gave up
GLOO_S = 3600.0  # gloo's own limit, which never counts

_kept: list[Any] = []  # gloo groups of failed communicators; see `Communicator.fail`


@dataclass(frozen=True)
class Call:
    """What a member tells the others about its call, before any data moves."""

    what: str
    signature: str
    site: str
    sends: list[int]  # bytes for each member
    expects: list[int] | None = None  # bytes from each member; None: what they send

    def __str__(self) -> str:
        sizes = "" if self.expects is None else f", {self.sends} bytes out, {self.expects} in"
        return f"{self.what} {self.signature}{sizes} at {self.site}"

    def encode(self) -> Tensor:
        """Its header: uint8 [HEADER_BYTES]."""
        text = json.dumps(asdict(self)).encode()
        header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        header[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return header

    @staticmethod
    def decode(header: Tensor) -> Call:
        """The call of a header."""
        return Call(**json.loads(bytes(header.tolist()).rstrip(b"\0")))


class Communicator:
    """The operations of some members, carried out one after the other on a thread, over gloo.

    Args:
        members: global ranks.
        rank: this rank's index among them.
    """

    def __init__(
        self, name: str, members: Sequence[int], rank: int, store: dist.Store, peers: Peers
    ) -> None:
        self.name = name
        self.members = members
        self.rank = rank
        self.dead = ""  # why it is gone
        self._store = dist.PrefixStore(f"communicator/{name}/", store)
        self._peers = peers
        self._gloo: dist.ProcessGroupGloo | None = None
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._waits: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._unlanded: list[Operation] = []
        self._lock = threading.Lock()

    @property
    def gloo(self) -> dist.ProcessGroupGloo:
        """Moves the data."""
        assert self._gloo is not None
        return self._gloo

    def make(self, what: str, site: str, timeout_s: float) -> None:
        """Wait for a first call of every member: `ncclCommInitRank` blocks the host until then."""
        if self._gloo is not None:
            return
        self._store.set(f"here/{self.rank}", f"{what} at {site}")
        missing = list(range(len(self.members)))
        end = time.monotonic() + timeout_s
        while missing := [i for i in missing if not self._store.check([f"here/{i}"])]:
            if time.monotonic() > end:
                raise self.fail(self._nobody_came(missing, timeout_s))
            time.sleep(0.002)
        try:
            self._gloo = dist.ProcessGroupGloo(
                dist.PrefixStore("gloo/", self._store),
                self.rank,
                len(self.members),
                timedelta(seconds=GLOO_S),
            )
        except RuntimeError as error:
            raise self.fail(
                Stuck(f"rank {this_rank()}: {self.name} cannot connect: {error}")
            ) from error
        for work in (self._carry_out, self._wait_for_gloo):
            threading.Thread(target=work, daemon=True, name=f"nccl_rules {self.name}").start()

    def _nobody_came(self, missing: Sequence[int], timeout_s: float) -> Stuck:
        came = [i for i in range(len(self.members)) if i not in missing]
        calls = [f"  rank {self.members[i]}: {self._store.get(f'here/{i}').decode()}" for i in came]
        where = self._peers.where([self.members[i] for i in missing])
        return Stuck(
            f"rank {this_rank()}: the first call on a group makes its communicator, for which all"
            f" of its ranks {list(self.members)} must come; after {timeout_s:g} s {self.name} has"
            " seen\n" + "\n".join(calls) + f"\nand these never came:\n{where}"
        )

    # --- the host's side --------------------------------------------------------------------------

    def enqueue(self, operation: Operation) -> Work:
        """Queue it behind all earlier ones."""
        if self.dead:
            raise Aborted(f"rank {this_rank()}: {operation}: {self.name} is gone: {self.dead}")
        with self._lock:
            self._unlanded.append(operation)
        operation.enqueued()
        self._queue.put(operation)
        return Work(operation)

    def settle(self, reads: Sequence[Tensor], writes: Sequence[Tensor], call: str) -> None:
        """Before a call on these buffers: let go of them what earlier operations still have.

        An earlier one of this communicator runs first anyway. One of another communicator runs on
        another stream, and nobody orders the two but its `wait()`.
        """
        uses = [(extent(t), False) for t in reads if t.numel()]
        uses += [(extent(t), True) for t in writes if t.numel()]
        for other in in_flight():
            if not any(
                (writes_one or writes_other) and overlap(one, theirs)
                for one, writes_one in uses
                for theirs, writes_other in other.extents()
            ):
                continue
            if other.communicator is not self and not other.waited:
                raise BufferRace(
                    f"rank {this_rank()}: {call} uses a buffer of {other}, for which nobody has"
                    " waited"
                )
            other.communicator.complete(other)

    def complete(self, operation: Operation) -> None:
        """Block until it is done; it lands, and all before it. Raises what became of it."""
        operation.done.wait()
        with self._lock:
            count = 0
            if operation in self._unlanded:
                count = self._unlanded.index(operation) + 1
            earlier = self._unlanded[:count]
            self._unlanded = self._unlanded[count:]
        for one in earlier:
            one.waited = True
            one.land()
        operation.land()
        if operation.error is not None:
            raise operation.error

    def complete_all(self) -> None:
        """Block until the queue is empty, as `torch.cuda.synchronize()` does."""
        while self._unlanded:
            self.complete(self._unlanded[-1])

    def fail(self, error: NcclRuleError) -> NcclRuleError:
        """Declare it gone, here and to its peers; return the error."""
        if not self.dead:
            self.dead = str(error)
            print(f"nccl_rules: {error}", file=sys.stderr, flush=True)
            self._store.set(f"gone/{self.rank}", self.dead[:3000])
            # The destructor of a gloo group joins its threads, one of which may be stuck.
            _kept.append(self._gloo)
        return error

    def close(self) -> None:
        """End its threads, once what is queued is done."""
        self._queue.put(None)
        self._waits.put(None)

    # --- the stream's side ------------------------------------------------------------------------

    def _carry_out(self) -> None:
        late_s = float(os.environ.get(DELAY, "0")) / 1000
        while (operation := self._queue.get()) is not None:
            time.sleep(random.random() * late_s)
            try:
                if self.dead:
                    raise Aborted(f"rank {this_rank()}: {operation} was queued behind: {self.dead}")
                assert operation.run is not None
                with unguarded():
                    operation.finish(operation.run(operation), None)
            except NcclRuleError as error:
                operation.finish([], self.fail(error))
            except Exception:  # noqa: BLE001  # raised by the operation's wait()
                trace = traceback.format_exc()
                operation.finish([], self.fail(NcclRuleError(f"{operation}: {trace}")))

    def _wait_for_gloo(self) -> None:
        while (wait := self._waits.get()) is not None:
            wait()

    def wait(self, operation: Operation, work: dist.Work) -> None:
        """Wait for gloo until the operation's deadline, or until a peer gives up.

        A thread of its own does: gloo's sends and receives cannot be polled.
        """
        over = threading.Event()
        errors: list[RuntimeError] = []

        def block() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                errors.append(error)
            over.set()

        self._waits.put(block)
        while not over.wait(max(0.001, min(LOOK_S, operation.deadline - time.monotonic()))):
            self._look_at_peers(operation)
            if time.monotonic() > operation.deadline:
                raise Stuck(self._stuck(operation))
        if errors:
            time.sleep(2 * LOOK_S)  # the peer that broke the connection says why
            self._look_at_peers(operation)
            raise Stuck(f"{self._stuck(operation)}\n{errors[0]}")

    def _look_at_peers(self, operation: Operation) -> None:
        for index, member in enumerate(self.members):
            if index != self.rank and self._store.check([f"gone/{index}"]):
                reason = self._store.get(f"gone/{index}").decode()
                raise Aborted(f"rank {this_rank()}: {operation}: rank {member} gave up: {reason}")

    def _stuck(self, operation: Operation) -> str:
        others = [member for i, member in enumerate(self.members) if i != self.rank]
        return (
            f"rank {this_rank()}: {operation} is not done"
            f" {time.monotonic() - operation.begun:.1f} s after it was enqueued (limit"
            f" {operation.timeout_s:g} s)\n{self._peers.where(others)}"
        )

    def compare(self, operation: Operation, call: Call) -> list[Call]:
        """Every member's call, in their order. Raises Mismatch where they do not fit."""
        header = call.encode()
        headers = [torch.empty_like(header) for _ in self.members]
        self.wait(operation, self.gloo.allgather([headers], [header]))
        calls = [Call.decode(one) for one in headers]
        for index, other in enumerate(calls):
            same = (other.what, other.signature) == (call.what, call.signature)
            fits = call.expects is None or call.expects[index] == other.sends[self.rank]
            if not (same and fits):
                raise Mismatch(
                    f"the calls on {self.name} differ:\n  rank {this_rank()}: {call}\n"
                    f"  rank {self.members[index]}: {other}"
                )
        return calls

    def exchange(self, operation: Operation, call: Call, chunks: Sequence[Tensor]) -> list[Tensor]:
        """Send bytes `chunks[i]` to member i; return what each member sent to this one."""
        calls = self.compare(operation, call)
        sizes = [other.sends[self.rank] for other in calls]
        got = torch.empty(sum(sizes), dtype=torch.uint8)
        if any(any(other.sends) for other in calls):
            out = torch.cat(list(chunks))
            self.wait(operation, self.gloo.alltoall_base(got, out, sizes, call.sends))
        return list(got.split(sizes))


def shortened(signature: str) -> str:
    """A signature that fits into a header."""
    if len(signature) <= SIGNATURE_CHARS:
        return signature
    return f"{signature[:SIGNATURE_CHARS]}… {hashlib.sha256(signature.encode()).hexdigest()[:16]}"
