"""Requests and answers of a `RemoteEngine` as JSON; arrays are base64, little-endian."""

from __future__ import annotations

import base64
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.data.generation import Completion, GenerateRequest, Prefix, SamplingParams
from rlcore.data.sample import SamplingMasks, VersionSpan, decode_experts, encode_experts
from rlcore.weights import Bucket, TensorSpec


def encode_array(array: NDArray[Any], dtype: str) -> str:
    """Encode an array as text."""
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode()


def decode_array(text: str, dtype: str) -> NDArray[Any]:
    """Decode the text of `encode_array`."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype).astype(
        dtype[1:], copy=True
    )


def encode_request(request: GenerateRequest) -> dict[str, Any]:
    """Encode a request."""
    prefixes = [[prefix.sample, encode_array(prefix.tokens, "<i4")] for prefix in request.prefixes]
    return asdict(replace(request, prefixes=())) | {
        "prompt": encode_array(request.prompt, "<i4"),
        "prefixes": prefixes,
    }


def decode_request(value: dict[str, Any]) -> GenerateRequest:
    """Decode the value of `encode_request`."""
    sampling = dict(value["sampling"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    sampling["stop"] = tuple(sampling["stop"])
    prefixes = tuple(
        Prefix(sample, decode_array(tokens, "<i4")) for sample, tokens in value["prefixes"]
    )
    prompt = decode_array(value["prompt"], "<i4")
    return GenerateRequest(
        **value | {"prompt": prompt, "sampling": SamplingParams(**sampling), "prefixes": prefixes}
    )


def encode_completion(completion: Completion) -> dict[str, Any]:
    """Encode a completion."""
    mask = completion.sampling_mask
    routed = completion.routed_experts
    return {
        "tokens": encode_array(completion.tokens, "<i4"),
        "logprobs": encode_array(completion.logprobs, "<f4"),
        "finish_reason": completion.finish_reason,
        "versions": [[span.version, span.start, span.end] for span in completion.versions],
        "keep_sets": (
            mask
            and {
                "tokens": encode_array(mask.tokens, "<i4"),
                "counts": encode_array(mask.counts, "<i4"),
            }
        ),
        "routed_experts": None if routed is None else encode_experts(routed),
        "cached_tokens": completion.cached_tokens,
    }


def decode_completion(value: dict[str, Any]) -> Completion:
    """Decode the value of `encode_completion`."""
    mask = value["keep_sets"]
    routed = value["routed_experts"]
    spans = value["versions"]
    if not all(type(number) is int for span in spans for number in span):
        raise ValueError(f"version spans {str(spans)[:80]}, expected whole numbers")
    return Completion(
        decode_array(value["tokens"], "<i4"),
        decode_array(value["logprobs"], "<f4"),
        value["finish_reason"],
        tuple(VersionSpan(*span) for span in spans),
        None
        if mask is None
        else SamplingMasks(
            decode_array(mask["tokens"], "<i4"), decode_array(mask["counts"], "<i4")
        ),
        None if routed is None else decode_experts(routed),
        value["cached_tokens"],
    )


def decode_buckets(value: list[Any]) -> list[Bucket]:
    """Decode the layout of an update, which orjson wrote."""
    return [
        Bucket(
            bucket["index"],
            tuple(
                TensorSpec(spec["name"], tuple(spec["shape"]), spec["dtype"])
                for spec in bucket["tensors"]
            ),
        )
        for bucket in value
    ]
