"""The seams of the system. Each is a `typing.Protocol`; `rlcore/launch/` picks the implementation.

Nothing here imports a backend or an engine, and no implementation sees behind another seam.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

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


class PolicyBackend(Protocol):
    """The trainer's models on their ranks. All ranks call every method, in the same order.

    Vectors enter and leave on rank 0, in the order of the loaded batch; other ranks pass and get
    None.
    """

    rank: int
    world_size: int
    data_parallel_size: int
    vocab_size: int

    @property
    def plan_rules(self) -> PlanRules:
        """The rules by which rank 0 plans the micro-batches of a step; no communication."""

    def load_batch(self, batch: RolloutBatch | None, plans: Sequence[MinibatchPlan] | None) -> None:
        """Give each data-parallel rank its sequences of the step (from rank 0)."""

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
        """Return what the updates of the loaded batch did to each token, for its record.

        Returns:
            `ratio` of the policy at the token's last update to `old_logprobs`, and `clipped` (1
            where the clip changed its loss); fp32 [M] on rank 0, NaN where no update trained it.
        """

    def buckets(self) -> tuple[Bucket, ...]:
        """Return the fixed layout of the policy's weights under their Hugging Face names."""

    def export_buckets(self, *, everywhere: bool = False) -> Iterator[tuple[Bucket, Tensor | None]]:
        """Yield the buckets in order, each gathered from the ranks that hold its parts.

        The bytes are uint8 [num_bytes] on rank 0, and None elsewhere unless `everywhere` is true.
        """

    def offload(self) -> None:
        """Move everything to host memory, free the device, and drop the loaded batch.

        Everything except the passes over a batch still works: it moves what it needs to the device
        for as long as it runs.
        """

    def onload(self) -> None:
        """Move everything back to the device. No effect without `offload`."""

    def release_cache(self) -> None:
        """Free the device memory that this process keeps for its next passes."""

    def save(self, folder: Path) -> None:
        """Save model, optimizer and schedule as a distributed checkpoint in `folder`."""

    def start_save(self, folder: Path) -> None:
        """Copy the state and return; threads write it to `folder` while training goes on.

        At most one such save runs at a time.
        """

    def save_seconds(self) -> float | None:
        """Return the seconds that this rank wrote for, None while it still does. No communication.

        Raises:
            RunFailed: it could not write; names the folder and the reason.
        """

    def finish_save(self) -> None:
        """Complete the save that `start_save` began, once every rank has written."""

    def load(self, folder: Path) -> None:
        """Load a checkpoint, under any layout that it can be resharded to."""

    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder (safetensors shards, config, tokenizer)."""

    def describe(self) -> dict[str, str]:
        """Return the choices that were made (attention, optimizer, layout), for the run's start."""

    def close(self) -> None:
        """Give everything back."""


# --- generation -----------------------------------------------------------------------------------


class RolloutEngine(Protocol):
    """An inference engine. It generates, and takes new weights in the steps of a publication.

    A failure of one engine, which another engine might not have, is EngineFailed.
    """

    name: str
    transports: tuple[str, ...]  # ways in which weights can reach it, the preferred one first
    # True if rlcore started it. Else `kill` only disconnects from it, and `start` connects anew.
    managed: bool

    @property
    def ended(self) -> asyncio.Future[Any] | None:
        """Done when its process is gone; None if rlcore did not start a process for it."""

    async def start(self) -> None:
        """Make it ready to answer, within `rollout.engine.start_timeout_s`.

        After `kill` it may be started again, then without weights.
        """

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """Return `n` completions for each request, in order. The caller limits the time."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; `mode` says what becomes of running requests.

        `drain` takes as long as they do. The caller limits the time.
        """

    async def resume(self) -> None:
        """Generate again after `pause`."""

    async def abort(self, rids: Sequence[str] | None = None) -> None:
        """Stop requests now; their completions end with the finish reason "abort".

        Args:
            rids: `GenerateRequest.rid` of those to stop, all requests of a call; default: every
                request.
        """

    async def progress(self) -> Any:
        """Return a value that changes as tokens are made; None while a pause holds the requests.

        An engine with requests whose value stays the same for `rollout.engine.progress_timeout_s`
        is taken to hang. None says that nothing can be told.
        """

    async def begin_update(self, buckets: Sequence[Bucket]) -> None:
        """Prepare for the weights of a publication, in this layout."""

    async def receive_bucket(self, index: int, flat: Tensor | None) -> None:
        """Take one bucket.

        Args:
            flat: its bytes, inside one process; None if they come over the process group.
        """

    async def end_update(self) -> None:
        """End the update: the new weights are in force, but carry no version yet."""

    async def set_version(self, version: int) -> None:
        """Name the version of its weights, which its completions then carry."""

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Free device memory while paused. Caches are empty afterwards; weights are gone."""

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take the memory again. Weights that were released need a whole publication first."""

    async def health(self) -> dict[str, Any]:
        """Return at least `name`, and `version` (None without whole weights).

        Raises:
            EngineFailed: it does not run, or does not answer within
                `rollout.engine.health_timeout_s`.
        """

    async def kill(self) -> None:
        """End it at once, at any time, even if it hangs or is stopped."""

    async def close(self) -> None:
        """End it in good order."""


