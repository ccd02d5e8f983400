"""The client against servers that speak HTTP byte by byte: answers of all shapes, what is no
answer, and which connections carry another request.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from functools import partial

import pytest
from raw_server import against, answer, ask, client_of, closing, listening, saying

from rlcore.errors import EngineFailed, EngineHangs
from rollout.engines import server_client
from rollout.engines.server_client import JOINED_BYTES

# --- answers --------------------------------------------------------------------------------------

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: Application/JSON; charset=utf-8\r\nTransfer-Encoding:"
    b" chunked\r\n\r\n"
)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (saying(*(bytes([byte]) for byte in answer(b"ok")), pause_s=0), "ok"),
        (saying(CHUNKED, b"3\r\n[1,\r", b"\n2;a=b\r\n2]\r\n0\r\n", b"Trailer: 1\r\n\r\n"), [1, 2]),
        (saying(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\n\r\n" + answer(b"ok")), "ok"),
        (saying(b"HTTP/1.1 204 No Content\r\n\r\n"), None),
        (saying(b"HTTP/1.0 200 OK\r\n\r\nall ", b"of it", close=True), "all of it"),
        (lambda *_: answer(b"a" * 30_000_000), "a" * 30_000_000),
    ],
    ids=["byte-by-byte", "chunked", "1xx-before", "no-content", "until-the-end", "huge"],
)
def test_answers_of_all_shapes(script, expected):
    async def use(client, _):
        return await ask(client)

    assert against(script, use) == expected


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        answer(b"half")[:-1],
        answer(b"none")[:-4],
        CHUNKED + b"3\r\nabc\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"\x00\x01\x02",
        b"HTTP/1.1 200 OK\r\nContent-Length: nine\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        CHUNKED + b"no number\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_whole_answer(said):
    async def use(client, _):
        with pytest.raises(EngineFailed, match=r"engine engine-3 at http.* broke off /generate: "):
            await ask(client)

    against(saying(said, close=True), use)


def test_another_protocol_is_refused():
    said = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"

    async def use(client, server):
        with pytest.raises(EngineFailed, match="refused /generate"):
            await ask(client)
        await asyncio.sleep(0.1)
        assert server.open() == 0

    against(saying(said, pause_s=0.01), use)


def test_a_redirect_is_not_followed():
    said = answer(b"", status=b"302 Found", head=b"Location: /elsewhere\r\n")

    async def use(client, server):
        with pytest.raises(EngineFailed, match="HTTP 302"):
            await ask(client)
        assert len(server.bodies) == 1

    against(lambda *_: said, use)


@pytest.mark.parametrize("size", [1, JOINED_BYTES + 1, 20_000_000])
def test_bodies_of_all_sizes_arrive_whole(size):
    body = "0123456789abcdef" * (size // 16) + "!" * (size % 16)

    async def use(client, server):
        await ask(client, body)
        assert server.bodies == [b'{"said":"%b"}' % body.encode()]
        assert b"transfer-encoding" not in server.heads[0].lower()

    against(lambda *_: answer(b"ok"), use)


# --- what is used again ---------------------------------------------------------------------------


def test_every_caller_gets_its_own_answer():
    counter = itertools.count()

    def script(_number, body):
        async def say(writer):
            await asyncio.sleep(next(counter) % 7 / 1000)
            writer.write(answer(body))

        return say

    async def use(client, server):
        async def caller(name):
            for turn in range(20):
                body = f"{name}-{turn}"
                call = asyncio.ensure_future(ask(client, body))
                if (name + turn) % 5 == 0:  # given up at all kinds of moments
                    await asyncio.sleep(name % 8 / 1000)
                    call.cancel()
                    await asyncio.wait({call})
                    if call.cancelled():
                        continue
                assert (await call) == f'{{"said":"{body}"}}'

        await asyncio.gather(*(caller(name) for name in range(30)))
        assert len(server.writers) < len(server.bodies)

    against(script, use)


@pytest.mark.parametrize(
    "script",
    [
        lambda *_: answer(b"ok", head=b"Connection: close\r\n"),
        lambda *_: answer(b"ok").replace(b"HTTP/1.1", b"HTTP/1.0"),
        lambda *_: answer(b"ok") + answer(b"of nobody"),
        saying(answer(b"ok"), b"garbage"),
        saying(answer(b"ok"), close=True),
    ],
    ids=["close", "http-1.0", "two", "garbage-while-idle", "closed-while-idle"],
)
def test_a_connection_that_is_not_used_again(script):
    async def use(client, server):
        for _ in range(3):
            assert (await ask(client)) == "ok"
            await asyncio.sleep(0.2)
        assert len(server.writers) == 3

    against(script, use)


@pytest.mark.parametrize("behind", [b"garbage", b"\x00"])
def test_an_answer_with_garbage_behind_it_counts_for_nothing(behind):
    async def use(client, server):
        for _ in range(2):
            with pytest.raises(EngineFailed, match="broke off /generate"):
                await ask(client)
        assert len(server.writers) == 2

    against(lambda *_: answer(b"ok") + behind, use)


def test_an_answer_to_no_request_reaches_nobody():
    async def use(client, server):
        for _ in range(2):
            assert (await ask(client)) == "ok"
            await asyncio.sleep(0.2)
            with pytest.raises(EngineFailed, match=r"broke off .* an answer to no request"):
                await ask(client)
        assert len(server.writers) == 2

    against(saying(answer(b"ok"), answer(b"of nobody"), pause_s=0.05), use)


def test_an_answer_before_the_body_was_sent_ends_the_connection():
    writers = []

    async def early(reader, writer):
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(b"too large", status=b"500 Too Large"))

    async def main():
        async with listening(early, writers) as port:
            client = client_of(f"http://127.0.0.1:{port}")
            for _ in range(2):
                with pytest.raises(EngineFailed, match="too large"):
                    await ask(client, "a" * 50_000_000)
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 30))
    assert len(writers) == 2


def test_idle_connections_come_of_age(monkeypatch):
    monkeypatch.setattr(server_client, "KEEP_ALIVE_S", 0.1)

    async def use(client, server):
        await asyncio.gather(ask(client), ask(client))
        while server.open():
            await asyncio.sleep(0.01)
        await ask(client)
        assert len(server.writers) == 3

    against(lambda *_: answer(b"ok"), use)


def test_age_counts_where_the_loop_stood_still(monkeypatch):
    monkeypatch.setattr(server_client, "KEEP_ALIVE_S", 0.1)

    async def use(client, server):
        await ask(client)
        time.sleep(0.2)  # nothing runs meanwhile, the timer of idle connections included
        await ask(client)
        assert len(server.writers) == 2

    against(lambda *_: answer(b"ok"), use)


@pytest.mark.parametrize("method", ["get", "post"])
def test_nothing_is_sent_twice(method):
    """On a new connection, and on one that broke while it carried a second request."""
    said = iter([closing(), answer(b"ok"), closing()])

    def script(*_):
        return next(said)

    async def use(client, server):
        send = client.get if method == "get" else partial(client.post, body={})
        with pytest.raises(EngineFailed, match="broke off"):
            await send("/generate")
        assert await send("/generate") == "ok"
        with pytest.raises(EngineFailed, match="broke off"):
            await send("/generate")
        assert len(server.bodies) == 3
        assert len(server.writers) == 2

    against(script, use)


# --- limits and ends ------------------------------------------------------------------------------


ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("chunked", [True, False])
def test_an_answer_without_end_is_not_gathered(chunked):
    """A router, a proxy or a hijacked engine would take rank 0's memory."""
    given = 0
    block = b"[" * 65536

    async def pour(writer):
        nonlocal given
        writer.write(ENDLESS + (b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"\r\n"))
        while given < 1 << 28:
            writer.write(b"%x\r\n%b\r\n" % (len(block), block) if chunked else block)
            given += len(block)
            await writer.drain()

    async def use(client, _):
        with pytest.raises(EngineFailed, match="answered /generate with more than 1,000,000 bytes"):
            await client.post("/generate", {}, answer_bytes=1_000_000)
        assert given < 1 << 25, "the connection was closed at once, but for what lay in buffers"

    against(lambda *_: pour, use)


