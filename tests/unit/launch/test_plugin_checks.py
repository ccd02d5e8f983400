"""Checks that build the algorithms: what they refuse, and how `rlcore validate` says it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlcore import cli
from rlcore.algorithms import Advantages, EstimatorInputs, registry
from rlcore.algorithms.registry import Plugin
from rlcore.config.load import load_config
from rlcore.launch.input_checks import check_plugins

# four lines
HEAD = "run: {name: x}\nmodel: {path: m}\ndata: {paths: [d.jsonl]}\ntraining: {steps: 1}\n"
HERE = f"{__name__}:Student"


PARTS = f"{__name__}:OfParts"


class OfParts:
    """An estimator that reads the parts of the reward."""

    needs = frozenset({"reward_parts"})

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        raise NotImplementedError


class Student:
    """An estimator that reads the teacher itself, and has no rewards a token."""

    needs = frozenset({"teacher_logprobs"})

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        assert inputs.teacher_logprobs is not None
        return Advantages(inputs.teacher_logprobs)


def validate(folder: Path, lines: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `rlcore validate` says against a file that ends with `lines`."""
    file = folder / "run.yaml"
    file.write_text(HEAD + "\n".join(lines) + "\n")
    assert cli.main(["validate", "--elsewhere", str(file)]) == 2
    return (
        capsys.readouterr().err.removeprefix("rlcore: ").replace(str(folder) + "/", "").splitlines()
    )


@pytest.mark.parametrize(
    ("given", "key", "said"),
    [
        # other tests of the process may have registered more
        ("name: passrate", ".name", "unknown curriculum 'passrate'; known: "),
        ("name: pass_rate, flor: 0.2", ".flor", "unknown keyword; did you mean data.curriculum.fl"),
        ("target: 2", "", "target: expected a number between 0 and 1, got 2"),
        ("name: 'no_such:Thing'", ".name", "curriculum 'no_such:Thing': no module 'no_such'"),
    ],
)
def test_a_wrong_curriculum_is_refused_by_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, key: str, said: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(HEAD.replace("[d.jsonl]}", f"[d.jsonl], curriculum: {{{given}}}}}"))
    assert cli.main(["validate", "--elsewhere", str(file)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"rlcore: data.curriculum{key} ({file}:3): {said}"), err


@pytest.mark.parametrize(
    ("lines", "key", "line", "said"),
    [
        (["reward: {non_stop_penalty: 0}", "algorithm:", f"  estimator: {{name: '{PARTS}'}}"],
         "reward.non_stop_penalty", 5, "replaces the sum, and estimator"),
        # seen without torch
        (["algorithm:", "  estimator: {name: gpg}", "  kl: {reward_coef: 0.1}"],
         "algorithm.kl.reward_coef", 7, "got 0.1, but estimator 'gpg' takes no KL into its reward "
         "and would ignore it: set algorithm.kl.loss_coef"),
        (["algorithm:", "  correction: {name: tis, lower: -1}"], "algorithm.correction.lower", 6,
         "got -1, expected at least 0"),
        (["rollout: {samples_per_prompt: 1}", "algorithm: {estimator: {name: ppo}, "
         "normalize_advantages: group}"], "rollout.samples_per_prompt", 5,
         "algorithm.normalize_advantages: group compares the samples of one prompt"),
        # seen when the algorithms are built
        (["algorithm:", f"  estimator: {{name: '{HERE}'}}", "  kl: {reward_coef: 0.1}"],
         "algorithm.kl.reward_coef", 7, "takes no KL into its reward and would ignore it"),
        (["teacher: {path: t}", "algorithm:", f"  estimator: {{name: '{HERE}'}}",
         "  distillation: {coef: 0.1}"], "algorithm.distillation.coef", 8,
         "takes no distillation into its reward and would ignore it"),
        (["algorithm:", f"  estimator: {{name: '{HERE}'}}"], "algorithm.estimator", 6,
         "'teacher_logprobs' is missing: set teacher.path"),
        (["algorithm:", "  loss: {name: clip_cov, clip_cov_ratio: 2.0}"], "algorithm.loss", 6,
         "clip_cov_ratio: expected a number in (0, 1], got 2.0"),
        (["algorithm:", "  loss: {name: gspo, clip_hi: 0.1}"], "algorithm.loss.clip_hi", 6,
         "unknown keyword; did you mean algorithm.loss.clip_high?"),
    ],
)  # fmt: skip
def test_a_refusal_names_key_file_and_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lines: list[str],
    key: str,
    line: int,
    said: str,
) -> None:
    (message,) = validate(tmp_path, lines, capsys)
    assert message.startswith(f"{key} (run.yaml:{line}): "), message
    assert said in message


class NoContext:
    def __init__(self, context: object, tokenizer: object) -> None: ...

    async def __call__(self, prompt: object, draw: int, generate: object) -> list[object]:
        return []


class NoDraw:
    def __init__(self, context: object) -> None: ...

    async def __call__(self, prompt: object, generate: object) -> list[object]:
        return []


class NoCall:
    def __init__(self, context: object) -> None: ...


