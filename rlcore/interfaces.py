"""The seams. Each is a `typing.Protocol`; `rlcore/launch/` picks what stands behind it.

Nothing here imports a backend or an engine, and nothing behind one seam sees what is behind
another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from rlcore.data.batch import RolloutBatch
from rlcore.data.generation import Completion, Generate, GenerateRequest, MemoryTag, PauseMode
from rlcore.data.packing import MinibatchPlan
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample
from rlcore.data.step import StepRollouts, UpdateResult
from rlcore.weights import Bucket

# --- training -------------------------------------------------------------------------------------


class PolicyBackend(Protocol):
    """The trainer's models on their ranks. Every method is collective: all ranks call it, in the
    same order.

    Vectors enter and leave on rank 0 in the order of the batch that was loaded; other ranks pass
    and get None.
    """

    rank: int
    world_size: int
    data_parallel_size: int
    vocab_size: int

    def plan(
        self, batch: RolloutBatch, minibatches: Sequence[Sequence[int]]
    ) -> list[MinibatchPlan]:
        """Rank 0 only, no communication: lay out each optimizer step over ranks and micro-batches."""
        ...

    def load_batch(self, batch: RolloutBatch | None, plans: Sequence[MinibatchPlan] | None) -> None:
        """Give each data-parallel rank its sequences of the step (from rank 0)."""
        ...

    def score(
        self, model: Literal["policy", "reference", "teacher", "critic"], *, entropy: bool = False
    ) -> dict[str, Tensor] | None:
        """A no-grad pass over the loaded batch: `logprobs` (and `entropy`), or `values` for the
        critic; fp32 [M].

        Log-probs of every model are those of its logits / `rollout.sampling.temperature`.
        """
        ...

    def assign(self, vectors: Mapping[str, Tensor] | None) -> None:
        """Hand per-token vectors ([M]: advantages, old_logprobs, weights, ...) to the ranks that
        hold the tokens.
        """
        ...

    def update(self, minibatch: int, *, train_policy: bool = True) -> UpdateResult:
        """One optimizer step on minibatch `minibatch` of the plan, of the policy and of the critic
        if there is one.
        """
        ...

    def buckets(self) -> tuple[Bucket, ...]:
        """The static layout of the policy's weights under their Hugging Face names; the same on
        every rank.
        """
        ...

    def export_buckets(self) -> Iterator[tuple[Bucket, Tensor | None]]:
        """Each bucket in order, gathered from the ranks that hold its parts: uint8 [num_bytes] on
        rank 0, else None.
        """
        ...

    def offload(self) -> None:
        """Move everything into host memory and give the device's memory back; the loaded batch is
        given up.

        Everything but a batch's passes still works, and brings what it needs for as long as it
        takes.
        """
        ...

    def onload(self) -> None:
        """The inverse of `offload`: on the device for good. No effect without it."""
        ...

    def release_cache(self) -> None:
        """Give back what this process keeps of the device's memory for its next passes: other
        processes need it now.
        """
        ...

    def save(self, folder: Path) -> None:
        """Model, optimizer and schedule as a distributed checkpoint in `folder`."""
        ...

    def start_save(self, folder: Path) -> None:
        """As `save`, but returns when the state is copied; it is written while training goes on. At
        most one at a time.
        """
        ...

    def save_seconds(self) -> float | None:
        """Seconds that this rank has written for, None while it still does. No communication.

        Raises RunFailed naming the folder and the reason where it could not be written.
        """
        ...

    def finish_save(self) -> None:
        """Complete what `start_save` began, once every rank has written."""
        ...

    def load(self, folder: Path) -> None:
        """The inverse of `save`, under any layout that the checkpoint can be resharded to."""
        ...

    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder (safetensors shards, config, tokenizer)."""
        ...

    def describe(self) -> dict[str, str]:
        """Choices that were made (attention, layer spec, optimizer, layout), printed at the start
        of a run.
        """
        ...

    def close(self) -> None: ...


# --- generation -----------------------------------------------------------------------------------


