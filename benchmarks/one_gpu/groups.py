"""Weight groups of two processes on one GPU over NCCL: right bytes, and members that are missing.

Needs NCCL 2.30, which takes two ranks on one GPU. After each failure the same process makes a new
group and sends again: an aborted communicator must leave it and its GPU as they were.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from shutil import which
from typing import Any

import torch
from one_gpu import receiving
from one_gpu.section import Found, Setting

from rlcore.errors import DeadlineExceeded, RunFailed
from rlcore.interpreters import ask
from rlcore.weights import fingerprint
from rollout.weight_sync.process_group import (
    SHARED_GPU,
    SHARED_SINCE,
    Backend,
    GroupAddress,
    WeightGroup,
    open_rendezvous,
)

LIMIT_S = 6.0  # of a meeting and of a broadcast
SLACK_S = 6.0  # that an error may come later, on a busy machine
ANSWER_S = 90.0  # of a process that starts, too
BUCKETS = 8
BUCKET_BYTES = 1 << 28
CHANNELS = {"NCCL_MAX_CTAS": "4"}  # NCCL's advice for ranks that share a GPU
AS_SGLANG = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}  # and the trainer beside it
URL = "http://127.0.0.1:1"
MPS = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"


def lacks_nccl(setting: Setting, found: Found) -> bool:
    """Let processes share the GPU. Says so where the NCCL that is loaded cannot."""
    if not setting.cuda:
        return False
    nccl = ask(sys.executable, []).nccl
    found.numbers["nccl"] = nccl
    if tuple(map(int, nccl.split("."))) < tuple(map(int, SHARED_SINCE.split("."))):
        print(
            f"  not made: NCCL {nccl} takes no two ranks on a GPU, {SHARED_SINCE} does", flush=True
        )
        found.numbers["not made, for want of"] = f"NCCL {SHARED_SINCE}"
        return True
    os.environ.update({SHARED_GPU: "1", **CHANNELS, **AS_SGLANG})
    return False


@contextmanager
def multi_process_service(setting: Setting) -> Iterator[None]:
    """Kernels of processes that are started inside run at once, where the driver has MPS.

    Without it processes have the GPU in turns of milliseconds, and each collective waits for one.
    """
    if not setting.cuda or which(MPS) is None or PIPES in os.environ:
        yield
        return
    os.environ.update({PIPES: str(setting.work / "mps"), LOGS: str(setting.work / "mps")})
    (setting.work / "mps").mkdir()
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run([MPS, "-d"], env=plain, check=True, timeout=ANSWER_S)
    try:
        yield
    finally:
        subprocess.run([MPS], input=b"quit\n", env=plain, check=True, timeout=ANSWER_S)
        del os.environ[PIPES], os.environ[LOGS]


def weight_groups(setting: Setting) -> Found:
    """Send buckets, then let the other process fail in every way."""
    found = Found()
    if lacks_nccl(setting, found):
        return found
    groups = Groups(setting)
    try:
        _send(groups, found)
        receiving.compare(groups, found)
        for how, work in (
            ("who never comes", _nobody),
            ("who is killed before the first bucket", _killed_at_once),
            ("who is killed between two", _killed_later),
            ("who is stopped between two", _stopped),
        ):
            began = time.perf_counter()
            kind = work(groups)
            seconds = time.perf_counter() - began
            found.number(f"groups: one {how}", seconds, "s", kind)
            found.check(
                f"groups: seconds beyond the limit, one {how}", max(0.0, seconds - LIMIT_S), SLACK_S
            )
            found.check(f"groups: wrong buckets after one {how}", float(groups.wrong(2)), 0.0)
        if setting.cuda:  # a socket of gloo takes a small bucket that nobody reads
            found.check("groups: seconds until a close frees a send", _closed(groups), SLACK_S)
            found.check("groups: wrong buckets after that", float(groups.wrong(2)), 0.0)
    finally:
        groups.close()
    return found


class Groups:
    """Groups of this process and another, one at a time."""

    def __init__(self, setting: Setting) -> None:
        self.device = torch.device(setting.device)
        self.backend: Backend = "nccl" if setting.cuda else "gloo"
        self.size = 1 << 16 if setting.toy else BUCKET_BYTES
        generator = torch.Generator(self.device).manual_seed(1)
        self._bytes = torch.randint(
            0, 256, (2 * self.size,), dtype=torch.uint8, device=self.device, generator=generator
        )
        self.member = _Member(setting.device)

    def bucket(self, index: int) -> torch.Tensor:
        """uint8 [size], another one for each index."""
        start = index * 64 % self.size
        return self._bytes[start : start + self.size]

    @contextmanager
    def joined(self) -> Iterator[WeightGroup]:
        """A group with the other process, which is started anew if it was lost."""
        if not self.member.is_alive:
            self.member = _Member(str(self.device))
        address, store = open_rendezvous(URL, 1, self.backend, LIMIT_S)
        self.member.tell("join", asdict(address))
        group = WeightGroup(address, 0, device=self.device, store=store)
        try:
            assert self.member.answer() == "joined"
            yield group
        finally:
            group.close()

    def wrong(self, count: int) -> int:
        """Send buckets in a new group. Returns the number that came otherwise."""
        with self.joined() as group:
            return self.sent_wrong(group, count)

    def sent_wrong(self, group: WeightGroup, count: int) -> int:
        """The buckets of `count` that come otherwise."""
        self.member.tell("receive", count, self.size)
        for index in range(count):
            group.send(self.bucket(index))
        told = self.member.answer()
        return sum(one != fingerprint(self.bucket(index)) for index, one in enumerate(told))

    def close(self) -> None:
        self.member.kill()


class _Member:
    """The other process."""

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, device), daemon=True)
        self._process.start()
        theirs.close()
        assert self.answer() == "ready"

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def tell(self, *words: Any) -> None:
        self._pipe.send(words)

    def answer(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"the other process says nothing for {ANSWER_S:g} s")
        return self._pipe.recv()

    def stop(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, device: str) -> None:
    """The other process: join groups, and receive buckets."""
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    torch.zeros(1, device=place)
    group: WeightGroup | None = None
    pipe.send("ready")
    while True:
        try:
            name, *given = pipe.recv()
        except EOFError:
            return
        if name == "join":
            if group is not None:
                group.close()
            group = WeightGroup(GroupAddress(**given[0]), 1, device=place)
            pipe.send("joined")
            continue
        assert group is not None
        if name == "load":
            size, order, beside = given
            pipe.send(receiving.load(group, size, order, beside=beside))
            continue
        count, size = given
        pipe.send([fingerprint(group.receive(size)) for _ in range(count)])


def _send(groups: Groups, found: Found) -> None:
    with groups.joined() as group:
        wrong = groups.sent_wrong(group, BUCKETS)  # makes the communicator
        groups.member.tell("receive", BUCKETS, groups.size)
        began = time.perf_counter()
        for index in range(BUCKETS):
            group.send(groups.bucket(index))
        seconds = time.perf_counter() - began
        groups.member.answer()
    found.check("groups: wrong buckets", float(wrong), 0.0)
    rate = BUCKETS * groups.size / seconds / 1e9
    found.number(f"groups: buckets of {groups.size >> 20} MiB", rate, "GB/s")


def _failure(work: Callable[[], object]) -> str:
    try:
        work()
    except (DeadlineExceeded, RunFailed) as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    raise AssertionError("nothing failed")


def _nobody(groups: Groups) -> str:
    address, store = open_rendezvous(URL, 1, groups.backend, LIMIT_S)

    def meet() -> None:
        group = WeightGroup(address, 0, device=groups.device, store=store)
        try:
            group.send(groups.bucket(0))
        finally:
            group.close()

    return _failure(meet)


def _killed_at_once(groups: Groups) -> str:
    with groups.joined() as group:
        groups.member.kill()
        return _failure(lambda: group.send(groups.bucket(0)))


def _killed_later(groups: Groups) -> str:
    with groups.joined() as group:
        assert groups.sent_wrong(group, 1) == 0
        groups.member.kill()
        return _failure(lambda: group.send(groups.bucket(1)))


def _stopped(groups: Groups) -> str:
    with groups.joined() as group:
        assert groups.sent_wrong(group, 1) == 0
        groups.member.stop()
        try:
            return _failure(lambda: _send_until_full(group, groups))
        finally:
            groups.member.kill()


def _send_until_full(group: WeightGroup, groups: Groups) -> None:
    """A socket of gloo takes the first bytes though nobody reads them."""
    for index in range(100):
        group.send(groups.bucket(index))


def _closed(groups: Groups) -> float:
    """The seconds from a close by another thread to the end of the send that waits."""
    with groups.joined() as group:
        assert groups.sent_wrong(group, 1) == 0
        groups.member.stop()
        try:
            pending = group.start_sending(groups.bucket(0))
            time.sleep(0.5)
            group.close()
            began = time.perf_counter()
            _failure(lambda: pending.result(ANSWER_S))
            return time.perf_counter() - began
        finally:
            groups.member.kill()
