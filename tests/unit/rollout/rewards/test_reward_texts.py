"""What a reward model of another family is sent: the chat, in its own template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from pydantic import ValidationError

from rlcore.config.sections.data import DataConfig
from rlcore.config.sections.reward_services import RewardServiceConfig
from rlcore.data.examples import open_examples
from rlcore.data.generation import Completion
from rlcore.data.prompts import PromptSet
from rlcore.data.sample import Sample
from rlcore.errors import ModelError
from rollout.conversation.samples import make_sample
from rollout.rewards.base import RewardFailure
from rollout.rewards.services import ServicePart, texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MakeSample = Callable[..., Sample]
# of the reward model: nothing like the policy's "<"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }};{% endfor %}"
)


@pytest.fixture
def theirs(chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> str:
    """The folder of the reward model's tokenizer, which puts a BOS before every text."""
    from tokenizers import processors

    chat_tokenizer.chat_template = TEMPLATE
    eos = chat_tokenizer.eos_token_id
    chat_tokenizer.bos_token = chat_tokenizer.eos_token
    chat_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", eos)]
    )
    folder = tmp_path / "rm"
    chat_tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_chat_is_rendered_by_the_reward_models_own_template(
    sample: MakeSample, theirs: str
) -> None:
    asked = sample("two")
    asked.messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "1+1="}]
    plain = sample("three")
    # without the BOS: the server's tokenizer puts it there
    expected = ["[s]short;[u]1+1=;[a]two;", "[u]1+1=;[a]three;"]
    for kind, key in (("sglang", "text"), ("openrlhf", "query")):
        config = RewardServiceConfig(url="http://h/", format=kind, tokenizer=theirs)
        assert ServicePart("rm", config)._request([asked, plain])[key] == expected
    assert texts(None, "key")([asked]) == ["1+1=two"]


def test_samples_have_the_messages_of_their_row(
    chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "1+1="}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": chat}) + "\n" + json.dumps({"prompt": "2+2="}) + "\n")
    prompts = PromptSet.of(
        open_examples(DataConfig(paths=[str(path)], label_key=None)), chat_tokenizer
    )
    nothing = np.zeros(0, dtype=np.int32)
    made = Completion(nothing, nothing.astype(np.float32), "stop", ())
    first = make_sample(prompts[0], 0, 0, made)
    assert first.messages == chat
    assert first.prompt_text == "<1+1=\n<"
    assert make_sample(prompts[1], 1, 0, made).messages is None
    assert "messages" not in first.to_record(), "the text of the prompt is recorded already"
    assert Sample.from_record(first.to_record()).messages is None


def test_a_tokenizer_without_a_template_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    config = RewardServiceConfig(
        url="http://h/classify", format="sglang", tokenizer=str(tmp_path / "plain")
    )
    with pytest.raises(ModelError, match=r"parts\.rm\.service\.tokenizer: .* no chat template"):
        ServicePart("rm", config)
    missing = config.model_copy(update={"tokenizer": str(tmp_path / "nothing")})
    with pytest.raises(ModelError, match=r"parts\.rm\.service\.tokenizer: .* is not a folder"):
        ServicePart("rm", missing)


def test_slimes_format_renders_no_chat() -> None:
    with pytest.raises(ValidationError, match="sends prompt and response apart"):
        RewardServiceConfig(url="http://h/", format="slime", tokenizer="/models/rm")


def test_a_chat_that_the_template_refuses_is_a_failure(
    sample: MakeSample, chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    chat_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    chat_tokenizer.save_pretrained(tmp_path / "strict")
    config = RewardServiceConfig(
        url="http://127.0.0.1:9/", format="sglang", tokenizer=str(tmp_path / "strict")
    )
    [got] = asyncio.run(ServicePart("rm", config).score([sample("two")]))
    reason = "book.jsonl:7: the chat template refuses the messages: roles must alternate"
    assert got == RewardFailure("error", reason)
