"""A reward part that asks a model to rate responses, over an OpenAI-compatible server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlcore.config.sections.reward_services import PLACEHOLDER, JudgeConfig
from rlcore.data.sample import Sample
from rollout.json_client import NoAnswer
from rollout.rewards.base import RewardFailure, RewardPart, Score, Verdict, each
from rollout.rewards.services import client_of, failure

ROUTE = "/chat/completions"
RECORDED = 2000  # characters of the judge's answer, its end, which are recorded with the sample


class JudgePart(RewardPart):
    """Rates each response by `template` and `pattern`.

    The score is the rating's place between `low` and `high`.

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
        try:
            said = _content(await self._client.post(self._request(sample), ROUTE))
        except NoAnswer as error:
            return failure(error, self._where, self._config)
        except ValueError as error:
            return RewardFailure("error", f"the judge answered {error}")
        return self._read(said)

    def _request(self, sample: Sample) -> dict[str, Any]:
        config = self._config
        return {
            "model": config.model,
            "messages": [{"role": "user", "content": filled(config.template, sample)}],
            "temperature": 0.0,
            "max_tokens": config.max_tokens,
            **config.extra_body,
        }

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
    """The template with the sample's texts, in one pass: a response cannot name another field."""
    fields = {
        "prompt": sample.prompt_text,
        "response": sample.response_text,
        "label": "" if sample.label is None else str(sample.label),
    }
    return PLACEHOLDER.sub(lambda match: fields[match[1]], template)


def _content(answer: Any) -> str:
    """The text of a chat completion. Raises ValueError: the answer is none."""
    try:
        content = answer["choices"][0]["message"]["content"]
    except (TypeError, KeyError, IndexError):
        raise ValueError(f"no chat completion: {str(answer)[:80]!r}") from None
    if not isinstance(content, str):
        raise ValueError(f"a message without text: {str(content)[:80]!r}")
    return content
