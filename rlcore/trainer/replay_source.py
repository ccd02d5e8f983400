"""Replay: train again on the samples of one recorded step (`rollouts/step_*.jsonl.zst`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlcore.data.sample import SAMPLING_MASK_KEY, Sample
from rlcore.data.step import StepRollouts
from rlcore.errors import DataError
from rlcore.runs.rollouts import read_rollouts

NOTHING: Mapping[str, str] = MappingProxyType({})


class ReplaySource:
    """A `RolloutSource` that returns the same recorded samples at every step.

    Args:
        greedy_baseline: the estimator needs a `baseline_reward` of every sample.
        recorded: fields that every sample must have, each with the key that asks for it.

    Raises:
        DataError: the file holds no samples, or one lacks a field that is needed. Also for samples
            with a sampling mask that `recorded` does not name: their log-probs depend on it.
    """

    def __init__(
        self, path: Path, *, greedy_baseline: bool = False, recorded: Mapping[str, str] = NOTHING
    ) -> None:
        records = read_rollouts(path)
        if not records:
            raise DataError(f"training.replay: {path} holds no samples")
        try:
            self.samples = [Sample.from_record(record) for record in records]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"training.replay: {path} holds something else than samples: {error!r}"
            ) from error
        if greedy_baseline and any(sample.baseline_reward is None for sample in self.samples):
            raise DataError(
                f"training.replay: {path} was recorded without the greedy baselines that this"
                " estimator needs; record a step with it, or use another estimator"
            )
        for name, key in recorded.items():
            if any(getattr(sample, name) is None for sample in self.samples):
                file_name = SAMPLING_MASK_KEY if name == "sampling_mask" else name
                raise DataError(
                    f"training.replay: {path} was recorded without {file_name}, which {key} needs:"
                    " turn it off"
                )
        if "sampling_mask" not in recorded and any(
            sample.sampling_mask is not None for sample in self.samples
        ):
            message = f"{path} was recorded with keep_sets: set policy.logprobs.keep_sets to true"
            raise DataError(f"training.replay: {message}")
        self.recorded_step: int | None = records[0].get("step")
        newest = max(
            (span.version for sample in self.samples for span in sample.versions), default=None
        )
        self.recorded_version: int | None = records[0].get("policy_version", newest)
        self._policy_steps = {
            span[0]: step
            for record in records
            for span, step in zip(record["versions"], record.get("policy_steps", ()))
        }

    def start(self) -> None:
        """Nothing generates in a replay."""

    def next_step(self, step: int) -> StepRollouts:
        """Return the recorded samples again; `step` does not matter."""
        return StepRollouts(
            list(self.samples), {}, epoch=float(step), snapshot={}, policy_steps=self._policy_steps,
            recorded_step=self.recorded_step, recorded_version=self.recorded_version,
        )  # fmt: skip

    def evaluate(self) -> tuple[dict[str, float], list[Sample]]:
        """Never called."""
        raise AssertionError("a replay has no engine to evaluate with")

    def published(self, step: int, version: int, incarnation: int) -> None:
        """Never called."""
        raise AssertionError("a replay has no engine to publish to")

    def snapshot(self) -> dict[str, Any]:
        """A replay has no state."""
        return {}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """A replay has no state."""

    def keep_ledger(self, path: Path) -> None:
        """Nothing is drawn, so there is no ledger."""

    def close(self) -> None:
        """Nothing is open."""
