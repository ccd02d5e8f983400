"""The sets of held-out prompts of a run, each with all its settings."""

from __future__ import annotations

from pydantic import PositiveInt

from rlcore.config.sections.evaluation import EvaluationSetConfig, EvaluationSettings
from rlcore.config.sections.root import Config

# The key of `Sample.metadata` that holds the name of a sample's set.
SET_KEY = "evaluation_set"


class EvaluationSet(EvaluationSetConfig):
    """One set of held-out prompts; with an empty `k` it has only means, without intervals."""

    name: str  # "" for the set of evaluation.paths
    k: list[PositiveInt]

    @property
    def key(self) -> str:
        """The configuration key of the set's section, for messages."""
        return f"evaluation.sets.{self.name}" if self.name else "evaluation"

    @property
    def prefix(self) -> str:
        """The prefix of its metrics' names."""
        return f"eval/{self.name}/" if self.name else "eval/"

    def is_due(self, step: int, *, ended: bool) -> bool:
        """Whether the set is scored after `step`; `ended`: that was the last step."""
        if step == 0:
            return self.at_start
        return (ended and self.at_end) or (self.every > 0 and step % self.every == 0)

    def config(self, config: Config) -> Config:
        """Return the run's configuration with the settings of this set."""
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
    shared = {name: getattr(given, name) for name in EvaluationSettings.model_fields}
    unnamed = EvaluationSetConfig(paths=given.paths, **shared)
    found = []
    for name, part in (({"": unnamed} if given.paths else {}) | given.sets).items():
        k = part.k
        if k is None:
            k = [1, part.samples_per_prompt] if name else []
        found.append(EvaluationSet(**{**dict(part), "name": name, "k": sorted(set(k))}))
    return found


def sets_due(config: Config, step: int, *, ended: bool) -> list[str]:
    """Return the names of the sets to score after `step`; `ended`: that was the last step."""
    return [given.name for given in evaluation_sets(config) if given.is_due(step, ended=ended)]


def set_of(metric: str) -> str:
    """Return the name of the set to which a metric `eval/...` belongs."""
    return metric.removeprefix("eval").strip("/").rpartition("/")[0]
