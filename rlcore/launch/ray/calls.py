"""Calls of actors with deadlines; translates Ray's errors into ours."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from rlcore.deadlines import ACTOR_END_S
from rlcore.errors import DeadlineExceeded, PartLost, RlcoreError, RunFailed

NAMESPACE = "rlcore"  # of all named actors
POLL_S = 0.2  # between two calls of an actor that is starting


class ActorLost(PartLost):
    """An actor's process or its node died; its replacement has no state."""


def get(ref: Any, *, limit_s: float, what: str, key: str) -> Any:
    """Wait for the result of a call, which messages name `what`.

    Raises:
        DeadlineExceeded: after `limit_s`, which the configuration `key` sets.
        ActorLost: its process died.
        RlcoreError: the error of the call itself.
    """
    try:
        return ray.get(ref, timeout=limit_s)
    except GetTimeoutError as error:
        raise DeadlineExceeded(f"{what}: no answer within {limit_s:g} s ({key})") from error
    except RayError as error:
        raise translate_error(error, what) from error


async def answer(ref: Awaitable[Any], *, what: str) -> Any:
    """As `get`, but without a limit."""
    try:
        return await ref
    except RayError as error:
        raise translate_error(error, what) from error


async def answer_when_up(call: Callable[[], Awaitable[Any]], *, what: str) -> Any:
    """As `answer`, but repeat the call while Ray restarts the actor."""
    while True:
        try:
            return await answer(call(), what=what)
        except ActorLost:
            await asyncio.sleep(POLL_S)


def translate_error(error: RayError, what: str) -> RlcoreError:
    """Return the actor's own error, or our error for Ray's description of its end."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, RlcoreError):
            return cause
        return RunFailed(f"{what}: {type(cause).__name__}: {cause}")
    if isinstance(error, RayActorError):
        # Ray gives the reason in the last line.
        why = line_of(error, -1)
        # Another start would fail, too.
        if error.actor_init_failed:
            return RunFailed(f"{what}: it could not begin: {why.partition(': ')[2] or why}")
        return ActorLost(f"{what}: its process is gone: {why}")
    return RunFailed(f"{what}: {type(error).__name__}: {line_of(error)}")


def line_of(error: BaseException, index: int = 0) -> str:
    """Return a line of an error, by default the first; Ray's messages have many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[index] if lines else type(error).__name__


def actor_name(run: str, part: str) -> str:
    """Return the name, in NAMESPACE, of an actor of a run."""
    return f"{run}/{part}"


def enter_folder(folder: str) -> None:
    """Enter the driver's folder, to which the configuration's paths are relative.

    Raises RunFailed if this node has no such folder.
    """
    try:
        os.chdir(folder)
    except OSError as error:
        raise RunFailed(
            f"{folder} cannot be entered on node {os.uname().nodename} ({error}): a run's nodes"
            " share the folder that it is started in, under one path"
        ) from error


def end_named(names: Iterable[str]) -> None:
    """End actors for good, by name; return once the names are free, or after ACTOR_END_S."""
    left = set(names)
    deadline = time.monotonic() + ACTOR_END_S
    while left and time.monotonic() < deadline:
        for name in sorted(left):
            try:
                ray.kill(ray.get_actor(name, namespace=NAMESPACE))
            except (RayError, ValueError):
                # The actor is gone.
                left.discard(name)
        time.sleep(POLL_S if left else 0.0)
