"""Checks that engines sample from the trained policy, by comparing log-probs with the trainer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rlcore.algorithms import Moments, mismatch_vectors, segment_sum
from rlcore.config import Config
from rlcore.config.derived import generates
from rlcore.data.batch import RolloutBatch
from rlcore.data.sample import Sample

PASS = "checked_"  # prefix of vectors computed for this check alone
# Mean difference in nats: well above rounding, well below what the causes below produce.
LIMITS = {"fp32": 1e-3, "bf16": 0.1, "fp8": 0.2}

CAUSES = (
    "its logits are not divided by rollout.sampling.temperature, its dtype is another"
    " (rollout.engine.dtype), its cache holds keys and values of older weights, weights did not"
    " arrive whole, or it serves another model or vocabulary than model.path"
)


class EngineCheck:
    """Compares log-probs at the first step of a process, before it trains, and then periodically.

    Only tokens made by the weights that are about to be trained count, since older tokens may
    differ. Asynchronous generation may leave no such tokens; then nothing is compared.
    """

    def __init__(self, limit: float, every: int, kind: str) -> None:
        self.limit = limit
        self.every = every
        self.kind = kind
        self._first: int | None = None

    @classmethod
    def of(cls, config: Config) -> EngineCheck | None:
        """Build the check from `rollout.engine`; None if disabled or nothing generates."""
        engine = config.rollout.engine
        if not generates(config) or not engine.logprobs_every:
            return None
        # The coarser of the two sides' number formats.
        dtypes = {config.model.dtype, engine.dtype or config.model.dtype}
        coarser = "bf16" if "bf16" in dtypes else "fp32"
        if engine.quantization is not None:
            coarser = "fp8"
        limit = engine.max_logprob_diff or LIMITS[coarser]
        return cls(limit, engine.logprobs_every, engine.kind)

    def is_due(self, step: int) -> bool:
        """Whether `step` is compared. The first step asked about is always compared."""
        if self._first is None:
            self._first = step
        return self.is_first(step) or step % self.every == 0

    def is_first(self, step: int) -> bool:
        """Whether `step` is the first one after a start or a resume."""
        return step == self._first

    def compare(
        self, batch: RolloutBatch, samples: Sequence[Sample], engines: Mapping[int, str]
    ) -> tuple[dict[str, float], str]:
        """Compare each engine's mean difference with the limit.

        Args:
            samples: the samples of the batch, in batch order.
            engines: draw -> engine that made its samples; {} if unknown.

        Returns:
            The metrics of the difference ({} if no token has the batch's version), and a
            description of what is wrong ("" if nothing is).
        """
        vectors = batch.vectors
        trainer = vectors["logprobs" if "logprobs" in vectors else f"{PASS}logprobs"]
        engine = vectors["rollout_logprobs"]
        assert batch.versions is not None
        of_batch = batch.versions.values.eq(-1 if batch.version is None else batch.version)
        current = batch.versions.spread(of_batch)
        moments = Moments()
        moments.update(mismatch_vectors(trainer[current], engine[current]))
        metrics = moments.reduce()
        gaps = torch.where(current, (trainer - engine).abs().double(), 0.0)
        # The sum of the gaps over the current tokens of each engine, and their number.
        totals: dict[str, list[float]] = {}
        per_sequence = zip(
            samples,
            segment_sum(gaps, batch.cu_seqlens).tolist(),
            segment_sum(current.double(), batch.cu_seqlens).tolist(),
        )
        for sample, gap, count in per_sequence:
            total = totals.setdefault(engines.get(sample.draw, self.kind), [0.0, 0.0])
            total[0] += gap
            total[1] += count
        means = {name: gap / count for name, (gap, count) in sorted(totals.items()) if count}
        # `not <=` also catches NaN.
        wrong = {name: mean for name, mean in means.items() if not mean <= self.limit}
        if not wrong:
            return metrics, ""
        worst = samples[int(torch.searchsorted(batch.cu_seqlens, gaps.argmax(), right=True)) - 1]
        by = ", ".join(f"those of engine {name} by {mean:.3g}" for name, mean in wrong.items())
        trouble = (
            f"log-probs differ from the trainer's: {by} nats on average over its tokens of"
            f" policy step {batch.version}, at most {self.limit:g} is expected"
            " (rollout.engine.max_logprob_diff); the largest difference,"
            f" {float(gaps.max()):.3g}, is in {worst.response_text[:40]!r}, a response to"
            f" {worst.prompt_id}. Likely causes: {CAUSES}"
        )
        return metrics, trouble
