"""The start of SGLang, without SGLang: stand-ins of the CPU, and the first request."""

from __future__ import annotations

import importlib
import io
import json
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
    manager = SimpleNamespace(server_status="starting", max_req_input_len=9000)
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


def arguments(**given: Any) -> SimpleNamespace:
    """SGLang's own arguments, of a server on a GPU."""
    fields = {"device": "cuda", "chunked_prefill_size": 4096, "is_embedding": False}
    return SimpleNamespace(url=lambda: URL, ssl_ca_certs=None, **(fields | given))


def answering(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> list[Any]:
    """Have one request after the other answered, or raise. Returns what was asked, as it comes."""
    left = [*answers]
    asked: list[Any] = []

    def urlopen(request: Any, context: Any) -> Any:
        asked.append(request)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return asked


def test_the_server_is_up_once_the_first_request_is_answered(
    manager: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = urllib.error.URLError(ConnectionRefusedError())
    asked = answering(monkeypatch, refused, refused, io.BytesIO(b"{}"), io.BytesIO(b"{}"))
    assert entry.warm_up(arguments(), None)
    assert manager.server_status == "up"
    bodies = [json.loads(request.data) for request in asked[2:]]
    assert [len(body["input_ids"]) for body in bodies] == [1, 4097]
    assert bodies[1]["sampling_params"]["top_p"] < 1 < bodies[1]["sampling_params"]["top_k"]


@pytest.mark.parametrize(
    ("given", "longest", "tokens"),
    [
        ({"device": "cpu"}, 9000, [1, 2]),
        ({}, 1000, [1, 992]),
        ({"chunked_prefill_size": -1}, 9000, [1, 2]),
        ({"is_embedding": True}, 9000, [1]),
    ],
)
def test_the_first_requests_fit_the_server(
    given: dict[str, Any], longest: int, tokens: list[int]
) -> None:
    bodies = entry.first_requests(arguments(**given), longest)
    assert [len(body["input_ids"]) for body in bodies] == tokens


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            urllib.error.HTTPError(URL, 500, "broken", Message(), io.BytesIO(b"no such token")),
            "the first request failed: HTTP Error 500: broken: no such token",
        ),
        (
            urllib.error.URLError(ssl.SSLCertVerificationError("self-signed")),
            f"the certificate of {URL}/generate is not accepted by None: ",
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
        entry.warm_up(arguments(), None)
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
