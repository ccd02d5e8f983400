"""Whether the engines sample from the policy that is trained: their log-probs against the trainer's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcore.algorithms import Moments, mismatch_vectors
from rlcore.config import Config
from rlcore.config.derived import generates
from rlcore.data.batch import RolloutBatch
from rlcore.data.sample import Sample

PASS = "checked_"                       # before the names of what a pass made for this check alone
GAP = "rollout/train_rollout_logprob_diff"
LIMITS = {"fp32": 1e-3, "bf16": 0.1}    # nats, mean over tokens: well above rounding, well below what the causes make

CAUSES = (
    "its logits are not divided by rollout.sampling.temperature, its dtype is another (rollout.engine.dtype), its cache holds "
    "keys and values of older weights, weights did not arrive whole (rollout.engine.verify_every: 1 shows it), or it serves "
    "another model or vocabulary than model.path"
)


class EngineCheck:
    """Compares log-probs on the first step of a process, before anything is trained, and then every few steps.

    Only tokens of the version that is about to be trained count: older ones may differ.
    """

    def __init__(self, limit: float, every: int, kind: str) -> None:
        self.limit, self.every, self.kind = limit, every, kind
        self._first: int | None = None

    @classmethod
    def of(cls, config: Config) -> EngineCheck | None:
        """None where nothing generates, or `rollout.engine.logprobs_every` is 0."""
        engine = config.rollout.engine
        if not generates(config) or not engine.logprobs_every:
            return None
        return cls(engine.max_logprob_diff or LIMITS[_coarser(config)], engine.logprobs_every, engine.kind)

    def is_due(self, step: int) -> bool:
        """Whether `step` is compared; the first step that is asked for always is."""
        if self._first is None:
            self._first = step
        return self.is_first(step) or step % self.every == 0

    def is_first(self, step: int) -> bool:
        """Whether it is the first step after a start or a resume."""
        return step == self._first

    def compare(self, batch: RolloutBatch, samples: Sequence[Sample]) -> tuple[dict[str, float], str]:
        """The metrics of the difference, {} without a token of the batch's version; and what is wrong, "" for nothing.

        Args:
            samples: those of the batch, in its order.
        """
        vectors = batch.vectors
        trainer = vectors["logprobs" if "logprobs" in vectors else f"{PASS}logprobs"]
        engine = vectors["rollout_logprobs"]
        current = vectors["versions"].eq(-1 if batch.version is None else batch.version)
        moments = Moments()
        moments.update(mismatch_vectors(trainer[current], engine[current]))
        metrics = moments.reduce()
        if not metrics or metrics[GAP] <= self.limit:       # NaN is neither
            return metrics, ""
        distance = (trainer - engine).abs() * current
        where = samples[_worst(distance, batch.cu_seqlens)]
        return metrics, (
            f"the log-probs of engine {self.kind} differ from the trainer's by {metrics[GAP]:.3g} nats on average over "
            f"{int(current.sum())} tokens of version {batch.version}, at most {self.limit:g} is expected "
            f"(rollout.engine.max_logprob_diff); the largest difference, {metrics[f'{GAP}_max']:.3g}, is in "
            f"{where.response_text[:40]!r}, a response to {where.prompt_id}. Likely causes: {CAUSES}"
        )


def _coarser(config: Config) -> str:
    dtypes = {config.model.dtype, config.rollout.engine.dtype or config.model.dtype}
    return "bf16" if "bf16" in dtypes else "fp32"


def _worst(distance: Tensor, cu_seqlens: Tensor) -> int:
    """The sequence that holds the largest entry; a NaN counts as that."""
    return int(torch.searchsorted(cu_seqlens, distance.argmax(), right=True)) - 1
