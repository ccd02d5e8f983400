"""Process groups for weights over real engines: bytes that are changed on the way."""

from __future__ import annotations

import asyncio
import re

import aiohttp
import pytest
import torch
from engine_kit import flatten, layout, remote_engine, tiny_qwen3

from rlcore.config.sections.rollout import EngineConfig
from rlcore.errors import UserError
from rlcore.tls import engine_client
from rollout.weight_sync.links import DistributedTransport
from tests.certificates import Authority
from tests.listeners import addresses
from tests.man_in_the_middle import ManInTheMiddle

LIMIT_S = 60.0  # on a busy machine, where nobody is waited for in vain


@pytest.fixture
def folder(tmp_path):
    tiny_qwen3().config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def with_engines(folder, tmp_path, use, *, count, tls):
    """Call `use(engines, buckets, model)` with paused engines that wait for the buckets."""
    torch.set_num_threads(1)

    async def main():
        config = EngineConfig(
            device="cpu",
            threads=1,
            update_timeout_s=LIMIT_S,
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
        transport = DistributedTransport(
            device=torch.device("cpu"), timeout_s=LIMIT_S, probe_s=10.0
        )
        assert await transport.open(engines, buckets) == {}
        for bucket in buckets:
            assert await transport.send(bucket, flatten(bucket, model)) == {}
        sent = [flatten(bucket, model).numpy().tobytes() for bucket in buckets]
        failed = await transport.complete()  # until then the last bucket may be on its way
        assert reader.seen == writer.seen == sent
        assert list(failed) == [engines[1]]
        assert re.search(
            r"engine-1: its rank 0 did not receive the weights as they were sent, .*digest sent",
            failed[engines[1]],
        )
        await transport.close()
        stranger = Authority(tmp_path, "stranger").tls("127.0.0.1")
        engines[0]._tls = stranger  # its client, from now on
        await engines[0]._hang_up()
        engines[0]._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=engine_client(stranger, engines[0].url))
        )
        with pytest.raises(UserError, match=r"127\.0\.0\.1 is not accepted by .*stranger\.pem"):
            await engines[0].health()

    with_engines(folder, tmp_path, use, count=2, tls=tls)
