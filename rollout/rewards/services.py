"""Parts that ask a server: a reward service, or a judge model behind OpenAI's API."""

from __future__ import annotations

import asyncio
import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rlcore.config.sections.reward_services import (
    PLACEHOLDER,
    JudgeConfig,
    RewardServiceConfig,
    ServerConfig,
)
from rlcore.data.sample import Sample
from rlcore.data.tokenizer import leading_bos, load_tokenizer, render_chat
from rlcore.errors import ConfigError, DataError, ModelError
from rlcore.tls import client_context
from rollout.json_client import JsonClient, NoAnswer
from rollout.rewards.base import RewardFailure, RewardPart, Score, Verdict, attempted, checked, each

MAX_ANSWER_BYTES = 4 << 20
RECORDED = 2000  # characters from the end of the judge's answer, recorded with the sample
Texts = Callable[[Sequence[Sample]], list[str]]


def client_of(where: str, config: ServerConfig) -> JsonClient:
    """The client of a part whose configuration key is `where`.

    Raises:
        ConfigError: `api_key_env` names an unset variable, or `ca_file` a missing file.
    """
    if config.ca_file is not None:
        # report an invalid file now
        client_context(config.ca_file, where=f"{where}.ca_file")
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


def failure(
    error: NoAnswer | ValueError, who: str, config: ServerConfig, where: str
) -> RewardFailure:
    """The failure of the samples that a server was asked to score."""
    if not isinstance(error, NoAnswer):
        return RewardFailure("error", f"the {who} answered {error}")
    attempts = f", in {config.retries + 1} attempts ({where}.retries)" if error.again else ""
    return RewardFailure("timeout" if error.kind == "timeout" else "error", f"{error}{attempts}")


# --- services -------------------------------------------------------------------------------------


