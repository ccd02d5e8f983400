"""Supervised batches: what is trained on, in which order, and what bad rows get."""

from __future__ import annotations

import json

import pytest

from rlcore.config import Config
from rlcore.data.batch import RolloutBatch
from rlcore.errors import DataError
from rlcore.trainer.sources import SFTSource


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


def test_label_and_eos_are_trained(additions, tokenizer):
    samples = SFTSource(make_config(additions, shuffle=False), tokenizer).next_step(1).samples
    assert len(samples) == 4
    assert tokenizer.decode(samples[3].tokens) == "3+3=6<eos>"
    assert [trained_text(s, tokenizer) for s in samples] == ["0<eos>", "2<eos>", "4<eos>", "6<eos>"]
    assert samples[3].token_versions().tolist() == [0, 0]
    assert samples[3].rollout_logprobs.tolist() == [0.0, 0.0]
    assert (samples[3].prompt_text, samples[3].response_text) == ("3+3=", "6")
    batch = RolloutBatch.from_samples(samples)
    assert batch.num_trainable == 8


def test_without_eos_only_the_label_is_trained(additions, tokenizer):
    samples = (
        SFTSource(make_config(additions, shuffle=False, add_eos=False), tokenizer)
        .next_step(1)
        .samples
    )
    assert [trained_text(s, tokenizer) for s in samples] == ["0", "2", "4", "6"]


def test_a_text_label_becomes_the_assistants_message(write_rows, chat_tokenizer):
    path = write_rows([{"prompt": [{"role": "user", "content": "1+2"}], "label": "3"}])
    source = SFTSource(make_config(path, batch_size=1), chat_tokenizer)
    sample = source.next_step(1).samples[0]
    assert chat_tokenizer.decode(sample.tokens) == "<1+2\n<3<eos>"
    assert trained_text(sample, chat_tokenizer) == "3<eos>"


def test_the_last_assistant_message_is_the_label_without_label_key(write_rows, chat_tokenizer):
    messages = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
    source = SFTSource(
        make_config(write_rows([{"prompt": messages}]), batch_size=1, label_key=None),
        chat_tokenizer,
    )
    assert trained_text(source.next_step(1).samples[0], chat_tokenizer) == "3<eos>"


@pytest.mark.parametrize("label", [None, 7, "", ["3"]])
def test_a_label_that_is_no_text_names_the_row(write_rows, tokenizer, label):
    path = write_rows([{"prompt": "1=", "label": "1"}, {"prompt": "3=", "label": label}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2: .*text label"):
        SFTSource(make_config(path), tokenizer)


def test_a_template_that_rewrites_the_prompt_is_refused(write_rows, tokenizer):
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    path = write_rows([{"prompt": [{"role": "user", "content": "1"}], "label": "3"}])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*writes the prompt differently"):
        SFTSource(make_config(path), tokenizer)


def test_resuming_gives_the_undisturbed_batches(additions, tokenizer):
    def ids(rollouts):
        return [(s.draw, s.prompt_id) for s in rollouts.samples]

    source = SFTSource(make_config(additions), tokenizer)
    steps = [source.next_step(step) for step in range(1, 6)]
    assert [s.epoch for s in steps] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert steps[0].metrics == {}
    resumed = SFTSource(make_config(additions), tokenizer)
    resumed.restore(json.loads(json.dumps(steps[1].snapshot)))
    assert [ids(resumed.next_step(step)) for step in (3, 4, 5)] == [ids(s) for s in steps[2:]]
    assert source.evaluate() == ({}, [])
