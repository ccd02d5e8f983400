"""Calls of actors with deadlines, and what their failures mean in our words."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from rlcore.errors import DeadlineExceeded, PartLost, RlcoreError, RunFailed

NAMESPACE = "rlcore"  # of all named actors
END_S = 10.0
POLL_S = 0.2  # from one question to the next, of an actor that is being started


class ActorLost(PartLost):
    """An actor's process or its node died; another one in its place knows nothing of what was."""


def get(ref: Any, *, limit_s: float, what: str, key: str) -> Any:
    """The result of a call.

    Args:
        what: who was asked what, for messages.
        key: the configuration's key that sets the limit.

    Raises:
        DeadlineExceeded: after `limit_s`.
        ActorLost: its process died.
        RlcoreError: what the call itself raised.
    """
    try:
        return ray.get(ref, timeout=limit_s)
    except GetTimeoutError as error:
        raise DeadlineExceeded(f"{what}: no answer within {limit_s:g} s ({key})") from error
    except RayError as error:
        raise in_our_words(error, what) from error


def get_when_up(call: Callable[[], Any], *, limit_s: float, what: str, key: str) -> Any:
    """As `get`, of an actor that Ray may be starting again: it is asked until it is there."""
    deadline = time.monotonic() + limit_s
    while True:
        left = max(POLL_S, deadline - time.monotonic())
        try:
            return get(call(), limit_s=left, what=what, key=key)
        except ActorLost as error:
            if left <= POLL_S:
                raise DeadlineExceeded(
                    f"{what}: its process was not started again within {limit_s:g} s ({key})"
                ) from error
        time.sleep(POLL_S)


async def answer(ref: Awaitable[Any], *, what: str) -> Any:
    """As `get`, without a limit of its own."""
    try:
        return await ref
    except RayError as error:
        raise in_our_words(error, what) from error


async def answer_when_up(call: Callable[[], Awaitable[Any]], *, what: str) -> Any:
    """As `get_when_up`, without a limit of its own."""
    while True:
        try:
            return await answer(call(), what=what)
        except ActorLost:
            await asyncio.sleep(POLL_S)


def in_our_words(error: RayError, what: str) -> RlcoreError:
    """What the actor raised, where it did."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, RlcoreError):
            return cause
        return RunFailed(f"{what}: {type(cause).__name__}: {cause}")
    if isinstance(error, RayActorError):
        if error.actor_init_failed:  # another start would fail, too
            return RunFailed(
                f"{what}: it could not begin:"
                f" {last_line(error).partition(': ')[2] or last_line(error)}"
            )
        return ActorLost(f"{what}: its process is gone: {last_line(error)}")
    return RunFailed(f"{what}: {type(error).__name__}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Ray's messages have many."""
    return _lines(error)[0]


def last_line(error: BaseException) -> str:
    """Where Ray says why an actor is gone."""
    return _lines(error)[-1]


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]


def actor_name(run: str, part: str) -> str:
    """Of a named actor of a run, in NAMESPACE."""
    return f"{run}/{part}"


def end_named(names: Iterable[str]) -> None:
    """End actors by their names, for good; returns when the names are free again, or after END_S."""
    left = set(names)
    deadline = time.monotonic() + END_S
    while left and time.monotonic() < deadline:
        for name in sorted(left):
            try:
                ray.kill(ray.get_actor(name, namespace=NAMESPACE))
            except (RayError, ValueError):  # it is gone
                left.discard(name)
        time.sleep(POLL_S if left else 0.0)
