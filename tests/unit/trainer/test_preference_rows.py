"""Rows with preferred answers: every shape that data sets have, and what bad rows get."""

from __future__ import annotations

from typing import Any

import pytest

from rlcore.config import Config
from rlcore.data.sample import Sample
from rlcore.errors import DataError
from rlcore.trainer.held_out import HeldOutRows, batch_of_rows
from rlcore.trainer.sources import RowSource

USER = {"role": "user", "content": "2+2="}
RIGHT = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}


def make_config(path: str, estimator: str = "dpo", **data: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "pairs"},
            "model": {"path": "unused"},
            "data": {"paths": [path], **data},
            "training": {"steps": 1, "batch_size": 2},
            "algorithm": {"estimator": {"name": estimator}},
        }
    )


def samples_of(path: str, tokenizer: Any, estimator: str = "dpo", **data: Any) -> list[Sample]:
    source = RowSource(make_config(path, estimator, shuffle=False, **data), tokenizer)
    return source.next_step(1).samples


SHAPES: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
    "question": {"question": "2+2=", "chosen": "4", "rejected": "5"},
    "implicit": {"chosen": "2+2=4", "rejected": "2+2=5"},
    "messages behind a text": {"prompt": "2+2=", "chosen": [RIGHT], "rejected": [WRONG]},
    "messages behind messages": {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]},
    "texts behind messages": {"prompt": [USER], "chosen": "4", "rejected": "5"},
    "chats": {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
    "chats that repeat the prompt": {
        "prompt": [USER], "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
    "as in UltraFeedback": {
        "prompt": "2+2=", "chosen": [USER, RIGHT], "rejected": [USER, WRONG], "score_chosen": 8.5},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_pair(shape: str, write_rows: Any, tokenizer: Any) -> None:
    """The tokenizer's template writes the contents of messages behind one another."""
    path = write_rows([SHAPES[shape], SHAPES[shape]])
    right, wrong = samples_of(path, tokenizer)[:2]
    assert [tokenizer.decode(s.tokens) for s in (right, wrong)] == ["2+2=4<eos>", "2+2=5<eos>"]
    trained = [tokenizer.decode(s.tokens[s.loss_mask == 1]) for s in (right, wrong)]
    assert trained == ["4<eos>", "5<eos>"]
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert (right.response_text, wrong.response_text) == ("4", "5")
    assert right.group_id == wrong.group_id
    assert right.rollout_id != wrong.rollout_id


def test_pairs_of_a_step_are_its_groups(write_rows: Any, tokenizer: Any) -> None:
    rows = [{"prompt": f"{i}+0=", "chosen": f"{i}", "rejected": "x"} for i in range(4)]
    batch = batch_of_rows(samples_of(write_rows(rows), tokenizer))
    assert batch.vectors["rewards"].tolist() == [1, 0, 1, 0]
    groups = batch.vectors["group_ids"].tolist()
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert batch.num_rollouts == 4
    assert batch.versions is None


def test_the_beginning_that_two_texts_share_ends_before_a_blank(
    write_rows: Any, tokenizer: Any
) -> None:
    row = {"chosen": "2+2= 4", "rejected": "2+2= 5"}
    right, wrong = samples_of(write_rows([row, row]), tokenizer)[:2]
    assert right.prompt_text == wrong.prompt_text == "2+2="
    assert (right.response_text, wrong.response_text) == (" 4", " 5")


def test_answers_without_a_partner(write_rows: Any, tokenizer: Any) -> None:
    """And pairs among them, of which each answer counts by itself."""
    rows = [
        {"prompt": "1+1=", "completion": "2", "label": True},
        {"prompt": "1+1=", "completion": "3", "label": False},
    ]
    good, bad = samples_of(write_rows(rows), tokenizer, "kto")
    assert [(s.response_text, s.reward) for s in (good, bad)] == [("2", 1.0), ("3", 0.0)]
    pairs = samples_of(write_rows([SHAPES["texts"]] * 2), tokenizer, "kto")
    assert [s.reward for s in pairs] == [1.0, 0.0, 1.0, 0.0]
    with pytest.raises(DataError, match=r":1: learning from preferences needs 'chosen' and"):
        samples_of(write_rows(rows), tokenizer, "dpo")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "one answer": ({"prompt": "2+2=", "chosen": "4"}, "'rejected' must be text"),
    "an empty answer": ({"prompt": "2+2=", "chosen": "4", "rejected": ""}, "'rejected' must be"),
    "a number": ({"prompt": "2+2=", "chosen": 4, "rejected": "5"}, "'chosen' must be text"),
    "two kinds": ({"prompt": "2+2=", "chosen": "4", "rejected": [WRONG]}, "both be text, or both"),
    "nothing in common": ({"chosen": "a", "rejected": "b"}, "no beginning that both"),
    "other prompts": (
        {"chosen": [USER, RIGHT], "rejected": [{**USER, "content": "2+3="}, WRONG]},
        "differ before the assistant's last message",
    ),
    "the user speaks last": (
        {"prompt": "2+2=", "chosen": [USER], "rejected": [USER]},
        "must end with the assistant's",
    ),
    "no verdict": ({"prompt": "2", "completion": "4", "label": "yes"}, "must be true or false"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_named(case: str, write_rows: Any, tokenizer: Any) -> None:
    row, message = BAD[case]
    fine = SHAPES["texts"] if "chosen" in row else {**row, "label": True}
    path = write_rows([fine, row])
    with pytest.raises(DataError, match=rf":2: .*{message}"):
        samples_of(path, tokenizer, "kto", format="preference")


def test_rows_without_preferences_are_refused(write_rows: Any, tokenizer: Any) -> None:
    path = write_rows([{"prompt": "2+2=", "label": "4"}])
    with pytest.raises(DataError, match="learning from preferences needs 'chosen' and 'rejected'"):
        samples_of(path, tokenizer)


def test_a_long_answer_leaves_its_pair_out(write_rows: Any, tokenizer: Any) -> None:
    rows = [SHAPES["texts"], {**SHAPES["texts"], "rejected": "5" * 40}, SHAPES["texts"]]
    config = make_config(write_rows(rows))
    config.policy.max_tokens_per_microbatch = 20
    source = RowSource(config, tokenizer)
    assert len(source.rows) == 2
    assert source.next_step(1).metrics["rollout/excluded_prompts"] == 1


def test_supervised_fine_tuning_takes_the_chosen_answers(write_rows: Any, tokenizer: Any) -> None:
    config = make_config(write_rows([SHAPES["texts"], SHAPES["texts"]]))
    config.algorithm.loss.name = "sft"
    samples = RowSource(config, tokenizer).next_step(1).samples
    assert [s.response_text for s in samples] == ["4", "4"]


def test_supervised_fine_tuning_takes_no_bad_answer(write_rows: Any, tokenizer: Any) -> None:
    rows = [
        {"prompt": "1+1=", "completion": "2", "label": True},
        {"prompt": "1+1=", "completion": "3", "label": False},
    ]
    config = make_config(write_rows(rows))
    config.algorithm.loss.name = "sft"
    with pytest.raises(DataError, match=r":2: the 'label' says that the 'completion' is bad"):
        RowSource(config, tokenizer)


def test_held_out_rows_come_in_batches(write_rows: Any, tokenizer: Any) -> None:
    rows = [{"prompt": f"{i}+0=", "chosen": f"{i}", "rejected": "x"} for i in range(5)]
    config = make_config(write_rows(rows))
    config.evaluation.paths = [write_rows(rows)]
    source = RowSource(config, tokenizer)
    held_out = HeldOutRows(source.held_out, 2)
    assert held_out.count("") == 3
    texts = [tokenizer.decode(held_out.batch("", index).tokens.tolist()) for index in range(3)]
    assert [text.count("<eos>") for text in texts] == [4, 4, 2]
    for index, value in enumerate((1.0, 4.0, 4.0)):
        size = held_out.batch("", index).num_sequences // 2
        held_out.add("eval/", {"loss": held_out.batch("", index).vectors["rewards"][:size] * value})
    # a mean over rows, not over batches
    assert held_out.metrics() == {"eval/loss": pytest.approx((1 + 0 + 4 + 0 + 4) / 5)}
    assert held_out.metrics() == {}
