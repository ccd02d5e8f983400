"""Tries an engine against its contract (rules.py)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from rlcore.algorithms.testing import ContractError, ContractReport
from rlcore.algorithms.testing.contract import Rule
from rlcore.config import Config
from rlcore.config.engine_registry import EngineKind
from rlcore.interfaces import RolloutEngine
from rollout.engines.checks import folder_vocab_size
from rollout.engines.factories import kind_of
from rollout.engines.testing.rules import REPEATABLE, RULES
from rollout.engines.testing.session import DEADLINES, Session

Build = Callable[[], "RolloutEngine | Awaitable[RolloutEngine]"]


def check_engine(
    engine: RolloutEngine | Build,
    *,
    config: Config,
    weights: Mapping[str, Tensor] | None = None,
    kind: EngineKind | None = None,
    long: int = 256,
    skip: Mapping[str, str] | None = None,
) -> ContractReport:
    """Try an engine against every rule that the framework takes for granted.

    The engine is started, published to by the transport that a run would choose, paused, killed and
    closed on an event loop of its own. Deadlines hold in every rule.

    Args:
        engine: an engine that was not started, or a function that builds one on that loop.
        config: the configuration of a run: model.path and rollout.engine are read.
        weights: by Hugging Face name; default: those in the folder `model.path`.
        kind: the facts about the engine; default: those of `rollout.engine.kind`.
        long: tokens of a response that takes at least half a second.
        skip: names of rules that are not checked, and why.

    Returns:
        The rules that were checked, and those left out.

    Raises:
        ContractError: a rule is broken; the message has what was got, expected, and what to do.
    """
    kind = kind_of(config.rollout.engine.kind) if kind is None else kind
    reasons = dict(skip or {})
    if unknown := reasons.keys() - {rule.name for rule in RULES}:
        raise ValueError(f"skip: no rule {sorted(unknown)[0]!r}")
    if not kind.repeatable:
        reasons.setdefault(REPEATABLE.name, "EngineKind(repeatable=False)")
    held = _folder_weights(Path(config.model.path)) if weights is None else weights
    return asyncio.run(_check(engine, config, kind, held, long, reasons))


async def _check(
    engine: RolloutEngine | Build,
    config: Config,
    kind: EngineKind,
    weights: Mapping[str, Tensor],
    long: int,
    skip: Mapping[str, str],
) -> ContractReport:
    built = engine() if inspect.isroutine(engine) or isinstance(engine, type) else engine
    made: Any = await built if inspect.isawaitable(built) else built
    vocab_size = folder_vocab_size(config.model.path)
    session = Session(made, config, kind, weights, vocab_size=vocab_size, long=long)
    kept: list[Rule] = []
    skipped: dict[Rule, str] = {}
    try:
        for rule, check in RULES.items():
            if rule.name in skip:
                skipped[rule] = skip[rule.name]
                continue
            session.rule = rule
            try:
                await check(session)
            except ContractError:
                raise
            # A user's engine may raise errors that no rule expects.
            except Exception as error:
                got = f"{type(error).__name__}: {error}"
                raise session.broken(got, "no such error") from error
            kept.append(rule)
    except BaseException:
        # The broken rule is reported, not an error of the clean-up.
        with suppress(Exception):
            await made.kill()
            await session.close()
        raise
    await session.close()
    kept.append(DEADLINES)
    return ContractReport(f"engine {made.name!r}", tuple(kept), skipped)


def _folder_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}
