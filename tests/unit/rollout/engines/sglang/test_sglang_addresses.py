"""The client at URLs of all kinds: names, IPv6, prefixes and TLS."""

from __future__ import annotations

import asyncio

import pytest
from raw_server import RawServer, against, answer, ask, client_of, listening

from rlcore.errors import EngineFailed, UserError
from rlcore.tls import server_context
from tests.certificates import Authority


@pytest.mark.parametrize("host", ["no host", "a..b", "x" * 70])
def test_hosts_that_cannot_be(host):
    async def main():
        client = client_of(f"http://{host}:80")
        with pytest.raises(EngineFailed, match="broke off /generate"):
            await ask(client)
        await client.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_ipv6():
    async def use(client, server):
        assert await ask(client) == "ok"
        assert b"\r\nHost: [::1]:" in server.heads[0]

    against(lambda *_: answer(b"ok"), use, host="::1")


def test_a_prefix_is_kept_and_a_users_name_is_not_sent():
    server = RawServer(lambda *_: answer(b"ok"))

    async def main():
        async with listening(server, server.writers) as port:
            client = client_of(f"http://name:word@127.0.0.1:{port}/engines/3/")
            await ask(client)
            await client.close()
            return port

    port = asyncio.run(asyncio.wait_for(main(), 30))
    lines = server.heads[0].decode().split("\r\n")
    assert lines[0] == "POST /engines/3/generate HTTP/1.1"
    assert f"Host: 127.0.0.1:{port}" in lines
    assert "Authorization: Bearer the-api-key" in lines


def test_tls(tmp_path, monkeypatch):
    authority = Authority(tmp_path)
    tls = server_context(authority.tls("127.0.0.1"))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))

    async def use(client, server):
        for size in (1, 3_000_000):
            assert await ask(client, "a" * size) == f'{{"said":"{"a" * size}"}}'
        assert len(server.writers) == 1

    against(lambda _, body: answer(body), use, tls=tls, scheme="https")


def test_a_certificate_that_nobody_vouches_for(tmp_path):
    tls = server_context(Authority(tmp_path).tls("127.0.0.1"))

    async def use(client, _):
        with pytest.raises(UserError, match=r"the certificate of 127\.0\.0\.1 is not accepted"):
            await ask(client)

    against(lambda _, body: answer(body), use, tls=tls, scheme="https")
