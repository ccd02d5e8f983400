"""`rlcore show`: which samples it picks, and what it says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlcore import cli
from rlcore.data.sample import Sample, TurnSpan
from rlcore.runs.directory import RunDirectory
from rlcore.runs.rollouts import write_rollouts


@pytest.fixture
def run(tmp_path: Path, make_sample: Callable[..., Sample]) -> Path:
    directory = RunDirectory.create(tmp_path, "a")
    for step in (2, 3):
        samples = [
            make_sample(draw, reward=draw / 4, prompt_id=f"train.jsonl:{draw}") for draw in range(5)
        ]
        samples[0].metadata["reward_error"] = "mine: raised KeyError (my.py:3 in score)"
        samples[1].response_text = "x" * 3000
        write_rollouts(directory.rollouts_path(step), step, samples)
    return directory.path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli.main(["show", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_samples_are_shown_with_where_they_are_from(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, str(run), "--worst", "--count", "2")
    assert lines[0] == "step 3: 5 samples, mean reward 0.5"
    assert lines[2].startswith(
        "train.jsonl:0, draw 0, sample 0: wrong, reward 0, 3 tokens, ended by"
    )
    assert lines[3:6] == ["> 12+34=", "< 46", "! mine: raised KeyError (my.py:3 in score)"]
    assert lines[7].startswith("train.jsonl:1, draw 1")
    assert "[... 1000 characters ...]" in lines[9]
    assert len(lines) == 10


def test_branches_of_a_rollout_and_verdicts_are_marked(
    tmp_path: Path, make_sample: Callable[..., Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    """Rollout 1 of the draw became three samples, rollouts 0 and 2 one each."""
    run = RunDirectory.create(tmp_path, "b")
    samples = [
        make_sample(7, reward=1 - index / 8, index=index, rollout_id=(7 << 20) + rollout)
        for index, rollout in enumerate([0, 1, 1, 1, 2])
    ]
    for sample, correct in zip(samples, [True, False, False, False, None]):
        sample.metadata.update({} if correct is None else {"correct": correct})
    write_rollouts(run.rollouts_path(1), 1, samples)
    heads = [line for line in shown(capsys, str(run.path), "--best") if ", draw 7, " in line]
    assert [line.partition("draw 7, ")[2].partition("reward")[0] for line in heads] == [
        "sample 0: right, ",
        "sample 1, branch 1 of 3 of rollout 1: wrong, ",
        "sample 2, branch 2 of 3 of rollout 1: wrong, ",
        "sample 3, branch 3 of 3 of rollout 1: wrong, ",
        "sample 4: ",
    ]


def test_their_order_can_be_chosen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def draws(*arguments: str) -> list[str]:
        lines = shown(capsys, str(run), "--count", "3", *arguments)
        return [line.split(",")[1].split()[1] for line in lines if line.startswith("train")]

    assert draws() == ["4", "2", "0"]
    assert draws("--best") == ["4", "3", "2"]
    assert draws("--worst", "--step", "2") == ["0", "1", "2"]


def test_a_step_that_was_not_recorded_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", str(run), "--step", "9"]) == 2
    assert "no samples of step 9" in (said := capsys.readouterr().err)
    assert "it has steps 2 to 3" in said
    assert cli.main(["show", str(tmp_path)]) == 2
    assert "it has none" in capsys.readouterr().err


def test_a_conversation_is_shown_turn_by_turn(
    tmp_path: Path, make_sample: Callable[..., Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "said before"},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "line\nand line"},
        {"role": "assistant", "content": "3"},
    ]
    sample = make_sample(
        messages=messages,
        turn_spans=(TurnSpan(1, 3, 0, 2), TurnSpan(2, 5, 2, 3)),
        token_rewards=np.array([0, 0.25, 1.0], np.float32),
    )
    directory = RunDirectory.create(tmp_path, "a")
    write_rollouts(directory.rollouts_path(1), 1, [sample])
    lines = shown(capsys, str(directory.path))
    assert lines[3:] == [
        "> [user] 1+2?",
        "< [context] said before",
        "> [user] and now?",
        "< [turn 1, 2 tokens, reward 0.250] (hm)",
        '  add {"a":1}',
        "> [tool] line",
        "  and line",
        "< [turn 2, 1 tokens, reward 1.00] 3",
    ]
