"""Workflows of several turns: the one that the page shows, and constructors that fail."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from fake_engine import FakeEngine

from rlcore.data.generation import GenerateRequest
from rlcore.errors import ConfigError
from rlcore.launch.commands.init_model import ALPHABETS, char_tokenizer
from tests.pages import block

TOKENIZER = char_tokenizer(ALPHABETS["addition"])
PAGE = Path(__file__).parents[3] / "docs" / "workflows.md"


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text).input_ids)


def thinks_again(request: GenerateRequest, sample: int) -> list[int]:
    """A wrong sum first, then, as the question mark asks, the right one."""
    text = TOKENIZER.decode(request.prompt.tolist())
    a, b = text.partition("=")[0].split("+")
    return ids(str(int(a) + int(b)) if text.endswith("?") else "x")


@pytest.fixture
def page_code(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("ask_twice")
    monkeypatch.setitem(sys.modules, "ask_twice", module)
    exec(block(PAGE, "ask_twice.py").text, vars(module))


def test_the_workflow_of_the_page_is_scored_by_its_last_answer(make_service, page_code) -> None:
    engine = FakeEngine(thinks_again)
    service = make_service(engines=[engine], rollout={"workflow": "ask_twice:AskTwice"})
    samples = service.next_step(1).samples
    assert len(samples) == 8
    for sample in samples:
        first = sample.prompt_text
        assert sample.response_text == str(sample.label)
        assert sample.reward == 1.0
        assert sample.turns == 2
        assert sample.tokens.tolist() == ids(f"{first}x?{sample.label}")
        trained = sample.tokens[sample.loss_mask == 1]
        assert trained.tolist() == ids(f"x{sample.label}")
    assert {(r.draw, r.first_sample, r.turn) for call in engine.calls for r in call} == {
        (sample.draw, sample.index, turn) for sample in samples for turn in (0, 1)
    }


class Raises:
    def __init__(self, context: object) -> None:
        raise KeyError("tool")


def test_a_constructor_that_raises_is_named_with_its_line(make_service) -> None:
    with pytest.raises(
        ConfigError,
        match=r"rollout\.workflow: '.*:Raises' raised KeyError: 'tool' at its construction"
        r" \(.*test_workflows\.py:\d+ in __init__\)",
    ):
        make_service(rollout={"workflow": f"{__name__}:Raises"})
