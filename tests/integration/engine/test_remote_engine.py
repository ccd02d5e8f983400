"""Engines in processes of their own: HTTP, the process group for weights, and their failures."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from engine_kit import flatten, layout, remote_engine, request, tiny_qwen3

from rlcore.config import Config
from rlcore.data.sample import VersionSpan
from rlcore.errors import DeadlineExceeded, ModelError, PublicationFailed, RunFailed, UserError
from rollout.engines.embedded.engine import EmbeddedEngine
from tests.one_rank import OneRank
from tests.static_participants import StaticParticipants

LIMITS = {
    "device": "cpu",
    "threads": 1,
    "start_timeout_s": 300.0,
    "request_timeout_s": 20.0,
    "update_timeout_s": 60.0,
}

LONG = 2000  # tokens: seconds, of which the tests wait for tenths
TRIES = 5  # of what may come too late on a machine that stands still


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return tiny_qwen3(max_position_embeddings=2 * LONG)


@pytest.fixture(scope="module")
def config(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    model.config.save_pretrained(folder)
    return Config.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": str(folder), "dtype": "fp32"},
            "data": {"paths": "none.jsonl"},
            "training": {"steps": 1},
            "rollout": {"engine": LIMITS, "on_update": "in_place"},
        }
    )


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def run(loop, coroutine, seconds=90):
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(seconds)


def with_limit(config, update_timeout_s):
    """The configuration with another limit of publications."""
    changed = config.model_copy(deep=True)
    changed.rollout.engine = config.rollout.engine.model_copy(
        update={"update_timeout_s": update_timeout_s}
    )
    return changed


def remote(config, name, log, **changes):
    settings = config.rollout.engine.model_copy(update=changes)
    return remote_engine(config.model.path, config=settings, name=name, log=log / f"{name}.log")


async def start_all(engines):
    await asyncio.gather(*(engine.start() for engine in engines))


async def close_all(engines):
    await asyncio.gather(*(engine.close() for engine in engines))


@pytest.fixture(scope="module")
def pair(config, loop, tmp_path_factory):
    """Two engine processes, for the tests that leave them whole."""
    engines = [remote(config, f"engine-{i}", tmp_path_factory.mktemp("logs")) for i in range(2)]
    run(loop, start_all(engines))
    yield engines
    run(loop, close_all(engines))
    assert not any(alive(engine.pid) for engine in engines)


def alive(pid):
    """Zombies are dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def publish(sink, model, version):
    buckets = layout(model)
    sink.prepare(buckets)
    send_all(sink, buckets, model)
    sink.finish(version)


def send_all(sink, buckets, model):
    for bucket in buckets:
        sink.send(bucket, flatten(bucket, model))


def begun(loop, engine):
    """A long generation that has made tokens."""
    before = run(loop, engine.progress())
    running = asyncio.run_coroutine_threadsafe(
        engine.generate([request([1, 2], max_new_tokens=LONG)]), loop
    )
    while run(loop, engine.progress()) in (None, before) and not running.done():
        time.sleep(0.01)
    return running


def requests():
    prompts = [[3, 4, 5], [6], [7, 8, 9, 10]]
    return [
        request(p, draw=i, n=3, max_new_tokens=12, stop_token_ids=(2,))
        for i, p in enumerate(prompts)
    ]


def test_weights_over_the_wire_and_the_same_responses_as_in_process(model, config, loop, pair):
    local = EmbeddedEngine(
        config.model.path, config=config.rollout.engine, dtype="fp32", name="local"
    )
    run(loop, local.start())
    beside = OneRank(config, StaticParticipants([local]), loop)
    publish(beside, model, 3)
    sink = OneRank(config, StaticParticipants(pair), loop)
    publish(sink, model, 3)
    first = dict(sink.sender._groups)
    assert len(first) == 2
    answers = [run(loop, engine.generate(requests())) for engine in (*pair, local)]
    for answer in answers[:2]:
        for a, b in zip((c for row in answer for c in row), (c for row in answers[2] for c in row)):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.tokens.dtype == np.int32
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
            assert (a.finish_reason, a.versions) == (b.finish_reason, b.versions)
            assert a.versions == (VersionSpan(3, 0, len(a.tokens)),)
    publish(sink, tiny_qwen3(seed=1), 4)
    # the same members: the groups are kept
    assert sink.sender._groups == first
    assert run(loop, pair[0].health())["version"] == 4
    sink.close()
    run(loop, local.close())


def test_an_update_in_the_middle_of_a_generation(model, config, loop, pair):
    sink = OneRank(config, StaticParticipants(pair[:1]), loop)
    for _ in range(TRIES):
        publish(sink, model, 5)
        running = begun(loop, pair[0])
        publish(sink, tiny_qwen3(seed=1), 6)
        [[completion]] = running.result(60)
        if len(completion.versions) > 1:
            break
    assert [span.version for span in completion.versions] == [5, 6]
    assert completion.versions[-1].end == len(completion.tokens) == LONG
    sink.close()


