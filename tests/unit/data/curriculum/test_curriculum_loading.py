"""A curriculum from the configuration: which prompts it may choose, and what it knows of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.config import Config
from rlcore.data.curriculum import PromptHistory, build_curriculum
from rlcore.data.curriculum.history import Outcome, Results, curriculum_keywords, weigh
from rlcore.data.loading import load_prompts, prompt_stream
from rlcore.errors import RunFailed
from tests.pages import blocks

seen: list[PromptHistory] = []


class Spy:
    """Prefers long prompts of the source `twos` until three results are there."""

    def __call__(self, history: PromptHistory) -> np.ndarray[Any, Any]:
        seen.append(history)
        if history.source_names and history.results < 3:
            return (history.sources == history.source_names.index("twos")) * history.lengths
        return np.ones(len(history))


def make_run(folder: Path, weights: tuple[float | None, float | None]) -> Config:
    for name, count in (("ones", 3), ("twos", 5)):
        rows = [{"prompt": "1" * (i + 1), "label": "1"} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = {
        name: {"paths": [str(folder / f"{name}.jsonl")], "weight": weight}
        for name, weight in zip(("ones", "twos"), weights)
    }
    return Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": str(folder / "none")},
            "data": {"sources": sources, "curriculum": {"name": f"{__name__}:Spy"}},
            "training": {"steps": 1},
        }
    )


def test_without_weights_a_curriculum_weighs_the_sources(tmp_path: Path, tokenizer: Any) -> None:
    run = make_run(tmp_path, (None, None))
    stream = prompt_stream(run, load_prompts(run, tokenizer))
    seen.clear()
    first = [stream.row(draw) for draw in stream.take(5)]
    assert sorted(first) == [3, 4, 5, 6, 7], "of twos alone"
    assert seen[0].lengths.tolist() == [1, 2, 3, 1, 2, 3, 4, 5]
    assert seen[0].sources.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert seen[0].source_names == ("ones", "twos")
    for draw in range(3):
        stream.finished(draw, Outcome(1, 2))
        stream.finish(draw)
    stream.handed_over()
    assert {stream.row(draw) for draw in stream.take(3)} & {0, 1, 2}, "then of all"


def test_with_weights_it_chooses_inside_of_a_source(tmp_path: Path, tokenizer: Any) -> None:
    run = make_run(tmp_path, (3.0, 1.0))
    prompts = load_prompts(run, tokenizer)
    stream = prompt_stream(run, prompts)
    found: Counter[str] = Counter()
    for _ in range(800):
        (draw,) = stream.take(1)
        found[prompts[stream.row(draw)].row["source"]] += 1
        stream.finish(draw)
        stream.handed_over()
    assert found["ones"] / 800 == pytest.approx(0.75, abs=0.05)


def test_supervised_fine_tuning_has_none(tmp_path: Path, tokenizer: Any) -> None:
    run = make_run(tmp_path, (None, None))
    run.algorithm.loss.name = "sft"
    stream = prompt_stream(run, load_prompts(run, tokenizer))
    assert sorted(stream.row(draw) for draw in range(8)) == list(range(8))


def history_of(size: int) -> PromptHistory:
    return Results(size, 0.5).history(np.ones(size, np.int64), np.zeros(size, np.int64))


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(3)])
def test_a_curriculum_that_raises_or_exits_fails_the_run_by_its_place(error: BaseException) -> None:
    def curriculum(_: PromptHistory) -> np.ndarray[Any, Any]:
        raise error

    said = rf"data\.curriculum failed \(.*:\d+ in curriculum\): {type(error).__name__}: {error}"
    with pytest.raises(RunFailed, match=said):
        weigh(curriculum, history_of(3))


def test_a_curriculum_cannot_change_what_it_is_shown() -> None:
    def curriculum(history: PromptHistory) -> np.ndarray[Any, Any]:
        history.right[:] = 1
        return np.ones(len(history))

    with pytest.raises(RunFailed, match="ValueError: assignment destination is read-only"):
        weigh(curriculum, history_of(3))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1.0, 1.0, 1.0], "returned list, expected an array"),
        (np.ones((3, 1)), r"returned shape \(3, 1\), expected an array \[N\] = \[3\]"),
        (np.array([True, True, False]), "returned bool, expected numbers"),
        (np.array([1.0, np.nan, -1.0]), r"gave prompt 1 the weight nan.*\(2 of 3 prompts\)"),
        (np.zeros(3), "some prompt must be drawn"),
    ],
)
def test_weights_that_cannot_be_drawn_from_fail_the_run(weights: Any, said: str) -> None:
    with pytest.raises(RunFailed, match=said):
        weigh(lambda _: weights, history_of(3))


def test_keywords_are_checked() -> None:
    for given, said in (
        ({"tarjet": 0.3}, "'pass_rate'.*tarjet"),
        ({"target": 1.0}, "target: expected a number between 0 and 1, got 1"),
        ({"floor": 0.0}, "floor: expected a number above 0"),
        ({"floor": "much"}, "keyword 'floor' expected float, got 'much'"),
    ):
        with pytest.raises(ValueError, match=said):
            build_curriculum("pass_rate", **given)
    with pytest.raises(
        ValueError, match=r"unknown curriculum 'passrate'.*did you mean 'pass_rate'"
    ):
        build_curriculum("passrate")


def test_the_function_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[4] / "docs" / "data.md"
    (example,) = (
        one.text for one in blocks(page) if "hardest_first" in one.text and "def " in one.text
    )
    (tmp_path / "my_prompts.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    name = "my_prompts:hardest_first"
    assert list(curriculum_keywords(name)) == ["floor", "warm_groups"]
    results = Results(3, memory=1.0)
    results.add(0, Outcome(4, 8))
    results.add_failure(1)
    history = results.history(np.ones(3, np.int64), np.zeros(3, np.int64))
    np.testing.assert_allclose(weigh(build_curriculum(name, floor=0.5), history), [1.0, 0.5, 1.5])
    with pytest.raises(ValueError, match="unknown keyword 'flor'"):
        build_curriculum(name, flor=0.5)
