"""Reward services: the client of a part, what services are sent and answer, and the part itself.

The formats are slime's, OpenRLHF's and SGLang's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlcore.config.sections.reward_services import RewardServiceConfig, ServerConfig
from rlcore.data.messages import Message
from rlcore.data.sample import Sample
from rlcore.data.tokenizer import leading_bos, load_tokenizer, render_chat
from rlcore.errors import ConfigError, DataError, ModelError
from rlcore.tls import client_context
from rollout.json_client import JsonClient, NoAnswer
from rollout.rewards.base import BatchedPart, RewardFailure, Score, checked

MAX_ANSWER_BYTES = 4 << 20
Texts = Callable[[Sequence[Sample]], list[str]]


def client_of(where: str, config: ServerConfig) -> JsonClient:
    """Return the client of a part whose configuration key is `where`.

    Raises:
        ConfigError: `api_key_env` names a variable that is not set, or `ca_file` no such file.
    """
    if config.ca_file is not None:
        client_context(config.ca_file, where=f"{where}.ca_file")  # says now what is wrong with it
    headers = {}
    if config.api_key_env is not None:
        key = os.environ.get(config.api_key_env)
        if not key:
            raise ConfigError(
                f"{where}.api_key_env: the variable {config.api_key_env} is not set in the"
                " environment of the trainer"
            )
        headers["Authorization"] = f"Bearer {key}"
    return JsonClient(
        config.url,
        where=where,
        timeout_s=config.timeout_s,
        retries=config.retries,
        concurrency=config.concurrency,
        answer_bytes=MAX_ANSWER_BYTES,
        headers=headers,
        ca_file=config.ca_file,
    )


def failure(error: NoAnswer, where: str, config: ServerConfig) -> RewardFailure:
    """Return the failure of the samples that were asked about."""
    attempts = f", in {config.retries + 1} attempts ({where}.retries)" if error.again else ""
    return RewardFailure("timeout" if error.kind == "timeout" else "error", f"{error}{attempts}")


@dataclass
class WireFormat:
    """How samples become the body of a request, and the answer a value a sample.

    `values` returns a number or a mapping of each sample. It raises ValueError for another answer.
    """

    body: Callable[[Sequence[Sample]], Any]
    values: Callable[[Any, Sequence[Sample]], list[Any]]


def wire_format(
    name: Literal["slime", "openrlhf", "sglang"], key: str | None, texts: Texts
) -> WireFormat:
    """Return the format of a name.

    slime's `remote_rm` takes one sample a request; the reward is the answer, or under a key.
    OpenRLHF's `--remote_rm_url` takes lists of texts, prompts and labels, and gives a list of
    rewards. SGLang's `/classify` with a reward model takes a list of texts; the score is the
    embedding.
    """
    if name == "slime":
        return WireFormat(
            _slime_body,
            lambda answer, _: [answer if key is None else _at(answer, key)],
        )
    if name == "sglang":
        return WireFormat(lambda samples: {"text": texts(samples)}, _embeddings)
    rewards = key or "rewards"
    return WireFormat(
        lambda samples: {
            "query": texts(samples),
            "prompts": [sample.prompt_text for sample in samples],
            "labels": [sample.label for sample in samples],
        },
        lambda answer, samples: _as_many(_at(answer, rewards), samples, rewards),
    )


def _slime_body(samples: Sequence[Sample]) -> dict[str, Any]:
    [sample] = samples
    return {
        "prompt": sample.prompt_text,
        "response": sample.response_text,
        "label": sample.label,
        "metadata": sample.metadata,
    }


def _embeddings(answer: Any, samples: Sequence[Sample]) -> list[Any]:
    embeddings = [_at(row, "embedding") for row in _as_many(answer, samples, "the answer")]
    for embedding in embeddings:
        if not isinstance(embedding, list) or len(embedding) != 1:
            size = len(embedding) if isinstance(embedding, list) else "no list"
            raise ValueError(f"an embedding of {size}, expected one score of a reward model")
    return [embedding[0] for embedding in embeddings]


def texts(tokenizer: str | None, key: str) -> Texts:
    """What a reward model reads of a sample, as its chat template or the policy's renders it.

    Args:
        tokenizer: the folder of the reward model's.
        key: the one of the configuration that names the folder, for errors.

    Raises:
        ModelError: there is no tokenizer with a chat template.
    """
    if tokenizer is None:
        return lambda samples: [sample.prompt_text + sample.response_text for sample in samples]
    if not Path(tokenizer).is_dir():
        raise ModelError(f"{key}: {tokenizer} is not a folder; expected a reward model's")
    loaded = load_tokenizer(tokenizer)
    if not loaded.chat_template:
        raise ModelError(
            f"{key}: the tokenizer in {tokenizer} has no chat template: leave the key out to send"
            " prompt and response as the policy saw them"
        )
    # the server's tokenizer puts its BOS before what it is sent
    bos = loaded.decode(leading_bos(loaded))
    return lambda samples: [
        render_chat(
            loaded, conversation(sample), sample.prompt_id, add_generation_prompt=False
        ).removeprefix(bos)
        for sample in samples
    ]


def conversation(sample: Sample) -> list[Message]:
    """The sample's chat: its messages, or its prompt as the user's, and the response."""
    chat = sample.chat or [
        {"role": "user", "content": sample.prompt_text},
        {"role": "assistant", "content": sample.response_text},
    ]
    return [*map(dict, chat)]


def _at(answer: Any, key: str) -> Any:
    if not isinstance(answer, Mapping) or key not in answer:
        keys = ", ".join(map(str, answer))[:80] if isinstance(answer, Mapping) else ""
        got = f"the keys {keys}" if keys else f"{str(answer)[:80]!r}"
        raise ValueError(f"no key {key!r}; got {got}")
    return answer[key]


def _as_many(values: Any, samples: Sequence[Sample], what: str) -> list[Any]:
    if not isinstance(values, list) or len(values) != len(samples):
        got = f"{len(values)} values" if isinstance(values, list) else f"{str(values)[:80]!r}"
        raise ValueError(f"{what}: {got}, expected a list of {len(samples)}")
    return values


class ServicePart(BatchedPart):
    """Sends samples to a service, those of different groups together in one request.

    Raises:
        ConfigError: see `client_of`.
        ModelError: `tokenizer` names a folder without a tokenizer that has a chat template.
    """

    def __init__(self, name: str, config: RewardServiceConfig) -> None:
        super().__init__(batch_size=config.batch_size, concurrency=config.concurrency)
        self._config = config
        self._where = f"reward.parts.{name}.service"
        self._client = client_of(self._where, config)
        rendered = texts(config.tokenizer, f"{self._where}.tokenizer")
        self._format = wire_format(config.format, config.key, rendered)

    async def _ask(self, samples: list[Sample]) -> list[Score]:
        try:
            body = self._format.body(samples)
        except DataError as error:
            return [RewardFailure("error", str(error))] * len(samples)
        try:
            answer = await self._client.post(body)
            return [checked(value) for value in self._format.values(answer, samples)]
        except NoAnswer as error:
            return [failure(error, self._where, self._config)] * len(samples)
        except ValueError as error:
            return [RewardFailure("error", f"the service answered {error}")] * len(samples)

    async def close(self) -> None:
        await super().close()
        await self._client.close()
