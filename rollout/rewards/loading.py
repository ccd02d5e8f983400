"""Loads reward functions, refuses those that cannot be called, and says where one failed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlcore.data.sample import Sample
from rlcore.errors import ConfigError
from rollout.plugins import call_method, load_object, place_of
from rollout.rewards.base import RewardFailure, Score, checked

RewardFunction = Callable[[Sample], Any]


def load_function(path: str, args: Mapping[str, Any], *, key: str) -> RewardFunction:
    """The function at `package.module:name` with its arguments, to be called with a sample.

    A class is constructed with the arguments instead.

    Raises:
        ConfigError: it cannot be imported, constructed, or called with a sample and `args`; names
            the configuration `key`, and file and line.
    """
    found: Callable[..., Any] = load_object(path, {}, key=key)
    if problem := signature_problem(found, args):
        raise ConfigError(f"{key}: {path!r} {problem}")
    if not inspect.isclass(found):
        return functools.partial(found, **args) if args else found
    try:
        made: Any = found(**args)
    except (Exception, SystemExit) as error:  # the user's constructor may raise anything
        raise ConfigError(
            f"{key}: {path!r} raised {type(error).__name__}: {error} at its construction"
            f"{place_of(found.__init__, error)}"
        ) from error
    function: RewardFunction = made
    return function


def signature_problem(found: Callable[..., Any], args: Mapping[str, Any]) -> str | None:
    """Why `found` cannot be called with a sample and `args`; None where it can or nobody knows."""
    name = getattr(found, "__name__", type(found).__name__)
    given = ", ".join(f"{key}={value!r}" for key, value in args.items())
    calls: list[tuple[Callable[..., Any], tuple[None, ...], dict[str, Any], str]]
    if inspect.isclass(found):
        method = call_method(found)
        if method is None:
            return "is a class whose instances cannot be called: give it a method __call__(sample)"
        calls = [
            (found, (), dict(args), f"{name}({given})"),
            (method, (None, None), {}, "__call__(self, sample)"),
        ]
    else:
        shown = f"{name}(sample, {given})" if given else f"{name}(sample)"
        calls = [(found, (None,), dict(args), shown)]
    for target, positional, keywords, shown in calls:
        if inspect.iscoroutinefunction(target):
            return f"is `async def`, and a reward function is called plainly{place_of(target)}"
        try:
            signature = inspect.signature(target)
        except (TypeError, ValueError):  # some functions of C have none
            continue
        try:
            signature.bind(*positional, **keywords)
        except TypeError as error:
            return f"is called as {shown}, but takes {signature}: {error}{place_of(target)}"
    return None


def scored(function: RewardFunction, sample: Sample) -> Score:
    """The function's verdict on a sample, or its failure with file and line."""
    try:
        score = checked(function(sample))
    except BaseException as error:  # noqa: BLE001 - SystemExit too: one sample's failure
        text = " ".join(str(error).split())[:200]
        return RewardFailure(
            "error", f"raised {type(error).__name__}: {text}{place_of(function, error)}"
        )
    if isinstance(score, RewardFailure):
        return RewardFailure(score.kind, score.reason + place_of(function))
    return score
