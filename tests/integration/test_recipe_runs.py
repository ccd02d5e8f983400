"""Each recipe for real data, at toy size through the real commands, on rows of the real shape.

A model of 2 layers and a character tokenizer is warmed up to answer in the form that the recipe
asks for, so that some answers are right. What is replaced: model, data, layout, engine, sizes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from json_server import answering
from workspace import ROOT, Run, Workspace, make_classifier

from rlcore.config.load import load_config
from rlcore.runs.rollouts import read_rollouts

sys.path.insert(0, str(ROOT / "tests" / "unit" / "data"))
import public_rows as public

RECIPES = ROOT / "examples" / "recipes"
DIGITS = [1 + i % 3 for i in range(24)]  # the answers
PARALLEL = ("tensor", "pipeline", "context", "expert")
TOY = (
    "model.dtype=fp32", "run.threads=1", "cluster.launcher=local", "cluster.processes_per_node=1",
    *(f"policy.parallel.{name}=1" for name in PARALLEL), "policy.parallel.sequence=false",
    "policy.optimizer.distributed=false", "critic.optimizer.distributed=false",
    "policy.max_tokens_per_microbatch=4096", "algorithm.minibatches=1",
    "rollout.engine.kind=embedded", "rollout.engine.colocated=false", "rollout.engine.count=1",
    "rollout.engine.server=null", "rollout.max_staleness=0", "rollout.prompts_per_step=4",
    "training.steps=2", "training.epochs=null", "training.episodes=null", "reward.workers=1",
    "checkpoint.export_hf=false", "tracking.show_samples=0",
)  # fmt: skip
PROGRAMS = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
LOWERCASE = json.dumps({"func_name": "validate_lowercase", "N": None, "quantifier": None})


def gsm8k(digit: int) -> dict[str, Any]:
    return {"question": f"What is {digit} + 0?", "answer": f"It is {digit}.\n#### {digit}"}


def verl_gsm8k(digit: int) -> dict[str, Any]:
    return public.verl_gsm8k(f"What is {digit} + 0?", str(digit), digit)


def dapo(digit: int) -> dict[str, Any]:
    asked = (
        "Solve the following math problem step by step. The last line of your response should be of"
        " the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
        f"What is {digit} + 0?\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    return public.dapo_17k(asked, str(digit))


def eurus(digit: int) -> dict[str, Any]:
    if digit == 1:
        return public.eurus("What is 1 + 0? Put the answer in a box.", "1")
    return public.eurus("Write Python code that prints 2.", PROGRAMS, "taco")


def webinstruct(digit: int) -> dict[str, Any]:
    return public.webinstruct(f"What is {digit} + 0?", str(digit))


def rlvr(digit: int) -> dict[str, Any]:
    if digit == 1:
        return public.rlvr_mixed("Say hello in lowercase.", LOWERCASE, "ifeval")
    verifier = "gsm8k" if digit == 2 else "MATH"
    return public.rlvr_mixed(f"What is {digit} + 0?", str(digit), verifier)


@dataclass(frozen=True)
class Case:
    """A recipe, rows of its data, and what the model is warmed up to answer."""

    recipe: str
    rows: Any
    answers: tuple[str, ...] = ()
    format: str = "verl"
    given: tuple[str, ...] = ()
    heldout: str | None = None  # its evaluation set
    sources: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=lambda: {"right"})
    tried: str = "behind ####"  # where `rlcore data` finds a right answer
    jsonl: bool = False
    length: int = 10  # of an answer

    @property
    def name(self) -> str:
        return f"{self.recipe.replace('/', '-')}-{self.rows.__name__}"


FOUR = ("rollout.samples_per_prompt=4",)
BARE = "data.prompt_template=null"  # verl's prompts hold the instruction
GRPO = "gsm8k/qwen2.5-0.5b-grpo"
HASHES = tuple(f"#### {digit}" for digit in (1, 2, 3))
CASES = [
    Case(GRPO, gsm8k, HASHES, "openai", FOUR, heldout="gsm8k"),
    Case(GRPO, verl_gsm8k, HASHES, "verl", (*FOUR, BARE), heldout="gsm8k"),
    Case("gsm8k/qwen2.5-0.5b-ppo", gsm8k, (), "openai", (), heldout="gsm8k", jsonl=True),
    Case(
        "dapo/qwen2.5-math-7b",
        dapo,
        tuple(f"Answer: {d}" for d in (1, 2, 3)),
        heldout="aime24",
        given=("rollout.samples_per_prompt=8", "evaluation.sets.aime24.samples_per_prompt=4",
               "reward.parts.overlong.args.buffer=4", "evaluation.sets.aime24.k=[1]",
               "checkpoint.best.metric=eval/aime24/avg@4"),
        sources={"math_dapo"},
        parts={"right", "overlong"},
        tried="in a line",
    ),
    Case(
        "code/qwen2.5-coder-7b",
        eurus,
        ("```python\nprint(2)\n```", "```python\nprint(3)\n```", "\\boxed{1}", "\\boxed{2}"),
        given=("rollout.samples_per_prompt=8", "reward.sandbox.concurrency=2"),
        heldout="held_out",
        length=26,
        sources={"taco", "numina_cn_k12"},
        parts={"code", "math"},
        tried="in a box",
    ),
    Case(
        "judge/qwen2.5-7b",
        webinstruct,
        format="openai",
        given=("rollout.samples_per_prompt=4", "reward.parts.overlong.args.buffer=4"),
        parts={"judge", "overlong"},
        tried="itself",
    ),
    Case(
        "llama-3.1-8b-ppo",
        rlvr,
        format="open-instruct",
        given=(),
        heldout="",
        sources={"gsm8k", "MATH", "ifeval"},
        parts={"answer", "constraints"},
        tried="itself",
    ),
]  # fmt: skip


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An OpenAI endpoint whose model knows numbers, and finds every other text right."""
    monkeypatch.setenv("JUDGE_KEY", "secret")
    calls = count(1)

    def answer(path: str, headers: Mapping[str, str], body: Any) -> tuple[int, Any]:
        assert path == "/v1/chat/completions"
        assert headers["Authorization"] == "Bearer secret"
        prompt = body["messages"][-1]["content"]
        reference, answer = (
            prompt.partition(f"[{what}]\n")[2].partition(f"\n[end of {what}]")[0]
            for what in ("reference answer", "student's answer")
        )
        rating = reference in answer or (not answer.isdigit() and next(calls) % 2)
        said = {"message": {"role": "assistant", "content": f"They differ. [[{int(rating)}]]"}}
        return 200, {"choices": [said]}

    with answering(answer) as url:
        yield f"{url}/v1"


