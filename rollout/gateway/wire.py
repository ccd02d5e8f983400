"""Chat completions in the format of OpenAI's clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
)

from rlcore.config.sections.base import as_list
from rlcore.data.generation import Completion, SamplingParams
from rlcore.data.messages import Message
from rlcore.errors import DataError
from rollout.conversation.tool_schemas import check_tools

# keys that a request may have and that have no effect
HARMLESS = frozenset(
    {
        "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
        "service_tier", "store", "user",
    }
)  # fmt: skip
EXPECTED = {
    "messages": "a list of at least one message",
    "tools": 'a list of tools, each {"type": "function", "function": {"name": text}}',
    "tool_choice": '"auto" or "none": a model is not forced to call',
    "stop": "a text, or a list of texts",
    "max_tokens": "a number of tokens, at least 1",
    "max_completion_tokens": "a number of tokens, at least 1",
    "stream": "true or false",
    "stream_options": "an object",
    "logprobs": "true or false",
    "return_token_ids": "true or false",
}
Text = Annotated[str, Field(min_length=1)]
JSON = "application/json"
EVENTS = "text/event-stream"


class Refused(Exception):
    """A request that is answered with an error, in OpenAI's form.

    Args:
        status: HTTP status. Clients retry no 4xx other than 408, 409 and 429.
        param: the offending key of the request.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """The body of the response."""
        kind = {401: "authentication_error", 500: "server_error"}
        error = {
            "message": str(self),
            "type": kind.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return orjson.dumps({"error": error})


class ChatRequest(BaseModel):
    """The content of a request, under OpenAI's keys."""

    model_config = ConfigDict(strict=True)

    messages: list[Any] = Field(min_length=1)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"
    stop: Annotated[list[Text], BeforeValidator(as_list)] = Field(default_factory=list)
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stream: bool = False
    stream_options: dict[str, Any] = Field(default_factory=dict)
    logprobs: bool = False
    return_token_ids: bool = False
    # By the name of the model.
    policy: str | None = None

    @field_validator("tools")
    @classmethod
    def _functions(cls, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for tool in tools:
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError("it is no function")
        return tools

    @property
    def limit(self) -> int | None:
        """Token limit of the turn."""
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(given, default=None)


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn of the model as a program sees it; `completion` is None if no request was made."""

    id: str
    created: int  # seconds since 1970
    model: str
    message: Message
    finish_reason: str
    prompt: NDArray[np.int32]  # [P]
    completion: Completion | None


def held_values(sampling: SamplingParams) -> dict[str, Any]:
    """The sampling keys that a request may only set to the run's own values."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0,
        "n": 1,
        "seed": None,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "top_logprobs": 0,
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
    }


def read_request(
    body: bytes, *, models: Mapping[str, str | None], held: Mapping[str, Any]
) -> ChatRequest:
    """Read the body of a request; for `held` see `held_values`.

    Args:
        models: the policy of `rollout.policies` behind a name; None: the trained one.

    Raises:
        Refused: the body is malformed or asks for what the run does not do; names the key.
    """
    try:
        given = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise Refused(400, f"the body must be an object, got {_short(given)}")
    given = {key: value for key, value in given.items() if value is not None}
    asked = given.pop("model", None)
    for key in [key for key in given if key not in EXPECTED and key not in HARMLESS]:
        _check_held(key, given.pop(key), held)
    if not isinstance(asked, str) or asked not in models:
        raise Refused(
            404,
            f"there is no model {asked!r} here, only {', '.join(map(repr, models))}",
            param="model",
            code="model_not_found",
        )
    try:
        request = ChatRequest.model_validate({**given, "policy": models[asked]})
        check_tools(request.tools)
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        message = f"{key}: got {_short(given.get(key))}, expected {EXPECTED[key]}"
        raise Refused(400, message, param=key) from error
    except DataError as error:
        raise Refused(400, str(error), param="tools") from error
    return request


def _check_held(key: str, value: Any, held: Mapping[str, Any]) -> None:
    if key not in held:
        raise Refused(
            400,
            f"{key}: this endpoint does not know the key, which may change what is sampled; leave"
            " it out",
            param=key,
        )
    if value != held[key]:
        run = "sets its own" if held[key] is None else f"has {orjson.dumps(held[key]).decode()}"
        raise Refused(
            400,
            f"{key}: got {_short(value)}, but the run {run}, and what it trains on must be sampled"
            " so; leave the key out",
            param=key,
        )


def _short(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 100 else text[:100] + " ..."


def answer_body(
    answer: Answer, request: ChatRequest, token_text: Callable[[int], str]
) -> tuple[bytes, str]:
    """The body of a `chat.completion` and its content type.

    A stream gets all events at once: the turn is parsed when it is complete.
    """
    tokens = answer.prompt[:0] if answer.completion is None else answer.completion.tokens
    head = {"id": answer.id, "created": answer.created, "model": answer.model}
    logprobs = _logprobs(answer, token_text) if request.logprobs else None
    choice: dict[str, Any] = {"index": 0, "logprobs": logprobs}
    prompt_ids = {}
    if request.return_token_ids:
        prompt_ids["prompt_token_ids"] = answer.prompt
        choice["token_ids"] = tokens
    usage = {
        "prompt_tokens": len(answer.prompt),
        "completion_tokens": len(tokens),
        "total_tokens": len(answer.prompt) + len(tokens),
    }
    if not request.stream:
        choice |= {"message": answer.message, "finish_reason": answer.finish_reason}
        body = head | {"object": "chat.completion", "choices": [choice], "usage": usage}
        return orjson.dumps(body | prompt_ids, option=orjson.OPT_SERIALIZE_NUMPY), JSON
    delta = dict(answer.message)
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    choice |= {"delta": delta, "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason, "logprobs": None}
    head |= {"object": "chat.completion.chunk"}
    chunks = [head | {"choices": [choice]} | prompt_ids, head | {"choices": [last]}]
    if request.stream_options.get("include_usage"):
        chunks = [chunk | {"usage": None} for chunk in chunks]
        chunks.append(head | {"choices": [], "usage": usage})
    events = [orjson.dumps(chunk, option=orjson.OPT_SERIALIZE_NUMPY) for chunk in chunks]
    return b"".join(b"data: " + event + b"\n\n" for event in (*events, b"[DONE]")), EVENTS


def model_list(created: int, models: Collection[str], one: str | None = None) -> bytes:
    """The body of `GET /v1/models`, or of a single model."""
    cards = [
        {"id": name, "object": "model", "created": created, "owned_by": "rlcore"}
        for name in ([one] if one else models)
    ]
    return orjson.dumps(cards[0] if one else {"object": "list", "data": cards})


def _logprobs(answer: Answer, token_text: Callable[[int], str]) -> dict[str, Any]:
    """The recorded log-probs of every token of the turn."""
    content = []
    if answer.completion is not None:
        made = zip(answer.completion.tokens.tolist(), answer.completion.logprobs.tolist())
        for token, logprob in made:
            text = token_text(token)
            entry = {"token": text, "logprob": logprob, "bytes": [*text.encode()]}
            content.append(entry | {"top_logprobs": []})
    return {"content": content, "refusal": None}
