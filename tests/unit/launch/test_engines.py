"""Which engines follow from a configuration; nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config import Config
from rlcore.config.load import load_config
from rlcore.errors import ConfigError
from rlcore.launch.engines import build_engines
from rollout.engines.embedded.client import RemoteEngine
from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.engines.factories import ADMIN_KEY, API_KEY
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.external import ExternalServer
from rollout.engines.sglang.server_process import ManagedServer

SGLANG = "rollout.engine.kind=sglang"
GIVEN = "given, of 32 random characters"


@pytest.fixture
def python(tmp_path: Path, tiny_model: Path) -> tuple[str, str]:
    """Stand-ins for the interpreter of the engines' environment, and for a model."""
    (tmp_path / "python").touch()
    return f"rollout.engine.python={tmp_path / 'python'}", f"model.path={tiny_model}"


IN_PROCESS = "rollout.service=in_process"


def config_of(*overrides: str) -> Config:
    given = (
        "run.name=x",
        "run.dir=runs",
        "model.path=m",
        "model.dtype=fp32",
        "data.paths=d.jsonl",
        "training.steps=1",
        "reward.parts.a.function=exact_match",
    )
    return load_config([], [*given, *overrides]).config


def built(*overrides: str) -> list[Any]:
    return list(build_engines(config_of(*overrides)))


def managed(*overrides: str) -> list[ManagedServer]:
    made = built(SGLANG, *overrides)
    assert all(
        isinstance(one, SGLangEngine) and isinstance(one.server, ManagedServer) for one in made
    )
    return [one.server for one in made]


@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        ([], [RemoteEngine]),
        ([IN_PROCESS], [EmbeddedEngine]),
        ([IN_PROCESS, "rollout.engine.count=2"], [RemoteEngine, RemoteEngine]),
    ],
)
def test_one_embedded_engine_is_in_the_process_of_the_service_there_and_others_are_processes(
    overrides: list[str], kinds: list[type]
) -> None:
    made = built(*overrides)
    assert [type(one) for one in made] == kinds
    assert [one.name for one in made] == [f"engine-{index}" for index in range(len(kinds))]


def test_embedded_engines_that_are_processes_have_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5,7")
    made = built("rollout.engine.count=2")
    assert [one._server.gpus for one in made] == [("0 2",), ("0 5",)]


def test_an_embedded_engine_in_this_process_has_no_variables_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine\.environment: the engine is in this"):
        built(IN_PROCESS, "rollout.engine.environment={A: b}")


def test_servers_have_names_and_logs_of_their_own_and_one_pair_of_keys(
    python: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, GIVEN)
    monkeypatch.delenv(ADMIN_KEY, raising=False)
    first, second = managed(*python, "rollout.engine.count=2")
    assert [first.name, second.name] == ["engine-0", "engine-1"]
    assert [str(one.log) for one in (first, second)] == [
        f"runs/x/logs/engine_{index}.log" for index in (0, 1)
    ]
    assert first.keys is second.keys
    assert first.keys.api == GIVEN
    assert len(first.keys.admin) > 30
    assert GIVEN not in repr(first.keys)


def test_engines_that_are_processes_are_told_the_model_s_dtype_and_tokenizer(
    python: tuple[str, str], tiny_model: Path
) -> None:
    given = (f"model.tokenizer={tiny_model}", "rollout.engine.count=2")
    embedded = [one._server for one in built(*given)]
    sglang = managed(*python, *given)
    told = [(one.config.dtype, one.config.tokenizer) for one in embedded]
    told += [(one._dtype, one._tokenizer) for one in sglang]
    assert told == [("fp32", str(tiny_model))] * 4
    assert [str(one.log) for one in (*embedded, *sglang)] == [
        f"runs/x/logs/engine_{index}.log" for index in (0, 1)
    ] * 2


