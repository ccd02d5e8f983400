"""The limits of a server, and its answers: completions of /generate, digests of an update.

The dispatcher refuses a completion that does not fit its request (`checks.check_completion`).
"""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rlcore.config.engine_registry import SGLANG_ANSWER_RESERVE
from rlcore.data.generation import Completion, Drafts, GenerateRequest, SamplingParams
from rlcore.data.sample import Experts, FinishReason, SamplingMasks, VersionSpan
from rlcore.errors import EngineFailed, InvalidAnswer
from rollout.engines.checks import ExpertLayers, folder_vocab_size

# The ending of this trainer's version names. Every new trainer names the versions again.
MARK = f".{secrets.token_hex(4)}"
NO_TOKENS = np.zeros(0, dtype=np.int32)
NO_LOGPROBS = np.zeros(0, dtype=np.float32)

# Generous limits of the bytes of JSON for a completion's frame, a token with its text and log-prob,
# a token in a sampling mask, and an expert.
FRAME_BYTES = 1 << 16
TOKEN_BYTES = 1 << 10
MASK_BYTES = 12
EXPERT_BYTES = 6


@dataclass(frozen=True)
class Limits:
    """What one server takes and reports."""

    vocab_size: int
    prompt_tokens: int  # the longest prompt
    total_tokens: int  # the longest prompt and response together
    sampling_mask_tokens: int  # the largest sampling mask that it reports
    experts: ExpertLayers | None = None  # None if it reports no experts

    @classmethod
    def of(cls, server_info: Any, model_path: str, engine: str) -> Limits:
        """Read the limits from the answer of /server_info and the model's folder.

        This may take seconds for a model with experts. Raises EngineFailed if the server is not
        sglang 0.5.23.
        """
        try:
            longest = int(server_info["max_req_input_len"])
            keep = int(server_info["sampling_mask_max_tokens"])
            reports_experts = bool(server_info["enable_return_routed_experts"])
        except (KeyError, TypeError, ValueError) as error:
            raise no_sglang(engine, error) from error
        experts = ExpertLayers.of(model_path) if reports_experts else None
        return cls(
            folder_vocab_size(model_path),
            longest - 1,
            longest + SGLANG_ANSWER_RESERVE,
            keep,
            experts,
        )


def answer_bytes(request: GenerateRequest, limits: Limits) -> int:
    """The bytes of the longest answer to a request."""
    sampling = request.sampling
    token = TOKEN_BYTES
    if asks_sampling_mask(sampling):
        token += MASK_BYTES * limits.sampling_mask_tokens
    each = FRAME_BYTES + token * sampling.max_new_tokens
    if sampling.routed_experts and limits.experts is not None:
        experts = limits.experts.num_layers * limits.experts.topk
        each += EXPERT_BYTES * experts * (len(request.prompt) + sampling.max_new_tokens)
    return request.n * each


def no_sglang(engine: str, error: Exception) -> EngineFailed:
    """The error for a server whose /server_info lacks the entry that `error` names."""
    return EngineFailed(
        f"engine {engine}: its /server_info is not that of sglang 0.5.23: {type(error).__name__}:"
        f" {error}"
    )


def asks_sampling_mask(sampling: SamplingParams) -> bool:
    """Whether SGLang is asked for sampling masks: some may be smaller than the vocabulary."""
    return (
        sampling.sampling_mask
        and sampling.temperature > 0
        and (sampling.top_p < 1 or sampling.top_k > 0)
    )


def decode(
    answer: Any,
    request: GenerateRequest,
    limits: Limits,
    *,
    engine: str,
    mark: str = "",
    version: int | None = None,
) -> list[Completion]:
    """Return the `request.n` completions in order.

    Args:
        version: of all tokens; None: as the server says of its weights.
        mark: the ending of our versions' names; see `version_name`.

    Raises InvalidAnswer, naming engine and request, for any other answer.
    """
    try:
        if not isinstance(answer, list) or len(answer) != request.n:
            got = (
                f"{len(answer)} completions" if isinstance(answer, list) else type(answer).__name__
            )
            raise ValueError(f"{got}, expected a list of {request.n} completions")
        return [
            _completion(part, request, limits, place, mark, version)
            for place, part in enumerate(answer)
        ]
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise InvalidAnswer(
            f"engine {engine} returned an invalid completion for request {request.rid}: {why}"
        ) from error


def version_name(version: int, mark: str) -> str:
    """The name of a version of our weights at a server.

    Args:
        mark: distinguishes this trainer from others, whose versions have the same numbers.
    """
    return f"{version}{mark}"


