"""Parts of `reward.parts` that call a server: a reward service, or a judge model."""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from rlcore.config.sections.base import CertificatePath, Section, TokenizerPath, as_list

PLACEHOLDER = re.compile(r"\{(prompt|response|label)\}")
TEMPLATE = """Rate the answer to the question on a scale from 0 to 10.

[question]
{prompt}
[end of question]

[reference answer]
{label}
[end of reference answer]

[answer]
{response}
[end of answer]

Give your reasons, then the rating as [[number]]."""


class ServerConfig(Section):
    """How a server is called."""

    url: list[str]
    """Where to send requests, in turns if there are several; one may stand without the list."""
    timeout_s: PositiveFloat = 60.0
    """Longest time of one attempt."""
    retries: NonNegativeInt = 8
    """Attempts after the first, if the server is down, slow, busy or failing. Their pauses
    double, from 0.5 s up to 30 s: 3 attempts last 4 to 5 s, 6 half a minute, 8 a minute and a half.
    """
    concurrency: PositiveInt = 32
    """Requests at a time."""
    api_key_env: str | None = None
    """Environment variable whose value is sent as a bearer token; default: none is sent."""
    ca_file: CertificatePath | None = None
    """PEM file of the authorities whose certificates are accepted; default: the system's."""

    _one_url = field_validator("url", mode="before")(as_list)

    @field_validator("url")
    @classmethod
    def _has_a_scheme(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("expected at least one URL")
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"expected http://... or https://..., got {url!r}")
        return value

    @model_validator(mode="after")
    def _one_way_to_log_in(self) -> ServerConfig:
        if self.api_key_env is not None and any(urlsplit(url).username for url in self.url):
            raise ValueError("either a user in the URL or `api_key_env`: a request has one of them")
        return self


class RewardServiceConfig(ServerConfig):
    """A service that scores samples: slime's, OpenRLHF's, or SGLang with a reward model."""

    format: Literal["slime", "openrlhf", "sglang"] = "slime"
    """Format of requests and answers: docs/rewards.md."""
    batch_size: PositiveInt = 1
    """Samples per request; slime's format has one."""
    key: str | None = None
    """Key of the score in the answer; default: `rewards` in OpenRLHF's format, none in slime's."""
    tokenizer: TokenizerPath | None = None
    """Folder of the reward model's tokenizer, whose chat template renders prompt and response;
    default: they are sent as the policy saw them."""

    @model_validator(mode="after")
    def _fits_the_format(self) -> RewardServiceConfig:
        if self.format == "slime" and self.batch_size > 1:
            raise ValueError("slime's format has one sample a request: set batch_size to 1")
        if self.format == "slime" and self.tokenizer is not None:
            raise ValueError("slime's format sends prompt and response apart: remove `tokenizer`")
        if self.format == "sglang" and self.key is not None:
            raise ValueError("SGLang's answer has its scores in one place: remove `key`")
        return self


class JudgeConfig(ServerConfig):
    """A model behind an OpenAI-compatible server that rates responses."""

    model: str
    """Name of the model at the server."""
    template: str = TEMPLATE
    """The judge's prompt, with `{prompt}`, `{response}`, `{label}`; default: a request to rate."""
    pattern: str = r"\[\[\s*(-?\d+(?:\.\d+)?)\s*\]\]"
    """Regular expression whose only group is the rating; its last match in the answer counts."""
    low: float = 0.0
    """Rating that scores 0."""
    high: float = 10.0
    """Rating that scores 1."""
    correct_from: float | None = None
    """Rating at which a response is right; default: the judge does not say right or wrong."""
    max_tokens: PositiveInt = 1024
    """Longest answer of the judge."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the request (`temperature`, which is 0, or `chat_template_kwargs`)."""

    @field_validator("template")
    @classmethod
    def _shows_the_response(cls, value: str) -> str:
        if "{response}" not in value:
            raise ValueError("expected {response} in the template: the judge would not see it")
        return value

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, value: str) -> str:
        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        if groups != 1:
            raise ValueError(f"expected one group, the rating; got {groups}")
        return value

    @model_validator(mode="after")
    def _range(self) -> JudgeConfig:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        return self
