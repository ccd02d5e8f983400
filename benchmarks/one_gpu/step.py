"""Builds a trainer on one device, and runs a GRPO step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from backends.megatron import MegatronBackend
from rlcore.config import Config
from rlcore.data.batch import RolloutBatch, UpdateResult
from rlcore.data.packing import MinibatchPlan
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
        self.plans = self.backend.plan(batch, self.minibatches) if plan is None else [plan]
        self.backend.load_batch(batch, self.plans)
        self.credit = CreditAssignment(config, objective)

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


def one_step(folder: Path, result: Path, config: Config, batch: RolloutBatch, device: str) -> None:
    """Log-probs, gradient norm and moved weights of one step, saved to `result`."""
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
