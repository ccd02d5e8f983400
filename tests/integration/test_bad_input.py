"""Bad input ends a command with code 2 and a line or two on what was got and what to do."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from workspace import Run, Workspace

from rlcore.data.sample import Sample
from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.runs.rollouts import read_rollouts
from rollout.rewards.base import Score
from rollout.rewards.pool import Worker

TINY = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 64}
ROW = '{"prompt": "1+1=", "label": "2"}\n'


@dataclass(frozen=True)
class Scene:
    """The workspace, and a folder with what is wrong."""

    workspace: Workspace
    wrong: Path

    @property
    def runs(self) -> Path:
        return self.workspace.folder / "runs"


def copy_model(model: Path, folder: Path, *, without: str = "-", **config: Any) -> None:
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns(without))
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | config))


@pytest.fixture(scope="module")
def scene(workspace: Workspace) -> Scene:
    return make_scene(workspace)


def make_scene(workspace: Workspace) -> Scene:
    wrong = workspace.folder / "wrong"
    wrong.mkdir()
    copy_model(workspace.model, wrong / "no_weights", without="*.safetensors")
    copy_model(workspace.model, wrong / "no_tokenizer", without="tok*")
    copy_model(
        workspace.model, wrong / "gpt2", model_type="gpt2", architectures=["GPT2LMHeadModel"]
    )
    init_model(wrong / "large", ModelSpec(**TINY, alphabet="0123456789+=-abcdefghijklmnopqrs"))
    init_model(wrong / "wide", ModelSpec(**TINY | {"hidden": 48}))
    (wrong / "no_json").mkdir()
    (wrong / "no_json" / "config.json").write_text("{'model_type': 'qwen3'}")
    (wrong / "empty").mkdir()
    for name, content in {
        "torn.jsonl": ROW + '{"prompt": "1+1=", "lab\n' + ROW,
        "list.jsonl": ROW + '["1+1=", "2"]\n',
        "no_prompt.jsonl": ROW + ROW + '{"promt": "1+1=", "label": "2"}\n',
        "no_label.jsonl": ROW + '{"prompt": "1+1="}\n',
        "label_map.jsonl": ROW + '{"prompt": "1+1=", "label": {"value": 2}}\n',
        "empty_prompt.jsonl": ROW + '{"prompt": "", "label": "2"}\n',
        "no_rows.jsonl": "\n",
        "strange_symbol.jsonl": ROW + '{"prompt": "1±1=", "label": "2"}\n',
        "long.jsonl": 2 * ROW + '{"prompt": "1111+1111=", "label": "2222"}\n' + 2 * ROW,
        "rows.csv": "prompt,label\n1+1=,2\n",
        "mistyped.yaml": (
            "policy:\n  optimizer: {lr: 1.0e-4}\nalgorithm:\n  los: {name: ppo_clip}\n"
        ),
    }.items():
        (wrong / name).write_text(content)
    assert workspace.train("kept", "training.steps=1").code == 0
    assert workspace.train("unsaved", "training.steps=1", "checkpoint.export_hf=false").code == 0
    shutil.rmtree(workspace.folder / "runs" / "unsaved" / "checkpoints" / "step_000001")
    assert workspace.train("wide", "training.steps=1", f"model.path={wrong / 'wide'}").code == 0
    return Scene(workspace, wrong)


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file, but for the lock that is taken and given back."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def assert_refused(run: Run, *says: str) -> None:
    assert run.code == 2, run.err
    lines = run.err.strip().splitlines()
    assert 1 <= len(lines) <= 2, run.err
    assert lines[0].startswith("rlcore: ")
    assert "Traceback" not in run.err + run.out
    for text in says:
        assert text in run.err


# --- what shows before a run of that name is touched ----------------------------------------------

Arguments = Callable[[Scene], list[str]]


def given(*arguments: str) -> Arguments:
    """`{wrong}` and `{runs}` stand for the folders."""
    return lambda scene: [
        a.replace("{wrong}", str(scene.wrong)).replace("{runs}", str(scene.runs)) for a in arguments
    ]


REFUSED: dict[str, tuple[Arguments, tuple[str, ...]]] = {
    # configuration
    "mistyped key": (given("policy.optimizr.lr=1"),
                     ("policy.optimizr", "unknown key", "did you mean policy.optimizer?")),
    "mistyped key in a file": (
        given("{wrong}/mistyped.yaml"),
        ("algorithm.los ", "mistyped.yaml:4", "did you mean algorithm.loss?")),
    "wrong type": (given("policy.optimizer.lr=fast"),
                   ("policy.optimizer.lr", "'fast'", "expected a number")),
    "no length": (given("training.steps=null"), ("how long to train is missing", "training.steps")),
    "unknown estimator": (given("algorithm.estimator.name=gropo"),
                          ("'gropo'", "known: dpo, dr_grpo, ", "did you mean 'grpo'")),
    "estimator's keyword": (
        given("algorithm.estimator={name: ppo, lamda: 0.9}"),
        ("algorithm.estimator.lamda", "did you mean", ".lam?")),
    "plugin's keyword": (
        given("algorithm.estimator={name: 'failing_plugins:Zero', scael: 2}"),
        ("algorithm.estimator.scael", "did you mean algorithm.estimator.scale?")),
    "plugin's keyword of a wrong type": (
        given("algorithm.estimator={name: 'failing_plugins:Zero', scale: big}"),
        ("scale", "expected float", "'big'")),
    "unknown loss": (given("algorithm.loss.name=ppo_clap"),
                     ("'ppo_clap'", "did you mean 'ppo_clip'")),
    "unknown megatron field": (
        given("policy.megatron.num_layrs=4"),
        ("policy.megatron.num_layrs", "no such field", "did you mean 'num_layers'")),
    "megatron field of the model": (
        given("policy.megatron.num_layers=4"),
        ("policy.megatron.num_layers", "the model folder decides it")),
    "value that megatron refuses": (
        given("policy.megatron.recompute_granularity=some"),
        ("policy.megatron.recompute_granularity", "'some'", "expected full or selective")),
    # models
    "no such model": (given("model.path={wrong}/nowhere"),
                      ("{wrong}/nowhere", "does not exist", "Hugging Face folder")),
    "model without weights": (given("model.path={wrong}/no_weights"),
                              ("no_weights", "no weights", "*.safetensors")),
    "architecture": (
        given("model.path={wrong}/gpt2"),
        ("GPT2LMHeadModel is not converted", "LlamaForCausalLM", "Qwen2ForCausalLM",
         "Qwen3ForCausalLM")),
    "config.json": (given("model.path={wrong}/no_json"), ("no_json/config.json", "not valid JSON")),
    "no tokenizer": (given("model.path={wrong}/no_tokenizer"),
                     ("no_tokenizer holds no tokenizer", "set model.tokenizer")),
    "tokenizer of another model": (given("model.tokenizer={wrong}/large"),
                                   ("vocabulary of 31", "34")),
    "critic's vocabulary": (
        given("algorithm.estimator.name=ppo", "critic.path={wrong}/large"),
        ("critic.path", "vocabulary of 34", "has 31")),
    "reference's vocabulary": (
        given("algorithm.kl.loss_coef=0.1", "reference.path={wrong}/large"),
        ("reference.path", "vocabulary of 34", "has 31")),
    # layout
    "heads": (
        given("policy.parallel.tensor=3", "cluster.processes_per_node=3"),
        ("policy.parallel.tensor: 3 does not divide", "attention heads (4)", "set it to 2")),
    "layers": (given("policy.parallel.pipeline=4", "cluster.processes_per_node=4"),
               ("pipeline 4", "2 layers")),
    "world size": (
        given("policy.parallel.tensor=2", "cluster.processes_per_node=3"),
        ("3 processes do not divide into models of 2",)),
    "too few processes": (
        given("policy.parallel.tensor=2"),
        ("needs 2 processes", "cluster.processes_per_node=2", "cluster.launcher=torchrun")),
    "torchrun alone": (given("cluster.launcher=torchrun"),
                       ("no RANK", "torchrun ... -m rlcore train")),
    # data
    "row that is not JSON": (given("data.paths={wrong}/torn.jsonl"),
                             ("torn.jsonl:2", "not JSON", '{"prompt": "1+1=", "lab')),
    "row that is a list": (given("data.paths={wrong}/list.jsonl"),
                           ("list.jsonl:2", "expected a JSON object, got list")),
    "row without prompt": (
        given("data.paths={wrong}/no_prompt.jsonl"),
        ("no_prompt.jsonl:3", "no key 'prompt'", "data.prompt_key", "'promt'")),
    "row without label": (given("data.paths={wrong}/no_label.jsonl"),
                          ("no_label.jsonl:2", "no key 'label'", "data.label_key")),
    "label of a wrong type": (
        given("data.paths={wrong}/label_map.jsonl", "reward.parts={a: {function: exact_match}}"),
        ("label_map.jsonl:2", "text or a number", "a map with 'value'")),
    "empty prompt": (given("data.paths={wrong}/empty_prompt.jsonl"),
                     ("empty_prompt.jsonl:2", "not empty")),
    "no rows": (given("data.paths={wrong}/no_rows.jsonl"), ("no_rows.jsonl: no rows",)),
    "no such file": (given("data.paths={wrong}/nothing.jsonl"),
                     ("nothing.jsonl does not exist", "JSONL or parquet")),
    "suffix": (given("data.paths={wrong}/rows.csv"), ("'.csv'", ".parquet")),
    "symbol": (given("data.paths={wrong}/strange_symbol.jsonl"),
               ("strange_symbol.jsonl:2", "cannot encode", "1±1=")),
    "every prompt too long": (
        given("data.paths={wrong}/long.jsonl", "data.max_prompt_tokens=2"),
        ("all 5 prompts have more than data.max_prompt_tokens = 2", "the shortest has 4")),
    "evaluation row": (given("evaluation.paths=[{wrong}/torn.jsonl]"),
                       ("torn.jsonl:2", "not JSON")),
    # rewards and the rest
    "reward module": (given("reward.parts={a: {function: 'no_such_module:f'}}"),
                      ("reward.parts.a.function", "no module")),
    "reward function": (
        given("reward.parts={a: {function: 'failing_rewards:slown'}}"),
        ("has no attribute 'slown'", "did you mean 'slow'?")),
    "reward name": (given("reward.parts={a: {function: exact}}"),
                    ("'exact' is unknown", "exact_match", "math")),
    "workflow": (given("rollout.workflow=multi"),
                 ("rollout.workflow", "'multi' is unknown", "single_turn")),
    "filter": (given("rollout.filters=[zero]"),
               ("rollout.filters", "'zero' is unknown", "zero_variance")),
    "replay": (
        given("training.debug=train_only", "training.replay={wrong}/step.parquet"),
        ("training.replay: ", "step.parquet does not exist; expected a recorded step")),
    # checkpoints
    "no such checkpoint": (
        given("policy.checkpoint={wrong}/nowhere"),
        ("policy.checkpoint", "does not exist", "expected a run, a checkpoint")),
    "run without checkpoint": (given("policy.checkpoint={runs}/unsaved"),
                               ("policy.checkpoint", "unsaved has no checkpoint")),
    "folder that is no checkpoint": (given("policy.checkpoint={wrong}/empty"),
                                     ("wrong/empty", "is empty", "a checkpoint")),
    "checkpoint of another architecture": (
        given("policy.checkpoint={runs}/wide"),
        ("policy was saved with hidden_size 48", "this model has 32")),
}  # fmt: skip


@pytest.mark.everyday
@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_and_nothing_is_lost(scene: Scene, case: str) -> None:
    arguments, says = REFUSED[case]
    expected = [text.replace("{wrong}", str(scene.wrong)) for text in says]
    assert_refused(scene.workspace.train("fresh", *arguments(scene)), *expected)
    assert not (scene.runs / "fresh").exists(), "the name of the run stays free"

    before = contents(scene.runs / "kept")
    assert_refused(scene.workspace.train("kept", *arguments(scene), "--overwrite"), *expected)
    assert contents(scene.runs / "kept") == before, (
        "the run that was to be overwritten is still there"
    )


# --- run names and resumes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("kept", [], ["run 'kept' exists", "--resume", "--overwrite", "run.name"]),
        ("kept", ["--resume"], ["'kept' is complete at step 1 of 1", "raise training.steps"]),
        (
            "kept",
            ["--resume", "training.steps=2", "model.dtype=bf16"],
            ["was saved in float32", "bfloat16"],
        ),
        ("a/b", [], ["run.name", "plain folder name", "'a/b'"]),
    ],
    ids=["existing", "complete", "other dtype", "no plain name"],
)
def test_a_run_that_cannot_be_started_stays_as_it_is(
    scene: Scene, name: str, arguments: list[str], says: list[str]
) -> None:
    data = f"data.paths={scene.workspace.folder / 'data' / 'train.jsonl'}"
    before = contents(scene.runs / "kept")
    assert_refused(scene.workspace.train(name, data, "training.steps=1", *arguments), *says)
    after = contents(scene.runs / "kept")
    assert {k: v for k, v in after.items() if not k.startswith("logs/")} == {
        k: v for k, v in before.items() if not k.startswith("logs/")
    }


def test_overwrite_spares_a_folder_that_is_no_run(scene: Scene) -> None:
    (scene.runs / "thesis").mkdir()
    (scene.runs / "thesis" / "chapter1.tex").write_text("years of work")
    assert_refused(
        scene.workspace.train("thesis", "--overwrite"),
        "does not look like a run",
        "delete it yourself",
    )
    assert (scene.runs / "thesis" / "chapter1.tex").read_text() == "years of work"


# --- what shows while a run goes ------------------------------------------------------------------


def test_prompts_that_are_too_long_are_counted_and_reported(scene: Scene) -> None:
    paths = f"data.paths={scene.wrong / 'long.jsonl'}"
    run = scene.workspace.train("long", paths, "data.max_prompt_tokens=5", "training.steps=1")
    assert run.code == 0
    said = (
        "1 of 5 prompts have more than data.max_prompt_tokens = 5 tokens and are left out (the"
        f" first: {scene.wrong}"
    )
    said += "/long.jsonl:3)"
    assert run.lines(said), "on the terminal"
    assert said in (run.folder / "logs" / "rank_0.log").read_text()
    assert run.rows[1]["rollout/excluded_prompts"] == 1


def test_an_empty_batch_after_filters(scene: Scene) -> None:
    run = scene.workspace.train(
        "empty", "rollout.filters=['failing_plugins:drops_all']", "rollout.prompts_per_step=2"
    )
    assert_refused(run, "step 1 has 0 of 2 groups", "drops_all dropped 32", "fewer rollout.filters")
    assert run.result["status"] == "failed"
    assert "drops_all dropped 32" in run.result["reason"]


def test_a_reward_that_fails_has_a_defined_score_and_is_counted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Worker.call

    async def patient(worker: Worker, part: str, sample: Sample, timeout_s: float) -> Score:
        hangs = sample.index == 5  # on a busy machine any other may take as long
        return await call(worker, part, sample, timeout_s if hangs else 60.0)

    monkeypatch.setattr(Worker, "call", patient)
    run = scene.workspace.train(
        "reward", "reward.parts={mine: {function: 'failing_rewards:one_way_each'}}",
        "reward.on_error=-0.5", "reward.max_failed=0.9", "reward.timeout_s=0.7", "training.steps=1",
        "rollout.prompts_per_step=1", "rollout.samples_per_prompt=8",
    )  # fmt: skip
    assert run.code == 0, run.err
    assert run.rows[1]["rollout/reward_errors"] == 5
    assert run.rows[1]["rollout/reward_timeouts"] == 1
    samples = read_rollouts(run.rollouts(1))
    assert [sample["reward"] for sample in samples[:6]] == 6 * [-0.5]
    assert [sample["reward_parts"]["mine"] for sample in samples[6:]] == [1.0, 1.0], (
        "the pool goes on"
    )
    log = (run.folder / "logs" / "rank_0.log").read_text()
    causes: set[str] = set()
    for sample, reason in zip(samples, WHY, strict=False):
        said = sample["metadata"]["reward_error"]
        assert re.sub(r" \(.*failing_rewards\.py:\d+ in \w+\)", "", said) == f"mine: {reason}"
        reason = said.removeprefix("mine: ")
        where = f"sample {sample['index']} of draw {sample['draw']} ({sample['prompt_id']})"
        said = f"reward.parts.mine (failing_rewards:one_way_each) failed on {where}: {reason};"
        place = re.search(r"\(\S*failing_rewards\.py:\d+ in", reason)
        cause = place[0] if place else reason
        if cause in causes:
            continue
        causes.add(cause)
        (line,) = run.lines(f"warning: {said}")
        assert line.endswith(
            "; scored -0.5 (reward.on_error: -0.5); more such failures are only counted"
        )
        assert said in log


def test_a_reward_that_never_works_ends_the_run(scene: Scene) -> None:
    run = scene.workspace.train(
        "never", "reward.parts={mine: {function: 'failing_rewards:raises'}}",
        "rollout.prompts_per_step=1", "rollout.samples_per_prompt=8",
    )  # fmt: skip
    assert run.code == 1, run.err
    said = "step 1: 8 of 8 rewards failed, which is more than reward.max_failed (0.1) allows;"
    (line,) = run.lines(f"rlcore: {said}")
    assert "8 times: reward.parts.mine (failing_rewards:raises) failed on sample 7 of draw" in line
    assert line.endswith("no step was trained yet")
    assert re.search(r"raised KeyError: 'solution' \(.*failing_rewards\.py:\d+ in raises\)", line)
    assert "Traceback" not in run.err + run.out
    assert run.result["status"] == "failed"
    assert said in run.result["reason"]


def test_a_reward_with_a_wrong_signature_is_refused(scene: Scene) -> None:
    run = scene.workspace.train(
        "signature", "reward.parts={mine: {function: 'failing_rewards:two_arguments'}}"
    )
    assert_refused(
        run, "reward.parts.mine.function", "is called as two_arguments(sample)", "'label'"
    )


WHY = (
    "returned nan, expected a finite number",
    "returned str 'good', expected a number",
    "returned NoneType 'None', expected a number",
    "raised KeyError: 'solution'",
    "its worker process died with exit code 3",
    "no score after 0.7 s (reward.timeout_s)",
)