@runtime_checkable
class BoundedEngine(Protocol):
    """An engine that tells how long a prompt and its response may be, once it has started."""

    @property
    def max_total_tokens(self) -> int | None:
        """The most tokens of both together; None before the start."""


class Workflow(Protocol):
    """Makes the unscored samples of a prompt. It may call `generate` any number of times.

    It may give process rewards as `sample.token_rewards`. For evaluation, and for an estimator's
    greedy baseline, it is built once more, with their sampling and number of samples.
    """

    async def __call__(self, prompt: Prompt, draw: int, generate: Generate) -> list[Sample]:
        """Return the samples of one drawing of `prompt`."""


# --- reward ---------------------------------------------------------------------------------------


class Reward(Protocol):
    """A reward function that users write, given by its `package.module:function`.

    It reads `sample.prompt_text`, `sample.response_text`, `sample.label` and `sample.metadata`, and
    runs in a worker process under `reward.timeout_s`.
    """

    def __call__(self, sample: Sample) -> float:
        """Score one sample."""


# --- the loop's other partners (rank 0) -----------------------------------------------------------


class RolloutSource(Protocol):
    """The source of batches on rank 0: the rollout service, a labelled data set, a recording."""

    def start(self) -> None:
        """Start the engines, once, and wait until they are ready."""

    def next_step(self, step: int) -> StepRollouts | None:
        """Return the samples of step `step` (from 1). Waits at most `rollout.timeout_s`.

        None means that an engine was started again and needs the weights. Generation goes on;
        bring the weights and call again.
        """

    def evaluate(
        self, sets: Sequence[str] | None = None
    ) -> tuple[dict[str, float], list[Sample]] | None:
        """Score sets of held-out prompts with the current weights. None as in `next_step`.

        Args:
            sets: their names, "" for `evaluation.paths`; default: all.
        """

    def published(self, step: int, version: int, incarnation: int) -> None:
        """Take note that `version` is in force at the engines: the weights after `step` updates.

        Called after each publication that succeeded, but not after a catch-up.
        """

    def snapshot(self) -> dict[str, Any]:
        """Return the state after the newest hand-over: cursor, ledger, buffer. JSON-able."""

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a snapshot; None is the state before the first draw.

        If the source has gone on since, for a trainer that is lost, samples of later weights are
        dropped.
        """

    def keep_ledger(self, path: Path) -> None:
        """Append every draw's transitions to `path` from here on.

        The file is first taken back to the state that `restore` gave. A source without draws
        writes nothing.
        """

    def close(self) -> None:
        """Stop generation and end the engines."""


class RankAddress(NamedTuple):
    """The machine of a rank of the trainer, and its GPU there: both None on the CPU."""

    host: str
    # the same in every process
    gpu: str | None = None
    # as in CUDA_VISIBLE_DEVICES
    visible: str | None = None


@dataclass(frozen=True)
class Orders:
    """The part that ranks of the trainer have in a publication, as the engines' side says.

    Attributes:
        transport: whose `BucketSender` the ranks use.
        ranks: `BucketSender.open` of each rank that sends gets its value; JSON-able.
        joins: the ranks answer with a rendezvous, where the engines join them.
        gathers: the engines take what `BucketSender.pack` of all these ranks returns.
    """

    transport: str
    ranks: Mapping[int, Any]
    joins: bool = False
    gathers: bool = False


class BucketSender:
    """The part of one rank in the publications by one transport; here, one that does nothing."""

    def open(self, order: Any, buckets: Sequence[Bucket]) -> Any:
        """Begin a publication. Returns its rendezvous with engines, JSON-able."""

    def enter(self, answers: Mapping[int, Any]) -> None:
        """Meet the ranks that this one helps; `answers` is what `open` returned on each rank."""

    def pack(self, bucket: Bucket, flat: Tensor) -> Any:
        """Return what the engines get with the call for this bucket.

        Args:
            flat: uint8 [num_bytes]; it does not change until `send` and that call have returned.
        """

    def send(self, bucket: Bucket, flat: Tensor, stopped: Callable[[], Any]) -> None:
        """Send the bucket, and return when it has left this rank.

        Args:
            stopped: returns None until the publication has failed, and then what is still sent
                (`Transport.stop`).
        """

    def discard(self, packed: Mapping[int, Any], stopped: Any) -> None:
        """Free what ranks packed and no engine reads, after a failure (rank 0).

        Args:
            stopped: says which engines still read it; None: none does.
        """

    def finish(self) -> Any:
        """Return what the engines' side gets when all buckets are sent (rank 0)."""

    def end(self, *, done: bool, stopped: Any) -> None:
        """End a publication.

        Args:
            done: every engine that is left has all weights.
            stopped: what was still sent after a failure; None where nothing was.
        """

    def close(self) -> None:
        """Close the connections to engines."""


class EngineMemory(Protocol):
    """The device memory of all engines that share GPUs with the trainer, as rank 0 sees it.

    Each call has a deadline. An engine that fails is out, as in a publication.
    """

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Make every engine idle and free the memory that `tags` name.

        None starts or generates until it is restored.
        """

    def restore(self, tags: Sequence[MemoryTag]) -> None:
        """Give every engine its memory again; it generates if nothing else is missing.

        Once nothing is released any more, engines that died start again.

        Raises:
            RunFailed: no engine can.
        """

    def any_running(self) -> bool:
        """Whether an engine runs."""
