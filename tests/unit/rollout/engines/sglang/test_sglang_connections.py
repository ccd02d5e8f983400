"""Connections to a server that speaks HTTP byte by byte: what may be used again, and what must not."""

from __future__ import annotations

import asyncio
import itertools
import ssl
import subprocess
from contextlib import asynccontextmanager

import pytest

from rollout.engines.sglang import connections
from rollout.engines.sglang.connection import JOINED_BYTES, Answer, BrokenOff
from rollout.engines.sglang.connections import Connections, DeadlinePassed

HEAD = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n"


def answer(content: bytes, *, head: bytes = b"", status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: text/plain\r\n%bContent-Length: %d\r\n\r\n%b" % (
        status,
        head,
        len(content),
        content,
    )


class RawServer:
    """Answers each request with `script(number of the connection, body)`: bytes, or a coroutine
    given the writer.
    """

    def __init__(self, script) -> None:
        self.script = script
        self.bodies = []
        self.writers = []

    async def __call__(self, reader, writer):
        number = len(self.writers)
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                said = self.script(number, self.bodies[-1])
                if isinstance(said, bytes):
                    writer.write(said)
                else:
                    await said(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


def against(script, use, *, host="127.0.0.1", tls=None, scheme="http"):
    """Run `use(connections, server)` against a server that follows `script`."""

    async def main():
        server = RawServer(script)
        async with listening(server, server.writers, host, tls) as port:
            pool = Connections(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
            try:
                return await use(pool, server)
            finally:
                await pool.close()

    return asyncio.run(asyncio.wait_for(main(), 30))


@asynccontextmanager
async def listening(server, writers, host="127.0.0.1", tls=None):
    listener = await asyncio.start_server(server, host, 0, ssl=tls)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)


async def ask(pool, body=b"x", timeout_s=5.0):
    return await pool.ask(HEAD % len(body), body, timeout_s)


def saying(*parts: bytes, close: bool = False, pause_s: float = 0.01):
    """A script of one answer in pieces."""

    async def say(writer):
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause_s)
        if close:
            writer.close()

    return lambda *_: say


def closing(_number, _body):
    async def close(writer):
        writer.close()

    return close


# --- answers --------------------------------------------------------------------------------------

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: Application/JSON; charset=utf-8\r\nTransfer-Encoding:"
    b" chunked\r\n\r\n"
)


