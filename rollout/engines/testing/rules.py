"""The rules that every engine keeps over its life, in the order in which they are tried."""

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
from rlcore.config.derived import max_request_s
from rlcore.config.engine_registry import EngineKind
from rlcore.data.generation import Completion, PauseMode, Prefix
from rlcore.errors import UserError
from rlcore.interfaces import RolloutEngine
from rollout.engines.factories import kind_of
from rollout.engines.testing.session import COMPLETIONS, DEADLINES, Session

UNDER_WAY_S = 0.05  # time for a request to reach the engine
QUIET_S = 0.2  # time in which no answer or token may come

Build = Callable[[], "RolloutEngine | Awaitable[RolloutEngine]"]
Check = Callable[[Session], Awaitable[None]]

# The first two bring the engine to where the others begin.
RULES: dict[Rule, Check] = {}


def checks(name: str, sentence: str, advice: str) -> Callable[[Check], Check]:
    """Add a rule with its check; the arguments are those of `Rule`."""

    def add(check: Check) -> Check:
        RULES[Rule(name, sentence, advice)] = check
        return check

    return add


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
    kind = kind or kind_of(config.rollout.engine.kind)
    reasons = dict(skip or {})
    if unknown := reasons.keys() - {rule.name for rule in RULES}:
        raise ValueError(f"skip: no rule {sorted(unknown)[0]!r}")
    if not kind.repeatable:
        reasons.setdefault("repeatable", "EngineKind(repeatable=False)")
    if weights is None:
        from safetensors.torch import load_file

        files = sorted(Path(config.model.path).glob("*.safetensors"))
        weights = {name: tensor for path in files for name, tensor in load_file(path).items()}

    async def check() -> ContractReport:
        built = engine() if inspect.isroutine(engine) or isinstance(engine, type) else engine
        made: Any = await built if inspect.isawaitable(built) else built
        session = Session(made, config, kind, weights, long=long)
        kept = await _kept(session, reasons)
        skipped = {rule: reasons[rule.name] for rule in RULES if rule.name in reasons}
        return ContractReport(f"engine {made.name!r}", (*kept, DEADLINES), skipped)

    return asyncio.run(check())


async def _kept(session: Session, skip: Mapping[str, str]) -> list[Rule]:
    """Check all other rules and close the engine. Raises ContractError."""
    tried = [rule for rule in RULES if rule.name not in skip]
    try:
        for session.rule in tried:
            try:
                await RULES[session.rule](session)
            except ContractError:
                raise
            # A user's engine may raise errors that no rule expects.
            except Exception as error:
                got = f"{type(error).__name__}: {error}"
                raise session.broken(got, "no such error") from error
    except BaseException:
        # The broken rule is reported, not an error of the clean-up.
        with suppress(Exception):
            await session.engine.kill()
            await session.close()
        raise
    await session.close()
    return tried


@checks(
    "start",
    "start returns when the engine answers: it has no version, and refuses to generate until then",
    "report version None and raise EngineFailed from generate until set_version, as WeightState"
    " does",
)
async def _start(session: Session) -> None:
    await session.start()
    name = (await session.health()).get("name")
    session.expect(name == session.engine.name, f"name {name!r} in health", "the engine's name")
    transports = session.engine.transports
    known = isinstance(transports, tuple) and len(transports) > 0
    session.expect(known, f"transports {transports!r}", "a tuple of names, the best first")
    await _without_weights(session)


@checks(
    "publication",
    "pause, begin_update, all buckets, end_update, set_version and resume put a version in force",
    "report the version of set_version in health, and generate again after resume",
)
async def _publication(session: Session) -> None:
    for _ in range(2):
        await session.publish()
        version = await session.version_in_force()
        session.expect(version == session.version, f"version {version}", f"{session.version}")
        await session.one(session.request())


async def _completions(session: Session) -> None:
    lengths = {3: 1.0, 1: 0.7, 4: 0.0}
    requests = [
        session.request(draw, n=1 + draw % 2, max_new_tokens=length, temperature=temperature)
        for draw, (length, temperature) in enumerate(lengths.items())
    ]
    for length, made in zip(lengths, await session.generate(*requests)):
        got = [len(completion.tokens) for completion in made]
        expected = f"{length} tokens, as max_new_tokens says where nothing stops"
        session.expect(got == [length] * len(made), f"responses of {got} tokens", expected)


RULES[COMPLETIONS] = _completions


