"""The policy, critic, reference and teacher of this rank: the trainer's `PolicyBackend`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from backends.megatron.cpu.shim import expected_warnings_off, importing_megatron, megatron_device

with importing_megatron():
    from megatron.core.parallel_state import get_global_memory_buffer

    from backends.megatron.batch.local_batch import LocalBatch, plan_rules
    from backends.megatron.build import (
        BuildContext,
        base_path,
        build_critic,
        build_frozen,
        build_policy,
    )
    from backends.megatron.checkpoint import save_load
    from backends.megatron.checkpoint.shards import HostCopies, PendingCheckpoint, Plans
    from backends.megatron.checks.layout import check_layout, check_lengths
    from backends.megatron.convert.read import read_policy
    from backends.megatron.model import routing_replay as replay
    from backends.megatron.model.attention.core import uses_varlen
    from backends.megatron.model.fused import fused_kernels
    from backends.megatron.model.head import HeadOptions
    from backends.megatron.model.layers import (
        Layers,
        PrefixSharing,
        choose_prefix_sharing,
        layers_of,
    )
    from backends.megatron.model.moe import forget_tokens, mean_losses
    from backends.megatron.model.recurrent.kernels import chosen_kernels
    from backends.megatron.parallel.state import (
        connect_groups,
        destroy_parallel,
        init_parallel,
        init_process_group,
    )
    from backends.megatron.training import passes
    from backends.megatron.training.offload import OffloadedTensors, wait_for_memory
    from backends.megatron.training.optimizer import StepReport
    from backends.megatron.training.passes import Frozen, Model
    from backends.megatron.weights.source import PolicyExports, PolicyWeights
from rlcore.algorithms import Moments, PolicyLoss, PolicyLossInputs
from rlcore.config import Config
from rlcore.config.derived import pack_multiple, policy_updates
from rlcore.data.batch import RolloutBatch, UpdateResult
from rlcore.data.packing.plan import MinibatchPlan, PlanRules
from rlcore.timeline.start import START
from rlcore.weights import DTYPES, Bucket


class MegatronBackend:
    """`PolicyBackend` on Megatron-Core. Every method is collective.

    Args:
        config: the models' sections and the sampling temperature are used.
        objective: the loss of a micro-batch, per token (`rlcore.trainer.objective.Objective`).
        with_reference: build the frozen reference.
        with_teacher: build the frozen teacher, `teacher.path`.
        with_critic: build the value model and its optimizer.
        total_steps: optimizer steps of the run, over which the learning rate is scheduled. With 0
            the policy is not trained and has no optimizer.
        device: "cpu" or this rank's CUDA device.
        weights: read the weights; a dry run has folders without weights.
        coordinates: (data-parallel index, stage) of every rank, if ranks cannot gather them.

    Raises ConfigError or ModelError if a layout, a `policy.megatron` field or a folder does not
    fit.
    """

    def __init__(
        self,
        config: Config,
        objective: Callable[[PolicyLossInputs], PolicyLoss],
        *,
        with_reference: bool,
        with_critic: bool,
        with_teacher: bool = False,
        total_steps: int,
        device: torch.device | str,
        weights: bool = True,
        coordinates: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.config = config
        self.objective = objective
        self.device = torch.device(device)
        policy = config.policy
        timeout_s = config.cluster.collective_timeout_s
        arch = read_policy(config, weights=weights)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        check_layout(arch, policy.parallel, dist.get_world_size() if dist.is_initialized() else 1)
        # 1 in greedy and supervised runs.
        temperature = 1.0 if config.learns_from_rows else config.rollout.sampling.temperature or 1.0
        self._head = HeadOptions(
            temperature, policy.logprobs.chunk_elements, fp32=policy.logprobs.fp32_head
        )
        self._local_batch: LocalBatch | None = None
        self._adapters_of: dict[str, save_load.Adapters] = {}
        # Memory for saves in the background.
        self._host_copies = HostCopies()
        self._checkpoint_plans = Plans()
        self._pending: PendingCheckpoint | None = None
        # Made at the first export.
        self._made_exports: PolicyExports | None = None
        self._owns_process_group = init_process_group(self.device, timeout_s=timeout_s)
        try:
            with megatron_device(self.device), expected_warnings_off():
                with START.phase("groups"):
                    self.parallel = init_parallel(
                        policy.parallel,
                        timeout_s=timeout_s,
                        seed=config.run.seed,
                        coordinates=coordinates,
                    )
                context = BuildContext(config, arch, self.parallel, self.device, weights)
                self.policy = build_policy(context)
                self._base_path = base_path(context)
                self.frozen: dict[str, Frozen] = {}
                if with_reference:
                    self.frozen["reference"] = build_frozen(context, self.policy, "reference")
                if with_teacher:
                    self.frozen["teacher"] = build_frozen(context, self.policy, "teacher")
                if total_steps:
                    steps = policy_updates(config, total_steps) if with_critic else total_steps
                    context.start_training(self.policy, policy.optimizer, steps)
                self.policy.make_offloadable(self.device, offload=False)
                self.critic = (
                    build_critic(context, self.policy, total_steps) if with_critic else None
                )
        except BaseException:
            # Megatron's groups are process-wide: they must not outlive a model that does not fit.
            self.close()
            raise
        self.rank = self.parallel.rank
        self.world_size = self.parallel.world_size
        self.data_parallel_size = self.parallel.dp_size
        self.vocab_size = arch.vocab_size

    # --- batches ----------------------------------------------------------------------------------

    @property
    def plan_rules(self) -> PlanRules:
        """The rules by which rank 0 plans micro-batches."""
        cost = self.policy.arch.shape.cost
        return plan_rules(self.config, self.parallel, cost, share_prefixes=self._prefixes().on)

    def load_batch(self, batch: RolloutBatch | None, plans: Sequence[MinibatchPlan] | None) -> None:
        """Give each replica its sequences.

        Raises ValueError unless `plans` hold every sequence exactly once, and RunFailed on rank 0
        if a sequence or its routed experts do not fit this model.
        """
        if batch is not None:
            for model in self._own_models:
                check_lengths(batch.lengths.tolist(), model.arch)
        if batch is not None and self.config.policy.routing_replay == "engine":
            replay.check_records(batch, self.policy.arch)
        self._local_batch = LocalBatch(
            batch,
            plans,
            self.parallel,
            self.device,
            pad_multiple=pack_multiple(self.config),
            share_prefixes=self._prefixes().on,
            mtp_coef=self.config.policy.mtp_coef,
        )

    def assign(self, vectors: Mapping[str, Tensor] | None) -> None:
        """Send vectors [M] to the ranks that hold the tokens.

        A vector named `batch_stats/<minibatch>/<name>` is sent whole to all ranks.
        """
        self._batch.assign(vectors)

    def score(
        self, model: Literal["policy", "reference", "teacher", "critic"], *, entropy: bool = False
    ) -> dict[str, Tensor] | None:
        """Run a model over the loaded batch without gradients.

        Returns `logprobs` (and `entropy`), or the critic's `values`: fp32 [M], on rank 0 only.
        """
        names = ["values"] if model == "critic" else ["logprobs", "entropy"][: 1 + entropy]
        head = replace(self._head, entropy=entropy)
        outputs: list[Any] = []
        routing: replay.Routing = replay.own_routing
        if model == "policy":
            records = self.config.policy.routing_replay == "engine"
            routing = replay.replaying if records else replay.recording
        with self._on_device(model) as module, megatron_device(self.device):
            for k in range(len(self._batch.minibatches)):
                packs = self._batch.micro_batches(k)
                outputs += passes.score_pass(module, packs, head, routing=routing)
        own = None
        if self.parallel.is_last_stage:
            vectors = [(out,) if isinstance(out, Tensor) else out for out in outputs]
            own = [torch.cat([out[i] for out in vectors]) for i in range(len(names))]
        collected = self._batch.collect(own, len(names))
        return None if collected is None else dict(zip(names, collected))

    # --- optimizer steps --------------------------------------------------------------------------

    def update(self, minibatch: int, *, train_policy: bool = True) -> UpdateResult:
        """Take one optimizer step of the policy, and of the critic if there is one.

        A model whose gradient norm is exactly 0 or not finite skips the step.
        """
        moments = Moments()
        reports: dict[str, StepReport] = {}
        with megatron_device(self.device), expected_warnings_off():
            if train_policy:
                loss = passes.policy_loss(self.objective, self._batch, minibatch, moments)
                with self.policy.on_device(training=True) as policy:
                    reports["policy"] = self._train(policy, minibatch, loss)
                self._batch.updates.moved |= not reports["policy"].skipped
            if self.critic is not None:
                loss = passes.critic_loss(self.config.critic, self._batch, moments)
                with self.critic.on_device(training=True) as critic:
                    reports["critic"] = self._train(critic, minibatch, loss)
        if self._prefixes().on and self.parallel.is_last_stage:
            for micro in self._batch.micro_batches(minibatch):
                moments.add("perf/shared_tokens", micro.repeated)
        moments = passes.shared_moments(moments, self.parallel)
        metrics = moments.reduce()
        if "policy" in reports:
            metrics["lr"] = reports["policy"].lr
            metrics["train/grad_norm"] = reports["policy"].grad_norm
            step_tokens = self._batch.minibatches[minibatch].step_tokens
            losses = mean_losses(self.policy.chunks, self.policy.arch, step_tokens)
            metrics |= {f"train/{name}": value for name, value in losses.items()}
            if self.config.policy.routing_replay != "none":
                changed = replay.changed_share(self.policy.chunks, self.policy.arch, step_tokens)
                metrics["train/routing_replay_changed"] = changed
        if "critic" in reports:
            metrics["train/critic_lr"] = reports["critic"].lr
            metrics["train/critic_grad_norm"] = reports["critic"].grad_norm
        skipped = [report.grad_norm for report in reports.values() if report.skipped]
        return UpdateResult(metrics, moments, any(n != 0.0 for n in skipped), 0.0 in skipped)

    def step_distance(self) -> Moments:
        """Measure how far the updates of the loaded batch moved the policy, as `step_kl`."""
        with self._on_device("policy") as policy, megatron_device(self.device):
            return passes.step_distance(policy, self._batch, self._head, self.parallel)

    def updated_vectors(self) -> dict[str, Tensor] | None:
        """Return `ratio` and `clipped` of each token at its last update. Collective."""
        return self._batch.collect_updates()

    def _train(self, model: Model, minibatch: int, loss: Any) -> StepReport:
        return passes.training_pass(
            model,
            self._batch.micro_batches(minibatch),
            self._head,
            loss,
            step_tokens=self._batch.minibatches[minibatch].step_tokens,
        )

    # --- weights ----------------------------------------------------------------------------------

    def buckets(self) -> tuple[Bucket, ...]:
        """The static layout of what engines get: the policy's weights, or its adapters' factors."""
        return self._exports.published.buckets()

    def export_buckets(self, *, everywhere: bool = False) -> Iterator[tuple[Bucket, Tensor | None]]:
        """See `PolicyWeights`."""
        return self._exports.published.export_buckets(everywhere=everywhere)

    @property
    def base(self) -> PolicyWeights | None:
        """The weights below the adapters, where these are published by themselves."""
        return self._exports.base

    def export_hf(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder, or its adapters as a PEFT folder."""
        self._exports.write(folder, self._base_path)

    def save(self, folder: Path) -> None:
        """Write policy and critic, with optimizers and schedules, as a distributed checkpoint."""
        with megatron_device(self.device), self._saved_weights_on_device():
            save_load.save_checkpoint(folder, self._saved, self.parallel, self._checkpoint_plans)

    def start_save(self, folder: Path) -> None:
        """Like `save`, but a thread writes from a host copy; `finish_save` completes the save."""
        with megatron_device(self.device), self._saved_weights_on_device():
            self._pending = save_load.start_checkpoint(
                folder, self._saved, self.parallel, self._host_copies, self._checkpoint_plans
            )

    def save_seconds(self) -> float | None:
        """The seconds that this rank's writing took; None while it is in progress. Not collective.

        Raises RunFailed if the writing failed.
        """
        return self._started_save.written()

    def finish_save(self) -> None:
        """Complete the checkpoint of `start_save`, after every rank has written."""
        pending = self._started_save
        self._pending = None
        with megatron_device(self.device):
            pending.finish()

    @property
    def _started_save(self) -> PendingCheckpoint:
        if self._pending is None:
            raise RuntimeError("call start_save first")
        return self._pending

    def load(self, folder: Path) -> None:
        """The inverse of `save`, under the current layout. Frozen models do not change."""
        with megatron_device(self.device), self._saved_weights_on_device():
            save_load.load_checkpoint(folder, self._saved, self.parallel)

    @property
    def _trained(self) -> dict[str, Model]:
        critic = {} if self.critic is None else {"critic": self.critic}
        return {"policy": self.policy, **critic}

    def _saved_weights_on_device(self) -> ExitStack:
        """Inside, the weights of a checkpoint are on the device; optimizers stay where they are."""
        stack = ExitStack()
        for model in self._trained.values():
            stack.enter_context(model.on_device())
        return stack

    @property
    def _saved(self) -> list[save_load.Saved]:
        return [
            save_load.Saved(name, model.arch, model.chunks, model.optimizer, self._adapters(name))
            for name, model in self._trained.items()
        ]

    def _adapters(self, name: str) -> save_load.Adapters | None:
        """The adapters of a trained model, and the weights below them."""
        lora = self.config.policy.lora
        own = self.config.critic.path if name == "critic" else None
        base = self._base_path if own is None else Path(own)
        if lora is None:
            return None
        return self._adapters_of.setdefault(name, save_load.Adapters(lora, base))

    # --- device memory ----------------------------------------------------------------------------

    def connect(self) -> dict[str, int]:
        """Make the communicators of a training step, whose memory engines on the GPU must see.

        Returns the sizes of their groups by name.
        """
        arch = self.policy.arch
        with megatron_device(self.device):
            return connect_groups(
                self.device,
                moe=bool(arch.num_experts),
                tied=arch.tie_word_embeddings or arch.mtp,
                distributed=self.config.policy.optimizer.distributed,
            )

    def offload(self) -> None:
        """Move the models into host memory, drop a loaded batch, and free the device's memory.

        Until `onload` each pass loads what it needs and offloads it again. No communication.
        """
        self._local_batch = None
        for tensors in self._offloadable:
            tensors.offload()
        self.release_cache()

    def onload(self) -> None:
        """The inverse of `offload`, once the device has the memory for it."""
        if self.device.type == "cuda":
            wait_for_memory(
                self.device,
                sum(tensors.returning_bytes for tensors in self._offloadable),
                free=lambda: torch.cuda.mem_get_info(self.device)[0],
            )
        for tensors in self._offloadable:
            tensors.onload()

    def release_cache(self) -> None:
        """Free the device memory that this process caches for its next passes. No communication."""
        if self._made_exports is not None:
            self._made_exports.free_buffers()
        # Megatron's buffers for gathers under sequence parallelism.
        get_global_memory_buffer().buffer.clear()
        for model in self._own_models:
            for chunk in model.chunks:
                forget_tokens(chunk)
        if self.device.type == "cuda":
            # Complete all kernels and copies to host memory before memory is freed.
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    @property
    def _own_models(self) -> list[Model]:
        """The models with separate modules."""
        models = [*self._trained.values(), *self.frozen.values()]
        return [model for model in models if isinstance(model, Model)]

    @property
    def _offloadable(self) -> list[OffloadedTensors]:
        return [tensors for model in self._own_models for tensors in model.offloadable]

    # --- description and helpers ------------------------------------------------------------------

    def describe(self) -> dict[str, str]:
        """The choices of layout, layers and optimizer, for the first lines of a run."""
        p = self.parallel
        checkpoint = self.config.policy.checkpoint
        weights = self.config.model.path
        if checkpoint is not None:
            weights = f"{checkpoint}, saved at {save_load.saved_layout(Path(checkpoint))}"
        dtype = DTYPES[self.config.model.dtype]
        distributed = ", distributed" * self.config.policy.optimizer.distributed
        layers = self._layers()
        attention = "variable-length flash" if uses_varlen(self.device, dtype) else "bucketed SDPA"
        if p.cp_size > 1:
            attention += ", keys and values gathered over CP"
        lora = self.config.policy.lora
        policy = "policy" if lora is None else f"policy with adapters of rank {lora.rank}"
        return {
            "layout": p.describe(self.device, sequence=self.config.policy.parallel.sequence),
            "attention": "Transformer Engine" if layers.transformer_engine else attention,
            "prefixes": str(self._prefixes()),
            "layers": str(layers),
            **chosen_kernels(self.policy.arch, self.device, dtype),
            **({"kernels": fused_kernels(self.device)} if self.device.type == "cuda" else {}),
            "optimizer": "AdamW" + distributed,
            "models": " + ".join([policy, *self.frozen, *["critic"] * (self.critic is not None)]),
            "weights": weights,
            "dtype": self.config.model.dtype,
        }

    def _layers(self) -> Layers:
        return layers_of(self.config, self.device.type, local_part=self.policy.arch.local_part)

    def _prefixes(self) -> PrefixSharing:
        # A frozen model that is swapped into the policy has the policy's positions.
        reasons = (model.arch.why_whole for model in self._own_models)
        return choose_prefix_sharing(self.config, self._layers(), next(filter(None, reasons), None))

    def close(self) -> None:
        """Release the models and Megatron's groups, and the process group if it was made here."""
        if self._pending is not None:
            self._pending.cancel()
        self._local_batch = self.critic = self._pending = self._made_exports = None
        self.frozen = {}
        destroy_parallel()
        if self._owns_process_group:
            dist.destroy_process_group()

    @property
    def _batch(self) -> LocalBatch:
        if self._local_batch is None:
            raise RuntimeError("call load_batch first")
        return self._local_batch

    @property
    def _exports(self) -> PolicyExports:
        if self._made_exports is None:
            self._made_exports = PolicyExports(self.config, self.policy, self.parallel)
        return self._made_exports

    def _on_device(self, name: str) -> AbstractContextManager[Model]:
        """Inside, the named model has its weights on the device."""
        model = self.frozen.get(name) or self._trained.get(name)
        if model is None:
            raise ValueError(f"the backend was built without a {name}")
        return model.on_device()
