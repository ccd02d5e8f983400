"""The sets of held-out prompts of a run, each with all its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from rlcore.config.sections.evaluation import EvaluationConfig, EvaluationSetConfig
from rlcore.config.sections.reward import RewardConfig
from rlcore.config.sections.rollout import WorkflowConfig
from rlcore.config.sections.root import Config

T = TypeVar("T")

SET_KEY = "evaluation_set"  # of `Sample.metadata`, for the samples of a named set


@dataclass(frozen=True)
class EvaluationSet:
    """One set of held-out prompts."""

    name: str  # "" for the set of evaluation.paths
    paths: tuple[str, ...]
    every: int
    at_start: bool
    at_end: bool
    samples_per_prompt: int
    temperature: float
    top_p: float
    max_new_tokens: int | None
    max_prompts: int | None
    k: tuple[int, ...]  # empty: means alone, without intervals
    prompt_key: str | None = None  # None: that of `data`
    label_key: str | None = None
    reward: RewardConfig | None = None  # None: the run's
    workflow: WorkflowConfig | None = None  # None: the run's

    @property
    def key(self) -> str:
        """The section with its settings, for messages."""
        return f"evaluation.sets.{self.name}" if self.name else "evaluation"

    @property
    def prefix(self) -> str:
        """The beginning of its metrics' names."""
        return f"eval/{self.name}/" if self.name else "eval/"

    def is_due(self, step: int, *, ended: bool) -> bool:
        """Whether it is scored after `step`; `ended`: that was the last."""
        if step == 0:
            return self.at_start
        return (ended and self.at_end) or (self.every > 0 and step % self.every == 0)

    def config(self, config: Config) -> Config:
        """Return the run's configuration with what is the set's own."""
        keys = {"prompt_key": self.prompt_key, "label_key": self.label_key}
        given = {name: key for name, key in keys.items() if key is not None}
        rollout = config.rollout
        if self.workflow is not None:
            rollout = rollout.model_copy(update={"workflow": self.workflow})
        return config.model_copy(
            update={
                "data": config.data.model_copy(update=given),
                "evaluation": config.evaluation.model_copy(
                    update={"max_new_tokens": self.max_new_tokens}
                ),
                "reward": config.reward if self.reward is None else self.reward,
                "rollout": rollout,
            }
        )


def evaluation_sets(config: Config) -> list[EvaluationSet]:
    """Return the set of `evaluation.paths`, if there is one, then the named sets."""
    given = config.evaluation
    unnamed = EvaluationSetConfig(paths=given.paths)
    found = {"": unnamed} if given.paths else {}
    return [_resolved(name, part, given) for name, part in (found | given.sets).items()]


def sets_due(config: Config, step: int, *, ended: bool) -> list[str]:
    """Return the names of the sets that are scored after `step`; `ended`: that was the last."""
    return [given.name for given in evaluation_sets(config) if given.is_due(step, ended=ended)]


def set_of(metric: str) -> str:
    """Return the name of the set that a metric `eval/...` is of."""
    return metric.removeprefix("eval").strip("/").rpartition("/")[0]


def _resolved(name: str, part: EvaluationSetConfig, given: EvaluationConfig) -> EvaluationSet:
    samples = _first(part.samples_per_prompt, given.samples_per_prompt)
    k = given.k if part.k is None else part.k
    if k is None:
        k = [1, samples] if name else []
    return EvaluationSet(
        name=name,
        paths=tuple(part.paths),
        every=_first(part.every, given.every),
        at_start=_first(part.at_start, given.at_start),
        at_end=_first(part.at_end, given.at_end),
        samples_per_prompt=samples,
        temperature=_first(part.temperature, given.temperature),
        top_p=_first(part.top_p, given.top_p),
        max_new_tokens=part.max_new_tokens or given.max_new_tokens,
        max_prompts=part.max_prompts or given.max_prompts,
        k=tuple(sorted(set(k))),
        prompt_key=part.prompt_key,
        label_key=part.label_key,
        reward=part.reward,
        workflow=part.workflow,
    )


def _first(own: T | None, shared: T) -> T:
    return shared if own is None else own
