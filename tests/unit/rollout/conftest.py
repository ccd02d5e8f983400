"""Fixtures: a service over a fake engine that adds."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import tiny_qwen3
from fake_engine import FakeEngine
from transformers import Qwen3ForCausalLM

from rlcore.config import Config
from rlcore.data.generation import GenerateRequest
from rlcore.data.loading import load_prompts
from rlcore.launch.commands.init_model import ALPHABETS, char_tokenizer
from rollout.service import RolloutService

TOKENIZER = char_tokenizer(ALPHABETS["addition"])
EOS = TOKENIZER.eos_token_id


def adds(request: GenerateRequest, sample: int) -> list[int]:
    """The right sum for even samples, a wrong one for odd samples and always for "9+9="."""
    text = TOKENIZER.decode(request.prompt.tolist())
    a, b = text.rstrip("=").split("+")
    wrong = sample % 2 == 1 or text == "9+9="
    return [*TOKENIZER(str(int(a) + int(b) + wrong)).input_ids, EOS]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    names = inspect.signature(pyfuncitem.function).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def users_module_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(adds)


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """A configuration over 20 sums; keyword arguments are whole sections to merge in, by name."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": len(TOKENIZER)}))
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**sections: dict[str, Any]) -> Config:
        base: dict[str, dict[str, Any]] = {
            "run": {"name": "test"},
            "model": {"path": str(tmp_path)},
            "data": {"paths": [str(tmp_path / "sums.jsonl")]},
            "training": {"steps": 10},
            "rollout": {
                "prompts_per_step": 4,
                "samples_per_prompt": 2,
                "sampling": {"max_new_tokens": 8},
            },
        }
        for name, section in sections.items():
            base[name] = {**base.get(name, {}), **section}
        return Config.model_validate(base)

    return make


def published(service: RolloutService, version: int = 0) -> None:
    """As a publication would leave the engines that run."""

    async def publish() -> None:
        for engine in await service.fleet.candidates():
            service.fleet.draining(engine)
            service.fleet.published(engine, version)

    asyncio.run_coroutine_threadsafe(publish(), service.loop).result(10)


@pytest.fixture
def make_service(
    make_config: Callable[..., Config], engine: FakeEngine
) -> Iterator[Callable[..., RolloutService]]:
    """Services that are closed after the test. `engines` replaces the fixture's engine, `options`
    are the service's own.
    """
    made: list[RolloutService] = []

    def make(
        *,
        engines: list[FakeEngine] | None = None,
        options: dict[str, Any] | None = None,
        **sections: dict[str, Any],
    ) -> RolloutService:
        config = make_config(**sections)
        prompts = load_prompts(config, TOKENIZER)
        made.append(
            RolloutService(config, TOKENIZER, engines or [engine], prompts, **(options or {}))
        )
        made[-1].start()
        published(made[-1])
        return made[-1]

    yield make
    for service in made:
        service.close()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model() -> Qwen3ForCausalLM:
    return tiny_qwen3()


@pytest.fixture(scope="session")
def folder(model: Qwen3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only the config: the engine must not find weights to read."""
    path = tmp_path_factory.mktemp("qwen3")
    model.config.save_pretrained(path)
    return path
