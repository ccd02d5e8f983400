"""Named evaluation sets: what they inherit, when they are due, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.config.derived import max_request_s
from rlcore.config.evaluation_sets import evaluation_sets, sets_due
from rlcore.config.load import Loaded
from rlcore.config.yaml_settings import render_config
from tests.pages import blocks

AIME = (
    "evaluation.sets.aime24={paths: a.jsonl, samples_per_prompt: 32, temperature: 0.6, every: 20}"
)


def test_every_0_says_what_is_evaluated_still(load):
    given = ["evaluation.paths=[x.jsonl]", "evaluation.every=0"]
    [note] = load(*given).warnings
    assert note.startswith("evaluation.every: 0: evaluated before the first step and after the")
    for told in (given[:1], [*given, "evaluation.at_start=true"]):
        assert load(*told).warnings == ()


def by_name(loaded):
    return {one.name: one for one in evaluation_sets(loaded.config)}


def test_a_set_takes_from_the_section_what_it_leaves_out(load):
    shared = "evaluation={paths: [e.jsonl], every: 5, temperature: 1.0, top_p: 0.9, at_end: no}"
    sets = by_name(load(shared, AIME, "evaluation.sets.mmlu.paths=[b.jsonl, c.jsonl]"))
    assert list(sets) == ["", "aime24", "mmlu"]
    aime, mmlu = sets["aime24"], sets["mmlu"]
    assert (aime.paths, mmlu.paths) == (["a.jsonl"], ["b.jsonl", "c.jsonl"])
    assert (aime.every, aime.temperature, aime.top_p, aime.at_end) == (20, 0.6, 0.9, False)
    assert (mmlu.every, mmlu.temperature, mmlu.samples_per_prompt) == (5, 1.0, 1)
    assert (sets[""].k, aime.k, mmlu.k) == ([], [1, 32], [1])
    assert (sets[""].prefix, aime.prefix) == ("eval/", "eval/aime24/")
    assert by_name(load(AIME, "evaluation.k=[8, 1, 8]"))["aime24"].k == [1, 8]


def test_a_configuration_that_was_written_out_still_inherits(load, write):
    """An override of the section reaches its sets and sources, but for what they gave."""
    base = write("shared.yaml", "evaluation: {top_p: 0.9}\ndata: {paths: [], split: test}\n")
    own = "evaluation.sets.own={paths: x, top_p: 0.9, temperature: 0}"
    given = (AIME, own, "data.paths=[]", "data.sources.a={paths: x, subset: main}")
    changes = ("evaluation.top_p=0.5", "evaluation.temperature=0.7", "data.split=dev",
               "data.subset=other")  # fmt: skip
    first = load(*given, files=[base])
    settings = render_config(first.config.model_dump(mode="json"), first.origins)
    again = load("data.paths=[]", *changes, files=[write("config.yaml", settings)])
    assert again.config == load(*given, *changes, files=[base]).config
    assert Loaded.from_json(again.to_json()).config == again.config
    sets = again.config.evaluation.sets
    assert (sets["own"].top_p, sets["own"].temperature) == (0.9, 0)
    assert (sets["aime24"].top_p, sets["own"].every) == (0.5, again.config.evaluation.every)
    assert again.config.data.sources["a"].split == "dev"


def test_the_columns_and_the_reward_of_a_set_are_its_own(load):
    own = "evaluation.sets.x={paths: x, label_key: answer, reward: {parts: {m: {function: math}}}}"
    loaded = load(own, AIME, "evaluation.max_new_tokens=99")
    sets = by_name(loaded)
    config = sets["x"].config(loaded.config)
    assert (config.data.prompt_key, config.data.label_key) == ("auto", "answer")
    assert list(config.reward.parts) == ["m"]
    assert config.evaluation.max_new_tokens == 99
    assert loaded.config.data.label_key == "auto", "the run's own stays"
    assert sets["aime24"].config(loaded.config).reward == loaded.config.reward


def test_the_workflow_of_a_set_is_its_own(load):
    loaded = load(
        "rollout.workflow={name: env, env: 'm:Calculator', max_turns: 3}",
        "evaluation.sets.alone={paths: x, workflow: single_turn}",
        "evaluation.sets.longer={paths: x, workflow: {name: env, env: 'm:Long', max_turns: 9}}",
        "evaluation.sets.same.paths=x",
    )
    sets = by_name(loaded).items()
    found = {name: one.config(loaded.config).rollout.workflow for name, one in sets}
    assert (found["alone"].name, found["alone"].options) == ("single_turn", {})
    assert (found["longer"].max_turns, found["longer"].options) == (9, {"env": "m:Long"})
    assert found["same"] == loaded.config.rollout.workflow


def test_each_set_has_its_own_period(load):
    config = load(
        "evaluation.paths=[e.jsonl]",
        AIME,
        "evaluation.sets.end={paths: x, at_start: off}",
        "evaluation.sets.never={paths: x, at_start: off, at_end: off}",
        "evaluation.sets.often={paths: x, every: 2, at_start: off, at_end: off}",
    ).config
    assert sets_due(config, 0, ended=False) == ["", "aime24"]
    assert sets_due(config, 1, ended=False) == []
    assert sets_due(config, 40, ended=False) == ["aime24", "often"]
    assert sets_due(config, 41, ended=True) == ["", "aime24", "end"]
    assert sets_due(config, 42, ended=True) == ["", "aime24", "end", "often"]


def test_a_run_without_prompts_to_score_scores_none(load):
    assert sets_due(load().config, 0, ended=False) == []
    off = load("evaluation=null").config
    assert evaluation_sets(off) == []


def test_a_set_of_an_earlier_file_can_be_dropped(load, write):
    base = write("base.yaml", "evaluation: {sets: {a: {paths: a}, b: {paths: b}}}\n")
    assert list(by_name(load("evaluation.sets.a=null", files=[base]))) == ["b"]
    assert by_name(load("evaluation.sets=null", files=[base])) == {}


def test_the_longest_response_of_any_set_counts(load):
    short = max_request_s(load(AIME).config)
    long = max_request_s(load(AIME, "evaluation.sets.aime24.max_new_tokens=32768").config)
    assert long > short + 30_000


BEST = "checkpoint.best.metric=eval/aime24/pass@1"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["evaluation.every=3"], "evaluation.paths: empty, but evaluation.every is 3"),
        (["evaluation.sets.a={every: 3}"], "evaluation.sets.a.paths: missing"),
        (["evaluation.sets.a.paths=[]"], "evaluation.sets.a.paths: got an empty list"),
        (["evaluation.sets={a/b: {paths: x}}"], "evaluation.sets.a/b: got the name 'a/b'"),
        ([AIME, "evaluation.sets.aime24.k=[64]"], "evaluation.sets.aime24.k: got 64, at most"),
        ([AIME, "evaluation.k=[64]"],
         "evaluation.k: got 64, at most evaluation.sets.aime24.samples"),
        (["evaluation.paths=[x]", "evaluation.k=[2]"], "evaluation.k: got 2, at most"),
        ([BEST], "checkpoint.best.metric: got eval/aime24/pass@1, expected a metric of a set"),
        ([AIME, BEST.replace("aime24", "aime25")], "that is evaluated: eval/aime24/score"),
        ([AIME, BEST.replace("@1", "@2")], "gives eval/aime24/avg@32, eval/aime24/pass@1"),
        ([AIME, BEST, "evaluation.sets.aime24.every=0", "evaluation.sets.aime24.at_end=off"],
         "checkpoint.best.metric: evaluation.sets.aime24 is never evaluated after a step"),
        ([AIME, BEST, "algorithm.loss.name=sft"],
         "got eval/aime24/pass@1, expected one of held-out rows, such as eval/aime24/loss"),
        ([AIME, BEST, "algorithm.estimator.name=dpo"], "such as eval/aime24/preference_accuracy"),
        ([AIME, BEST, "training.debug=train_only", "training.replay=x"],
         "got eval/aime24/pass@1, but train_only has no engine to generate with:"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(refusal, overrides, line):
    (said,) = refusal(*overrides)
    assert line in said.replace(" (override)", "")


def test_what_does_nothing_is_noted(load):
    greedy = load("evaluation.sets.a={paths: x, samples_per_prompt: 4}")
    assert greedy.warnings == (
        "evaluation.sets.a.samples_per_prompt: the samples are all alike:"
        " evaluation.sets.a.temperature is 0",
    )
    never = load("evaluation.sets.a={paths: x, at_start: no, at_end: no}")
    assert never.warnings[0].startswith("evaluation.sets.a: is never evaluated")


def test_a_metric_of_the_evaluation_can_choose_the_checkpoint(load):
    assert load(AIME, BEST).config.checkpoint.best.mode == "max"
    assert load(AIME, BEST + "_low"), "the lower end of its interval"
    assert load("evaluation.paths=[x]", "checkpoint.best={metric: eval/score, mode: min}")


def test_the_page_on_evaluation_shows_a_configuration_that_is_valid(load, write):
    page = Path(__file__).parents[3] / "docs" / "evaluation.md"
    _, shown, _, conversations = (one.text for one in blocks(page) if one.language == "yaml")
    sets = by_name(load(files=[write("shown.yaml", shown)]))
    found = [(one.name, one.every, one.temperature) for one in sets.values()]
    assert found == [("aime24", 50, 0.6), ("gsm8k", 10, 0.0), ("style", 50, 0.6)]
    sets = by_name(load(files=[write("conversations.yaml", conversations)]))
    workflows = [one.workflow and one.workflow.name for one in sets.values()]
    assert workflows == [None, "env", "single_turn"]
