"""Answers to the question where the other ranks are, for the error of a stuck operation."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence

import torch.distributed as dist

from tests.nccl_rules.buffers import is_of_the_program

POLL_S = 0.25
ANSWER_S = 10.0  # for all to answer, on a busy machine
LINES = 4  # of each thread's stack


class Peers:
    """A thread of each rank that writes the stacks of its process where a peer asks for them."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = dist.PrefixStore("peers/", store)
        self._rank = rank
        self._over = threading.Event()
        threading.Thread(target=self._answer, daemon=True, name="nccl_rules peers").start()
        atexit.register(self._over.set)

    def where(self, ranks: Sequence[int]) -> str:
        """A line for each of these ranks: what its threads do."""
        number = self._store.add("questions", 1) - 1
        self._store.set(f"question/{number}", "")
        found: dict[int, str] = {}
        end = time.monotonic() + ANSWER_S
        while len(found) < len(ranks) and time.monotonic() < end:
            for rank in ranks:
                key = f"answer/{number}/{rank}"
                if rank not in found and self._store.check([key]):
                    found[rank] = self._store.get(key).decode()
            time.sleep(0.05)
        return "\n".join(f"  rank {r} is at {found.get(r, '(no answer: gone?)')}" for r in ranks)

    def _answer(self) -> None:
        answered = 0
        while not self._over.wait(POLL_S):
            try:
                if self._store.check([f"question/{answered}"]):
                    self._store.set(f"answer/{answered}/{self._rank}", stacks())
                    answered += 1
            except dist.DistError:  # the store's server, rank 0, has left
                return


def stacks() -> str:
    """The innermost lines of each thread of this process, without ours."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        lines = [
            f"{os.path.basename(entry.filename)}:{entry.lineno} {entry.name}"
            for entry in traceback.extract_stack(frame)
            if is_of_the_program(entry.filename)
        ]
        if lines and not names.get(ident, "").startswith("nccl_rules"):
            found.append(" < ".join(reversed(lines[-LINES:])))
    return "; ".join(found)
