"""Each rule of `nccl_rules`: the wrong program is caught, with both calls named, the right runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.nccl_rules.rule_cases import CASES
from tests.parity.spawn import run_ranks

RANKS = Path(__file__).with_name("rule_ranks.py")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """How each program ended on each rank."""
    folder = tmp_path_factory.mktemp("nccl_rules") / "ranks"
    run_ranks(RANKS, 3, folder, list(CASES), deadline_s=180)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize(
    ("program", "rank", "words"),
    [
        ("subset_batch_first", 0, [
            r"Stuck: rank 0: the first call on a group makes its communicator.*\[0, 1, 2\]",
            r"rank 0: batch_isend_irecv\(isend to 1\) at rule_cases.py:\d+ transfer",
            r"rank 1: batch_isend_irecv\(irecv from 0\) at rule_cases.py",
            r"never came.*\n  rank 2 is at rule_cases.py:\d+ subset_batch_first"]),
        ("ring_of_single_sends", 0, [r"(Stuck|Aborted): .*isend"]),
        ("call_on_an_aborted_group", 0, [r"Aborted: all_reduce at .* gone: abort\(\) at rule"]),
        ("send_buffer_overwritten", 0, [r"BufferRace: rank 0: the send buffer of batch_isend"]),
        ("receive_buffer_written", 1, [r"BufferRace: rank 1: the receive buffer of batch_isend"]),
        ("one_buffer_on_two_groups", 0, [
            r"BufferRace: rank 0: all_reduce at .* uses a buffer of all_reduce on .*rule_cases"]),
        ("guarded_send_buffer_overwritten", 0, [r"BufferRace: .*send buffer.*written by aten"]),
        ("guarded_receive_buffer_read", 1, [r"BufferRace: .*receive buffer.*read by aten.mul"]),
        ("sizes_differ", 0, [r"rank 0: all_reduce SUM .*float32\[3\]", r"rank 1: .*float32\[4\]"]),
        ("dtypes_differ", 1, [r"Mismatch: ", r"rank 1: .*float32", r"rank 0: .*bfloat16"]),
        ("kinds_differ", 0, [r"Mismatch: ", r"rank 0: barrier", r"rank 1: all_reduce"]),
        ("roots_differ", 0, [r"Mismatch: ", r"rank 0: .* 0\) at", r"rank 1: .* 1\) at"]),
        ("splits_differ", 1, [r"Mismatch: ", r"\[8, 8\] bytes out, \[8, 8\] in", r"\[4, 12\] b"]),
        ("transfers_differ_in_size", 1, [
            r"Mismatch: ", r"rank 0: isend float32\[4\]", r"rank 1: irecv float32\[5\]"]),
        ("transfers_differ_in_tag", 1, [r"Mismatch: ", r"rank 0: .*tag 0", r"rank 1: .*tag 1"]),
    ],
)  # fmt: skip
def test_a_wrong_program_is_caught(
    ended: list[dict[str, Any]], program: str, rank: int, words: list[str]
) -> None:
    for word in words:
        assert re.search(word, str(ended[rank][program]), re.DOTALL), ended[rank][program]


@pytest.mark.parametrize(
    ("program", "rank", "result"),
    [
        ("subset_batch_after_a_collective", 1, [0, 1, 2, 3]),
        ("single_send_first", 1, None),
        ("ring_in_a_batch", 2, 1.0),
        ("waits_first", 1, [0, 2, 4, 6]),
        ("guarded_waits_first", 1, [0, 2, 4, 6]),
        ("one_buffer_twice_on_a_group", 0, [4, 4]),
        ("coalesced", 0, [3] * 5),
        ("uneven_lists", 1, [0, 1, 1, 2, 2, 2, 3, 3]),
    ],
)
def test_a_right_program_runs(
    ended: list[dict[str, Any]], program: str, rank: int, result: Any
) -> None:
    assert ended[rank][program] == result


def test_a_buffer_that_is_read_early_holds_no_data(ended: list[dict[str, Any]]) -> None:
    assert ended[1]["receive_buffer_read"] == "[nan, nan, nan, nan]"


def test_only_synchronize_shows_data_to_other_processes(ended: list[dict[str, Any]]) -> None:
    right = "[0.0, 1.0, 2.0, 3.0]"
    assert ended[1]["looks_past_the_stream"] == {
        "plain": right,  # not caught without guard()
        "plain, synchronized": right,
        "guarded": "[nan, nan, nan, nan]",
        "guarded, synchronized": right,
    }


def test_a_limit_counts_from_the_enqueueing(ended: list[dict[str, Any]]) -> None:
    found = ended[0]["stuck_and_queued_behind"]
    assert re.search(r"Stuck: rank 0: all_reduce .* after it was enqueued", found["stuck"])
    assert re.search(r"Aborted: .*batch_isend_irecv.* queued behind: .*all_reduce", found["behind"])
    # the second has had half of its limit
    assert found["seconds"] < 8 + 8  # and what asking the peers takes
    assert ended[1]["stuck_and_queued_behind"] == {}, "the other group lives"


def test_what_nccl_refuses(ended: list[dict[str, Any]]) -> None:
    allowed = [name for name, outcome in ended[0]["refused"].items() if outcome == "allowed"]
    assert not allowed
    assert "strides (1, 4), at rule_cases.py" in ended[0]["refused"]["not contiguous"]


def test_results_are_gloos_to_the_bit(ended: list[dict[str, Any]]) -> None:
    for rank in range(3):
        same = ended[rank]["all_collectives_as_gloo"]
        assert all(same.values()), same
        assert len(same) >= 12
