from __future__ import annotations

import io
import os
import pty
from collections.abc import Callable
from itertools import pairwise

import pytest

from rlcore.data.sample import Sample, TurnSpan
from rlcore.terminal import LastingStream
from rlcore.tracking.format import clipped, duration, number, sample_lines
from rlcore.tracking.progress import Progress

METRICS = {
    "rollout/reward": 0.4123,
    "objective/kl": 0.0031,
    "val/sequence_lengths": 3.214,
    "perf/tokens_per_second": 12345.6,
    "time/step": 2.13,
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_say_what_matters() -> None:
    stream = io.StringIO()
    clock = Clock()
    progress = Progress("addition", 40, stream, clock=clock)
    progress.start({"layout": "TP 2 x DP 1", "attention": "unfused\n(no GPU)"})
    clock.now += 5
    progress.log(0, {"eval/score": 0.38})
    clock.now += 3
    progress.log(1, METRICS)
    clock.now += 2
    progress.log(
        2, {**METRICS, "eval/score": 0.5, "eval/accuracy": 0.25, "eval/aime24/score": 0.125}
    )
    progress.note("early stopping: armed")
    clock.now += 1
    progress.close("early_stopped")
    assert stream.getvalue().splitlines() == [
        "run addition",
        "  layout     TP 2 x DP 1",
        "  attention  unfused",
        "             (no GPU)",
        "step  0/40 | eval 0.380",
        (
            "step  1/40 | reward 0.412 | kl 0.00310 | length 3.21 | 12.3k tok/s | 2.1 s/step |"
            " 1m57s left"
        ),
        (
            "step  2/40 | reward 0.412 | kl 0.00310 | length 3.21 | 12.3k tok/s | 2.1 s/step |"
            " 1m35s left | eval 0.500 (accuracy 0.250) | eval aime24 0.125"
        ),
        "early stopping: armed",
        "run addition: stopped early after step 2/40, 11 s",
    ]


def test_a_run_without_reward_shows_its_loss_and_its_own_clock() -> None:
    stream = io.StringIO()
    clock = Clock()
    progress = Progress("sft", 2, stream, clock=clock)
    clock.now += 0.5
    progress.log(1, {"loss/policy_avg": 2.5})
    clock.now += 0.5
    progress.log(2, {"loss/policy_avg": float("nan")})
    assert stream.getvalue().splitlines() == [
        "step 1/2 | loss 2.50 | 0.50 s/step | 0.50 s left",
        "step 2/2 | loss nan | 0.50 s/step",
    ]


def test_the_time_left_of_a_resumed_run_counts_its_own_steps() -> None:
    clock = Clock()
    progress = Progress("a", 100, io.StringIO(), clock=clock)
    assert progress.seconds_left is None
    progress.start({})
    clock.now += 4
    progress.log(91, {})
    assert progress.seconds_left == pytest.approx(36)
    for step in range(92, 100):
        clock.now += 1
        progress.log(step, {})
    assert progress.seconds_left == pytest.approx((4 + 8) / 9)


def test_quick_steps_share_lines() -> None:
    stream = io.StringIO()
    clock = Clock()
    progress = Progress("quick", 500, stream, clock=clock)
    for step in range(1, 501):
        clock.now += 0.0625
        progress.log(step, METRICS if step != 77 else {**METRICS, "eval/score": 0.5})
    progress.close("completed")
    lines = stream.getvalue().splitlines()
    said = [at for at, line in enumerate(lines) if line.startswith("(")]
    assert said == [1], "it is said once, before the first gap"
    assert lines.pop(1) == "(a line for several quick steps; metrics.jsonl has each)"
    steps = [int(line.split("/")[0].split()[-1]) for line in lines[:-1]]
    assert steps[:5] == [1, 33, 65, 77, 109]
    assert steps[-1] == 500
    assert all(b - a == 32 for a, b in pairwise(steps) if b not in (77, 500))


def test_what_follows_a_step_follows_its_line(make_sample: Callable[..., Sample]) -> None:
    stream = io.StringIO()
    clock = Clock()
    progress = Progress("quick", 9, stream, clock=clock)
    for step in (1, 2, 3, 4, 5):
        progress.log(step, METRICS)
        if step == 2:
            progress.show_samples(2, [make_sample()])
        if step == 4:
            progress.note("early stopping")
    progress.close("interrupted")
    heads = [
        line.split(" |")[0].split(":")[0]
        for line in stream.getvalue().splitlines()
        if not line.startswith(("   ", "("))
    ]
    assert heads == [
        "step 1/9",
        "step 2/9",
        "  training sample of step 2",
        "step 4/9",
        "early stopping",
        "step 5/9",
        "run quick",
    ]


def test_samples_are_shown_as_text(make_sample: Callable[..., Sample]) -> None:
    stream = io.StringIO()
    sample = make_sample(
        response_text="46\nis it", reward=0.5, reward_parts={"math": 1.0, "form": 0.0}
    )
    Progress("a", 9, stream).show_samples(3, [sample])
    Progress("a", 9, stream).show_samples(3, [make_sample()], "held-out sample (aime24)")
    assert stream.getvalue().splitlines() == [
        (
            "  training sample of step 3: reward 0.500, math 1.00, form 0, 3 tokens, ended by stop,"
            " expected '46'"
        ),
        "    > 12+34=",
        "    < 46",
        "      is it",
        "  held-out sample (aime24) of step 3: reward 1.00, 3 tokens, ended by stop, expected '46'",
        "    > 12+34=",
        "    < 46",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_response_does_not_steer_the_terminal(
    make_sample: Callable[..., Sample], terminal: bool
) -> None:
    stream = Terminal() if terminal else io.StringIO()
    sample = make_sample(response_text="\x1b]0;mine\x07\x1b[2J\r46 \u202e64\x9b\ud800")
    Progress("a", 9, stream).show_samples(3, [sample])
    assert r"\x1b]0;mine\x07\x1b[2J\r46 \u202e64\x9b\ud800" in stream.getvalue()
    assert not set("\x07\r\u202e\x9b") & set(stream.getvalue())


def test_a_terminal_shows_the_same_lines_above_a_bar(make_sample: Callable[..., Sample]) -> None:
    stream = Terminal()
    clock = Clock()
    progress = Progress("addition", 40, stream, clock=clock)
    progress.start({"layout": "TP 2"})
    clock.now += 3
    progress.log(1, METRICS)
    progress.show_samples(1, [make_sample(response_text="[bold]46[/nonsense]")])
    progress.close("completed")
    text = stream.getvalue()
    for expected in (
        "layout",
        "1/40",
        "1m57s left",
        "[bold]46[/nonsense]",
        "completed after step 1/40",
    ):
        assert expected in text
    assert "\x1b[" in text


def cells(progress: Progress) -> dict[str, str]:
    names, texts = (column.cells for column in progress.table().columns)
    return {str(name): str(text) for name, text in zip(names, texts)}


def test_a_notice_in_the_table_does_not_steer_the_terminal() -> None:
    progress = Progress("a", 9, Terminal(), clock=Clock())
    progress.show_notices(["engine-0 said \x1b[2J"])
    assert cells(progress)["LOOKS WRONG"] == r"engine-0 said \x1b[2J"


def test_a_run_is_read_at_a_glance() -> None:
    clock = Clock()
    progress = Progress("addition", 40, Terminal(), clock=clock)
    assert cells(progress) == {
        "run": "addition  step  0/40  0.00 s",
        "step": "(after the first step)",
    }
    clock.now += 3
    progress.log(0, {"eval/score": 0.4})
    clock.now += 2
    row = METRICS | {
        "eval/aime/score": 0.2,
        "rollout/staleness_mean": 1.21,
        "rollout/zero_std_groups": 3.0,
        "rollout/engines_serving": 4.0,
        "perf/engine_idle_fraction": 0.12,
        "time/generation": 1.5,
        "time/engine": 1.1,
        "time/training": 0.5,
    }
    progress.log(1, row)
    found = cells(progress)
    assert found.pop("step").startswith("reward 0.412  kl 0.00310  length 3.21  12.3k tok/s")
    assert found == {
        "run": "addition  step  1/40  5.0 s",
        "evaluation": "0.400 (step 0)  aime 0.200 (step 1)",
        "rollouts": "staleness 1.21  3 groups without variance",
        "load": "4 engines serving  engine idle 12%",
        "time": "generation 75%  training 25%",
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (1, "1.00"), (0.41234, "0.412"), (-3.217, "-3.22"), (99.96, "100"),
        (999.4, "999"), (999.6, "1.00k"), (12345, "12.3k"), (999_600, "1.00M"), (2.5e9, "2.50G"),
        (3e17, "3.00e+17"), (0.00312, "0.00312"), (3.1e-5, "3.1e-05"), (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)  # fmt: skip
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.123, "0.12 s"), (0.999, "1.0 s"), (8.31, "8.3 s"), (9.96, "10 s"), (59.4, "59 s"),
        (59.7, "1m00s"), (200, "3m20s"), (3599.6, "1h00m"), (7500, "2h05m"), (273_600, "3d04h"),
        (float("nan"), "?"), (-1, "?"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_long_texts_keep_both_ends(make_sample: Callable[..., Sample]) -> None:
    text = "A" * 300 + "B" * 300
    assert clipped(text, 100) == "A" * 50 + " [... 500 characters ...] " + "B" * 50
    assert clipped("short", 100) == "short"
    assert len(sample_lines(make_sample(response_text=text), limit=100)[2]) < 140


def test_arguments_that_few_readers_of_json_know_are_shown(
    make_sample: Callable[..., Sample],
) -> None:
    call = {"function": {"name": "add", "arguments": {"x": 2**70, "half": "\ud800"}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    sample = make_sample(messages=(message,), turn_spans=(TurnSpan(0, 0, 0, 1),))
    line = sample_lines(sample)[1]
    assert line.endswith(f'add {{"x":{2**70},"half":"\ud800"}}')


def test_a_reader_that_has_gone_does_not_end_the_run() -> None:
    """`rlcore train | head`, or a `tee` that was killed."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        progress = Progress("a", 3, stream)
        progress.write("one")
        progress.write("two")


@pytest.mark.parametrize("plain", [True, False])
def test_a_terminal_that_is_closed_does_not_end_the_run(
    plain: bool,
    make_sample: Callable[..., Sample],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A connection that is lost while the run goes on, `rlcore train & disown` before a logout."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        if plain:
            monkeypatch.setattr(stream, "isatty", lambda: False)
        progress = Progress("a", 3, stream)
        progress.start({"layout": "TP 1"})
        os.close(ours)
        progress.log(1, METRICS)
        progress.show_samples(1, [make_sample()])
        progress.note("WARNING of step 1")
        progress.close("completed")
    (told,) = [record.message for record in caplog.records]
    assert "nothing is shown from here on, since the output was closed" in told


def test_a_closed_terminal_that_lacks_a_character_does_not_end_the_run() -> None:
    ours, theirs = pty.openpty()
    os.close(ours)
    with os.fdopen(theirs, "w", buffering=1, encoding="latin-1") as stream:
        lasting = LastingStream(stream)
        lasting.write("\u6771\n")
        assert not lasting.isatty()


@pytest.mark.parametrize("terminal", [False, True])
def test_characters_that_the_terminal_lacks_are_spelled_out(
    terminal: bool, make_sample: Callable[..., Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="latin-1")
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    Progress("a", 9, stream).show_samples(1, [make_sample(response_text="caf\u00e9 \u6771")])
    assert "caf\u00e9 \\u6771" in written.getvalue().decode("latin-1")
