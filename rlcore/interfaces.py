"""The interfaces between the parts of the system; `rlcore/launch/` picks the implementations.

Nothing here imports a backend or an engine, and no implementation depends on another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.algorithms import Moments
    from rlcore.data.batch import RolloutBatch, StepRollouts, UpdateResult
    from rlcore.data.generation import Completion, Generate, GenerateRequest, MemoryTag, PauseMode
    from rlcore.data.packing.plan import MinibatchPlan, PlanRules
    from rlcore.data.prompts import Prompt
    from rlcore.data.sample import Sample
    from rlcore.weights import Bucket

# --- training -------------------------------------------------------------------------------------


class WeightSource(Protocol):
    """Weights on the trainer's ranks, for a publication. All ranks call the methods alike."""

    def buckets(self) -> tuple[Bucket, ...]:
        """Return the fixed layout of the weights under their Hugging Face names."""

    def export_buckets(self, *, everywhere: bool = False) -> Iterator[tuple[Bucket, Tensor | None]]:
        """Yield the buckets in order, each gathered from the ranks that hold its parts.

        The bytes are uint8 [num_bytes] on rank 0, and None elsewhere unless `everywhere` is true.
        """


class PolicyBackend(WeightSource, Protocol):
    """The trainer's models on their ranks. All ranks call every method, in the same order.

    Vectors enter and leave on rank 0, in the order of the loaded batch; other ranks pass and get
    None. As a `WeightSource` it has what a publication sends: the policy's weights or, where only
    adapters are trained, their factors.
    """

    rank: int
    world_size: int
    data_parallel_size: int
    vocab_size: int

    @property
    def base(self) -> WeightSource | None:
        """The weights below the adapters, which an engine takes once; None without adapters."""

    @property
    def plan_rules(self) -> PlanRules:
        """Return the rules for rank 0's plan of micro-batches; no communication."""

    def load_batch(self, batch: RolloutBatch | None, plans: Sequence[MinibatchPlan] | None) -> None:
        """Send each data-parallel rank its sequences of the step (from rank 0)."""

    def score(
        self, model: Literal["policy", "reference", "teacher", "critic"], *, entropy: bool = False
    ) -> dict[str, Tensor] | None:
        """Run a pass without gradients over the loaded batch.

        Returns:
            `logprobs` (and `entropy`), or `values` for the critic; fp32 [M] on rank 0. Log-probs of
            every model are those of its logits / `rollout.sampling.temperature`.
        """

    def assign(self, vectors: Mapping[str, Tensor] | None) -> None:
        """Send vectors [M] (advantages, weights, ...) to the ranks that hold the tokens."""

    def update(self, minibatch: int, *, train_policy: bool = True) -> UpdateResult:
        """Take one optimizer step on a mini-batch of the plan, of policy and critic (if any)."""

    def step_distance(self) -> Moments:
        """Measure how far the updates of the loaded batch moved the policy, as `step_kl`."""

    def updated_vectors(self) -> dict[str, Tensor] | None:
        """Return the effect of the loaded batch's updates on each token, for its record.

        Returns:
            `ratio` of the policy at the token's last update to `old_logprobs`, and `clipped` (1
            where the clip changed its loss); fp32 [M] on rank 0, NaN where no update trained it.
        """

    def connect(self) -> object:
        """Make the communicators of a training step, which stay on the device. Collective."""

    def offload(self) -> None:
        """Move everything to host memory, free the device, and drop the loaded batch.

        Everything except the passes over a batch still works: each call moves the data it needs to
        the device while it runs.
        """

    def onload(self) -> None:
        """Move everything back to the device. No effect without `offload`."""

    def release_cache(self) -> None:
        """Free the device memory that this process keeps for its next passes."""

    def save(self, folder: Path) -> None:
        """Save model, optimizer and schedule as a distributed checkpoint in `folder`."""

    def start_save(self, folder: Path) -> None:
        """Copy the state and return; threads write it to `folder` while training continues.

        At most one such save runs at a time.
        """

    def save_seconds(self) -> float | None:
        """Return how many seconds this rank wrote, None while it still writes. No communication.

        Raises:
            RunFailed: the write failed; names the folder and the reason.
        """

    def finish_save(self) -> None:
        """Complete the save that `start_save` began, once every rank has written."""

    def load(self, folder: Path) -> None:
        """Load a checkpoint into this layout, which may differ from the saved one."""

    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder (safetensors shards, config, tokenizer)."""

    def describe(self) -> dict[str, str]:
        """Return the backend's choices (attention, optimizer, layout), for the start's log."""

    def close(self) -> None:
        """Release all resources."""


# --- generation -----------------------------------------------------------------------------------


class RolloutEngine(Protocol):
    """An inference engine. It generates, and receives new weights in the steps of a publication.

    Failures of this engine, which another engine might not have, are EngineFailed. After its start
    an engine may have `max_total_tokens`, its limit for a prompt and its response together.
    """

    name: str
    transports: tuple[str, ...]  # transports of weights that it supports, the preferred one first
    # True if rlcore started the engine. Otherwise `kill` only disconnects, and `start` reconnects.
    managed: bool

    @property
    def ended(self) -> asyncio.Future[Any] | None:
        """A future that is done when the engine's process ends; None without such a process."""

    async def start(self) -> None:
        """Make the engine ready for requests, within `rollout.engine.start_timeout_s`.

        After `kill` it may be started again, without weights.
        """

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """Return `n` completions for each request, in order. The caller limits the time."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; `mode` determines what happens to running requests.

        `drain` waits for all of them. The caller limits the time.
        """

    async def resume(self) -> None:
        """Generate again after `pause`."""

    async def abort(self, rids: Sequence[str] | None = None) -> None:
        """Stop requests now; their completions end with the finish reason "abort".

        Args:
            rids: `GenerateRequest.rid` of the requests to stop, which are all requests of one or
                more calls; default: every request.
        """

    async def progress(self) -> Any:
        """Return a value that changes as tokens are made; None while a pause holds the requests.

        An engine with requests whose value stays the same for `rollout.engine.progress_timeout_s`
        counts as hung. None means unknown.
        """

    async def begin_update(self, buckets: Sequence[Bucket]) -> None:
        """Prepare for the weights of a publication, in this layout."""

    async def receive_bucket(self, index: int, flat: Tensor | None) -> None:
        """Receive one bucket.

        Args:
            flat: the bytes, inside one process; None if they arrive over the process group.
        """

    async def end_update(self) -> None:
        """End the update: the new weights are in use, but have no version yet."""

    async def set_version(self, version: int) -> None:
        """Set the version of the weights, which later completions report."""

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Free device memory while paused. Freed caches are emptied; freed weights are lost."""

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Allocate the memory again. Released weights then need a whole publication."""

    async def health(self) -> dict[str, Any]:
        """Return at least `name`, and `version` (None without whole weights).

        An engine that takes adapters also tells whether it holds the weights below them: `base`.

        Raises:
            EngineFailed: the engine does not run, or does not answer within
                `rollout.engine.health_timeout_s`.
        """

    async def kill(self) -> None:
        """End the engine at once, at any time, even if it hangs or is stopped."""

    async def close(self) -> None:
        """End the engine cleanly."""


