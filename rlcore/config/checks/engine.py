"""Checks of `rollout.engine`: each kind of engine reads what is given. Pure, as all checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from rlcore.config.derived import generates, truncates, world_size
from rlcore.config.messages import Problem
from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.root import Config

ENGINE = "rollout.engine"
EMBEDDED_ONLY = ("in_process", "max_batch")
SGLANG_ONLY = (
    "python",
    "urls",
    "tensor_parallel",
    "gpus",
    "host",
    "server",
    "router_url",
    "transport",
    "weights_dir",
    "max_in_flight",
)
# time beyond the limit to give up an engine that does not answer, and end it
ENDING_S = 45.0
# set by the user who starts the engines
MANAGED_ONLY = ("count", "python", "gpus", "host", "server", "threads", "device")


def engine_kind(config: Config) -> Iterator[Problem]:
    """Every key of the engine is one that its kind reads."""
    engine = config.rollout.engine
    if engine.kind == "embedded":
        yield from _given(
            engine,
            SGLANG_ONLY,
            "only SGLang engines read it: set rollout.engine.kind=sglang, or leave it out",
        )
        if engine.in_process and engine.count > 1:
            yield Problem(
                f"{ENGINE}.count",
                f"got {engine.count}, but one engine runs in this process: leave it out",
            )
    else:
        yield from _given(engine, EMBEDDED_ONLY, "only the embedded engine reads it: leave it out")


def engine_servers(config: Config) -> Iterator[Problem]:
    """Engines are either started by the run or given by URL."""
    engine = config.rollout.engine
    if engine.urls:
        why = (
            "engines given by rollout.engine.urls are started by somebody else: leave it out, or to"
            " `rlcore engine`"
        )
        yield from _given(engine, MANAGED_ONLY, why)
        yield from (_bad_url(f"{ENGINE}.urls", url) for url in engine.urls if not _is_url(url))
        if len({url.rstrip("/") for url in engine.urls}) < len(engine.urls):
            yield Problem(f"{ENGINE}.urls", "one engine is named twice")
    if engine.router_url is not None:
        if not engine.urls:
            message = (
                "a router hands requests to engines that it knows by URL: name the same in"
                " rollout.engine.urls"
            )
            yield Problem(
                f"{ENGINE}.router_url",
                f"{message} (weights and control go to them directly), or leave it out",
            )
        if not _is_url(engine.router_url):
            yield _bad_url(f"{ENGINE}.router_url", engine.router_url)
        lost = {
            "rollout.sampling.stop": bool(config.rollout.sampling.stop),
            "policy.routing_replay": config.policy.routing_replay == "engine",
            "policy.logprobs.keep_sets": config.policy.logprobs.keep_sets and truncates(config),
        }
        for path in (path for path, is_asked in lost.items() if is_asked):
            yield Problem(
                path,
                "sglang-router 0.3.2 does not pass that on: leave rollout.engine.router_url out, or"
                " this",
            )


def engine_transport(config: Config) -> Iterator[Problem]:
    """A folder for weights goes with a transport that writes there, and is known to who else reads
    it.
    """
    engine = config.rollout.engine
    if engine.weights_dir is not None and engine.transport not in ("disk", "delta"):
        message = (
            f"only transports disk and delta write there: set {ENGINE}.transport to one of these"
        )
        yield Problem(f"{ENGINE}.weights_dir", f"{message}, got {engine.transport!r}")
    if engine.transport == "delta" and engine.urls and engine.weights_dir is None:
        message = (
            "not given; engines elsewhere follow the changes there: name a folder that they share"
            " with the trainer"
        )
        yield Problem(f"{ENGINE}.weights_dir", message)


def engine_notes(config: Config) -> Iterator[Problem]:
    """Yield keys of `rollout` that have no effect, or not the expected one."""
    if not generates(config):
        return
    rollout = config.rollout
    sglang = config.rollout.engine.kind == "sglang"
    if rollout.on_update != "drain" and rollout.max_staleness == 0:
        message = (
            "changes nothing: with max_staleness 0 no response is unfinished when weights change"
        )
        yield Problem("rollout.on_update", message)
    update_s = rollout.engine.update_timeout_s
    collective_s = config.cluster.collective_timeout_s
    if world_size(config) > 1 and update_s + ENDING_S > collective_s:
        message = (
            f"got {update_s:g}, but while an engine hangs the other ranks wait in a collective, for"
            f" {collective_s:g} s at most: "
        )
        message += f"leave cluster.collective_timeout_s at least {ENDING_S:g} s more than this"
        yield Problem(f"{ENGINE}.update_timeout_s", message)
    if sglang and config.run.deterministic:
        yield Problem(
            "run.deterministic",
            "covers the trainer alone: what SGLang samples differs from run to run",
        )


def _given(engine: EngineConfig, keys: Sequence[str], message: str) -> Iterator[Problem]:
    default = EngineConfig()
    for key in keys:
        if (got := getattr(engine, key)) != getattr(default, key):
            yield Problem(f"{ENGINE}.{key}", f"got {_show(got)}, but {message}")


def _show(value: object) -> str:
    return repr(value) if isinstance(value, str | int | float | list) else "a value"


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535, half an IPv6 address
        return False


def _bad_url(path: str, url: str) -> Problem:
    return Problem(path, f"got {url!r}, expected http://HOST:PORT")
