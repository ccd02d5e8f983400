"""Changes how SGLang 0.5.23 takes weights over a process group.

This file runs in the engines' environment, which lacks rlcore, and imports nothing from rlcore.
Requests of other clients are unaffected.

**Digests.** A scheduler computes a digest of all bytes that it receives in an update, and does not
wait for the digest of a bucket before it takes the next one.

    request   load_format "flattened_bucket+digest:KIND:KEY": as "flattened_bucket", and the bucket
              is added to the update's digest of this order
    request   load_format "digests": no bucket; the answer's message is JSON, the digests of all
              tensor-parallel ranks

**A stream for receiving.** NCCL begins a broadcast when the calling stream has finished its earlier
work. On SGLang's own stream that is the digest of a bucket and its copies into the weights, while
the network is idle. Here broadcasts have a stream of their own, so that a bucket arrives while the
GPU loads the previous one. Nothing changes on the CPU.

**Derived weights.** SGLang refuses updates of models with copies of their weights that would stay
old. Before each bucket it walks through all modules of the model several times, which is 60 % of
the fixed cost of a bucket (96 layers, on a CPU: benchmarks/bucket_costs.py). Its own comment says
that the answer never changes. Here it looks once in each update.

**Turns.** The server serves a second /update_weights_from_distributed when the first has ended:
both wait for one lock, in the order in which their bodies arrive. With two connections this may
differ from the order of the buckets. So the trainer names the bucket, and a call waits for its turn
before it waits for the lock.

    request   load_format "...+turn:INDEX"; the suffix is removed before SGLang reads it
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

LOAD_FORMAT = "flattened_bucket"
ORDERED = f"{LOAD_FORMAT}+digest:"
DIGESTS = "digests"
TURN = "+turn:"
# Entries of the internal states of /server_info: the server computes digests, and orders calls.
HAS_DIGESTS = "rlcore_digests_of_updates"
HAS_TURNS = "rlcore_bucket_turns"
NOT_LOADED = "not loaded: "  # replaces a digest; the reason follows

NamedTensors = Sequence[tuple[str, torch.Tensor]]


def install_in_scheduler(digests: Any, states: Collection[str]) -> None:
    """Wrap four methods and a function of a scheduler's process.

    Args:
        digests: the module digests.py.
        states: the entries that the internal states get.
    """
    from sglang.srt.managers.scheduler_components.internal_state import (
        SchedulerInternalStateController as InternalState,
    )

    update = Update(digests.Digest)
    _wrap_updater(update)
    _wrap_manager(update)
    describe = InternalState._add_topology

    def describe_too(self: Any, state: dict[str, Any]) -> None:
        describe(self, state)
        state |= dict.fromkeys(states, True)

    InternalState._add_topology = describe_too


def _wrap_updater(update: Update) -> None:
    from sglang.srt.model_executor.model_runner_components import weight_updater

    updater = weight_updater.WeightUpdater
    receive = updater._receive_bucketed_weights_from_distributed
    look = weight_updater._unsupported_derived_weight_cache_error
    # by device
    streams: dict[str, ReceivingStream] = {}

    def receive_and_digest(self: Any, **given: Any) -> NamedTensors:
        digest = update.digest()
        if self.device not in streams:
            streams[self.device] = ReceivingStream(torch.device(self.device))
        tensors = streams[self.device].receive(lambda: receive(self, **given))
        if digest is not None:
            digest.add(whole(tensors))
        return tensors

    def look_once(model: Any = None) -> str | None:
        if id(model) not in update.looked:
            update.looked[id(model)] = look(model)
        return update.looked[id(model)]

    updater._receive_bucketed_weights_from_distributed = receive_and_digest
    weight_updater._unsupported_derived_weight_cache_error = look_once


def _wrap_manager(update: Update) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput as Answer
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager as Manager,
    )

    begin = Manager.begin_weight_update
    take = Manager.update_weights_from_distributed

    def begin_and_forget(self: Any, request: Any) -> Any:
        update.clear()
        return begin(self, request)

    def take_and_digest(self: Any, request: Any) -> Any:
        if request.load_format == DIGESTS:
            own = update.read()
            ranks = [own] * dist.get_world_size(self.tp_cpu_group)
            if len(ranks) > 1:
                dist.all_gather_object(ranks, own, group=self.tp_cpu_group)
            return Answer(success=True, message=json.dumps(ranks))
        if not (request.load_format or "").startswith(ORDERED):
            return take(self, request)
        update.order = request.load_format.removeprefix(ORDERED)
        request.load_format = LOAD_FORMAT
        try:
            answer = take(self, request)
        finally:
            update.order = None
        # SGLang sends only rank 0's answer, so the digests report the failures of the others.
        if not answer.success:
            update.failure = update.failure or f"{NOT_LOADED}{answer.message}"
        return answer

    Manager.begin_weight_update = begin_and_forget
    Manager.update_weights_from_distributed = take_and_digest


def install_in_server(turns_module: Any) -> None:
    """Wrap two methods of the server's process.

    Args:
        turns_module: bucket_turns.py.
    """
    from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin as Manager

    turns = turns_module.BucketTurns()
    begin = Manager.begin_weight_update
    update = Manager.update_weights_from_distributed

    async def begin_update(self: Any, *given: Any) -> Any:
        turns.begin()
        return await begin(self, *given)

    async def update_in_turn(self: Any, request: Any, *given: Any) -> Any:
        load_format, mark, index = (request.load_format or "").rpartition(TURN)
        if not mark:
            return await update(self, request, *given)
        request.load_format = load_format
        try:
            async with turns.take(int(index)) as taken:
                success, message = await update(self, request, *given)
                if not success:
                    taken.failed = int(index)
        # recovery: SGLang's form of a refusal
        except turns_module.OutOfTurn as error:
            return False, str(error)
        return success, message

    Manager.begin_weight_update = begin_update
    Manager.update_weights_from_distributed = update_in_turn


class Update:
    """The current update on this rank.

    Args:
        make: makes a digest from its order (`digests.Digest`).
    """

    def __init__(self, make: Any) -> None:
        self._make = make
        self._digest: Any = None
        # of the bucket that is being received
        self.order: str | None = None
        # Why a bucket was not loaded.
        self.failure = ""
        # id of a model -> SGLang's finding
        self.looked: dict[int, str | None] = {}

    def digest(self) -> Any:
        """Return the digest for the next bucket; None if it has no order."""
        if self.order is None:
            return None
        if self._digest is None or self._digest.order != self.order:
            self._digest = self._make(self.order)
        return self._digest

    def read(self) -> str:
        """Return the digest of the update's buckets, "" without any, or why one was not loaded."""
        return self.failure or ("" if self._digest is None else str(self._digest.read()))

    def clear(self) -> None:
        """Begin an update."""
        self._digest = None
        self.failure = ""
        self.looked = {}


class ReceivingStream:
    """A stream of a device on which buckets are received."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def receive(self, receive: Callable[[], NamedTensors]) -> NamedTensors:
        """Call `receive` from the stream, and return the views of its one buffer.

        The caller's stream may use them. Their memory is reused after that stream has finished the
        work that it had when the last view was dropped.
        """
        if self._stream is None:
            return receive()
        with torch.cuda.stream(self._stream):
            tensors = receive()
        loading = torch.cuda.current_stream(self._stream.device)
        loading.wait_stream(self._stream)
        tensors[0][1].record_stream(loading)
        return tensors


def whole(tensors: NamedTensors) -> torch.Tensor:
    """The bytes of which the tensors of a bucket are views: uint8 [n]."""
    first = tensors[0][1]
    none = torch.empty(0, dtype=torch.uint8, device=first.device)
    return none.set_(first.untyped_storage())