def write_rows(case: Case, folder: Path) -> Path:
    rows = [case.rows(digit) for digit in DIGITS]
    if case.jsonl:
        path = folder / f"{case.name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    return Path(public.write_parquet(folder / f"{case.name}.parquet", rows))


def warmed_up(workspace: Workspace, case: Case, model: Path) -> Path:
    """Teach the model, in seconds, to answer its prompts with any of the case's answers."""
    if not case.answers:
        return model
    path = workspace.folder / f"{case.name}-warmup.jsonl"
    with path.open("w") as file:
        for number, digit in enumerate(DIGITS):
            row = case.rows(digit)
            prompt = row.get("prompt") or row.get("question") or row["messages"]
            answer = case.answers[number // 3 % len(case.answers)]  # each to each prompt
            file.write(json.dumps({"prompt": prompt, "label": answer}) + "\n")
    recipe = load_config([RECIPES / f"{case.recipe}.yaml"]).config.data
    template = None if BARE in case.given else json.dumps(recipe.prompt_template)
    run = workspace.sft(
        f"{case.name}-warmup", f"model.path={model}", f"data.paths={path}",
        f"data.as_chat={str(recipe.as_chat).lower()}", f"data.prompt_template={template or 'null'}",
        "training.steps=80", "training.batch_size=24", "policy.optimizer.lr=5e-3",
    )  # fmt: skip
    assert run.code == 0, run.err
    return run.folder / "hf"


@pytest.mark.parametrize("case", [
    # verl's rows are trained on in test_public_data.py
    pytest.param(case, id=case.name, marks=pytest.mark.full if case.rows is verl_gsm8k else ())
    for case in CASES
])  # fmt: skip
def test_a_recipe_trains_on_rows_of_its_data(workspace: Workspace, judge: str, case: Case) -> None:
    chat_model = workspace.chat_model()
    data = write_rows(case, workspace.folder)
    given = [str(RECIPES / f"{case.recipe}.yaml"), *TOY, f"run.dir={workspace.folder / 'runs'}",
             f"run.name={case.name}", f"data.paths={data}", f"model.path={chat_model}",
             f"rollout.sampling.max_new_tokens={case.length}", *case.given]  # fmt: skip
    if case.heldout is not None:
        key = f"evaluation.sets.{case.heldout}" if case.heldout else "evaluation"
        given += [f"{key}.paths={data}", f"{key}.max_prompts=4"]
    if "judge" in case.parts:
        given.append(f"reward.parts.judge.judge.url={judge}")
    if "llama" in case.recipe:
        make_classifier(chat_model, workspace.folder / "value_model")
        given.append(f"critic.path={workspace.folder / 'value_model'}")
    valid = workspace.command("validate", *given)
    assert valid.code == 0, valid.err
    shown = workspace.command("data", "--ask-services", *given)
    assert shown.code == 0, shown.err
    assert f"format {case.format}, prompt in " in shown.out
    pointed_out = [line for line in shown.out.splitlines() if line.startswith("!")]
    assert not any("scores the label no higher" in line for line in pointed_out), shown.out
    if "judge" not in case.parts:  # a stub, which takes any text with the right digit
        assert not pointed_out, shown.out
    assert f" for the label {case.tried}" in shown.out
    given.append(f"model.path={warmed_up(workspace, case, chat_model)}")
    run = workspace.command("train", *given, name=case.name)
    assert run.code == 0, run.err
    check_run(run, case)


def check_run(run: Run, case: Case) -> None:
    """Its rewards are those of the recipe's parts, of all of them, and none failed."""
    assert max(run.rows) == 2
    samples = [sample for step in (1, 2) for sample in read_rollouts(run.rollouts(step))]
    for step in (1, 2):
        assert run.rows[step]["rollout/reward_errors"] == 0
        assert run.rows[step]["rollout/reward_timeouts"] == 0
    assert {part for sample in samples for part in sample["reward_parts"]} == case.parts
    assert all(sample["metadata"]["correct"] in (True, False) for sample in samples)
    if case.sources:
        assert {sample["metadata"]["source"] for sample in samples} <= case.sources
    if case.answers:
        assert len({sample["metadata"]["correct"] for sample in samples}) == 2, "right and wrong"
        assert run.rows[2]["train/grad_norm"] > 0


def test_repeated_prompts_are_dropped(tmp_path: Path) -> None:
    """As they are repeated in DAPO-Math-17k and AIME-2024."""
    rows = [dapo(digit) for digit in (1, 2, 3)] * 40
    source = public.write_parquet(tmp_path / "many.parquet", rows)
    script = [sys.executable, str(RECIPES / "dapo" / "unique.py"), source, "few.parquet"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "few.parquet: 3 of 120 rows\n"
    assert pq.read_table(tmp_path / "few.parquet").to_pylist() == rows[:3]