@pytest.mark.parametrize(("script", "expected"), [
    (saying(*(bytes([byte]) for byte in answer(b"ok")), pause_s=0), Answer(200, "text/plain", b"ok")),
    (saying(CHUNKED, b"3\r\nabc\r", b"\n1;a=b\r\nd\r\n0\r\n", b"Trailer: 1\r\n\r\n"), Answer(200, "application/json", b"abcd")),
    (saying(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\n\r\n" + answer(b"ok")), Answer(200, "text/plain", b"ok")),
    (saying(b"HTTP/1.1 204 No Content\r\n\r\n"), Answer(204, "", b"")),
    (saying(b"HTTP/1.0 500 Trouble\r\n\r\nall ", b"of it", close=True), Answer(500, "", b"all of it")),
    (saying(answer(b"", status=b"302 Found", head=b"Location: /elsewhere\r\n")), Answer(302, "text/plain", b"")),
    (lambda *_: answer(b"a" * 30_000_000), Answer(200, "text/plain", b"a" * 30_000_000)),
], ids=["byte-by-byte", "chunked", "1xx-before", "no-content", "until-the-end", "redirect", "huge"])  # fmt: skip
def test_answers_of_all_shapes(script, expected):
    async def use(pool, _):
        return await ask(pool)

    assert against(script, use) == expected


@pytest.mark.parametrize("said", [
    b"", b"HTTP/1.1 200 OK\r\n", answer(b"half")[:-1], answer(b"none")[:-4], CHUNKED + b"3\r\nabc\r\n",
    b"SSH-2.0-OpenSSH\r\n", b"\x00\x01\x02", b"HTTP/1.1 200 OK\r\nContent-Length: nine\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", CHUNKED + b"no number\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
])  # fmt: skip
def test_what_is_no_whole_answer(said):
    async def use(pool, _):
        with pytest.raises(BrokenOff):
            await ask(pool)

    against(saying(said, close=True), use)


@pytest.mark.parametrize("size", [1, JOINED_BYTES + 1, 20_000_000])
def test_bodies_of_all_sizes_arrive_whole(size):
    body = bytes(range(256)) * (size // 256) + b"!" * (size % 256)

    async def use(pool, server):
        await ask(pool, body)
        assert server.bodies == [body]

    against(lambda *_: answer(b"ok"), use)


# --- what is used again ---------------------------------------------------------------------------


def test_every_caller_gets_its_own_answer():
    counter = itertools.count()

    def script(_number, body):
        async def say(writer):
            await asyncio.sleep(next(counter) % 7 / 1000)
            writer.write(answer(body))

        return say

    async def use(pool, server):
        async def caller(name):
            for turn in range(20):
                body = f"{name}-{turn}".encode()
                call = asyncio.ensure_future(ask(pool, body))
                if (name + turn) % 5 == 0:  # given up at all kinds of moments
                    await asyncio.sleep(name % 8 / 1000)
                    call.cancel()
                    await asyncio.wait({call})
                    if call.cancelled():
                        continue
                assert (await call).content == body

        await asyncio.gather(*(caller(name) for name in range(30)))
        assert len(server.writers) < len(server.bodies)

    against(script, use)


@pytest.mark.parametrize("script", [
    lambda *_: answer(b"ok", head=b"Connection: close\r\n"),
    lambda *_: answer(b"ok").replace(b"HTTP/1.1", b"HTTP/1.0"),
    lambda *_: answer(b"ok") + answer(b"of nobody"),
    lambda *_: answer(b"ok") + b"garbage",
    lambda *_: answer(b"ok") + b"\x00",
    saying(answer(b"ok"), answer(b"of nobody")),
    saying(answer(b"ok"), close=True),
], ids=["close", "http-1.0", "two", "garbage", "a-byte", "unasked", "closed-while-idle"])  # fmt: skip
def test_a_connection_that_is_not_used_again(script):
    async def use(pool, server):
        for _ in range(3):
            assert (await ask(pool)).content == b"ok"
            await asyncio.sleep(0.2)
        assert len(server.writers) == 3

    against(script, use)


def test_an_answer_before_the_body_was_sent_ends_the_connection():
    body = b"a" * 50_000_000
    writers = []

    async def early(reader, writer):
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(b"too large", status=b"413 Too Large"))

    async def main():
        async with listening(early, writers) as port:
            pool = Connections(f"http://127.0.0.1:{port}")
            for _ in range(2):
                assert (await ask(pool, body)).status == 413
            await pool.close()

    asyncio.run(asyncio.wait_for(main(), 30))
    assert len(writers) == 2


def test_idle_connections_come_of_age(monkeypatch):
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", 0.1)

    async def use(pool, server):
        await asyncio.gather(ask(pool), ask(pool))
        while pool._open or not all(writer.transport.is_closing() for writer in server.writers):
            await asyncio.sleep(0.01)
        await ask(pool)
        assert len(server.writers) == 3

    against(lambda *_: answer(b"ok"), use)


def test_those_that_are_not_needed_come_of_age_first():
    async def use(pool, server):
        await asyncio.gather(ask(pool), ask(pool))
        for connection in pool._open:
            connection.idle_since -= 2
        await ask(pool)  # one of the two is enough for this
        for connection in pool._open:
            connection.idle_since -= 2
        pool._drop_old()
        assert len(pool._open) == 1
        await ask(pool)
        assert len(server.writers) == 2

    against(lambda *_: answer(b"ok"), use)


def test_age_counts_where_the_loop_stood_still():
    async def use(pool, server):
        await ask(pool)
        # as if nothing had run since, the timer included
        pool._idle[0].idle_since -= connections.KEEP_ALIVE_S
        await ask(pool)
        assert len(server.writers) == 2

    against(lambda *_: answer(b"ok"), use)


def test_nothing_is_sent_twice():
    async def use(pool, server):
        with pytest.raises(BrokenOff):
            await ask(pool)
        assert len(server.bodies) == 1

    against(closing, use)


# --- limits and ends ------------------------------------------------------------------------------


def test_the_deadline_holds_for_the_whole_answer():
    async def use(pool, _):
        with pytest.raises(DeadlinePassed):
            await ask(pool, timeout_s=0.1)
        assert not pool._open

    against(saying(CHUNKED, *[b"1\r\na\r\n"] * 100), use)


async def never(*_, **__):
    await asyncio.sleep(60)


def test_the_deadline_holds_for_connecting(monkeypatch):
    async def use(pool, _):
        monkeypatch.setattr(pool._loop, "create_connection", never)
        with pytest.raises(DeadlinePassed):
            await ask(pool, timeout_s=0.1)
        assert not pool._open
        assert not pool._connecting

    against(closing, use)


def test_closing_ends_calls_that_connect(monkeypatch):
    async def use(pool, _):
        monkeypatch.setattr(pool._loop, "create_connection", never)
        call = asyncio.ensure_future(ask(pool))
        await asyncio.sleep(0.01)
        await pool.close()
        with pytest.raises(BrokenOff, match="the client was closed"):
            await asyncio.wait_for(call, 1)

    against(closing, use)


def test_closing_in_the_middle_of_an_answer_without_a_length_does_not_pass_it_for_whole():
    async def use(pool, _):
        call = asyncio.ensure_future(ask(pool))
        await asyncio.sleep(0.05)
        await pool.close()
        with pytest.raises(BrokenOff):
            await asyncio.wait_for(call, 1)

    against(saying(b"HTTP/1.1 200 OK\r\n\r\nhalf", b"", pause_s=1), use)


@pytest.mark.parametrize("after_s", [0, 0.02])
def test_a_cancelled_call_closes_its_connection(after_s):
    async def use(pool, server):
        call = asyncio.ensure_future(ask(pool))
        await asyncio.sleep(after_s)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
        assert not pool._open
        await asyncio.sleep(0.2)
        # it reads on, and finds the end
        assert all(writer.transport.is_closing() for writer in server.writers)

    against(lambda *_: b"", use)


@pytest.mark.parametrize("host", ["no host", "a..b", "x" * 70])
def test_hosts_that_cannot_be(host):
    async def main():
        with pytest.raises(OSError):
            await ask(Connections(f"http://{host}:80"))

    asyncio.run(asyncio.wait_for(main(), 30))


# --- addresses ------------------------------------------------------------------------------------


def test_ipv6():
    async def use(pool, _):
        assert pool.authority.startswith("[::1]:")
        return (await ask(pool)).content

    assert against(lambda *_: answer(b"ok"), use, host="::1") == b"ok"


def test_a_prefix_and_a_default_port():
    async def main():
        pool = Connections("https://name:word@example.org/engines/3/")
        assert (pool.path, pool.authority, pool._host, pool._port) == (
            "/engines/3",
            "example.org",
            "example.org",
            443,
        )

    asyncio.run(main())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Of 127.0.0.1, by itself."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", path, "-out", f"{path}.crt", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True,
    )  # fmt: skip
    path.write_bytes(path.read_bytes() + path.with_name("both.pem.crt").read_bytes())
    return path


def test_tls(certificate, monkeypatch):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))

    async def use(pool, server):
        for size in (1, 3_000_000):
            assert (await ask(pool, b"a" * size)).content == b"a" * size
        assert len(server.writers) == 1

    against(lambda _, body: answer(body), use, tls=tls, scheme="https")


def test_a_certificate_that_nobody_vouches_for(certificate):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)

    async def use(pool, _):
        with pytest.raises(OSError, match="certificate"):
            await ask(pool)

    against(lambda _, body: answer(body), use, tls=tls, scheme="https")