def test_servers_by_url(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    urls = "rollout.engine.urls=[http://a:1, http://b:2/]"
    made = built(SGLANG, urls, f"model.path={tmp_path}")
    assert all(isinstance(one.server, ExternalServer) and not one.managed for one in made)
    assert [one.server.url for one in made] == ["http://a:1", "http://b:2"]


def test_servers_by_a_file_of_urls_are_named_by_host_and_port(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "urls.json").write_text('["http://a:1", "http://[::1]:2/"]')
    given = (SGLANG, f"rollout.engine.urls_file={tmp_path / 'urls.json'}")
    made = built(*given, f"model.path={tmp_path}")
    assert [one.server.url for one in made] == ["http://a:1", "http://[::1]:2"]
    assert [one.name for one in made] == ["a-1", "1-2"]
    (tmp_path / "urls.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"urls_file: .*urls\.json lists no engine"):
        built(*given, f"model.path={tmp_path}")


def test_a_server_is_told_what_the_trainer_needs_of_it(
    python: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[dict[str, Any]] = []
    make = ManagedServer.__init__

    def spy(self: ManagedServer, *args: Any, **given: Any) -> None:
        recorded.append(given)
        make(self, *args, **given)

    monkeypatch.setattr(ManagedServer, "__init__", spy)
    colocated = "rollout.engine.colocated=true"
    replay = "policy.routing_replay=engine"
    managed(*python)
    managed(*python, replay, colocated)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    managed(*python, colocated)
    managed(*python, "rollout.engine.count=2", "rollout.engine.gpus=[3,1]")
    # the trainer has the first two
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    managed(*python)
    # They read no weights.
    assert {given["arguments"].pop("load_format") for given in recorded} == {"dummy"}
    assert [given["arguments"] for given in recorded] == [
        {}, {"enable_return_routed_experts": True}, {"enable_memory_saver": True}, {}, {}, {},
    ]  # fmt: skip
    assert [given["gpus"] for given in recorded] == [[], [], ["4"], ["7"], ["5"], ["6"]]


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("{load_format: safetensors}", {}),
        (
            "{speculative-draft-model-path: /d}",
            {"load_format": "dummy", "speculative_draft_load_format": "auto"},
        ),
        (
            "{speculative-algorithm: EAGLE}",
            {"load_format": "dummy", "speculative_draft_load_format": "auto"},
        ),
    ],
)
def test_weights_that_no_publication_brings_are_read(
    python: tuple[str, str], server: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch)
    [made] = managed(*python, f"rollout.engine.server={server}")
    assert made._arguments == expected


def with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


DRAFTS = "rollout.engine.server={speculative-algorithm: EAGLE}"


def test_the_weights_of_a_draft_survive_a_turn_of_the_trainer(
    python: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch)
    [made] = managed(*python, DRAFTS, "rollout.engine.colocated=true")
    assert made._arguments["enable_draft_weights_cpu_backup"] is True


@pytest.mark.parametrize(
    ("server", "expected"),
    [(DRAFTS, "all"), (f"{DRAFTS[:-1]}, speculative_draft_model_path: /d}}", "target")],
)
def test_a_draft_of_the_model_s_own_layers_is_published_to_if_they_are_trained(
    python: tuple[str, str], monkeypatch: pytest.MonkeyPatch, server: str, expected: str
) -> None:
    with_gpus(monkeypatch)
    for coef, selector in (("0.1", expected), ("0", "target")):
        [engine] = built(SGLANG, *python, server, f"policy.mtp_coef={coef}")
        assert engine._loading == {"selector": selector}


def test_a_draft_on_a_cpu_is_refused(python: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"speculative_algorithm: on a CPU .* greedily"):
        managed(*python, DRAFTS)


def test_without_an_environment_the_script_is_named(tiny_model: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"rollout.engine.python: there is no /no/python; run scripts/install_sglang.sh",
    ):
        built(SGLANG, f"model.path={tiny_model}", "rollout.engine.python=/no/python")
