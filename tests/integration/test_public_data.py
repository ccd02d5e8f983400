"""Rows in the formats of the field, through the real commands: data, train, train --resume."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from workspace import LEARNING, Workspace

from rlcore.runs.rollouts import read_rollouts

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "data"))
import public_rows as public

EXACT = "reward.parts={right: {function: exact_match}}"
MATH = "reward.parts={right: {function: math}}"
NOTHING_ELSE = "reward.parts.liked.weight=0"


@pytest.fixture(scope="module")
def folder(workspace: Workspace) -> Path:
    folder = workspace.folder / "public"
    folder.mkdir()
    for make in (
        public.verl_gsm8k,
        public.dapo_17k,
        public.openai_gsm8k,
        public.openai_chat,
        public.trl,
        public.open_instruct,
        public.slime,
        public.verifiers,
        public.plain,
    ):
        rows = [make(f"{i}+{i}=", str(2 * i)) for i in range(1, 41)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{make.__name__}.jsonl").write_text(lines)
        if make is not public.slime:  # its tools have an empty map, which parquet cannot hold
            public.write_parquet(folder / f"{make.__name__}.parquet", rows)
    return folder


@pytest.mark.everyday
def test_verls_gsm8k_trains_as_it_is(workspace: Workspace, folder: Path) -> None:
    given = (f"data.paths={folder / 'verl_gsm8k.parquet'}", MATH, NOTHING_ELSE)
    shown = workspace.command("data", str(workspace.base), "run.name=verl-data", *given)
    assert shown.code == 0, shown.err
    assert "format verl, prompt in 'prompt', label in 'reward_model.ground_truth'" in shown.out
    assert "reward   1 for the label itself: '2'" in shown.out
    assert "reward   0 for a wrong answer: '4'" in shown.out
    run = workspace.train("verl", *given, *LEARNING, "training.steps=2")
    assert run.code == 0, run.err
    assert max(run.rows) == 2
    samples = read_rollouts(run.rollouts(2))
    assert {sample["metadata"]["source"] for sample in samples} == {"openai/gsm8k"}
    for sample in samples:
        assert sample["prompt_text"] == f"{int(sample['label']) // 2}+{int(sample['label']) // 2}="
        assert sample["metadata"]["extra_info"]["split"] == "train"
    assert run.rows[2]["rollout/reward_errors"] == 0


@pytest.mark.parametrize(
    ("file", "more"),
    [
        ("dapo_17k.parquet", ()),
        ("openai_gsm8k.jsonl", (MATH,)),
        ("openai_chat.parquet", ()),
        ("trl.parquet", ()),
        ("open_instruct.parquet", ()),
        ("slime.jsonl", ("data.tools_key=null",)),
        ("verifiers.parquet", ()),
        ("plain.jsonl", ()),
    ],
)
def test_every_format_is_read_and_scored(
    workspace: Workspace, folder: Path, file: str, more
) -> None:
    given = (f"data.paths={folder / file}", EXACT, NOTHING_ELSE, *more)
    shown = workspace.command("data", str(workspace.base), "run.name=shown", *given)
    assert shown.code == 0, shown.err
    assert shown.out.count("reward   1 for the label") >= 3


@pytest.mark.parametrize(
    ("setting", "answer"),
    [
        ("data.label_key=reward_model", "reward_model.ground_truth"),
        ("data.label_key=ground_truth", "set data.label_key to reward_model.ground_truth"),
        ("data.prompt_key=question", "set data.prompt_key to extra_info.question"),
    ],
)
def test_the_nearest_attempts_are_answered(workspace: Workspace, folder, setting, answer) -> None:
    given = (f"data.paths={folder / 'verl_gsm8k.parquet'}", EXACT, NOTHING_ELSE, setting)
    run = workspace.train("attempt", *given)
    assert run.code == 2
    assert answer in run.err
    assert len(run.err.strip().splitlines()) == 1
    assert not run.folder.exists()


def test_a_mixture_resumes_in_its_order(workspace: Workspace, folder: Path) -> None:
    sources = {
        "verl": {"paths": str(folder / "verl_gsm8k.parquet"), "weight": 3},
        "plain": {"paths": str(workspace.folder / "data" / "train.jsonl"), "weight": 1},
    }
    given = ("data.paths=[]", f"data.sources={json.dumps(sources)}")
    whole = workspace.train("mixed", *given, "training.steps=6")
    assert whole.code == 0, whole.err
    workspace.train("mixed-2", *given, "training.steps=3", "checkpoint.every=3")
    rest = workspace.train("mixed-2", *given, "training.steps=6", "--resume")
    assert rest.code == 0, rest.err
    drawn = Counter()
    for step in range(1, 7):
        ids = [
            [(s["draw"], s["prompt_id"], s["metadata"]["source"]) for s in read_rollouts(path)]
            for path in (whole.rollouts(step), rest.rollouts(step))
        ]
        assert ids[0] == ids[1]
        drawn.update(source for _, _, source in ids[0])
    assert drawn["verl"] > drawn["plain"] > 0
    sources["verl"]["weight"] = 1
    other = workspace.train("mixed-2", "data.paths=[]", f"data.sources={json.dumps(sources)}",
                            "training.steps=7", "--resume")  # fmt: skip
    assert other.code == 2
    assert "resume with the same data" in other.err


def test_chats_of_several_turns_are_fine_tuned(workspace: Workspace, folder: Path) -> None:
    roles = ("user", "assistant", "user", "assistant")
    chats = [zip(roles, (f"{i}=", f"{i}", "+", "1"), strict=True) for i in range(10, 40)]
    rows = [{"messages": [{"role": r, "content": c} for r, c in chat]} for chat in chats]
    path = public.write_parquet(folder / "turns.parquet", rows)
    for turns, tokens in (("last", 2), ("all", 4), ("each", 5)):
        given = (f"data.paths={path}", f"data.train_turns={turns}", "training.steps=2")
        run = workspace.sft(f"turns-{turns}", *given)
        assert run.code == 0, run.err
        assert run.rows[1]["val/sequence_lengths"] == tokens, sorted(run.rows[1])