def test_abort_over_the_wire(model, config, loop, pair):
    sink = OneRank(config, StaticParticipants(pair[:1]), loop)
    publish(sink, model, 7)
    for _ in range(TRIES):
        running = begun(loop, pair[0])
        run(loop, pair[0].abort())
        [[completion]] = running.result(60)
        if len(completion.tokens) < LONG:
            break
    assert completion.finish_reason == "abort"
    assert len(completion.tokens) < LONG
    sink.close()


def test_errors_of_the_engine_arrive_as_what_they_are(model, config, loop, pair):
    with pytest.raises(UserError, match="draw 9: a prompt token lies outside"):
        run(loop, pair[0].generate([request([99], draw=9)]))
    run(loop, pair[1].pause("drain"))
    with pytest.raises(
        ModelError, match=r"engine-1: the published weights do not fit model.path: missing"
    ):
        run(loop, pair[1].begin_update(layout(model)[1:]))
    with pytest.raises(RunFailed, match="engine-1 is another process"):
        run(loop, pair[1].receive_bucket(0, torch.zeros(4, dtype=torch.uint8)))
    run(loop, pair[1].resume())


def test_the_server_wants_its_key(loop, pair):
    async def ask(key):
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{pair[0].url}/health", headers={"Authorization": f"Bearer {key}"}
            ) as answer,
        ):
            return answer.status

    assert run(loop, ask("guess")) == 401
    assert run(loop, ask(pair[0]._key)) == 200


@pytest.mark.full  # a run in which they do: tests/integration/test_chaos.py
def test_engines_that_die_and_hang(model, config, loop, pair, tmp_path):
    """Of three engines one dies in a request, one hangs in a publication, the third goes on."""
    doomed = remote(config, "doomed", tmp_path)
    frozen = remote(config, "frozen", tmp_path, health_timeout_s=2.0, update_timeout_s=10.0)
    run(loop, start_all([doomed, frozen]))
    participants = StaticParticipants([doomed, frozen, pair[0]])
    sink = OneRank(with_limit(config, 10.0), participants, loop)
    publish(sink, model, 11)

    for _ in range(TRIES):
        running = begun(loop, doomed)
        os.kill(doomed.pid, signal.SIGSTOP)  # so that it does not end before it is killed
        if not running.done():
            break
        os.kill(doomed.pid, signal.SIGCONT)
    os.kill(doomed.pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"engine doomed died: killed by SIGKILL"):
        running.result(60)

    os.kill(frozen.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(
        DeadlineExceeded, match=r"engine frozen did not answer /progress within 2 s \(rollout"
    ):
        run(loop, frozen.progress())
    assert time.monotonic() - began < 18  # less than `request_timeout_s`
    os.kill(frozen.pid, signal.SIGCONT)

    buckets = layout(model)
    sink.prepare(buckets)  # goes on without the dead one
    assert [engine.name for engine in participants.engines] == ["frozen", "engine-0"]
    sink.send(buckets[0], flatten(buckets[0], model))
    os.kill(frozen.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(PublicationFailed, match=r"engine frozen .*did not answer"):
        send_all(sink, buckets[1:], model)
    assert time.monotonic() - began < 60
    for bucket in buckets[1:]:  # the other one was called for the third already
        sink.send_after_a_failure(bucket, flatten(bucket, model))
    sink.cancel()
    assert not alive(frozen.pid)

    publish(sink, model, 12)
    assert [engine.name for engine in participants.engines] == ["engine-0"]
    assert run(loop, pair[0].health())["version"] == 12
    sink.close()
    run(loop, close_all([doomed, frozen]))


def test_a_start_that_fails_shows_the_end_of_the_log(config, loop, tmp_path):
    engine = remote_engine(
        tmp_path / "nowhere", config=config.rollout.engine, name="lost", log=tmp_path / "log"
    )
    with pytest.raises(
        RunFailed,
        match=r"(?s)engine lost ended before it was ready: exit code 1.*ModelError.*no config.json",
    ):
        run(loop, engine.start())
    with pytest.raises(RunFailed, match="engine lost does not run"):
        run(loop, engine.health())


def test_a_start_that_takes_too_long_leaves_no_process(config, loop, tmp_path):
    settings = config.rollout.engine.model_copy(update={"start_timeout_s": 0.2})
    engine = remote_engine(config.model.path, config=settings, name="late", log=tmp_path / "log")
    with pytest.raises(
        DeadlineExceeded,
        match=r"engine late was not ready within 0.2 s \(rollout.engine.start_timeout_s\)",
    ):
        run(loop, engine.start())
    assert not alive(engine.pid)


PARENT = """
import asyncio, sys
from pathlib import Path
from rlcore.config.sections.rollout import EngineConfig
from rollout.engines.embedded.factory import EmbeddedServer
from rollout.engines.embedded.server import ServerConfig

async def main():
    config = EngineConfig(device="cpu", threads=1)
    server = EmbeddedServer(
        ServerConfig("engine-0", sys.argv[1], config, "the-key", dtype="fp32"), Path(sys.argv[2])
    )
    await server.start()
    print(server.pid, flush=True)
    await asyncio.sleep(120)

asyncio.run(main())
"""


def test_an_engine_ends_with_its_parent(config, tmp_path):
    repository = Path(__file__).resolve().parents[3]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, config.model.path, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository)},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait(10)
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)