def _completion(
    part: dict[str, Any],
    request: GenerateRequest,
    limits: Limits,
    place: int,
    mark: str,
    version: int | None,
) -> Completion:
    """The tokens that follow the prefix of response number `place` of the request."""
    meta = part["meta_info"]
    ids = part["output_ids"]
    tokens = _tokens(ids)
    made = len(tokens)
    reason = meta["finish_reason"]["type"]
    matched = meta["finish_reason"].get("matched")
    if reason == "stop" and isinstance(matched, int) and tokens[-1] != matched:
        raise ValueError(
            f"it reports a stop at token {matched}, but the last token is {tokens[-1]}"
        )
    # Each row is log-prob, token, text.
    rows = meta.get("output_token_logprobs") or []
    if [row[1] for row in rows] != ids:
        raise ValueError(f"log-probs of {len(rows)} tokens that are not the {made} of the response")
    logprobs = _logprobs([row[0] for row in rows])
    sampling = request.sampling
    sets = None
    if sampling.sampling_mask:
        sets = SamplingMasks.whole(made)
        if made and asks_sampling_mask(sampling):
            # The whole vocabulary is stored as an empty set.
            ordered = [
                [] if len(row) == limits.vocab_size else sorted(row)
                for row in meta["output_token_sampling_mask"]
            ]
            counts = np.array([len(row) for row in ordered], dtype=np.int32)
            sets = SamplingMasks(_tokens([token for row in ordered for token in row]), counts)
            logprobs = _logprobs(meta["output_token_sampling_logprobs"])
    experts = None
    if sampling.routed_experts:
        given = len(request.prompt) + len(request.made(place))
        experts = _experts(meta, limits, given, made)
    return Completion(
        tokens,
        logprobs,
        cast(FinishReason, reason),
        _versions(meta, mark) if version is None else _whole(version, made),
        sets,
        experts,
        meta.get("cached_tokens"),
        _drafts(meta),
    )


def _drafts(meta: Mapping[str, Any]) -> Drafts | None:
    """The counts of a response of which the model has verified a part; SGLang omits others."""
    if "spec_verify_ct" not in meta:
        return None
    return Drafts(
        meta["spec_num_proposed_drafts"], meta["spec_num_correct_drafts"], meta["spec_verify_ct"]
    )


def _versions(meta: Mapping[str, Any], mark: str) -> tuple[VersionSpan, ...]:
    """Our publication numbers. An engine without a version reports `default`, which is refused."""
    return tuple(
        VersionSpan(_number(span["version"], mark), span["start"], span["end"])
        for span in meta["weight_versions"]
        if span["end"] > span["start"]
    )


def _whole(version: int, made: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(version, 0, made),) if made else ()


def _tokens(ids: list[int]) -> NDArray[np.int32]:
    # array() refuses fractions, which numpy would round, and is fast for short responses.
    return np.frombuffer(array("i", ids), dtype=np.int32) if ids else NO_TOKENS


def _logprobs(values: list[float]) -> NDArray[np.float32]:
    return np.frombuffer(array("f", values), dtype=np.float32) if values else NO_LOGPROBS


def _experts(meta: dict[str, Any], limits: Limits, given: int, made: int) -> Experts:
    """Read the experts of the `given` tokens and of all made tokens but the last.

    The record is empty if the request never ran.
    """
    if limits.experts is None:
        raise ValueError("routed experts of a model without any")
    if made == 0:
        return np.zeros((0, 0, 0), dtype=np.int16)
    return limits.experts.decode(meta["routed_experts"], given + made - 1)


def _number(name: str, mark: str) -> int:
    """The number in the name of one of our versions."""
    if not name.endswith(mark):
        raise ValueError(
            f"weights of version {name!r}, which this trainer did not publish: another trainer"
            " uses the engine"
        )
    return int(name.removesuffix(mark))


def read_digests(engine: str, answer: Any) -> list[str]:
    """Read the digests of the bytes that each tensor-parallel rank received in an update.

    Args:
        answer: its message repeats the digests of all ranks for each part of divided attention.
    """
    try:
        found, *others = map(json.loads, answer["message"].split(" | "))
        if any(other != found for other in others):
            raise ValueError(f"different digests from {len(others) + 1} parts of it")
        if not isinstance(found, list):
            raise TypeError(f"{found!r}, expected a list")
        return [str(digest) for digest in found]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineFailed(
            f"engine {engine}: its answer with the digests of the received weights is invalid:"
            f" {error!r}"
        ) from error