def takes_two(group: object, step: int) -> bool:
    return True


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("rollout.workflow", "NoContext", r"is called as NoContext\(context\), but takes "
         r"\(context.*missing a required argument: 'tokenizer'"),
        ("rollout.workflow", "NoDraw", r"called as __call__\(self, prompt, draw, generate\), but "
         r"takes .*too many"),
        ("rollout.workflow", "NoCall", "without a method that makes samples: give it rollout"),
        ("rollout.filters", "takes_two", r"called as takes_two\(group\), but takes .*'step'"),
    ],
)  # fmt: skip
def test_workflows_and_filters_that_cannot_be_called_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, name: str, said: str
) -> None:
    section, _, field = key.partition(".")
    value = f"['{__name__}:{name}']" if field == "filters" else f"'{__name__}:{name}'"
    (message,) = validate(tmp_path, [f"{section}: {{{field}: {value}}}"], capsys)
    assert re.match(rf"{key}.*: '{__name__}:{name}' .*{said}", message), message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rollout: {workflow: nope}", "rollout.workflow.*: 'nope' is unknown .known: agent, env, "),
        ("rollout: {filters: [zero_varience]}", "'zero_varience' is unknown; did you mean 'zero_v"),
    ],
)
def test_names_that_nobody_knows_are_refused_by_validate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    (message,) = validate(tmp_path, [line], capsys)
    assert re.search(said, message), message


class Lamp:
    """An environment; `turn` is no tool."""

    def __init__(self, *, colour: str = "white") -> None: ...

    def turn(self, on):  # type: ignore[no-untyped-def]
        """Turn the lamp on."""


class Door:
    """An environment."""

    def __init__(self, *, colour: str = "white") -> None: ...


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (f"env: '{__name__}:Window'", r"rollout\.workflow\.env \(run\.yaml:5\): .*has no 'Window'"),
        (
            f"env: '{__name__}:Lamp'",
            r"rollout\.workflow\.env .*: Lamp\.turn is a public method, and",
        ),
        (
            f"env: '{__name__}:Door', options: {{color: red}}",
            r"rollout\.workflow\.options .*Door: got an unexpected keyword argument 'color'",
        ),
        (f"env: '{__name__}:Door', color: red", r"rollout\.workflow .*: env: .*argument 'color'"),
        ("max_turns: 3", r"rollout\.workflow\.env: missing: name a class, .* or give `mcp`"),
    ],
)
def test_environments_that_cannot_work_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, said: str
) -> None:
    lines = [f"rollout: {{workflow: {{name: env, {given}}}}}"]
    (message,) = validate(tmp_path, lines, capsys)
    assert re.match(said, message), message
    of_a_set = [f"evaluation: {{sets: {{x: {{paths: x, workflow: {{name: env, {given}}}}}}}}}"]
    (message,) = validate(tmp_path, of_a_set, capsys)
    assert re.match(said.replace(r"rollout\.", r"evaluation\.sets\.x\."), message), message


def test_an_environment_that_can_work_is_accepted() -> None:
    workflow = f"rollout.workflow={{name: env, env: '{__name__}:Door', options: {{colour: red}}}}"
    given = ["run.name=x", "model.path=m", "data.paths=d.jsonl", "training.steps=1", workflow]
    assert check_plugins(load_config([], given)) == []


def test_the_workflow_of_an_evaluation_set_is_looked_at_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"evaluation: {{sets: {{x: {{paths: x, workflow: '{__name__}:NoCall'}}}}}}"]
    (message,) = validate(tmp_path, lines, capsys)
    assert message.startswith("evaluation.sets.x.workflow"), message
    assert "without a method that makes samples" in message


def test_a_plugin_that_compares_a_group_needs_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = Plugin("student", Student, (), (), compares_group=True)
    monkeypatch.setitem(registry._ESTIMATORS._plugins, "student", entered)
    lines = ["rollout: {samples_per_prompt: 1}", "algorithm: {estimator: {name: student}}"]
    assert validate(tmp_path, lines, capsys) == [
        "rollout.samples_per_prompt (run.yaml:5): got 1, but estimator 'student' compares the"
        " samples of one prompt: use 2 or more"
    ]


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        (["teacher.path=t"], ["teacher: is ignored: algorithm.distillation.coef is 0"]),
        (["teacher.path=t", "algorithm.estimator.name=ppo", "algorithm.distillation.coef=0.1"], []),
        (["teacher.path=t", f"algorithm.estimator.name={HERE}"], []),
        (["critic.path=c"], ["critic: is ignored: estimator 'grpo' needs no values"]),
        (["critic.path=c", "algorithm.estimator.name=vapo"], []),
        (["algorithm.estimator.name=remax"], []),
        (["algorithm.loss.name=decoupled_ppo", "algorithm.old_logprobs=recompute"], []),
        (
            [
                "algorithm.correction={name: mis, level: geometric, lower: 0.999, upper: 1.001,"
                " veto: 1e-4}"
            ],
            [],
        ),
    ],
)
def test_what_is_accepted_and_noted(overrides: list[str], noted: list[str]) -> None:
    given = ["run.name=x", "model.path=m", "data.paths=d.jsonl", "training.steps=1", *overrides]
    assert check_plugins(load_config([], given)) == noted
