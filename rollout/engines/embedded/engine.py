"""The embedded engine: the Hugging Face model in this process, decoded by one worker thread.

Order. Calls of `generate` run one after the other, in the order in which they were made, and each
is decoded by itself: requests of different calls never share a batch. Inside a call the requests
are sorted by (draw, first sample, turn, seed) and cut into chunks of `max_batch` responses of one
policy in that order. So the batches, and with them every last bit of the result, depend on what was
asked in one call and never on timing: hand over a whole step in one call.

Threads. The event loop only waits. Decoding runs on the worker thread; weights are copied on
another, while the worker is idle or held at the pause gate.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rlcore.config.sections.rollout import EngineConfig
from rlcore.data.generation import Completion, GenerateRequest, MemoryTag, PauseMode, StopStrings
from rlcore.data.tokenizer import load_tokenizer
from rlcore.deadlines import LAST_TOKEN_S
from rlcore.errors import RunFailed, UserError
from rlcore.weights import Bucket
from rollout.asyncio_utils import within
from rollout.engines.checks import check_request as check_common
from rollout.engines.embedded.causal_lm import CausalLM
from rollout.engines.embedded.decoding import Decoding, Slot
from rollout.engines.embedded.model_weights import ModelWeights


class PauseGate:
    """The point between two tokens where pause, resume and abort reach the decoding thread.

    Calls carry tickets in the order in which they were accepted. A pause holds the calls that it
    does not let finish; an abort ends every call accepted so far. The control side runs in other
    threads.

    The gate has no deadlines: callers have their own, and end a wait by `abandon` or `close`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        # the pause in force
        self.mode: PauseMode | None = None
        self._changed = threading.Condition()
        self._next_ticket = 0
        self._open_tickets: set[int] = set()
        # The ticket of the call that is held in `pass_through`.
        self._held_ticket: int | None = None
        # The first ticket that a pause holds.
        self._held_from = 0
        self._aborted_before = 0
        self._abandoned: set[int] = set()

    # --- calls ------------------------------------------------------------------------------------

    def enter(self) -> int:
        """Return a ticket for a call that was just accepted."""
        with self._changed:
            ticket = self._next_ticket
            self._next_ticket += 1
            self._open_tickets.add(ticket)
            return ticket

    def leave(self, ticket: int) -> None:
        """Remove a call that has returned or failed."""
        with self._changed:
            self._open_tickets.discard(ticket)
            self._abandoned.discard(ticket)
            self._changed.notify_all()

    def aborted(self, ticket: int) -> bool:
        """Whether a call has to end at its next token."""
        return ticket < self._aborted_before or ticket in self._abandoned

    def abandon(self, ticket: int) -> None:
        """End a call at its next token: its caller has gone."""
        with self._changed:
            if ticket in self._open_tickets:
                self._abandoned.add(ticket)
                self._changed.notify_all()

    def pass_through(self, ticket: int, on_retract: Callable[[], None]) -> None:
        """Wait, between two tokens, while the engine is paused.

        Raises RunFailed if the engine is closed during the wait.
        """
        # The common case takes no lock.
        if self.mode is None and not self.closed:
            return
        with self._changed:
            while self._holds(ticket):
                if self.mode == "retract":
                    on_retract()
                self._held_ticket = ticket
                self._changed.notify_all()
                self._changed.wait()
            self._held_ticket = None
            if self.closed:
                raise RunFailed(f"{self.name}: the engine was closed during a request")

    def _holds(self, ticket: int) -> bool:
        return (
            not self.closed
            and self.mode is not None
            and ticket >= self._held_from
            and not self.aborted(ticket)
        )

    @property
    def holding(self) -> bool:
        """Whether a pause keeps calls from making tokens."""
        with self._changed:
            return self.mode is not None and self._quiet()

    # --- control ----------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Return once no token is being made. A second pause keeps holding the held calls.

        Raises RunFailed when the engine was closed meanwhile.
        """
        with self._changed:
            if self.mode is None:
                self._held_from = self._next_ticket if mode in ("drain", "abort") else 0
            if mode == "abort":
                self._aborted_before = self._next_ticket
            self.mode = mode
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.closed or self._quiet())
            if self.closed:
                raise RunFailed(f"{self.name}: the engine was closed before it was paused")

    def _quiet(self) -> bool:
        """Whether no token is being made.

        Calls run one after the other: when a call is held, all that were accepted later wait too.
        """
        if any(
            ticket < max(self._held_from, self._aborted_before) for ticket in self._open_tickets
        ):
            return False
        return not self._open_tickets or self._held_ticket is not None

    def resume(self) -> None:
        """Let the held calls continue."""
        with self._changed:
            self.mode = None
            self._changed.notify_all()

    def abort(self) -> None:
        """End every call accepted so far."""
        with self._changed:
            self._aborted_before = self._next_ticket
            self._changed.notify_all()

    def close(self) -> None:
        """End every call, and refuse new ones."""
        with self._changed:
            self.closed = True
            self._aborted_before = self._next_ticket
            self._changed.notify_all()


class EmbeddedEngine:
    """`rlcore.interfaces.RolloutEngine` in this process.

    It leaves torch's number of threads unchanged; `config.threads` is for engines in their own
    processes.

    Args:
        model_path: Hugging Face folder; only its config is read, weights come by publication.
        dtype: "fp32" or "bf16"; `config.dtype` overrides it.
        tokenizer: folder of the tokenizer, read when a request has stop strings; default
            `model_path`.
        alpha: `policy.lora.alpha` of a run that publishes adapters.
        fp32_head: `policy.logprobs.fp32_head`.
        policies: `rollout.policies`.
    """

    transports: tuple[str, ...] = ("copy",)

    def __init__(
        self,
        model_path: str,
        *,
        config: EngineConfig,
        dtype: str = "bf16",
        tokenizer: str | None = None,
        alpha: float | None = None,
        fp32_head: bool = False,
        policies: Mapping[str, str] = MappingProxyType({}),
        name: str = "engine-0",
    ) -> None:
        self.name = name
        self.alpha = alpha
        self.fp32_head = fp32_head
        self.policies = policies
        self.config = config
        self.managed = True
        self.ended = None
        self.model_path = model_path
        self.tokenizer_path = tokenizer or model_path
        self.dtype = config.dtype or dtype
        self.device = torch.device(
            config.device or ("cuda" if torch.cuda.is_available() else "cpu")
        )
        self._open()
        self._model: CausalLM | None = None
        self._weights: ModelWeights | None = None
        self._tokenizer: Any = None

    # --- life -------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._gate = PauseGate(self.name)
        # by ticket: the ids of its requests
        self._calls: dict[int, set[str]] = {}
        # Decoding steps so far; each gives every response of a batch a token.
        self._steps = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=self.name)

    async def start(self) -> None:
        """See `RolloutEngine.start`."""
        if self._gate.closed:
            self._open()
        if self._model is None:
            await asyncio.get_running_loop().run_in_executor(self._worker, self._build)

    def _build(self) -> None:
        self._model = CausalLM(
            self.model_path, device=self.device, dtype=self.dtype, fp32_head=self.fp32_head
        )
        self._weights = ModelWeights(self.name, self._model.module, self.alpha, self.policies)

    async def close(self) -> None:
        """Fail requests in flight with RunFailed at their next token, and end the worker.

        Raises DeadlineExceeded when the next token does not come.
        """
        self._gate.close()
        stopping = asyncio.to_thread(self._worker.shutdown)
        await within(
            LAST_TOKEN_S,
            stopping,
            lambda: f"{self.name}: one token took longer than {LAST_TOKEN_S:g} s while closing",
        )

    async def kill(self) -> None:
        """Abandon the worker; its model is freed when its current work is done."""
        self._gate.close()
        self._worker.shutdown(wait=False)
        self._model = self._weights = None

    async def health(self) -> dict[str, Any]:
        """See `RolloutEngine.health`."""
        return {"name": self.name, "version": self.version, "base": self.holds_base}

    # --- generation -------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """See `RolloutEngine.generate`.

        Raises UserError for a request that cannot be served, RunFailed when there is no whole
        version of weights.
        """
        model = self._started()[0]
        for request in requests:
            check_request(request, model, self.policies)
        # A restart makes a new gate.
        gate = self._gate
        ticket = gate.enter()
        try:
            future = self._worker.submit(self._generate, gate, ticket, list(requests))
        except RuntimeError:
            # The worker takes no work after `close`.
            gate.leave(ticket)
            raise RunFailed(f"{self.name}: the engine is closed") from None
        calls = self._calls
        calls[ticket] = {request.rid for request in requests}

        def leave(_: object) -> None:
            gate.leave(ticket)
            calls.pop(ticket, None)

        future.add_done_callback(leave)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            gate.abandon(ticket)
            raise

    def _generate(
        self, gate: PauseGate, ticket: int, requests: list[GenerateRequest]
    ) -> list[list[Completion]]:
        result: list[list[Completion]] = [[] for _ in requests]
        with torch.inference_mode():
            for chunk in self._chunks(requests):
                for slot, completion in zip(chunk, self._decode(gate, ticket, requests, chunk)):
                    result[slot.request].append(completion)
        return result

    def _chunks(self, requests: Sequence[GenerateRequest]) -> Iterator[list[Slot]]:
        """Yield the responses that are decoded together, all by one policy."""
        slots = plan_slots(requests)
        for policy in dict.fromkeys(request.policy for request in requests):
            own = [slot for slot in slots if requests[slot.request].policy == policy]
            for start in range(0, len(own), self.config.max_batch):
                yield own[start : start + self.config.max_batch]

    def _decode(
        self,
        gate: PauseGate,
        ticket: int,
        requests: Sequence[GenerateRequest],
        slots: Sequence[Slot],
    ) -> list[Completion]:
        model, weights = self._started()
        weights.use(requests[slots[0].request].policy)
        decoding = Decoding(model, requests, slots, self._stop_strings)
        while not decoding.finished:
            gate.pass_through(ticket, decoding.drop_cache)
            if gate.aborted(ticket):
                decoding.abort()
            else:
                decoding.step(weights.require_ready())
                self._steps += 1
        if gate.closed:
            raise RunFailed(f"{self.name}: the engine was closed during a request")
        return decoding.completions()

    def _stop_strings(self, strings: tuple[str, ...]) -> StopStrings:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.tokenizer_path)
        return StopStrings(strings, self._tokenizer)

    async def pause(self, mode: PauseMode) -> None:
        """Return when no token is being made any more.

        `drain` lets the calls that were accepted finish, `abort` ends them; `retract` and
        `in_place` hold them between two tokens, and after `resume` the first computes keys and
        values again, the second keeps the old ones. Calls made during the pause wait.
        """
        await asyncio.to_thread(self._gate.pause, mode)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._gate.resume()

    async def abort(self, rids: Sequence[str] | None = None) -> None:
        """See `RolloutEngine.abort`. A call ends as a whole, if one of its requests is named."""
        if rids is None:
            self._gate.abort()
            return
        for ticket, own in list(self._calls.items()):
            if not own.isdisjoint(rids):
                self._gate.abandon(ticket)

    async def progress(self) -> int | None:
        """See `RolloutEngine.progress`."""
        return None if self._gate.holding else self._steps

    # --- weights ----------------------------------------------------------------------------------

    async def begin_update(self, buckets: Sequence[Bucket]) -> None:
        """Open an update. Raises RunFailed unless the engine is paused.

        Raises ModelError when the names or shapes are not the model's.
        """
        self._check_paused("weights can be updated")
        self._started()[1].begin(buckets)

    async def receive_bucket(self, index: int, flat: Tensor | None) -> None:
        """See `RolloutEngine.receive_bucket`."""
        if flat is None:
            raise RunFailed(
                f"{self.name}: an engine in this process takes buckets by copy, not over a process"
                " group"
            )
        await asyncio.to_thread(self._started()[1].copy, index, flat)

    async def end_update(self) -> None:
        """See `RolloutEngine.end_update`."""
        self._started()[1].end()

    async def set_version(self, version: int) -> None:
        """See `RolloutEngine.set_version`."""
        self._started()[1].set_version(version)

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Release the weights; keys and values live no longer than a call.

        Raises RunFailed unless the engine is paused.
        """
        self._check_paused("memory can be released")
        if "weights" in tags:
            self._started()[1].release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """See `RolloutEngine.resume_memory`."""
        if "weights" in tags:
            self._started()[1].restore()

    @property
    def version(self) -> int | None:
        """The version in force; None without a whole version."""
        weights = self._weights
        return weights.version if weights is not None and weights.state == "ready" else None

    @property
    def holds_base(self) -> bool:
        """Whether whole weights came since the start."""
        return self._weights is not None and self._weights.holds_base

    # --- inside -----------------------------------------------------------------------------------

    def _check_paused(self, what: str) -> None:
        if self._gate.mode is None:
            raise RunFailed(
                f"{self.name}: {what} only while the engine is paused; call pause first"
            )

    def _started(self) -> tuple[CausalLM, ModelWeights]:
        if self._model is None or self._weights is None:
            raise RunFailed(
                f"{self.name}: the engine {'is closed' if self._gate.closed else 'was not started'}"
            )
        return self._model, self._weights


def plan_slots(requests: Sequence[GenerateRequest]) -> list[Slot]:
    """Return the responses of a call, in the order in which they are decoded."""

    def address(index: int) -> tuple[int, int, int, int]:
        request = requests[index]
        return request.draw, request.first_sample, request.turn, request.seed

    order = sorted(range(len(requests)), key=address)
    return [Slot(i, place) for i in order for place in range(requests[i].n)]


def check_request(
    request: GenerateRequest, model: CausalLM, policies: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise UserError for a request that would otherwise fail deep inside the model."""
    check_common(
        request,
        vocab_size=model.vocab_size,
        total_tokens=model.max_positions,
        limit="the model's context",
        policies=policies,
    )
    if request.sampling.routed_experts and not model.tap.num_layers:
        raise UserError(
            f"draw {request.draw}: asks for routed experts, but the model has none: set"
            " policy.routing_replay to none"
        )