def test_an_answer_that_says_to_be_too_long_is_not_read():
    async def use(client, _):
        with pytest.raises(EngineFailed, match="more than 67,108,864 bytes"):
            await client.post("/flush_cache", {})

    against(saying(ENDLESS + b"Content-Length: 99999999999\r\n\r\n[", pause_s=1.0), use)


@pytest.mark.parametrize("many", [True, False])
def test_headers_without_end_are_not_gathered(many):
    async def pour(writer):
        writer.write(ENDLESS)
        for number in range(1 << 14):
            writer.write(b"X-%d: %b\r\n" % (number, b"y" * 1000) if many else b"y" * 1000)
            await writer.drain()

    async def use(client, _):
        with pytest.raises(EngineFailed, match="broke off /generate"):
            await client.post("/generate", {})

    against(lambda *_: pour, use)


def test_the_deadline_holds_for_the_whole_answer():
    async def use(client, server):
        with pytest.raises(
            EngineHangs,
            match=r"did not answer /generate within 0\.1 s \(rollout\.engine\.update_timeout_s\)",
        ):
            await ask(client, timeout_s=0.1)
        await asyncio.sleep(0.1)
        assert server.open() == 0

    against(saying(CHUNKED, *[b"1\r\n1\r\n"] * 100), use)


async def never(*_, **__):
    await asyncio.sleep(60)


def test_the_deadline_holds_for_connecting(monkeypatch):
    async def use(client, _):
        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", never)
        with pytest.raises(EngineHangs):
            await ask(client, timeout_s=0.1)

    against(closing, use)


def test_closing_ends_calls_that_connect(monkeypatch):
    async def use(client, _):
        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", never)
        call = asyncio.ensure_future(ask(client))
        await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(EngineFailed, match="closed"):
            await asyncio.wait_for(call, 1)

    against(closing, use)


def test_closing_in_the_middle_of_an_answer_without_a_length_does_not_pass_it_for_whole():
    async def use(client, _):
        call = asyncio.ensure_future(ask(client))
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(EngineFailed):
            await asyncio.wait_for(call, 1)

    against(saying(b"HTTP/1.1 200 OK\r\n\r\nhalf", b"", pause_s=1), use)


@pytest.mark.parametrize("after_s", [0, 0.02])
def test_a_cancelled_call_closes_its_connection(after_s):
    async def use(client, server):
        call = asyncio.ensure_future(ask(client))
        await asyncio.sleep(after_s)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
        await asyncio.sleep(0.2)
        # it reads on, and finds the end
        assert server.open() == 0

    against(lambda *_: b"", use)


def test_as_many_connections_as_calls():
    async def use(client, server):
        for _ in range(2):
            await asyncio.gather(*(ask(client) for _ in range(300)))
        assert len(server.writers) == 300

    def slowly(*_):
        async def say(writer):
            await asyncio.sleep(0.5)
            writer.write(answer(b"ok"))

        return say

    against(slowly, use)