@checks(
    "finish-reasons",
    "a response ends by 'stop' at a stop token, which is kept, or by 'length' at max_new_tokens",
    "keep the stop token as the last token, and report why the response ended",
)
async def _finish_reasons(session: Session) -> None:
    full = await session.one(session.request(7, temperature=0.0))
    session.expect(full.finish_reason == "length", repr(full.finish_reason), "'length'")
    first = int(full.tokens[0])
    cut = await session.one(session.request(7, temperature=0.0, stop_token_ids=(first,)))
    got = f"{cut.tokens.tolist()}, {cut.finish_reason!r}"
    stopped = cut.tokens.tolist() == [first] and cut.finish_reason == "stop"
    session.expect(stopped, got, f"[{first}], 'stop': {first} is a stop token")


@checks(
    "prefixes",
    "a completion behind a prefix holds what is new; max_new_tokens counts the prefix too",
    "feed prompt and prefix to the model, and make max_new_tokens - len(prefix) tokens",
)
async def _prefixes(session: Session) -> None:
    full = await session.one(session.request(8, temperature=0.0))
    prefix = Prefix(0, full.tokens[:2])
    rest = await session.one(session.request(8, temperature=0.0, prefixes=[prefix]))
    length = len(full.tokens) - 2
    session.expect(len(rest.tokens) == length, f"{len(rest.tokens)} tokens", f"{length}")
    if session.kind.repeatable:
        wanted = full.tokens[2:].tolist()
        session.expect(rest.tokens.tolist() == wanted, rest.tokens.tolist(), f"{wanted}")


@checks(
    "repeatable",
    "the same request gives the same tokens and log-probs; another sample index gives others",
    "draw each random number from (seed, draw, sample, turn, position), or state"
    " EngineKind(repeatable=False)",
)
async def _repeatable(session: Session) -> None:
    request = session.request(9, n=4, max_new_tokens=8)
    first, second = [(await session.generate(request))[0] for _ in range(2)]
    for one, other in zip(first, second):
        same = one.tokens.tolist() == other.tokens.tolist()
        same = same and one.logprobs.tolist() == other.logprobs.tolist()
        session.expect(same, f"{other.tokens.tolist()}", f"{one.tokens.tolist()}, as before")
    alone = await session.one(session.request(9, first=2, max_new_tokens=8))
    wanted = first[2].tokens.tolist()
    session.expect(alone.tokens.tolist() == wanted, f"{alone.tokens.tolist()}", f"{wanted}")
    different = {tuple(completion.tokens.tolist()) for completion in first}
    session.expect(len(different) > 1, "four samples that are all alike", "different samples")


@checks(
    "bad-request",
    "a request that no engine can serve is UserError, so that no other engine is asked",
    "check the request first, as rollout.engines.checks.check_request does",
)
async def _bad_request(session: Session) -> None:
    request = session.request(1)
    request.prompt[0] = session.vocab_size
    what = f"generate, with the prompt token {session.vocab_size},"
    await session.refused(what, session.engine.generate([request]), UserError)
    # The refused request must not harm the engine.
    await session.one(session.request(1))


@checks(
    "pause-drain",
    "pause('drain') returns when the requests in flight are finished; new ones wait for resume",
    "hold requests that come during a pause, do not fail them, and wait for those accepted before",
)
async def _drain(session: Session) -> None:
    made = await _paused(session, "drain")
    session.expect(made.done(), "pause returned before the request in flight was finished", "after")
    late = asyncio.ensure_future(session.one(session.request()))
    await asyncio.sleep(QUIET_S)
    session.expect(not late.done(), "an answer while paused", "none before resume")
    await session.call("resume", session.engine.resume())
    await late
    await _whole(session, made)


@checks(
    "pause-hold",
    "pause('retract') and pause('in_place') hold responses, which go on after resume",
    "stop between two tokens, report progress None, and finish the response after resume",
)
async def _hold(session: Session) -> None:
    modes: tuple[PauseMode, ...] = ("retract", "in_place")
    for mode in modes:
        made = await _paused(session, mode)
        # The response may have finished before the pause.
        held = not made.done()
        paused = await session.call("progress", session.engine.progress())
        session.expect(paused is None or not held, f"progress {paused!r}, paused", "None")
        await asyncio.sleep(QUIET_S)
        got = f"a response that ended while paused ({mode})"
        session.expect(made.done() != held, got, "no token")
        await session.call("resume", session.engine.resume())
        await _whole(session, made)


@checks(
    "progress",
    "progress changes while tokens are made",
    "count tokens, or steps, where they are made; without it an engine that works counts as hung",
)
async def _progress(session: Session) -> None:
    before = await session.call("progress", session.engine.progress())
    await session.one(session.request(50, max_new_tokens=session.long))
    later = await session.call("progress", session.engine.progress())
    got = f"{before!r} before a response of {session.long} tokens, {later!r} behind it"
    session.expect(later is not None and later != before, got, "another value, not None")


