"""One rank of a configuration: build, score, update, publish and save without memory or peers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import torch

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedTensor,
        apply_factories,
        is_main_replica,
    )

    from backends.megatron.backend import MegatronBackend
    from backends.megatron.batch.local_batch import LocalBatch, LocalMinibatch
    from backends.megatron.batch.update_record import UpdateRecord
    from backends.megatron.checkpoint.save_load import _sharded_state
    from backends.megatron.dryrun.stubs import Peers, without_peers
    from backends.megatron.dryrun.usage import Phase, Usage, storage_bytes
    from backends.megatron.parallel.state import ParallelState
    from backends.megatron.training.passes import SwappedIn, critic_loss, policy_loss
from rlcore.algorithms import Moments
from rlcore.config import Config
from rlcore.config.derived import Passes, pack_multiple
from rlcore.data.batch import RolloutBatch
from rlcore.trainer.objective import Objective

_Model = Literal["policy", "reference", "teacher", "critic"]
_SCORED: tuple[_Model, ...] = ("policy", "reference", "teacher", "critic")


# Vectors that the losses of a policy and a critic may read.
_PER_TOKEN = (
    "advantages", "weights", "old_logprobs", "ref_logprobs", "rollout_logprobs", "returns",
    "values",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """The micro-batches of a rank: full packs of sequences of one length."""

    micro_batches: int
    pack_tokens: int  # over all context-parallel ranks
    length: int  # tokens of a sequence; the last of a pack may be shorter
    trainable: int  # trainable tokens of a sequence
    siblings: int = 1  # sequences that share all tokens except the trainable ones

    @property
    def sequences(self) -> list[tuple[list[int], int]]:
        """The distinct tokens of each sequence of one pack, and how many of them are trainable.

        A shorter sequence with the same share of trainable tokens fills the rest of the pack.
        """
        found: list[tuple[list[int], int]] = []
        own = self._trainable(self.length)
        start = 0
        while (left := self.pack_tokens - start) > 1:
            prompt = self.length - own if left >= self.length else left - self._trainable(left)
            shared = list(range(start, start + prompt))
            start += prompt
            for _ in range(self.siblings):
                count = min(own, self.pack_tokens - start)
                if count:
                    found.append(([*shared, *range(start, start + count)], count))
                start += count
        return found

    def _trainable(self, length: int) -> int:
        return min(max(1, length * self.trainable // self.length), length - 1)


class RankBatch(LocalBatch):
    """A `LocalBatch` that is made without other ranks."""

    def __init__(
        self,
        work: Work,
        parallel: ParallelState,
        *,
        pad_multiple: int,
        routed: tuple[int, int] | None,
        mtp_coef: float = 0.0,
    ) -> None:
        """Make the batch.

        Args:
            routed: (layers with experts, experts per token) of the engine's records, if any.
        """
        sequences = work.sequences * work.micro_batches
        own = [len(tokens) for tokens, _ in sequences]
        mask = torch.cat([torch.arange(n) >= n - count for n, (_, count) in zip(own, sequences)])
        trainable = int(mask.sum())
        vectors = dict.fromkeys(_PER_TOKEN, torch.full((trainable,), 0.1))
        self.batch = RolloutBatch(
            tokens=torch.tensor([t for tokens, _ in sequences for t in tokens], dtype=torch.int32),
            cu_tokens=torch.tensor([0, *accumulate(own)]),
            loss_mask=mask,
            vectors=vectors | {"sequence_ids": torch.arange(len(own))},
            routed_experts=(
                None if routed is None else torch.zeros(len(mask), *routed, dtype=torch.int16)
            ),
        )
        self.vectors = dict(self.batch.vectors)
        self.stats = {}
        offsets = range(0, len(own) + 1, len(own) // work.micro_batches)
        self.minibatches = [LocalMinibatch(offsets, len(mask) * parallel.dp_size)]
        self._parallel = parallel
        # `MetaFloats` keeps integers in real memory.
        self._device = torch.device("meta")
        self._pad_multiple = pad_multiple
        self._share_prefixes = work.siblings > 1
        self.mtp_coef = mtp_coef
        self._shard_map = None
        self._packs = {}
        self.updates = UpdateRecord()


@dataclass
class RankReport:
    """The memory and communication of one rank."""

    rank: int
    stage: int
    parameters: dict[str, int] = field(default_factory=dict)  # model -> number of parameters
    bytes: dict[str, int] = field(default_factory=dict)  # "policy weights" -> bytes
    phases: Mapping[str, Phase] = field(default_factory=dict)
    buckets: tuple[int, int] = (0, 0)  # of a publication: number, bytes
    checkpoint: tuple[int, int] = (0, 0)  # written by this rank: tensors, bytes
    seconds: float = 0.0
    operations: int = 0


def rehearse(
    config: Config,
    passes: Passes,
    work: Work,
    *,
    rank: int,
    world: int,
    skew: float = 1.0,
    everywhere: bool = False,
) -> RankReport:
    """Run the phases of a step as one rank of `world`.

    Args:
        passes: the models that the run builds, and the models that it scores.
        work: the rank's micro-batches.
        skew: the share of tokens for this rank's experts, as a multiple of the even share.
        everywhere: a publication sends the buckets to all ranks.

    Raises ConfigError or ModelError naming the key if the configuration does not fit.
    """
    began = time.perf_counter()
    usage = Usage()
    peers = Peers(config.policy.parallel, world, config.model.vocab_divisible_by)
    objective = Objective(config.algorithm)
    report = RankReport(rank, rank // peers.of_a_stage, phases=usage.phases)
    with without_peers(usage, peers, rank, skew=skew):
        with usage.phase("build"):
            backend = MegatronBackend(
                config,
                objective,
                with_reference=passes.reference,
                with_critic=passes.critic,
                with_teacher=passes.teacher,
                total_steps=2,
                device="meta",
                weights=False,
                coordinates=peers.coordinates(),
            )
            for model in backend._trained.values():
                assert model.optimizer is not None
                model.optimizer.prepare_for_load()
                model.optimizer.set_steps_taken(1)
        try:
            _run(backend, passes, work, usage, report)
            with usage.phase("publication"):
                buckets = backend.export_buckets(everywhere=everywhere)
                sizes = [bucket.num_bytes for bucket, _ in buckets]
                report.buckets = (len(sizes), sum(sizes))
            with usage.phase("checkpoint"):
                report.checkpoint = _checkpoint(backend)
        finally:
            backend.close()
    report.operations = usage.operations
    report.seconds = time.perf_counter() - began
    return report


def _run(
    backend: MegatronBackend, passes: Passes, work: Work, usage: Usage, report: RankReport
) -> None:
    config = backend.config
    arch = backend.policy.arch
    records = config.policy.routing_replay == "engine"
    with usage.on_host():
        batch = RankBatch(
            work,
            backend.parallel,
            pad_multiple=pack_multiple(config),
            routed=(sum(arch.moe_layers), arch.transformer["moe_router_topk"]) if records else None,
            mtp_coef=config.policy.mtp_coef,
        )
    batch.micro_batches(0)
    backend._local_batch = batch
    report.parameters, report.bytes = _held(backend)
    for name in _SCORED:
        if getattr(passes, name):
            with usage.phase(f"{name} pass"):
                backend.score(name)  # type: ignore[arg-type]
    _update(backend, usage)
    backend._local_batch = batch = None  # type: ignore[assignment]


def _update(backend: MegatronBackend, usage: Usage) -> None:
    """Forward, backward and the optimizer step of each trained model, as `backend.update` does.

    `backend.update` would also merge metrics with the other ranks, which do not exist.
    """
    batch = backend._batch
    for name, model in backend._trained.items():
        if name == "policy":
            loss = policy_loss(backend.objective, batch, 0, Moments())
        else:
            loss = critic_loss(backend.config.critic, batch, Moments())
        optimizer = model.optimizer
        assert optimizer is not None
        step = optimizer.step

        def marked(name: str = name, step: Any = step) -> Any:
            with usage.phase(f"{name} optimizer step"):
                return step()

        optimizer.step = marked  # type: ignore[method-assign]
        try:
            with usage.phase(f"{name} forward and backward"), model.on_device(training=True):
                backend._train(model, 0, loss)
        finally:
            del optimizer.step


def _held(backend: MegatronBackend) -> tuple[dict[str, int], dict[str, int]]:
    """The parameters of each model, and the bytes of each kind while they are on the device."""
    parameters: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for name, model in {**backend._trained, **backend.frozen}.items():
        if isinstance(model, SwappedIn):
            continue
        with model.on_device(training=model.optimizer is not None):
            parameters[name] = sum(p.numel() for p in model.parameters())
            own = (p for p in model.parameters() if p.requires_grad or model.base is None)
            sizes[f"{name} weights"] = storage_bytes(own)
            if model.optimizer is not None:
                sizes[f"{name} gradients"] = storage_bytes(iter(model._gradients()))
                with model.optimizer.state.on_device():
                    state = (t for t in model.optimizer._own_tensors() if t.dim())
                    sizes[f"{name} optimizer"] = storage_bytes(state)
    return parameters, sizes


def _checkpoint(backend: MegatronBackend) -> tuple[int, int]:
    """The number and bytes of the tensors that this rank would write to a checkpoint."""
    with backend._saved_weights_on_device():
        states = [
            _sharded_state(saved, backend.parallel, optimizer=True) for saved in backend._saved
        ]
        for state in states:
            apply_factories(state)
    written = [
        tensor.data
        for tensor in nested_values({"models": states})
        if isinstance(tensor, ShardedTensor) and is_main_replica(tensor.replica_id)
    ]
    sizes = (data.numel() * data.element_size() for data in written if data is not None)
    return len(written), sum(sizes)
