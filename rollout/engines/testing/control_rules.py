"""What every engine keeps over its life: start, pauses, publications, its end."""

from __future__ import annotations

import asyncio

from rlcore.algorithms.testing.contract import Rule
from rlcore.config.derived import longest_request_s
from rlcore.data.generation import Completion, PauseMode
from rollout.engines.testing.session import Session

UNDER_WAY_S = 0.05  # for a request to reach the engine
SETTLE_S = 0.2  # for an answer or a token that should not come

START = Rule(
    "start",
    "start returns when the engine answers: health has its name, and version None",
    "wait until the engine answers, and report no version before the first publication",
)
NO_WEIGHTS = Rule(
    "no-weights",
    "an engine without a whole version refuses to generate",
    "raise EngineFailed from generate until set_version, as WeightState.require_ready does",
)
PUBLICATION = Rule(
    "publication",
    "pause, begin_update, all buckets, end_update, set_version and resume put a version in force",
    "report the version of set_version in health, and generate again after resume",
)
PAUSED = Rule(
    "update-unpaused",
    "an update is opened only while the engine is paused",
    "raise EngineFailed from begin_update unless the engine is paused",
)
PARTIAL = Rule(
    "partial-update",
    "an update that ends without a bucket leaves the engine stale until a whole one came",
    "count the buckets; raise EngineFailed from end_update, and from generate afterwards",
)
BACKWARDS = Rule(
    "version-order",
    "versions never go back",
    "raise EngineFailed from set_version for a version behind the one in force",
)
DRAIN = Rule(
    "pause-drain",
    "pause('drain') returns when the requests in flight are finished",
    "take no new request, and wait for those that were accepted",
)
HOLD = Rule(
    "pause-hold",
    "pause('retract') and pause('in_place') hold responses, which go on after resume",
    "stop between two tokens, make none while paused, and finish the response after resume",
)
ABORT = Rule(
    "abort",
    "abort and pause('abort') end requests in flight with finish reason 'abort', and no others",
    "return the tokens made so far, with finish reason 'abort'; go by the ids, if there are any",
)
PROGRESS = Rule(
    "progress",
    "progress changes while tokens are made, and is None while a pause holds the requests",
    "count tokens, or steps, where they are made; without it an engine that works counts as hung",
)
WAITING = Rule(
    "requests-wait",
    "a request that comes during a pause waits, and is served after resume",
    "hold the request until resume; do not fail it",
)
MIXED = Rule(
    "mixed-versions",
    "tokens made behind an update that held a response carry the new version",
    "close the version span at the pause, and open another one at the next token",
)
KILL = Rule(
    "kill",
    "kill ends the engine at any time; start again gives one without weights",
    "drop model and connections in kill, and begin anew in start",
)


async def start(session: Session) -> None:
    """The first life."""
    await session.start()
    health = await session.health()
    session.expect(
        health.get("name") == session.engine.name, f"health {health}", "its name in `name`"
    )
    session.expect(health.get("version", 0) is None, f"health {health}", "`version` None")
    transports = session.engine.transports
    known = isinstance(transports, tuple) and len(transports) > 0
    session.expect(known, f"transports {transports!r}", "a tuple of names, the best first")


async def no_weights(session: Session) -> None:
    """A request before the first publication."""
    await session.refused(
        "generate, without weights,", session.engine.generate([session.request()])
    )


async def publication(session: Session) -> None:
    """The first version, and the next."""
    for _ in range(2):
        await session.publish()
        version = (await session.health()).get("version")
        session.expect(version == session.version, f"version {version}", f"{session.version}")
        await session.one(session.request())


async def update_unpaused(session: Session) -> None:
    """An update in the middle of service."""
    work = session.engine.begin_update(session.buckets)
    await session.refused("begin_update, of an engine that is not paused,", work)
    await session.publish()


async def partial_update(session: Session) -> None:
    """The last bucket never comes."""
    engine = session.engine
    await session.call("pause", engine.pause("drain"))
    await session.bring(len(session.buckets) - 1)
    await session.refused("end_update, without the last bucket,", engine.end_update())
    version = (await session.health()).get("version")
    session.expect(version is None, f"version {version}", "None: the engine is stale")
    await session.publish()
    await session.one(session.request())


async def version_order(session: Session) -> None:
    """A version that was in force before."""
    await session.call("pause", session.engine.pause("drain"))
    work = session.engine.set_version(session.version - 1)
    await session.refused(f"set_version({session.version - 1}), after {session.version},", work)
    await session.publish()


async def drain(session: Session) -> None:
    """A long response is finished before the pause."""
    made = await _paused(session, "drain")
    session.expect(made.done(), "pause returned before the request in flight was finished", "after")
    await session.call("resume", session.engine.resume())
    await _whole(session, made)


