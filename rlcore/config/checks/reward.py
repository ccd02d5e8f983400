"""Checks of rewards. Pure, as all checks."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from pydantic import ValidationError

from rlcore.config.evaluation_sets import evaluation_sets
from rlcore.config.messages import Problem, expected_by, show
from rlcore.config.sections.graders import GRADERS, GraderArgs
from rlcore.config.sections.reward import RewardConfig
from rlcore.config.sections.root import Config


def graders(config: Config) -> Iterator[Problem]:
    """Built-in graders of rewards are known and take the arguments they are given."""
    yield from _graders(config.reward, "reward")
    for one in evaluation_sets(config):
        if one.reward is not None:
            yield from _graders(one.reward, f"{one.key}.reward")


def _graders(reward: RewardConfig, path: str) -> Iterator[Problem]:
    for name, part in reward.parts.items():
        function = part.function
        if function in GRADERS:
            yield from _problems(GRADERS[function], part.args, f"{path}.parts.{name}.args")
        elif function is not None and ":" not in function:
            near = difflib.get_close_matches(function, GRADERS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            module, dot, attribute = function.rpartition(".")
            if dot:
                hint = f"; did you mean '{module}:{attribute}', with a colon?"
            yield Problem(
                f"{path}.parts.{name}.function",
                f"{function!r} is unknown{hint} (known: {', '.join(GRADERS)}, or"
                " package.module:function)",
            )


def _problems(known: type[GraderArgs], args: dict[str, object], path: str) -> Iterator[Problem]:
    try:
        known.model_validate(args)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            key = ".".join((path, *(str(part) for part in details["loc"])))
            if details["type"] == "extra_forbidden":
                near = difflib.get_close_matches(str(details["loc"][-1]), known.model_fields, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                yield Problem(key, f"unknown{hint} (known: {', '.join(known.model_fields)})")
            elif details["type"] == "missing":
                yield Problem(key, f"missing: give it in a file or as {key}=VALUE")
            elif not details["loc"]:
                yield Problem(key, expected_by(details))
            else:
                yield Problem(key, f"got {show(details['input'])}, expected {expected_by(details)}")