class Workflow(Protocol):
    """Makes the unscored samples of a prompt, with any number of calls of `generate`.

    It may set process rewards as `sample.token_rewards`. Evaluation and an estimator's greedy
    baseline use further instances, with their own sampling and number of samples.
    """

    async def __call__(self, prompt: Prompt, draw: int, generate: Generate) -> list[Sample]:
        """Return the samples of one draw of `prompt`."""


# --- partners of the loop on rank 0 ---------------------------------------------------------------


class RolloutSource(Protocol):
    """The source of batches on rank 0: the rollout service, a labelled data set, a recording."""

    def start(self) -> None:
        """Start the engines, once, and wait until they are ready."""

    def next_step(self, step: int) -> StepRollouts | None:
        """Return the samples of step `step` (from 1). Waits at most `rollout.timeout_s`.

        None means that an engine was restarted and needs the weights. Generation continues; publish
        the weights and call again.
        """

    def evaluate(
        self, sets: Sequence[str] | None = None
    ) -> tuple[dict[str, float], list[Sample]] | None:
        """Score sets of held-out prompts with the current weights. None as in `next_step`.

        Args:
            sets: names of the sets, "" for `evaluation.paths`; default: all.
        """

    def published(self, step: int, version: int, incarnation: int) -> None:
        """Record that the engines use `version`, the weights after `step` updates.

        Called after each successful publication, but not after a catch-up.
        """

    def snapshot(self) -> dict[str, Any]:
        """Return the state after the newest hand-over: cursor, ledger, buffer. JSON-able."""

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a snapshot; None is the state before the first draw.

        If the source has continued since then, for a trainer that was lost, samples of later
        weights are dropped.
        """

    def keep_ledger(self, path: Path) -> None:
        """Append every draw's transitions to `path` from now on.

        The file is first truncated to the state that `restore` set. A source without draws writes
        nothing.
        """

    def close(self) -> None:
        """Stop generation and end the engines."""


class RankAddress(NamedTuple):
    """The node and GPU of a trainer rank; `gpu` and `name` are None on the CPU."""

    # The launcher's id of the node, see `node_identity`.
    host: str
    # An identifier of the GPU that is the same in every process.
    gpu: str | None = None
    # `HOST GPU`, the GPU as in CUDA_VISIBLE_DEVICES; engines name theirs likewise.
    name: str | None = None


@dataclass(frozen=True)
class Orders:
    """The orders of the engines' side to the trainer's ranks for a publication.

    Attributes:
        transport: the transport whose `BucketSender` the ranks use.
        ranks: the argument of `BucketSender.open` for each sending rank; JSON-able.
        joins: the ranks answer with a rendezvous, where the engines join them.
        enters: for each rank that helps others, the ranks whose rendezvous it enters.
        gathers: the engines receive the results of `BucketSender.pack` of all these ranks.
    """

    transport: str
    ranks: Mapping[int, Any]
    joins: bool = False
    enters: Mapping[int, Sequence[int]] = field(default_factory=dict)
    gathers: bool = False


class BucketSender:
    """One rank's side of the publications by a transport. This base class sends nothing."""

    def open(self, order: Any, buckets: Sequence[Bucket]) -> Any:
        """Begin a publication. Returns this rank's rendezvous for engines, JSON-able."""

    def enter(self, answers: Mapping[int, Any]) -> None:
        """Connect to the ranks that this rank helps; `answers` has the result of their `open`."""

    def pack(self, bucket: Bucket, flat: Tensor) -> Any:
        """Return the data that the call for this bucket sends to the engines.

        Args:
            flat: uint8 [num_bytes]; it does not change until `send` and that call have returned.
        """

    def send(self, bucket: Bucket, flat: Tensor, stopped: Callable[[], Any]) -> None:
        """Send the bucket, and return when it has left this rank.

        Args:
            stopped: returns None until the publication fails, and then the result of
                `Transport.stop`: the sends that continue.
        """

    def discard(self, packed: Mapping[int, Any], stopped: Any) -> None:
        """Free this rank's packed data that no engine reads, after a failure.

        Args:
            packed: the result of `pack`, by this rank.
            stopped: the result of `Transport.stop`; None if no engine was sent the data.
        """

    def finish(self) -> Any:
        """Return the data for the engines' side once all buckets are sent (rank 0)."""

    def end(self, *, done: bool, stopped: Any) -> None:
        """End a publication.

        Args:
            done: every remaining engine has all weights.
            stopped: the sends that continued after a failure; None if there were none.
        """

    def close(self) -> None:
        """Close the connections to engines."""


class EngineMemory(Protocol):
    """The device memory of all engines that share GPUs with the trainer, as rank 0 sees it.

    Each call has a deadline. An engine that fails is excluded, as in a publication.
    """

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Make every engine idle and free the memory that `tags` name.

        No engine starts or generates until `restore`.
        """

    def restore(self, tags: Sequence[MemoryTag]) -> None:
        """Allocate every engine's memory again; complete engines generate.

        Once all memory is restored, engines that died start again.

        Raises:
            RunFailed: no engine can restore its memory.
        """

    def any_running(self) -> bool:
        """Whether any engine runs."""
