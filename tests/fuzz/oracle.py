"""What a completion and a sample may be, said again and without the product's own checks."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from rlcore.data.generation import Completion, GenerateRequest
from rlcore.data.sample import Sample
from tests.fuzz.harness import WrongValue

REASONS = {"stop", "length", "abort", "context", "turns", "timeout", "env"}


def need(holds: bool, what: str) -> None:
    """Raise WrongValue, which the harness reports, unless a rule holds."""
    if not holds:
        raise WrongValue(what)


def check_vector(name: str, array: Any, dtype: type, length: int) -> None:
    """An accepted array has its type and its size."""
    need(type(array) is np.ndarray and array.dtype == dtype, f"{name} is {array!r}")
    need(array.shape == (length,), f"{name} has shape {array.shape}, expected {length}")


def check_tokens(name: str, tokens: Any, vocab_size: int) -> None:
    """Every id is one of the vocabulary."""
    need(all(0 <= int(token) < vocab_size for token in tokens), f"{name} {list(tokens)}")


def check_logprobs(logprobs: Any) -> None:
    """Every log-prob is finite and at most a little above 0."""
    for value in logprobs.tolist():
        need(math.isfinite(value) and value <= 1e-3 + 1e-9, f"the log-prob {value} was accepted")


def check_spans(spans: Any, length: int, versions: Collection[int]) -> None:
    """Spans cover all tokens in order, each of a version that may have made them."""
    need(isinstance(spans, tuple), f"version spans {spans!r}")
    at = 0
    for span in spans:
        for value in (span.version, span.start, span.end):
            need(type(value) is int, f"version span {span}")
        need(span.start == at and span.end >= span.start, f"version spans {spans}")
        need(span.version in versions, f"version {span.version}, possible are {versions}")
        at = span.end
    need(at == length, f"version spans {spans} of {length} tokens")


def check_masks(masks: Any, tokens: Any, vocab_size: int) -> None:
    """Each token is in its own set, and sets are of the vocabulary."""
    check_vector("counts", masks.counts, np.int32, len(tokens))
    need(bool((masks.counts >= 0).all()), f"counts {masks.counts}")
    check_vector("mask", masks.tokens, np.int32, int(masks.counts.sum()))
    check_tokens("mask", masks.tokens, vocab_size)
    at = 0
    for token, count in zip(tokens.tolist(), masks.counts.tolist()):
        kept = masks.tokens[at : at + count].tolist()
        need(count == 0 or token in kept, f"token {token} is not in its set {kept}")
        at += count


def check_completion(
    found: Completion,
    request: GenerateRequest,
    place: int,
    *,
    vocab_size: int,
    versions: Collection[int],
    experts: tuple[int, int, int],
) -> None:
    """An accepted completion is one that the engine can have made.

    Args:
        experts: layers with experts, experts a token, experts a layer.
    """
    made = len(found.tokens)
    before = len(request.made(place))
    check_vector("tokens", found.tokens, np.int32, made)
    check_tokens("tokens", found.tokens, vocab_size)
    check_vector("logprobs", found.logprobs, np.float32, made)
    check_logprobs(found.logprobs)
    need(found.finish_reason in ("stop", "length", "abort"), f"reason {found.finish_reason!r}")
    need(made > 0 or found.finish_reason == "abort", "no tokens and no abort")
    need(before + made <= request.sampling.max_new_tokens, f"{before} + {made} tokens")
    check_spans(found.versions, made, versions)
    need((found.sampling_mask is not None) >= request.sampling.sampling_mask, "no sampling mask")
    if found.sampling_mask is not None:
        check_masks(found.sampling_mask, found.tokens, vocab_size)
    need((found.routed_experts is not None) >= request.sampling.routed_experts, "no experts")
    if found.routed_experts is not None and len(found.routed_experts):
        record = found.routed_experts
        need(record.dtype == np.int16 and record.ndim == 3, f"experts {record.dtype}")
        need(record.shape[1:] == experts[:2], f"experts of shape {record.shape}")
        need(len(record) == len(request.prompt) + before + made - 1, f"{len(record)} experts")
        need(0 <= int(record.min()) <= int(record.max()) < experts[2], f"expert {record.max()}")
    cached = found.cached_tokens
    need(
        cached is None or (type(cached) is int and 0 <= cached <= len(request.prompt) + before),
        f"{cached!r} cached tokens",
    )
    if (drafts := found.drafts) is not None:
        counts = (drafts.proposed, drafts.accepted, drafts.verifications)
        need(all(type(count) is int for count in counts), f"{drafts}")
        need(0 <= drafts.accepted <= drafts.proposed, f"{drafts}")
        need(1 <= drafts.verifications <= drafts.proposed, f"{drafts}")


def check_sample(sample: Sample, *, vocab_size: int, versions: Collection[int]) -> None:
    """An accepted sample can be trained on and written down."""
    check_vector("tokens", sample.tokens, np.int32, len(sample.tokens))
    check_tokens("tokens", sample.tokens, vocab_size)
    check_vector("loss_mask", sample.loss_mask, np.uint8, len(sample.tokens))
    mask = sample.loss_mask.tolist()
    need(set(mask) <= {0, 1} and not (mask and mask[0]), f"loss_mask {mask}")
    made = sum(mask)
    check_vector("rollout_logprobs", sample.rollout_logprobs, np.float32, made)
    check_logprobs(sample.rollout_logprobs)
    check_spans(sample.versions, made, versions)
    if sample.token_rewards is not None:
        check_vector("token_rewards", sample.token_rewards, np.float32, made)
        need(bool(np.isfinite(sample.token_rewards).all()), "token_rewards")
    if sample.sampling_mask is not None:
        trained = sample.tokens[sample.loss_mask == 1]
        check_masks(sample.sampling_mask, trained, vocab_size)
    need(
        type(sample.reward) in (int, float) and abs(sample.reward) <= np.finfo(np.float32).max,
        f"reward {sample.reward!r}",
    )
    need(sample.finish_reason in REASONS, f"finish reason {sample.finish_reason!r}")
    for name in ("draw", "index", "group_id", "rollout_id", "turns"):
        need(type(getattr(sample, name)) is int, f"{name} is {getattr(sample, name)!r}")
        need(abs(getattr(sample, name)) < 2**62, f"{name} is {getattr(sample, name)!r}")
    for name in ("prompt_id", "prompt_text", "response_text"):
        need(isinstance(getattr(sample, name), str), f"{name} is {getattr(sample, name)!r}")
    at = 0
    for span in sample.turn_spans:
        need(span.start == at <= span.end, f"turn spans {sample.turn_spans}")
        at = span.end
    need(not sample.turn_spans or at == made, f"turn spans {sample.turn_spans}")
