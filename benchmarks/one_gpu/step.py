"""Builds a trainer on one device, and runs a GRPO step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from one_gpu.models import SHAPES, full_packs, make_batch, make_config, write_model
from one_gpu.section import Setting
from torch import Tensor

from backends.megatron import MegatronBackend
from rlcore.config import Config
from rlcore.data.batch import RolloutBatch, UpdateResult
from rlcore.data.packing.plan import MinibatchPlan, plan_minibatches
from rlcore.launch.process import cuda_environment
from rlcore.trainer.credit import CreditAssignment
from rlcore.trainer.loop import put
from rlcore.trainer.objective import Objective


class Trainer:
    """Make policy and reference on `device`; load `batch` by `plan` or by the backend's plan."""

    def __init__(
        self, config: Config, batch: RolloutBatch, device: str, plan: MinibatchPlan | None
    ) -> None:
        self.config = config
        self.batch = batch
        objective = Objective(config.algorithm)
        self.backend = MegatronBackend(
            config, objective, with_reference=True, with_critic=False, total_steps=10, device=device
        )
        self.minibatches = [range(batch.num_sequences)]
        self.plans = self._plan() if plan is None else [plan]
        self.backend.load_batch(batch, self.plans)
        self.credit = CreditAssignment(config, objective)

    def _plan(self) -> list[MinibatchPlan]:
        return plan_minibatches(self.backend.plan_rules, self.batch, self.minibatches)

    def reload(self, config: Config) -> None:
        """Plan and load the batch again, with another way to share prefixes."""
        self.backend.config = config
        self.plans = self._plan()
        self.backend.load_batch(self.batch, self.plans)

    @property
    def slots(self) -> int:
        """The tokens that a pass computes, pads among them."""
        loaded = self.backend._local_batch
        assert loaded is not None
        return sum(micro.input_ids.numel() for micro in loaded.micro_batches(0))

    @property
    def micro_batches(self) -> int:
        return len(self.plans[0].microbatches[0])

    def score(self, model: str = "policy") -> dict[str, Tensor]:
        """fp32 [M] each, on the CPU."""
        scores = self.backend.score(model, entropy=model == "policy")  # type: ignore[arg-type]
        assert scores is not None
        return scores

    def assign(self) -> None:
        """Advantages and weights of the step from both passes."""
        put(self.batch, self.score())
        put(self.batch, self.score("reference"), prefix="ref_")
        self.backend.assign(self.credit.assign(self.batch, self.minibatches))

    def update(self) -> UpdateResult:
        return self.backend.update(0)

    def weights(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for bucket, flat in self.backend.export_buckets():
            if flat is not None:
                named.update(
                    (name, tensor.cpu().float().clone()) for name, tensor in bucket.views(flat)
                )
        return named


@contextmanager
def trainer(
    config: Config, batch: RolloutBatch, device: str, plan: MinibatchPlan | None = None
) -> Iterator[Trainer]:
    """Yield a trainer, and destroy its process groups afterwards."""
    made = Trainer(config, batch, device, plan)
    try:
        yield made
    finally:
        made.backend.close()


@contextmanager
def random_trainer(
    setting: Setting,
    model: str,
    *,
    lr: float = 1e-6,
    packs: int = 1,
    offload: bool = False,
    recompute: bool = False,
    engine: dict[str, Any] | None = None,
) -> Iterator[Trainer]:
    """Yield a trainer of a random model, which is in the folder "model", with full packs."""
    size = setting.size
    shape = SHAPES["toy" if setting.toy else model]
    folder = setting.work / "model"
    config = make_config(
        folder,
        dtype=size.dtype,
        micro_tokens=size.micro_tokens,
        optimizer={"lr": lr, "distributed": True},
        offload=offload,
        recompute=recompute,
        engine=engine,
    )
    set_environment(config, setting.device)
    write_model(folder, shape, size.torch_dtype, device=setting.device)
    batch = make_batch(shape.vocab, size.micro_tokens, packs, size.longest)
    with trainer(config, batch, setting.device, full_packs(batch, size.micro_tokens)) as made:
        yield made


def set_environment(config: Config, device: str) -> None:
    """Set what a run sets before its process first uses the GPU."""
    if device != "cpu":
        for name, value in cuda_environment(config, torch.__version__).items():
            os.environ.setdefault(name, value)


def one_step(folder: Path, result: Path, config: Config, batch: RolloutBatch, device: str) -> None:
    """Log-probs, gradient norm and moved weights of one step, saved to `result`."""
    set_environment(config, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    with trainer(config, batch, device) as made:
        before = made.weights()
        reference = made.score("reference")["logprobs"]
        scores = made.score()
        made.assign()
        metrics = made.update().metrics
        after = made.weights()
        torch.save(
            {
                "logprobs": scores["logprobs"],
                "entropy": scores["entropy"],
                "reference": reference,
                "reference_after": made.score("reference")["logprobs"],
                "grad_norm": metrics["train/grad_norm"],
                "moved": {name: after[name] - before[name] for name in before},
                "peak": torch.cuda.max_memory_allocated() if device != "cpu" else 0,
            },
            result,
        )