class WeightVerifier(Protocol):
    """What an engine should say of its weights when it took every bucket."""

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor that is sent. It is read now, and may be overwritten afterwards."""
        ...

    def mismatch(self, reported: Any) -> str | None:
        """What is wrong with an engine whose `checksum` said this; None where its weights are what
        was sent.
        """
        ...


class RolloutEngine(Protocol):
    """An engine: generates, and takes new weights by the steps of a publication.

    What goes wrong with one engine, and might not with another, is EngineFailed.
    """

    name: str
    transports: tuple[str, ...]  # by which weights can reach it, the preferred one first
    # we started it; else somebody did, and to kill and start it is to leave it and connect anew
    managed: bool

    @property
    def ended(self) -> asyncio.Future[Any] | None:
        """Done when its process is gone; None where it has none of ours."""
        ...

    async def start(self) -> None:
        """Ready to answer, within `rollout.engine.start_timeout_s`. Again after `kill`, without
        weights then.
        """
        ...

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """`n` completions a request, in order."""
        ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self) -> None:
        """Stop all requests now; their completions end with finish reason "abort"."""
        ...

    async def begin_update(self, buckets: Sequence[Bucket]) -> None: ...

    async def receive_bucket(self, index: int, flat: Tensor | None) -> None:
        """Take one bucket: `flat` by copy inside one process, None when it comes over the process
        group.
        """
        ...

    async def end_update(self) -> None:
        """All buckets came; the new weights are in force but carry no version yet."""
        ...

    async def set_version(self, version: int) -> None: ...

    def verifier(self) -> WeightVerifier:
        """A fresh one, to be told what is sent. Raises ConfigError where this engine's weights
        cannot be verified.
        """
        ...

    async def checksum(self) -> Any:
        """A digest of its weights, for `WeightVerifier.mismatch`."""
        ...

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Give the device's memory back; the engine is paused. Caches are empty afterwards, weights
        gone.
        """
        ...

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take it again. Released weights take a whole publication before the engine generates."""
        ...

    async def health(self) -> dict[str, Any]:
        """At least `name`, and `version` (None without whole weights).

        Raises EngineFailed: it does not run, or answers nothing within
            `rollout.engine.health_timeout_s`.
        """
        ...

    async def kill(self) -> None:
        """End it at once, whatever it is doing, hung and stopped ones too. May be called at any
        time.
        """
        ...

    async def close(self) -> None: ...


class Workflow(Protocol):
    """From a prompt to its samples, unscored. May call `generate` any number of times.

    It may give process rewards, as `sample.token_rewards`. For evaluation, and for an estimator's
    greedy baseline, it is built once more with the sampling and the number of samples of those.
    """

    async def __call__(self, prompt: Prompt, draw: int, generate: Generate) -> list[Sample]: ...


# --- reward ---------------------------------------------------------------------------------------


class Reward(Protocol):
    """A reward function that users write: any callable `(sample) -> float`, by
    `package.module:function`.

    It sees `sample.prompt_text`, `sample.response_text`, `sample.label`, `sample.metadata`; it runs
    in a worker process under `reward.timeout_s`.
    """

    def __call__(self, sample: Sample) -> float: ...


# --- the loop's other partners (rank 0) -----------------------------------------------------------


class RolloutSource(Protocol):
    """Where batches come from: the rollout service, the labels of a data set (sft), or a recording.
    Rank 0 only.
    """

    def start(self) -> None:
        """Start what generates, once; waits until it is ready."""
        ...

    def next_step(self, step: int) -> StepRollouts | None:
        """The samples of step `step` (1-based). Waits at most `rollout.timeout_s`.

        None: an engine that was started again waits for the weights. The work goes on; bring them,
            and ask again.
        """
        ...

    def evaluate(self) -> tuple[dict[str, float], list[Sample]] | None:
        """Score the evaluation prompts with the current weights. None as above."""
        ...

    def published(self, step: int, version: int, incarnation: int) -> None:
        """Weights of policy step `step`, the number of updates behind them, are in force at the
        engines as `version`.

        Said after each publication that succeeded, but not of a catch-up.
        """
        ...

    def snapshot(self) -> dict[str, Any]:
        """The consistent cut after the newest hand-over, JSON-able, from which `restore` goes on:
        cursor, ledger, buffer.
        """
        ...

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a snapshot, None being the one before the first draw.

        A source that has gone on since, with a trainer that is no more, gives up what was made by
        later weights.
        """
        ...

    def keep_ledger(self, path: Path) -> None:
        """From here on append every draw's transitions to `path`, which `restore` has gone back to
        the cut of a step in.

        Where nothing is drawn, there is nothing to write.
        """
        ...

    def close(self) -> None: ...


class WeightSink(Protocol):
    """All engines of a publication, seen by the trainer's rank 0; blocking, each call with a
    deadline.
    """

    def prepare(self, buckets: Sequence[Bucket], *, only_stale: bool = False) -> None:
        """Pause, agree on the members and the layout, open the update.

        Args:
            only_stale: those engines alone that wait for weights; the others go on serving.
        """
        ...

    def send(self, bucket: Bucket, flat: Tensor) -> None: ...

    def finish(self, version: int) -> None:
        """Close the update, verify, set the version, resume."""
        ...

    def cancel(self) -> None:
        """Give up this publication; the engines that took part are stale."""
        ...


class EngineMemory(Protocol):
    """Device memory of all engines, seen by the rank 0 of a trainer that takes turns with them;
    each call with a deadline.

    An engine that fails is out, as in a publication.
    """

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Every engine is idle and has given back what `tags` name; none starts or generates until
        it is restored.
        """
        ...

    def restore(self, tags: Sequence[MemoryTag]) -> None:
        """Every engine has its memory again, and generates if nothing else is missing.

        When nothing is released any more, engines that died start again. Raises RunFailed when none
        can.
        """
        ...

    def anyone(self) -> bool:
        """Whether an engine runs."""
        ...


class Tracker(Protocol):
    @property
    def url(self) -> str | None:
        """Where the run can be seen, if anywhere."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def show_samples(self, step: int, samples: Sequence[Sample]) -> None: ...

    def note(self, line: str) -> None:
        """One line for the people who watch."""
        ...

    def state(self) -> dict[str, Any]:
        """What a resumed run needs (wandb's run id)."""
        ...

    def close(self, status: str) -> None: ...
