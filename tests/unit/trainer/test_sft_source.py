"""Supervised batches: what is trained on, in which order, and what bad rows get."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from rlcore.config import Config
from rlcore.config.sections.algorithm import LossConfig
from rlcore.data.batch import RolloutBatch
from rlcore.errors import ConfigError, DataError
from rlcore.trainer.credit import CreditAssignment
from rlcore.trainer.objective import Objective
from rlcore.trainer.sources import RowSource
from tests.unit.data.prompt_sets import excluded


def make_config(path: str, *, batch_size: int = 4, **data) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "sft"},
            "model": {"path": "unused"},
            "data": {"paths": [path], **data},
            "training": {"steps": 1, "batch_size": batch_size},
            "algorithm": {"loss": {"name": "sft"}},
        }
    )


@pytest.fixture
def additions(write_rows) -> str:
    return write_rows([{"prompt": f"{i}+{i}=", "label": str(2 * i)} for i in range(10)])


def trained_text(sample, tokenizer) -> str:
    return tokenizer.decode(sample.tokens[sample.loss_mask == 1])


def trained_alone(path: str, tokenizer, **data) -> str:
    """The text that the first row of a file is trained on."""
    source = RowSource(make_config(path, batch_size=1, **data), tokenizer)
    return trained_text(source.next_step(1).samples[0], tokenizer)


def test_label_and_eos_are_trained(additions, tokenizer):
    samples = RowSource(make_config(additions, shuffle=False), tokenizer).next_step(1).samples
    assert len(samples) == 4
    assert tokenizer.decode(samples[3].tokens) == "3+3=6<eos>"
    assert [trained_text(s, tokenizer) for s in samples] == ["0<eos>", "2<eos>", "4<eos>", "6<eos>"]
    assert samples[3].token_versions().tolist() == [0, 0]
    assert samples[3].rollout_logprobs.tolist() == [0.0, 0.0]
    assert (samples[3].prompt_text, samples[3].response_text) == ("3+3=", "6")
    batch = RolloutBatch.from_samples(samples)
    assert batch.num_trainable == 8


def test_without_eos_only_the_label_is_trained(additions, tokenizer):
    assert trained_alone(additions, tokenizer, shuffle=False, add_eos=False) == "0"


def test_a_text_label_becomes_the_assistants_message(write_rows, chat_tokenizer):
    path = write_rows([{"prompt": [{"role": "user", "content": "1+2"}], "label": "3"}])
    source = RowSource(make_config(path, batch_size=1), chat_tokenizer)
    sample = source.next_step(1).samples[0]
    assert chat_tokenizer.decode(sample.tokens) == "<1+2\n<3<eos>"
    assert trained_text(sample, chat_tokenizer) == "3<eos>"


def test_the_last_assistant_message_is_the_label_without_label_key(write_rows, chat_tokenizer):
    messages = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
    path = write_rows([{"prompt": messages}])
    assert trained_alone(path, chat_tokenizer, label_key=None) == "3<eos>"


@pytest.mark.parametrize("label", [None, 7, "", ["3"]])
def test_a_label_that_is_no_text_names_the_row(write_rows, tokenizer, label):
    path = write_rows([{"prompt": "1=", "label": "1"}, {"prompt": "3=", "label": label}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2: .*text label"):
        RowSource(make_config(path), tokenizer)


def test_a_template_that_rewrites_the_prompt_is_refused(write_rows, tokenizer):
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    path = write_rows([{"prompt": [{"role": "user", "content": "1"}], "label": "3"}])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*writes the prompt differently"):
        RowSource(make_config(path), tokenizer)


def test_resuming_gives_the_undisturbed_batches(additions, tokenizer):
    def ids(rollouts):
        return [(s.draw, s.prompt_id) for s in rollouts.samples]

    source = RowSource(make_config(additions), tokenizer)
    steps = [source.next_step(step) for step in range(1, 6)]
    assert [s.epoch for s in steps] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert steps[0].metrics == {"rollout/excluded_prompts": 0.0}
    resumed = RowSource(make_config(additions), tokenizer)
    resumed.restore(json.loads(json.dumps(steps[1].snapshot)))
    assert [ids(resumed.next_step(step)) for step in (3, 4, 5)] == [ids(s) for s in steps[2:]]
    assert source.evaluate() == ({}, [])


def test_rows_that_cannot_fit_with_their_answers_are_left_out(
    write_rows, tokenizer, tmp_path, caplog
):
    """The prompt alone would fit; a run would end at the step that draws the row."""
    rows = [{"prompt": f"{i}=", "label": "1" * size} for i, size in enumerate((3, 7, 5, 9, 8))]
    config = make_config(write_rows(rows), batch_size=2, shuffle=False)
    config.policy.max_tokens_per_microbatch = 11  # 2 of the prompt, 1 of EOS
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 10}))
    config.model.path = str(tmp_path)
    with caplog.at_level(logging.WARNING):
        source = RowSource(config, tokenizer)
    step = source.next_step(1)
    step = source.next_step(2)
    assert excluded(source.rows.prompts) == [f"{config.data.paths[0]}:{row}" for row in (4, 5)]
    assert step.metrics == {"rollout/excluded_prompts": 2.0}
    assert [trained_text(s, tokenizer) for s in step.samples] == ["11111<eos>", "111<eos>"]
    assert [s.prompt_id.rpartition(":")[2] for s in step.samples] == ["3", "1"]
    assert "2 of 5 rows have more than the context (max_position_embeddings" in caplog.text
    assert "rows.jsonl:4)" in caplog.text
    config.policy.max_tokens_per_microbatch = 9
    assert RowSource(config, tokenizer).rows.prompts.num_excluded == 3
    config.policy.max_tokens_per_microbatch = 5
    with pytest.raises(
        ConfigError, match=r"all 5 rows have more than policy\.max_tokens_per_microbatch, .* = 5"
    ):
        RowSource(config, tokenizer)
    alone = RowSource(make_config(write_rows(rows[:3])), tokenizer)
    assert source.rows.prompts.fingerprint() == alone.rows.prompts.fingerprint()


# --- chats of several turns -----------------------------------------------------------------------

# The template of `chat_tokenizer`, which marks for transformers what the assistant says.
MARKED = (
    "{% for m in messages %}<{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "<eos>{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<{% endif %}"
)


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def test_every_turn_of_the_assistant_is_trained(write_rows, chat_tokenizer):
    rows = [
        {
            "messages": [
                {"role": "system", "content": "+"},
                *chat("1+2", "3", "3+4", "7", "=", "11"),
            ]
        },
        {"messages": chat("5", "6")},
    ]
    config = make_config(write_rows(rows), batch_size=2, shuffle=False)
    samples = RowSource(config, chat_tokenizer).next_step(1).samples
    assert trained_text(samples[0], chat_tokenizer) == "3<eos>7<eos>11<eos>"
    chat_tokenizer.chat_template = MARKED
    for sample, row in zip(samples, rows, strict=True):
        oracle = chat_tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        assert oracle["input_ids"][:-1] == sample.tokens.tolist()  # all but the last line break
        assert oracle["assistant_masks"][:-1] == sample.loss_mask.tolist()
        assert sample.num_trainable == len(sample.rollout_logprobs) == sum(sample.loss_mask)
    assert RolloutBatch.from_samples(samples).num_trainable == sum(s.num_trainable for s in samples)


@pytest.mark.parametrize(
    ("data", "trained"), [({"train_turns": "last"}, "7<eos>"), ({"add_eos": False}, "37")]
)
def test_which_turns_and_ends_are_trained(write_rows, chat_tokenizer, data, trained):
    path = write_rows([{"messages": chat("1+2", "3", "3+4", "7")}])
    assert trained_alone(path, chat_tokenizer, **data) == trained


# like Qwen3's, which shows the thoughts of the last turn alone
REWRITES = (
    "{% for m in messages %}<{{ '=' if m['role'] == 'assistant' and loop.last else '' }}"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<{% endif %}"
)


@pytest.mark.parametrize(
    ("turns", "sequences"),
    [
        ("all", ["<1+2<=3<eos>", "<1+2<3<3+4<=7<eos>"]),
        ("each", ["<1+2<=3<eos>", "<1+2<3<3+4<=7<eos>"]),
        ("last", ["<1+2<3<3+4<=7<eos>"]),
    ],
)
def test_turns_that_the_template_rewrites_are_sequences_of_one_row(
    write_rows, tokenizer, turns, sequences
):
    tokenizer.chat_template = REWRITES
    path = write_rows([{"messages": chat("1+2", "3", "3+4", "7")}, {"messages": chat("1", "2")}])
    config = make_config(path, batch_size=2, shuffle=False, train_turns=turns)
    source = RowSource(config, tokenizer)
    *of_row, single = source.next_step(1).samples
    assert [tokenizer.decode(s.tokens) for s in of_row] == sequences
    trained = [trained_text(s, tokenizer) for s in of_row]
    assert trained == ["=3<eos>", "=7<eos>"][-len(of_row) :]
    assert [s.index for s in of_row] == [*range(len(of_row))]
    assert {(s.draw, s.rollout_id, s.group_id, s.prompt_id) for s in of_row} == {
        (0, 0, 0, f"{path}:1")
    }
    assert (of_row[-1].prompt_text, of_row[-1].response_text) == ("<1+2<3<3+4<", "7")
    if len(of_row) > 1:
        assert (of_row[0].prompt_text, of_row[0].response_text) == ("<1+2<", "=3")
    assert (single.draw, single.index) == (1, 0)
    assert source.rows.answers.lengths.tolist() == [len(of_row[-1].tokens), len(single.tokens)]
    assert source.rows.answers.trained == sum(s.num_trainable for s in (*of_row, single))


def test_each_parts_what_the_template_keeps_and_trains_the_same_tokens(write_rows, chat_tokenizer):
    path = write_rows([{"messages": chat("1+2", "3", "3+4", "7", "5", "6")}])
    whole, apart = (
        RowSource(make_config(path, batch_size=1, train_turns=turns), chat_tokenizer)
        .next_step(1)
        .samples
        for turns in ("all", "each")
    )
    assert [trained_text(s, chat_tokenizer) for s in whole] == ["3<eos>7<eos>6<eos>"]
    assert [trained_text(s, chat_tokenizer) for s in apart] == ["3<eos>", "7<eos>", "6<eos>"]
    for sample in apart:
        assert np.array_equal(sample.tokens, whole[0].tokens[: len(sample.tokens)])


def test_a_row_is_left_out_if_its_longest_sequence_does_not_fit(write_rows, tokenizer):
    """An earlier turn may be the longest, as its thought is left out later."""
    tokenizer.chat_template = REWRITES.replace("'='", "'=' * (9 if loop.index == 2 else 1)")
    later = [{"role": "user", "content": "3"}, *chat("1", "2")]
    rows = [{"messages": row} for row in (chat("1", "2", "3", "4"), chat("1", "2"), later)]
    config = make_config(write_rows(rows), shuffle=False)
    assert RowSource(config, tokenizer).rows.answers.lengths.tolist() == [14, 14, 8]
    config.policy.max_tokens_per_microbatch = 13
    source = RowSource(config, tokenizer)
    assert excluded(source.rows.prompts) == [f"{config.data.paths[0]}:{row}" for row in (1, 2)]
    assert source.rows.answers.lengths.tolist() == [8]
    assert [trained_text(s, tokenizer) for s in source.next_step(1).samples] == ["=2<eos>"] * 4


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_loss_counts_a_row_once_however_many_sequences_it_has(
    write_rows, chat_tokenizer, aggregation
):
    path = write_rows([{"messages": chat("1", "23", "4", "5")}, {"messages": chat("1", "2")}])

    def weights(turns: str, **loss: object) -> list[float]:
        config = make_config(path, batch_size=2, shuffle=False, train_turns=turns)
        config.algorithm.loss = LossConfig(name="sft", aggregation=aggregation, **loss)
        batch = RolloutBatch.from_samples(RowSource(config, chat_tokenizer).next_step(1).samples)
        credit = CreditAssignment(config, Objective(config.algorithm))
        return credit.assign(batch, [range(batch.num_sequences)])["weights"].tolist()

    assert weights("each") == weights("all")
    expected = {"token-mean": 1 / 7, "seq-mean-token-mean": 1 / 9, "seq-mean-token-sum": 1 / 3}
    apart = weights("each", per_rollout=False)
    assert apart[0] == pytest.approx(expected[aggregation])


def test_a_completion_of_messages_is_the_label(write_rows, chat_tokenizer):
    """The conversational prompt-completion rows of TRL."""
    row = {"prompt": chat("1+2"), "completion": [{"role": "assistant", "content": "3"}]}
    assert trained_alone(write_rows([row]), chat_tokenizer) == "3<eos>"


def test_a_call_of_a_tool_is_an_answer(write_rows, tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['content'] or '' }}{% for c in m.get('tool_calls') or [] %}"
        "{{ c['function']['name'] }}+{{ c['function']['arguments']['a'] }}{% endfor %}"
        "{{ '<eos>' if m['role'] == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}<{% endif %}"
    )
    call = {"type": "function", "function": {"name": "3", "arguments": '{"a": 4}'}}
    row = {
        "messages": [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
        ]
    }
    assert trained_alone(write_rows([row]), tokenizer) == "3+4<eos>3+43+4<eos>"