class ServicePart(RewardPart):
    """Sends samples to a service, several groups together in one request.

    Samples that wait while all calls are busy form the next request.

    slime's `remote_rm` takes one sample per request; the reward is the answer, or under a key.
    OpenRLHF's `--remote_rm_url` takes lists of texts, prompts and labels, and returns a list of
    rewards. SGLang's `/classify` with a reward model takes a list of texts; the score is the
    embedding.

    Raises:
        ConfigError: see `client_of`.
        ModelError: `tokenizer` names a folder without a tokenizer that has a chat template.
    """

    def __init__(self, name: str, config: RewardServiceConfig) -> None:
        self._config = config
        self._where = f"reward.parts.{name}.service"
        self._client = client_of(self._where, config)
        self._texts = texts(config.tokenizer, f"{self._where}.tokenizer")
        self._waiting: deque[tuple[Sample, asyncio.Future[Score]]] = deque()
        self._senders: set[asyncio.Task[None]] = set()

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Score]] = [loop.create_future() for _ in samples]
        self._waiting.extend(zip(samples, futures))
        calls = -(-len(self._waiting) // self._config.batch_size)
        for _ in range(min(calls, self._config.concurrency - len(self._senders))):
            self._senders.add(loop.create_task(self._send()))
        return list(await asyncio.gather(*futures))

    async def _send(self) -> None:
        try:
            # let groups that finish in this iteration of the loop join the first batch
            await asyncio.sleep(0)
            while self._waiting:
                size = min(len(self._waiting), self._config.batch_size)
                calls = [self._waiting.popleft() for _ in range(size)]
                if calls := [call for call in calls if not call[1].done()]:
                    await self._send_batch(calls)
        finally:
            # in the same iteration of the loop, since `score` starts a new sender in the next
            self._senders.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _send_batch(self, calls: list[tuple[Sample, asyncio.Future[Score]]]) -> None:
        try:
            scores = await attempted(self._ask([sample for sample, _ in calls]))
        except asyncio.CancelledError:
            for _, future in calls:
                future.cancel()
            raise
        if isinstance(scores, RewardFailure):
            scores = [scores] * len(calls)
        for (_, future), score in zip(calls, scores, strict=True):
            if not future.done():
                future.set_result(score)

    async def _ask(self, samples: list[Sample]) -> list[Score]:
        try:
            body = self._request(samples)
        except DataError as error:
            return [RewardFailure("error", str(error))] * len(samples)
        try:
            answer = await self._client.post(body)
            return [checked(value) for value in self._values(answer, samples)]
        except (NoAnswer, ValueError) as error:
            return [failure(error, "service", self._config, self._where)] * len(samples)

    def _request(self, samples: Sequence[Sample]) -> dict[str, Any]:
        if self._config.format == "slime":
            [sample] = samples
            return {
                "prompt": sample.prompt_text,
                "response": sample.response_text,
                "label": sample.label,
                "metadata": sample.metadata,
            }
        if self._config.format == "sglang":
            return {"text": self._texts(samples)}
        return {
            "query": self._texts(samples),
            "prompts": [sample.prompt_text for sample in samples],
            "labels": [sample.label for sample in samples],
        }

    def _values(self, answer: Any, samples: Sequence[Sample]) -> list[Any]:
        """A number or a mapping for each sample. Raises ValueError for an invalid answer."""
        key = self._config.key
        if self._config.format == "slime":
            return [answer if key is None else _at(answer, key)]
        if self._config.format == "openrlhf":
            return _as_many(_at(answer, key or "rewards"), samples, key or "rewards")
        found = [_at(row, "embedding") for row in _as_many(answer, samples, "the answer")]
        for embedding in found:
            if not isinstance(embedding, list) or len(embedding) != 1:
                size = len(embedding) if isinstance(embedding, list) else "no list"
                raise ValueError(f"an embedding of {size}, expected one score of a reward model")
        return [embedding[0] for embedding in found]

    async def close(self) -> None:
        """Cancel the calls, and close the connections."""
        for sender in list(self._senders):
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        await self._client.close()


def texts(tokenizer: str | None, key: str) -> Texts:
    """The function that renders a sample for a reward model, by its chat template or the policy's.

    Args:
        tokenizer: folder of the reward model's tokenizer.
        key: the configuration key that names the folder, for errors.

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
    # the server's tokenizer adds its own BOS
    bos = loaded.decode(leading_bos(loaded))

    def rendered(sample: Sample) -> str:
        chat = sample.chat or [
            {"role": "user", "content": sample.prompt_text},
            {"role": "assistant", "content": sample.response_text},
        ]
        messages = [*map(dict, chat)]
        text = render_chat(loaded, messages, sample.prompt_id, add_generation_prompt=False)
        return text.removeprefix(bos)

    return lambda samples: list(map(rendered, samples))


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


# --- judges ---------------------------------------------------------------------------------------


class JudgePart(RewardPart):
    """Rates each response by `template` and `pattern`.

    The score is the rating's relative position between `low` and `high`.

    Raises:
        ConfigError: see `client_of`.
    """

    def __init__(self, name: str, config: JudgeConfig) -> None:
        self._config = config
        self._where = f"reward.parts.{name}.judge"
        self._client = client_of(self._where, config)
        self._pattern = re.compile(config.pattern)

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return await each(samples, self._rate)

    async def _rate(self, sample: Sample) -> Score:
        config = self._config
        body = {
            "model": config.model,
            "messages": [{"role": "user", "content": filled(config.template, sample)}],
            "temperature": 0.0,
            "max_tokens": config.max_tokens,
            **config.extra_body,
        }
        try:
            answer = await self._client.post(body, "/chat/completions")
            said = _content(answer)
        except (NoAnswer, ValueError) as error:
            return failure(error, "judge", config, self._where)
        return self._read(said)

    def _read(self, said: str) -> Score:
        config = self._config
        found = self._pattern.findall(said)
        if not found:
            end = said[-80:]
            return RewardFailure("error", f"the judge gave no rating; its answer ends {end!r}")
        try:
            rating = float(found[-1])
        except ValueError:
            return RewardFailure("error", f"the judge's rating {found[-1][:80]!r} is no number")
        if not config.low <= rating <= config.high:
            expected = f"{config.low:g} to {config.high:g}"
            return RewardFailure("error", f"the judge's rating {rating:g} is not in {expected}")
        return Verdict(
            (rating - config.low) / (config.high - config.low),
            None if config.correct_from is None else rating >= config.correct_from,
            info={"judge": said[-RECORDED:]},
        )

    async def close(self) -> None:
        await self._client.close()


def filled(template: str, sample: Sample) -> str:
    """Fill the template in one pass, so that a response cannot name another field."""
    fields = {
        "prompt": sample.prompt_text,
        "response": sample.response_text,
        "label": "" if sample.label is None else str(sample.label),
    }
    return PLACEHOLDER.sub(lambda match: fields[match[1]], template)


def _content(answer: Any) -> str:
    """The text of a chat completion. Raises ValueError for an invalid answer."""
    try:
        content = answer["choices"][0]["message"]["content"]
    except (TypeError, KeyError, IndexError):
        raise ValueError(f"no chat completion: {str(answer)[:80]!r}") from None
    if not isinstance(content, str):
        raise ValueError(f"a message without text: {str(content)[:80]!r}")
    return content
