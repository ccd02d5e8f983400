"""The start of SGLang, without SGLang: stand-ins of the CPU, and the first request."""

from __future__ import annotations

import importlib
import io
import ssl
import sys
import urllib.error
import urllib.request
from email.message import Message
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollout.engines.sglang import entry

URL = "https://127.0.0.1:9"


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's tokenizer manager; `os._exit` raises."""
    manager = SimpleNamespace(server_status="starting")
    server = ModuleType("sglang.srt.entrypoints.http_server")
    vars(server)["get_global_state"] = lambda: SimpleNamespace(tokenizer_manager=manager)
    theirs = ModuleType("sglang.srt.managers.tokenizer_manager")
    vars(theirs)["ServerStatus"] = SimpleNamespace(Up="up")
    for module in (server, theirs):
        parts = module.__name__.split(".")
        for count in range(1, len(parts)):
            name = ".".join(parts[:count])
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(entry.os, "_exit", end)
    monkeypatch.setattr(entry, "POLL_S", 0.0)
    return manager


def answering(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
    """Have one request after the other answered, or raise."""
    left = [*answers]

    def urlopen(request: Any, context: Any) -> Any:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)


def test_the_server_is_up_once_the_first_request_is_answered(
    manager: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = urllib.error.URLError(ConnectionRefusedError())
    answering(monkeypatch, refused, refused, io.BytesIO(b"{}"))
    assert entry.warm_up(URL, None)
    assert manager.server_status == "up"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            urllib.error.HTTPError(URL, 500, "broken", Message(), io.BytesIO(b"no such token")),
            "the first request failed: HTTP Error 500: broken: no such token",
        ),
        (
            urllib.error.URLError(ssl.SSLCertVerificationError("self-signed")),
            f"the certificate of {URL} is not accepted by None: ",
        ),
    ],
    ids=["error", "certificate"],
)
def test_a_first_request_that_cannot_succeed_ends_the_server(
    manager: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    message: str,
) -> None:
    answering(monkeypatch, error)
    with pytest.raises(Ended):
        entry.warm_up(URL, None)
    assert message in capsys.readouterr().err
    assert manager.server_status == "starting"


def test_stand_ins_come_behind_real_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[str] = []
    monkeypatch.setattr(sys, "path", ["/site-packages"])
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name: SimpleNamespace(install=lambda: installed.append(name)),
    )
    for _ in range(2):
        entry.install_stubs()
    assert sys.path == ["/site-packages", f"{entry.HERE}/cpu"]
    assert installed == ["stubs", "stubs"]
