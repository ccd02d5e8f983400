"""The worker process of the reward pool: `python -m rollout.rewards.worker SOCKET`.

The worker exchanges frames with the rollout service over one socket: 4 bytes of length, then the
message. Requests are pickles, since they come only from the service. Answers are JSON, since a
function may influence them. First comes the set-up ({"functions": {part: (import path, keywords)},
"sys_path": [...], "memory_gb": ...}), answered with {"problem": text or null}; then calls
(id, part, sample), each answered with {"id": id, "score": ..., ...} or
{"id": id, "error": text, "place": text, "external": bool}.

A function may print, start processes, leave some of them behind, exit or run out of memory. Its
standard input is empty, its prints go to the log, its processes do not inherit the socket, and
processes started by a call end with the call.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import inspect
import os
import pickle
import resource
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from rlcore.boundary.process_tree import adopt_orphans, descendants, die_with_parent, kill_below
from rlcore.data.sample import Sample
from rlcore.deadlines import STRAYS_S
from rlcore.errors import ConfigError
from rlcore.import_paths import call_method, location_of
from rollout.plugins import load_object
from rollout.rewards.base import RewardFailure, Score, checked, failed, readable

RewardFunction = Callable[[Sample], Any]
HEADER = struct.Struct("<I")
STRAYS_LEFT = 70  # exit code of a worker that cannot end the processes of a call
HIGH = 200  # above the descriptors that code relies on or loops over


def pack(payload: bytes) -> bytes:
    """Pack a message into a frame."""
    return HEADER.pack(len(payload)) + payload


def receive(stream: BinaryIO) -> Any:
    """Read the next request. Raises EOFError if the parent has ended."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    return pickle.loads(stream.read(HEADER.unpack(header)[0]))


def answer(stream: BinaryIO, message: Mapping[str, Any]) -> None:
    """Send an answer."""
    stream.write(pack(orjson.dumps(message)))
    stream.flush()


def main() -> None:
    """Serve calls until the parent ends."""
    die_with_parent()
    adopt_orphans()
    requests, answers = open_socket(int(sys.argv.pop()))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # if the machine runs out of memory, the kernel kills this process before the trainer
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        setup = receive(requests)
        functions = load_functions(setup, answers)
        # processes started by imports or constructors may serve every call
        keep = frozenset(descendants(os.getpid()))
        while functions:
            identity, part, sample = receive(requests)
            score = call(functions[part], sample, setup["memory_gb"])
            # no sample survives its call, nor does a process that could look for it
            del sample
            end_strays(keep)
            answer(answers, encoded(identity, score))
    except EOFError:
        return


def open_socket(inherited: int) -> tuple[BinaryIO, BinaryIO]:
    """Open requests and answers on descriptors that children of this process do not inherit."""
    descriptor = fcntl.fcntl(inherited, fcntl.F_DUPFD_CLOEXEC, HIGH)
    os.close(inherited)
    requests = os.fdopen(descriptor, "rb")
    answers = os.fdopen(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH), "wb")

    def close() -> None:
        for stream in (requests, answers):
            with suppress(OSError):
                os.close(stream.fileno())

    # a child that forks without exec would keep them open
    os.register_at_fork(after_in_child=close)
    return requests, answers


def load_functions(setup: dict[str, Any], answers: BinaryIO) -> dict[str, RewardFunction]:
    """The functions by part; {} after reporting an error."""
    sys.path[:] = setup["sys_path"]
    # Allocations beyond the limit fail. RLIMIT_DATA counts private writable memory; the address
    # space also counts the gigabytes that CUDA and torch only reserve.
    limit = int(setup["memory_gb"] * 2**30)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        functions = {
            part: load_function(path, args, key=f"reward.parts.{part}.function")
            for part, (path, args) in setup["functions"].items()
        }
    except ConfigError as error:
        answer(answers, {"problem": readable(str(error))})
        return {}
    answer(answers, {"problem": None})
    return functions


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
    except (Exception, SystemExit) as error:
        # the user's constructor may raise anything
        raise ConfigError(
            f"{key}: {path!r} raised {type(error).__name__}: {error} at its construction"
            f"{location_of(found.__init__, error)}"
        ) from error
    function: RewardFunction = made
    return function


def signature_problem(found: Callable[..., Any], args: Mapping[str, Any]) -> str | None:
    """The reason for which `found` cannot be called with a sample and `args`; None if unknown."""
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
            return f"is `async def`, but a reward function must be synchronous{location_of(target)}"
        try:
            signature = inspect.signature(target)
        except (TypeError, ValueError):
            # some C functions have no signature
            continue
        try:
            signature.bind(*positional, **keywords)
        except TypeError as error:
            return f"is called as {shown}, but takes {signature}: {error}{location_of(target)}"
    return None


def call(function: RewardFunction, sample: Sample, memory_gb: float) -> Score:
    """The function's verdict on a sample, or its failure with file and line."""
    place = None
    try:
        score = checked(function(sample))
    except BaseException as error:  # noqa: BLE001 - SystemExit too: one sample's failure
        score = failed(error)
        place = location_of(function, error)
    if not isinstance(score, RewardFailure):
        return score
    reason = score.reason
    if reason.startswith("raised MemoryError"):
        gc.collect()
        reason += f" (reward.memory_gb is {memory_gb:g})"
    return replace(score, reason=reason, place=location_of(function) if place is None else place)


def encoded(identity: str, score: Score) -> dict[str, Any]:
    """The answer to a call, as JSON-able data."""
    if isinstance(score, RewardFailure):
        place = readable(score.place)
        failure = {"error": score.reason, "place": place, "external": score.external}
        return {"id": identity, **failure}
    return {"id": identity, **asdict(score)}


def end_strays(keep: frozenset[int]) -> None:
    """End the processes of a call; exit, and so be replaced, if that fails."""
    if not keep:
        try:
            # cheap: orphans are our children too, so without a child there is no descendant
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
    if not kill_below(os.getpid(), seconds=STRAYS_S, keep=keep, reap=True):
        os._exit(STRAYS_LEFT)


if __name__ == "__main__":
    main()