async def hold(session: Session) -> None:
    """A long response is held, in both modes."""
    modes: tuple[PauseMode, ...] = ("retract", "in_place")
    for mode in modes:
        made = await _paused(session, mode)
        was_done = made.done()  # by chance, before the pause
        await asyncio.sleep(SETTLE_S)
        session.expect(
            made.done() == was_done, f"a response that ended while paused ({mode})", "no token"
        )
        await session.call("resume", session.engine.resume())
        await _whole(session, made)


async def abort(session: Session) -> None:
    """A long response is ended, in both ways."""
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


async def progress(session: Session) -> None:
    """Before and behind a response, and while one is held."""
    engine = session.engine
    before = await session.call("progress", engine.progress())
    await session.one(session.request(50, max_new_tokens=session.long))
    later = await session.call("progress", engine.progress())
    got = f"{before!r} before a response of {session.long} tokens, {later!r} behind it"
    session.expect(later is not None and later != before, got, "another value, not None")
    made = await _paused(session, "in_place")
    held = not made.done()
    paused = await session.call("progress", engine.progress())
    session.expect(paused is None or not held, f"{paused!r}, paused", "None: requests are held")
    await session.call("resume", engine.resume())
    await made


async def requests_wait(session: Session) -> None:
    """A request of the pause."""
    await session.call("pause", session.engine.pause("drain"))
    made = asyncio.ensure_future(session.one(session.request()))
    await asyncio.sleep(SETTLE_S)
    session.expect(not made.done(), "an answer while paused", "none before resume")
    await session.call("resume", session.engine.resume())
    await made


async def mixed_versions(session: Session) -> None:
    """A response over an update in place."""
    made = await _under_way(session)
    before = session.version
    await session.publish("in_place")
    completion = await made
    spans = [(span.version, span.start, span.end) for span in completion.versions]
    named = [version for version, _, _ in spans]
    ends = [end for _, _, end in spans]
    covered = [start for _, start, _ in spans] == [0, *ends[:-1]]
    covered = covered and ends[-1:] == [len(completion.tokens)]
    wanted = f"spans that cover {len(completion.tokens)} tokens, of {before} and then {before + 1}"
    right = named in ([before, before + 1], [before], [before + 1])
    session.expect(covered and right, f"(version, start, end) {spans}", wanted)
    later = await session.one(session.request())
    session.expect(
        {span.version for span in later.versions} == {session.version},
        f"{later.versions}",
        f"version {session.version}",
    )


async def kill(session: Session) -> None:
    """Killed twice in the middle of a request, and started again."""
    engine = session.engine
    made = await _under_way(session)
    await session.call("kill", engine.kill())
    await session.call("kill", engine.kill())
    done, _ = await asyncio.wait({made}, timeout=longest_request_s(session.config))
    session.expect(bool(done), "a request that hangs after kill", "its failure")
    made.exception()
    await session.refused("generate, after kill,", engine.generate([session.request()]))
    await session.start()
    version = (await session.health()).get("version")
    session.expect(version is None, f"version {version}", "None: a new life has no weights")
    await session.refused("generate, without weights,", engine.generate([session.request()]))
    session.version = 0
    await session.publish()
    await session.one(session.request())


async def _under_way(session: Session) -> asyncio.Future[Completion]:
    request = session.request(50, max_new_tokens=session.long)
    made = asyncio.ensure_future(session.one(request))
    await asyncio.sleep(UNDER_WAY_S)
    return made


async def _paused(session: Session, mode: PauseMode) -> asyncio.Future[Completion]:
    """A request that was under way when the engine was paused."""
    made = await _under_way(session)
    await session.call(f"pause({mode!r})", session.engine.pause(mode))
    await asyncio.sleep(0)
    if mode == "drain":  # its answer may be a few callbacks away
        await asyncio.wait({made}, timeout=SETTLE_S)
    return made


async def _whole(session: Session, made: asyncio.Future[Completion]) -> None:
    completion = await made
    got = f"{len(completion.tokens)} tokens, {completion.finish_reason!r}"
    whole = completion.finish_reason == "length" and len(completion.tokens) == session.long
    session.expect(whole, got, f"{session.long} tokens, 'length'")


async def _ended(session: Session, made: asyncio.Future[Completion], how: str) -> None:
    """A response that was ended early; one that was finished before is none to judge by."""
    completion = await made
    got = f"{len(completion.tokens)} tokens, {completion.finish_reason!r}, behind {how}"
    if completion.finish_reason == "length" and len(completion.tokens) == session.long:
        raise session.broken(got, "fewer, 'abort'; if it is so fast, pass a larger `long`")
    session.expect(completion.finish_reason == "abort", got, "fewer, 'abort'")