@checks(
    "abort",
    "abort and pause('abort') end requests in flight with finish reason 'abort', and no others",
    "return the tokens made so far, with finish reason 'abort'; go by the ids, if there are any",
)
async def _abort(session: Session) -> None:
    engine = session.engine
    made = await _paused(session, "abort")
    await session.call("resume", engine.resume())
    await _ended(session, made, "pause('abort')")
    made = await _under_way(session)
    await session.call("abort", engine.abort())
    await _ended(session, made, "abort")
    made = await _under_way(session)
    other = asyncio.ensure_future(session.one(session.request(51)))
    await session.call("abort", engine.abort([session.request(50).rid]))
    await _ended(session, made, "abort of its id")
    reason = (await other).finish_reason
    session.expect(reason != "abort", f"{reason!r}, of a request beside the aborted one", "another")
    await session.one(session.request())


@checks(
    "mixed-versions",
    "tokens made behind an update that held a response carry the new version",
    "close the version span at the pause, and open another one at the next token",
)
async def _mixed_versions(session: Session) -> None:
    made = await _paused(session, "in_place")
    held = not made.done()
    before = session.version
    await session.update()
    named = [span.version for span in (await made).versions]
    wanted = [[before, before + 1], [before + 1]] if held else [[before]]
    session.expect(named in wanted, f"spans of versions {named}", f"{before}, then {before + 1}")
    later = {span.version for span in (await session.one(session.request())).versions}
    session.expect(later == {session.version}, f"versions {later}", f"{session.version}")


@checks(
    "updates",
    "an update needs a pause and all its buckets, else the engine is stale; versions never go back",
    "raise EngineFailed from begin_update, end_update or set_version, as WeightState does",
)
async def _updates(session: Session) -> None:
    engine = session.engine
    work = engine.begin_update(session.buckets)
    await session.refused("begin_update, of an engine that is not paused,", work)
    await session.call("pause", engine.pause("drain"))
    await session.bring(len(session.buckets) - 1)
    await session.refused("end_update, without the last bucket,", engine.end_update())
    version = await session.version_in_force()
    session.expect(version is None, f"version {version}", "None: the engine is stale")
    await session.publish()
    await session.one(session.request())
    await session.call("pause", engine.pause("drain"))
    work = engine.set_version(session.version - 1)
    await session.refused(f"set_version({session.version - 1}), after {session.version},", work)
    await session.publish()


@checks(
    "kill",
    "kill ends the engine at any time; start again gives one without weights",
    "drop model and connections in kill, and begin anew in start",
)
async def _kill(session: Session) -> None:
    engine = session.engine
    made = await _under_way(session)
    await session.call("kill", engine.kill())
    await session.call("kill", engine.kill())
    done, _ = await asyncio.wait({made}, timeout=max_request_s(session.config))
    session.expect(bool(done), "a request that hangs after kill", "its failure")
    made.exception()
    await session.refused("generate, after kill,", engine.generate([session.request()]))
    await session.start()
    await _without_weights(session)
    session.version = 0
    await session.publish()
    await session.one(session.request())


async def _without_weights(session: Session) -> None:
    version = await session.version_in_force()
    session.expect(version is None, f"version {version}", "None: it has no weights")
    work = session.engine.generate([session.request()])
    await session.refused("generate, without weights,", work)


async def _under_way(session: Session) -> asyncio.Future[Completion]:
    request = session.request(50, max_new_tokens=session.long)
    made = asyncio.ensure_future(session.one(request))
    await asyncio.sleep(UNDER_WAY_S)
    return made


async def _paused(session: Session, mode: PauseMode) -> asyncio.Future[Completion]:
    """Pause the engine while a request is under way. Returns the response."""
    made = await _under_way(session)
    await session.call(f"pause({mode!r})", session.engine.pause(mode))
    await asyncio.sleep(0)
    # The answer may still be a few callbacks away.
    if mode == "drain":
        await asyncio.wait({made}, timeout=QUIET_S)
    return made


async def _whole(session: Session, made: asyncio.Future[Completion]) -> None:
    completion = await made
    got = f"{len(completion.tokens)} tokens, {completion.finish_reason!r}"
    whole = completion.finish_reason == "length" and len(completion.tokens) == session.long
    session.expect(whole, got, f"{session.long} tokens, 'length'")


async def _ended(session: Session, made: asyncio.Future[Completion], how: str) -> None:
    """Expect a response that was ended early; one that was finished before proves nothing."""
    completion = await made
    got = f"{len(completion.tokens)} tokens, {completion.finish_reason!r}, behind {how}"
    if completion.finish_reason == "length" and len(completion.tokens) == session.long:
        raise session.broken(got, "fewer, 'abort'; if it is so fast, pass a larger `long`")
    session.expect(completion.finish_reason == "abort", got, "fewer, 'abort'")
