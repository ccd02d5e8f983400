"""Checks that refuse impossible samples before they are trained on.

A sample is checked again when its maker hands it over, since it may have been modified.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from rlcore.data.sample import MAX_LOGPROB, FinishReason, Sample, SamplingMasks, TurnSpan

ARRAYS = ("tokens", "loss_mask", "rollout_logprobs", "routed_experts")
# The upper bound of each field, so that `Sample.sequence_id` fits into 64 bits.
MAX_INTEGERS = {"draw": 1 << 42, "index": 1 << 20, "group_id": 1 << 62, "rollout_id": 1 << 62}
TEXTS = ("prompt_id", "prompt_text", "response_text")
NUMBERS = ("reward_parts", "outcome", "measured")  # fields that map names to numbers
REASONS = get_args(FinishReason)
MAX_REWARD = float(np.finfo(np.float32).max)  # rewards are float32 in a batch


def check_sample(sample: Sample, *, vocab_size: int) -> None:
    """Refuse a sample that cannot be trained on or written down (ValueError).

    Args:
        vocab_size: the policy's vocabulary size.
    """
    where = f"sample {sample.index!r} of draw {sample.draw!r}"
    _check_types(where, sample)
    sample.__post_init__()
    _check_tokens(f"{where}: token", sample.tokens, vocab_size)
    if sample.sampling_mask is not None:
        _check_tokens(f"{where}: keep-sets: token", sample.sampling_mask.tokens, vocab_size)
    try:
        check_logprobs(sample.rollout_logprobs)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    at = 0
    for span in sample.turn_spans:
        if not isinstance(span, TurnSpan) or span.start != at or span.end < at:
            break
        at = span.end
    if sample.turn_spans and at != sample.num_trainable:
        raise ValueError(
            f"{where}: turn_spans {str(sample.turn_spans)[:200]} do not cover"
            f" {sample.num_trainable} trainable tokens in order"
        )


def check_logprobs(logprobs: NDArray[np.float32]) -> None:
    """Refuse log-probs that no engine can have computed (ValueError)."""
    if not len(logprobs):
        return
    # A quick check: the minimum is NaN if any value is.
    if -math.inf < logprobs.min() and logprobs.max() <= MAX_LOGPROB:
        return
    bad = (~(np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB))).nonzero()[0]
    if len(bad):
        raise ValueError(
            f"the log-prob of trainable token {bad[0]} is {logprobs[bad[0]]}, expected a finite"
            " number up to 0"
        )


def _check_tokens(what: str, tokens: NDArray[np.int32], vocab_size: int) -> None:
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        wrong = ((tokens < 0) | (tokens >= vocab_size)).nonzero()[0]
        raise ValueError(
            f"{what} {wrong[0]} is {tokens[wrong[0]]}, expected ids from 0 to {vocab_size - 1},"
            " the model's vocabulary"
        )


def _check_types(where: str, sample: Sample) -> None:
    for name in ARRAYS:
        value: Any = getattr(sample, name)
        if not (isinstance(value, np.ndarray) or (value is None and name == "routed_experts")):
            raise _wrong(where, name, value, "an array")
    if sample.rollout_logprobs.dtype != np.float32:
        raise _wrong(where, "rollout_logprobs", sample.rollout_logprobs.dtype, "float32")
    masks = sample.sampling_mask
    if masks is not None and not isinstance(masks, SamplingMasks):
        raise _wrong(where, "sampling_mask", masks, "SamplingMasks or None")
    for name, largest in MAX_INTEGERS.items():
        _check_integer(where, name, getattr(sample, name), largest)
    _check_integer(where, "turns", sample.turns, 1 << 31)
    for name in ("versions", "turn_spans"):
        if not isinstance(getattr(sample, name), tuple):
            raise _wrong(where, name, getattr(sample, name), "a tuple")
    for span in sample.versions:
        for number in (span.version, span.start, span.end):
            _check_integer(where, "versions", number, 1 << 62)
    for name in TEXTS:
        if not isinstance(getattr(sample, name), str):
            raise _wrong(where, name, getattr(sample, name), "text")
    if sample.finish_reason not in REASONS:
        raise _wrong(where, "finish_reason", sample.finish_reason, f"one of {', '.join(REASONS)}")
    if not isinstance(sample.metadata, dict):
        raise _wrong(where, "metadata", sample.metadata, "a dict")
    for name in NUMBERS:
        value = getattr(sample, name)
        if not isinstance(value, Mapping) or not all(
            isinstance(key, str) and _is_number(number) for key, number in value.items()
        ):
            raise _wrong(where, name, value, "finite numbers by name")
    for name in ("reward", "baseline_reward"):
        value = getattr(sample, name)
        if not (value is None and name == "baseline_reward") and not _is_number(value):
            raise _wrong(where, name, value, "a finite number of float32")
    messages = sample.messages
    if messages is not None and (
        isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages)
    ):
        raise _wrong(where, "messages", messages, "a list of maps, or None")


def _check_integer(where: str, name: str, value: Any, largest: int) -> None:
    if type(value) is int and 0 <= value < largest:
        # The usual case, handled fast.
        return
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not (whole and 0 <= value < largest):
        raise _wrong(where, name, value, f"a whole number from 0 to {largest - 1}")


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, Real | np.bool_) and abs(float(value)) <= MAX_REWARD
    except OverflowError:
        return False


def _wrong(where: str, name: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{where}: {name} is {str(value)[:80]}, expected {expected}")
