"""TLS by certificate files, over real connections, and what is refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.training import TLSConfig
from rlcore.errors import ConfigError, UserError
from rlcore.tls import check_files, client_context, server_context
from rollout.engines.factories import Keys
from rollout.engines.server_client import ServerClient
from rollout.json_client import JsonClient, NoAnswer
from tests.certificates import Authority

HOST = "127.0.0.1"
KEYS = Keys(api="a" * 16, admin="b" * 16)


def ask(serving: TLSConfig, use: Callable[[int], object]) -> object:
    """Serve over TLS while `use(port)`, a coroutine, runs."""

    async def main() -> object:
        async def answer(_: web.BaseRequest) -> web.Response:
            return web.json_response({"is": "here"})

        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, HOST, 0, ssl_context=server_context(serving)).start()
        try:
            return await use(runner.addresses[0][1])  # type: ignore[misc]
        finally:
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(main(), 60))


def ask_engine(serving: TLSConfig, ca_file: Path) -> object:
    async def use(port: int) -> object:
        url = f"https://{HOST}:{port}"
        tls = TLSConfig(ca_file=str(ca_file))
        client = ServerClient("engine-0", url, KEYS, config=EngineConfig(), tls=tls)
        try:
            return await client.get("/server_info")
        finally:
            await client.close()

    return ask(serving, use)


def ask_service(serving: TLSConfig, ca_file: str | None) -> object:
    async def use(port: int) -> object:
        client = JsonClient(
            [f"https://{HOST}:{port}"],
            where="reward.parts.a.service",
            timeout_s=20,
            retries=3,
            concurrency=1,
            answer_bytes=1000,
            ca_file=ca_file,
        )
        try:
            return await client.post({})
        finally:
            await client.close()

    return ask(serving, use)


def test_a_server_of_the_authority_is_asked(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    assert ask_engine(authority.tls(HOST), authority.file) == {"is": "here"}
    assert ask_service(authority.tls(HOST), str(authority.file)) == {"is": "here"}


@pytest.mark.parametrize(
    ("names", "days", "of", "why"),
    [
        ((HOST,), 1, "another", "unable to get local issuer certificate|self.signed"),
        ((HOST,), -2, "authority", "certificate has expired"),
        (("engine.example", "192.0.2.7"), 1, "authority", "IP address mismatch"),
    ],
)
def test_a_certificate_that_is_not_accepted_is_named(
    tmp_path: Path, names: tuple[str, ...], days: int, of: str, why: str
) -> None:
    serving = Authority(tmp_path, of).tls(*names, days=days)
    trusted = Authority(tmp_path).file if of == "another" else tmp_path / "authority.pem"
    with pytest.raises(UserError) as refused:
        ask_engine(serving, trusted)
    message = f"engine engine-0: the certificate of {HOST} is not accepted by {trusted}"
    assert str(refused.value).startswith(f"{message} (cluster.tls.ca_file):")
    assert re.search(why, str(refused.value))
    with pytest.raises(NoAnswer) as unanswered:  # at the first attempt
        ask_service(serving, str(trusted))
    said = f"{HOST} is not accepted by {trusted} (reward.parts.a.service.ca_file)"
    assert said in str(unanswered.value)
    assert not unanswered.value.again


def test_without_a_file_the_systems_authorities_count(tmp_path: Path) -> None:
    with pytest.raises(NoAnswer, match="is not accepted by the system's authorities"):
        ask_service(Authority(tmp_path).tls(HOST), None)


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = authority.tls(HOST)
    check_files(tls)
    other = authority.tls("other.example")
    words = tmp_path / "words.txt"
    words.write_text("no certificate\n")
    missing = tmp_path / "missing"
    refused = {
        r"cluster\.tls\.ca_file: .*missing does not exist": ("ca_file", missing),
        "has no certificate in PEM": ("ca_file", words),
        r"cluster\.tls\.key_file: .*missing does not exist": ("key_file", missing),
        "are no certificate and its private key": ("key_file", other.key_file),
    }
    for message, (key, path) in refused.items():
        with pytest.raises(ConfigError, match=message):
            check_files(tls.model_copy(update={key: str(path)}))
    with pytest.raises(ConfigError, match="certificate_file: not given, and this command starts"):
        server_context(TLSConfig(ca_file=tls.ca_file))
    with pytest.raises(ConfigError, match=r"a\.ca_file: .* does not exist"):
        client_context(str(missing), where="a.ca_file")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    tls = Authority(tmp_path).tls(HOST)
    assert tls.key_file is not None
    Path(tls.key_file).chmod(mode)
    said = rf"others may read .* \(mode {mode:04o}\), expected 0600"
    with pytest.raises(ConfigError, match=said):
        server_context(tls)
