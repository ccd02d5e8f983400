"""Decodes answers of a server: completions of /generate, digests of an update.

A completion that does not fit its request is refused, so that nothing of it is trained on.
"""

from __future__ import annotations

import json
import math
from array import array
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rlcore.data.generation import Completion, GenerateRequest
from rlcore.data.sample import MAX_LOGPROB, Experts, FinishReason, SamplingMasks, VersionSpan
from rlcore.errors import EngineFailed
from rollout.engines.sglang.limits import Limits, asks_sampling_mask

NO_TOKENS = np.zeros(0, dtype=np.int32)
NO_LOGPROBS = np.zeros(0, dtype=np.float32)


def decode(
    answer: Any, request: GenerateRequest, limits: Limits, *, engine: str, mark: str = ""
) -> list[Completion]:
    """Return the `request.n` completions in order.

    Args:
        mark: the ending of our versions' names; see `version_name`.

    Raises EngineFailed, naming engine and request, for any other answer.
    """
    try:
        if not isinstance(answer, list) or len(answer) != request.n:
            got = (
                f"{len(answer)} completions" if isinstance(answer, list) else type(answer).__name__
            )
            raise ValueError(f"{got}, expected a list of {request.n} completions")
        return [
            _completion(part, request, limits, place, mark) for place, part in enumerate(answer)
        ]
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise EngineFailed(
            f"engine {engine} returned an invalid completion for request {request.rid}: {why}"
        ) from error


def version_name(version: int, mark: str) -> str:
    """The name of a version of our weights at a server.

    Args:
        mark: distinguishes this trainer from others, whose versions have the same numbers.
    """
    return f"{version}{mark}"


def _completion(
    part: dict[str, Any], request: GenerateRequest, limits: Limits, place: int, mark: str
) -> Completion:
    """The tokens that follow the prefix of response number `place` of the request."""
    meta = part["meta_info"]
    sampling = request.sampling
    before = len(request.made(place))
    tokens = _tokens(part["output_ids"], limits.vocab_size)
    made = len(tokens)
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish reason {reason!r}, expected stop, length or abort")
    if before + made > sampling.max_new_tokens or (made == 0 and reason != "abort"):
        raise ValueError(f"{made} tokens, expected 1 to {sampling.max_new_tokens - before}")
    matched = meta["finish_reason"].get("matched")
    if reason == "stop" and isinstance(matched, int) and tokens[-1] != matched:
        raise ValueError(
            f"it reports a stop at token {matched}, but the last token is {tokens[-1]}"
        )
    logprobs = _logprobs(meta.get("output_token_logprobs") or [], part["output_ids"])
    sets = None
    if sampling.sampling_mask:
        sets = SamplingMasks.whole(made)
        if made and asks_sampling_mask(sampling):
            sets = _sampling_mask(meta["output_token_sampling_mask"], tokens, limits.vocab_size)
            logprobs = _finite(meta["output_token_sampling_logprobs"], made)
    experts = (
        _experts(meta, limits, len(request.prompt) + before, made)
        if sampling.routed_experts
        else None
    )
    return Completion(
        tokens,
        logprobs,
        cast(FinishReason, reason),
        _spans(meta["weight_versions"], made, mark),
        sets,
        experts,
        meta.get("cached_tokens"),
    )


def _tokens(ids: Any, vocab_size: int) -> NDArray[np.int32]:
    # array() refuses fractions, which numpy would round. array, min and max are fast for short
    # responses.
    tokens = np.frombuffer(array("i", ids), dtype=np.int32) if ids else NO_TOKENS
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"tokens from {min(ids)} to {max(ids)} of a vocabulary of {vocab_size}")
    return tokens


def _logprobs(rows: list[Any], ids: list[int]) -> NDArray[np.float32]:
    """Read `[[logprob, token, text], ...]`, which has one row for each of `ids`."""
    if [row[1] for row in rows] != ids:
        raise ValueError(
            f"log-probs of {len(rows)} tokens that are not the {len(ids)} of the response"
        )
    return _finite([row[0] for row in rows], len(ids))


def _finite(values: list[float], count: int) -> NDArray[np.float32]:
    if len(values) != count:
        raise ValueError(f"{len(values)} log-probs, expected {count}")
    if values and not (math.isfinite(sum(values)) and max(values) <= MAX_LOGPROB):
        raise ValueError(
            f"log-probs from {min(values)} to {max(values)}, expected finite ones up to 0"
        )
    return np.frombuffer(array("f", values), dtype=np.float32) if values else NO_LOGPROBS


def _sampling_mask(
    rows: list[list[int]], tokens: NDArray[np.int32], vocab_size: int
) -> SamplingMasks:
    """Read a set of tokens for each token made. The whole vocabulary is stored as an empty set."""
    ordered = [[] if len(row) == vocab_size else sorted(row) for row in rows]
    counts = np.array([len(row) for row in ordered], dtype=np.int32)
    sets = SamplingMasks(_tokens([token for row in ordered for token in row], vocab_size), counts)
    if len(counts) != len(tokens) or len(sets.missing(tokens)):
        raise ValueError(
            f"{len(counts)} keep-sets for {len(tokens)} tokens, or one that does not hold its own"
            " token"
        )
    return sets


def _experts(meta: dict[str, Any], limits: Limits, given: int, made: int) -> Experts:
    """Read the experts of the `given` tokens and of all made tokens but the last.

    The record is empty if the request never ran.
    """
    if limits.experts is None:
        raise ValueError("routed experts of a model without any")
    if made == 0:
        return np.zeros((0, 0, 0), dtype=np.int16)
    return limits.experts.decode(meta["routed_experts"], given + made - 1)


def _spans(values: list[dict[str, Any]], made: int, mark: str) -> tuple[VersionSpan, ...]:
    """Read the weight versions, which are our publication numbers.

    An engine without a version reports `default`, which is refused.
    """
    spans = tuple(
        VersionSpan(_number(v["version"], mark), v["start"], v["end"])
        for v in values
        if v["end"] > v["start"]
    )
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != made:
        raise ValueError(f"weight_versions {values} do not cover {made} tokens in order")
    return spans


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
