"""Process groups for weights over real engines, if one fails: which is blamed, which waits."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time

import pytest
import torch
from engine_kit import flatten, layout, remote_engine, tiny_qwen3

from rlcore.config.sections.rollout import EngineConfig
from rlcore.errors import EngineFailed, UserError
from rlcore.interfaces import RankAddress
from rollout.engines.embedded.client import VerbClient
from rollout.engines.factories import Keys
from rollout.weight_sync.distributed import DistributedTransport
from rollout.weight_sync.sender import GroupSender
from tests.certificates import Authority
from tests.listeners import addresses
from tests.man_in_the_middle import ManInTheMiddle

LIMIT_S = 60.0  # on a busy machine, where nobody is waited for in vain
HANGS_S = 10.0  # where somebody is


class Publication:
    """Both halves of a publication over process groups, on one loop."""

    def __init__(self, limit_s=LIMIT_S):
        self.transport = DistributedTransport(timeout_s=limit_s, probe_s=10.0)
        self.transport.ranks = [RankAddress("here")]
        self.sender = GroupSender(torch.device("cpu"), limit_s)
        self.stop = None

    async def open(self, engines, buckets):
        self.stop = None
        if failed := await self.transport.open(engines, buckets):
            return failed
        order = self.transport.orders().ranks[0]
        failed = await self.transport.join({0: self.sender.open(order, buckets)})
        if not failed:
            await asyncio.to_thread(self.sender._end_joining)
        return failed

    async def send(self, bucket, model):
        """Send a bucket to the engines that are called for it, or were before a failure."""
        call = None
        if self.stop is None:
            call = asyncio.ensure_future(self.transport.send(bucket.index, {}))

        def stopped():
            if self.stop is None and call.done() and call.result():
                self.stop = self.transport.stop()
            return self.stop

        await asyncio.to_thread(self.sender.send, bucket, flatten(bucket, model), stopped)
        failed = {} if call is None else await call
        stopped()
        return failed

    async def complete(self):
        return await self.transport.complete(self.sender.finish())

    async def give_up(self):
        failed = await self.transport.give_up()
        self.sender.end(done=False, stopped=self.stop)
        return failed


@pytest.fixture
def folder(tmp_path):
    tiny_qwen3().config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def with_engines(folder, tmp_path, use, *, count=3, tls=None, limit_s=LIMIT_S):
    """Call `use(engines, buckets, model)` with paused engines that wait for the buckets."""
    torch.set_num_threads(1)

    async def main():
        config = EngineConfig(
            device="cpu",
            threads=1,
            update_timeout_s=limit_s,
            request_timeout_s=20.0,
            health_timeout_s=5.0,
            start_timeout_s=300.0,
        )
        engines = [
            remote_engine(
                folder, config=config, name=f"engine-{i}", log=tmp_path / f"{i}.log", tls=tls
            )
            for i in range(count)
        ]
        model = tiny_qwen3()
        buckets = layout(model)
        await asyncio.gather(*(engine.start() for engine in engines))
        try:
            for engine in engines:
                await engine.pause("drain")
                await engine.begin_update(buckets)
            return await use(engines, buckets, model)
        finally:
            await asyncio.gather(*(engine.kill() for engine in engines))

    return asyncio.run(asyncio.wait_for(main(), 180))


@pytest.mark.full
def test_who_hangs_is_named_and_the_others_have_the_bucket(folder, tmp_path):
    async def use(engines, buckets, model):
        transport = Publication(HANGS_S)
        frozen = engines[1]
        assert await transport.open(engines, buckets) == {}
        kept = dict(transport.sender._groups)
        del kept[frozen.name]
        assert await transport.send(buckets[0], model) == {}
        os.kill(frozen.pid, signal.SIGSTOP)
        began = time.monotonic()
        failed = {}
        left = iter(buckets[1:])
        while not failed:  # its socket takes a bucket or two
            bucket = next(left)
            failed = await transport.send(bucket, model)
        assert list(failed) == [frozen]
        assert re.search(r"engine-1 did not answer receive_bucket within 10 s", failed[frozen])
        assert time.monotonic() - began < HANGS_S + 30.0
        for bucket in left:  # they were called for the next one already
            assert await transport.send(bucket, model) == {}
        assert await transport.give_up() == {}
        others = [engines[0], engines[2]]
        assert await transport.open(others, buckets) == {}
        # those that are well keep theirs
        assert transport.sender._groups == kept
        for bucket in buckets:
            assert await transport.send(bucket, model) == {}
        assert await transport.complete() == {}
        for engine in others:
            await engine.end_update()
        transport.sender.close()

    with_engines(folder, tmp_path, use, limit_s=HANGS_S)


@pytest.mark.full
def test_who_refuses_is_named_at_once(folder, tmp_path, monkeypatch):
    """It never receives: our side hangs till its own deadline, for which nobody waits."""

    async def use(engines, buckets, model):
        async def refuse(*_):
            raise EngineFailed("engine-1 has no memory")

        transport = Publication()
        monkeypatch.setattr(engines[0], "join_group", refuse)
        assert await transport.open(engines, buckets) == {engines[0]: "engine-1 has no memory"}
        assert await transport.open(engines[1:], buckets) == {}
        monkeypatch.setattr(engines[1], "receive_bucket", refuse)
        began = time.monotonic()
        assert await transport.send(buckets[0], model) == {engines[1]: "engine-1 has no memory"}
        assert time.monotonic() - began < LIMIT_S / 2
        transport.sender.close()

    with_engines(folder, tmp_path, use)


@pytest.mark.full
def test_who_dies_is_named_and_who_was_started_again_is_joined_anew(folder, tmp_path):
    async def use(engines, buckets, model):
        transport = Publication()
        mortal = engines[2]
        assert await transport.open(engines, buckets) == {}
        kept = [transport.sender._groups.get(engine.name) for engine in engines[:2]]
        os.kill(mortal.pid, signal.SIGKILL)
        assert list(await transport.send(buckets[0], model)) == [mortal]
        for _ in range(2):  # the second time nobody has seen it die
            await mortal.kill()
            await mortal.start()
            await mortal.pause("drain")
            await mortal.begin_update(buckets)
            assert await transport.open([mortal], buckets) == {}
            assert await transport.send(buckets[0], model) == {}
        assert [transport.sender._groups[engine.name] for engine in engines[:2]] == kept
        transport.sender.close()

    with_engines(folder, tmp_path, use)


def test_a_byte_that_is_changed_on_the_way_takes_the_engine_out(folder, tmp_path, monkeypatch):
    """A man in the middle may read (there is no key on gloo); what he changes is not used.

    The control channel, which carries the digests, is over TLS here.
    """
    tls = Authority(tmp_path).tls("127.0.0.1")

    async def use(engines, buckets, model):
        reader, writer = ManInTheMiddle(None), ManInTheMiddle((1, 5))
        for engine, man in zip(engines, (reader, writer)):
            assert engine.url.startswith("https://127.0.0.1:")
            assert addresses(engine.pid) == {"127.0.0.1"}
            man.stand_before(engine, monkeypatch)
            await engine.begin_update(buckets)  # he learns their sizes
        transport = Publication()
        assert await transport.open(engines, buckets) == {}
        for bucket in buckets:
            assert await transport.send(bucket, model) == {}
        sent = [flatten(bucket, model).numpy().tobytes() for bucket in buckets]
        failed = await transport.complete()  # until then the last bucket may be on its way
        assert reader.seen == writer.seen == sent
        assert list(failed) == [engines[1]]
        assert re.search(
            r"engine-1: its rank 0 did not receive the weights as they were sent: .*digest sent",
            failed[engines[1]],
        )
        transport.sender.close()
        stranger = Authority(tmp_path, "stranger").tls("127.0.0.1")
        engines[0]._tls = stranger  # its client, from now on
        await engines[0]._hang_up()
        engines[0]._client = VerbClient(
            engines[0].name, engines[0].url, Keys("a", "b"), config=engines[0].config, tls=stranger
        )
        with pytest.raises(UserError, match=r"127\.0\.0\.1 is not accepted by .*stranger\.pem"):
            await engines[0].health()

    with_engines(folder, tmp_path, use, count=2, tls=tls)
