"""Checks of `rollout.engine`: each kind of engine reads what is given. Pure, as all checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from rlcore.config.derived import generates, recorded_fields, truncates, world_size
from rlcore.config.engine_kinds import KINDS, EngineKind, is_import_path
from rlcore.config.messages import Problem
from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.root import Config
from rlcore.deadlines import ENGINE_ENDING_S

ENGINE = "rollout.engine"
# set by the user who starts the engines
MANAGED_ONLY = ("count", "python", "gpus", "host", "server", "threads", "device")


def engine_kind(config: Config) -> Iterator[Problem]:
    """Every key of the engine is one that its kind reads."""
    engine = config.rollout.engine
    # rlcore/launch/plugin_checks.py imports an engine of another package, and asks the same of it
    if (kind := KINDS.get(engine.kind)) is not None:
        yield from fits_kind(config, kind)
    if engine.in_process and engine.count > 1 and engine.kind == "embedded":
        yield Problem(
            f"{ENGINE}.count",
            f"got {engine.count}, but one engine runs in this process: leave it out",
        )


def fits_kind(config: Config, kind: EngineKind) -> Iterator[Problem]:
    """Find what the configuration gives to, or asks of, an engine that is not of a kind for it."""
    engine = config.rollout.engine
    foreign = is_import_path(engine.kind)
    for name, other in KINDS.items():
        reason = f"{kind.title} does not read it: leave it out" if foreign else other.not_read
        if name != engine.kind:
            yield from _given(
                engine, [key for key in other.own_keys if key not in kind.own_keys], reason
            )
    unserved = {
        key: f"does not report {field.replace('_', ' ')}"
        for field, key in recorded_fields(config).items()
        if field not in kind.records
    }
    if config.rollout.sampling.stop and not kind.stop_strings:
        unserved["rollout.sampling.stop"] = "knows no stop strings"
    if engine.colocated and not kind.colocated:
        unserved[f"{ENGINE}.colocated"] = "cannot give its memory back"
    for key, why in unserved.items():
        yield Problem(key, f"{kind.title} {why}: leave it out, or use another rollout.engine.kind")


def engine_servers(config: Config) -> Iterator[Problem]:
    """Engines are either started by the run or given by URL."""
    engine = config.rollout.engine
    if engine.urls:
        why = (
            "engines given by rollout.engine.urls are started by somebody else: leave it out, or to"
            " `rlcore engine`"
        )
        # options of another package's engine are not those of a server
        options = ("server",) if is_import_path(engine.kind) else ()
        yield from _given(engine, [key for key in MANAGED_ONLY if key not in options], why)
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
    if rollout.on_update != "drain" and rollout.max_staleness == 0:
        message = (
            "changes nothing: with max_staleness 0 no response is unfinished when weights change"
        )
        yield Problem("rollout.on_update", message)
    update_s = rollout.engine.update_timeout_s
    collective_s = config.cluster.collective_timeout_s
    if world_size(config) > 1 and update_s + ENGINE_ENDING_S > collective_s:
        message = (
            f"got {update_s:g}, but while an engine hangs the other ranks wait in a collective, for"
            f" {collective_s:g} s at most: "
        )
        message += (
            f"leave cluster.collective_timeout_s at least {ENGINE_ENDING_S:g} s more than this"
        )
        yield Problem(f"{ENGINE}.update_timeout_s", message)
    if (kind := KINDS.get(rollout.engine.kind)) is not None:
        yield from kind_notes(config, kind)


def kind_notes(config: Config, kind: EngineKind) -> Iterator[Problem]:
    """Find what has another effect with this kind of engine than one may think."""
    if config.run.deterministic and not kind.repeatable:
        yield Problem(
            "run.deterministic",
            f"covers the trainer alone: what {kind.title} samples differs from run to run",
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
