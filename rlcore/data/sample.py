"""The sample: a finished response with everything that training needs, as sent to processes."""

from __future__ import annotations

import base64
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

ARRAYS = ("tokens", "loss_mask", "rollout_logprobs", "token_rewards")  # array fields of a sample
SAMPLING_MASK_KEY = "keep_sets"  # in records: files keep their first name for a sampling mask
# By how much a log-prob may exceed 0 through an engine's rounding.
MAX_LOGPROB = 1e-3
# The experts that an engine recorded, [t, layers with experts, experts a token]; -1: not recorded.
# Row i belongs to token i of a sequence, prompt included. A record may end before the sequence
# does: the last token of a response is never fed to the engine.
Experts = NDArray[np.int16]
# Why the last turn of a sample was the last:
#   stop      the model ended it           length   tokens of a turn or of the rollout were spent
#   abort     an engine gave it up         context  the engine's context is full
#   turns     no more turns are allowed    timeout  the rollout's time is up
#   env       the environment ended it
FinishReason = Literal["stop", "length", "abort", "context", "turns", "timeout", "env"]


def verdict_in(metadata: Mapping[str, Any], reward: float) -> bool | None:
    """Return whether a sample's answer is right, according to its record; None if unknown.

    A sample that has a score although its reward failed counts as wrong; leaving it out would raise
    the accuracy.
    """
    correct = metadata.get("correct")
    if isinstance(correct, bool):
        return correct
    return False if "reward_error" in metadata and not math.isnan(reward) else None


def joint_verdict(verdicts: Iterable[bool | None]) -> bool | None:
    """Return whether all samples of a rollout are right; None if no verdict is known."""
    known = [verdict for verdict in verdicts if verdict is not None]
    return all(known) if known else None


def verdict_word(verdict: bool | None) -> str:
    """Return the word for a verdict on all pages and terminals; "" for None."""
    return "" if verdict is None else "right" if verdict else "wrong"


class Branch(NamedTuple):
    """The position of a sample in its rollout."""

    rollout: int  # number of the rollout in the draw, from 0
    branch: int  # number of the sample in the rollout, from 1
    branches: int


def branches_of(samples: Iterable[tuple[Hashable, int]]) -> list[Branch]:
    """Number the samples of each rollout, in order.

    Args:
        samples: for each sample, its draw (with its set if there are several) and rollout_id.
    """
    groups: dict[Hashable, dict[int, int]] = {}
    branches = []
    for draw, rollout_id in samples:
        counts = groups.setdefault(draw, {})
        counts[rollout_id] = counts.get(rollout_id, 0) + 1
        branches.append((draw, rollout_id, counts[rollout_id]))
    numbers = {draw: {one: n for n, one in enumerate(counts)} for draw, counts in groups.items()}
    return [
        Branch(numbers[draw][rollout_id], branch, groups[draw][rollout_id])
        for draw, rollout_id, branch in branches
    ]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The policy version that made trainable tokens `[start, end)` of a sample."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """A turn of the model that is trained in a sample."""

    turn: int  # number of the turn in the rollout
    message: int  # index into `Sample.messages`
    start: int  # the turn made trainable tokens [start, end)
    end: int


@dataclass(slots=True)
class Sample:
    """One response to one prompt.

    Tokens are the engine's own: they are never decoded and tokenised again.

        tokens            a  b  c | x  y  eos
        loss_mask         0  0  0 | 1  1  1
        rollout_logprobs            .. .. ..      one per trainable token
    """

    draw: int  # number of the draw: unique in a run, the ledger's key
    index: int  # number of the sample in its draw
    prompt_id: str  # the row: "file:line"
    group_id: int  # equal for samples of one draw
    rollout_id: int  # equal for samples of one rollout
    tokens: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.uint8]  # [T], 1 where the policy chose the token
    rollout_logprobs: NDArray[np.float32]  # [m], m = loss_mask.sum()
    versions: tuple[VersionSpan, ...]  # cover [0, m) in order
    finish_reason: FinishReason
    reward: float = 0.0  # NaN: see `is_scored`
    reward_parts: dict[str, float] = field(default_factory=dict)
    turns: int = 1
    prompt_text: str = ""
    response_text: str = ""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    # Reward of the greedy response to the same prompt, if the estimator needs it.
    baseline_reward: float | None = None
    # [m]: process rewards, if the workflow gives them.
    token_rewards: NDArray[np.float32] | None = None
    # m sets: the tokens among which each trainable token was drawn, if the engine recorded them.
    sampling_mask: SamplingMasks | None = None
    # [t <= T, layers, k]: the experts of each token, if the engine recorded them.
    routed_experts: Experts | None = None
    # The prompt as chat messages, if the row has them; in a conversation all messages.
    messages: Sequence[Mapping[str, Any]] | None = None
    # In a conversation, the turns whose tokens are trainable here.
    turn_spans: tuple[TurnSpan, ...] = ()
    # Rewards that the workflow itself gave the rollout, by name.
    outcome: dict[str, float] = field(default_factory=dict)
    # Measurements of the rollout, by name; in only one of its samples, so that they count once.
    measured: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"sample {self.index} of draw {self.draw}"
        if self.tokens.dtype != np.int32 or self.loss_mask.dtype != np.uint8:
            raise ValueError(
                f"{where}: tokens and loss_mask must be int32 and uint8, got {self.tokens.dtype},"
                f" {self.loss_mask.dtype}"
            )
        if self.tokens.shape != self.loss_mask.shape or self.tokens.ndim != 1:
            raise ValueError(
                f"{where}: tokens {self.tokens.shape} and loss_mask {self.loss_mask.shape} must be"
                " one [T]"
            )
        if len(self.tokens) and self.loss_mask.max() > 1:
            raise ValueError(f"{where}: loss_mask has {self.loss_mask.max()}, expected 0 and 1")
        if len(self.tokens) and self.loss_mask[0]:
            raise ValueError(f"{where}: the first token cannot be trainable, nothing predicts it")
        m = self.num_trainable
        if self.rollout_logprobs.shape != (m,):
            raise ValueError(
                f"{where}: {m} trainable tokens but rollout_logprobs of shape"
                f" {self.rollout_logprobs.shape}"
            )
        covered = 0
        for span in self.versions:
            if span.start != covered or span.end < span.start:
                raise ValueError(
                    f"{where}: version spans {self.versions} do not cover [0, {m}) in order"
                )
            covered = span.end
        if covered != m:
            raise ValueError(f"{where}: version spans cover {covered} of {m} trainable tokens")
        if self.sampling_mask is not None:
            if self.sampling_mask.counts.shape != (m,):
                raise ValueError(
                    f"{where}: {len(self.sampling_mask.counts)} keep-sets, expected one for each of"
                    f" {m} trainable tokens"
                )
            missing = self.sampling_mask.missing(self.tokens[self.loss_mask == 1])
            if len(missing):
                raise ValueError(
                    f"{where}: the keep-set of trainable token {missing[0]} does not hold the token"
                    " itself"
                )
        self._check_token_rewards(where, m)
        routed = self.routed_experts
        if routed is not None and (
            routed.dtype != np.int16 or routed.ndim != 3 or len(routed) > len(self.tokens)
        ):
            got = f"{routed.dtype} {routed.shape}"
            raise ValueError(
                f"{where}: routed_experts must be int16 [t, layers, k], t at most"
                f" {len(self.tokens)}, got {got}"
            )

    def _check_token_rewards(self, where: str, m: int) -> None:
        given = self.token_rewards
        if given is None:
            return
        is_array = isinstance(given, np.ndarray)
        if not is_array or given.dtype != np.float32 or given.shape != (m,):
            got = f"{given.dtype} {given.shape}" if is_array else type(given).__name__
            raise ValueError(
                f"{where}: token_rewards must be a float32 array ({m},), one a trainable token, got"
                f" {got}"
            )
        if not np.isfinite(given).all():
            raise ValueError(
                f"{where}: token_rewards must be finite, got {given[~np.isfinite(given)][0]}"
            )

    @property
    def is_scored(self) -> bool:
        """Whether the reward is known; a failed reward is NaN."""
        return not math.isnan(self.reward)

    @property
    def verdict(self) -> bool | None:
        """Whether the answer is right; None if unknown."""
        return verdict_in(self.metadata, self.reward)

    @property
    def num_trainable(self) -> int:
        """The number of trainable tokens, m."""
        return int(self.loss_mask.sum())

    @property
    def sequence_id(self) -> int:
        """The identity of the sample: unique in a run for up to 2^20 samples a draw."""
        return (self.draw << 20) + self.index

    def token_versions(self) -> NDArray[np.int64]:
        """Return the policy version that made each trainable token, int64 [m]."""
        lengths = [span.end - span.start for span in self.versions]
        return np.repeat(
            np.array([span.version for span in self.versions], dtype=np.int64), lengths
        )

    @property
    def chat(self) -> list[Mapping[str, Any]] | None:
        """The messages of prompt and response; None if the prompt is not a chat."""
        if self.messages is None or self.turn_spans:
            return None if self.messages is None else [*self.messages]
        return [*self.messages, {"role": "assistant", "content": self.response_text}]

    def turn_ids(self) -> NDArray[np.int64]:
        """Return the number of the turn that made each trainable token, int64 [m]."""
        if not self.turn_spans:
            return np.zeros(self.num_trainable, dtype=np.int64)
        lengths = [span.end - span.start for span in self.turn_spans]
        return np.repeat(np.array([span.turn for span in self.turn_spans], dtype=np.int64), lengths)

    def to_record(self, *, arrays: bool = False) -> dict[str, Any]:
        """Return everything as JSON-able values, for recorded samples and checkpoints.

        Args:
            arrays: leave arrays as they are, for a writer that handles them faster than lists.
        """
        record = {name: getattr(self, name) for name in self.__slots__}
        if not self.turn_spans:
            # The text of the prompt is sufficient.
            del record["messages"]
        for name in () if arrays else ARRAYS:
            record[name] = None if record[name] is None else record[name].tolist()
        record["versions"] = [[s.version, s.start, s.end] for s in self.versions]
        record["turn_spans"] = [[s.turn, s.message, s.start, s.end] for s in self.turn_spans]
        mask = record.pop("sampling_mask")
        record[SAMPLING_MASK_KEY] = None if mask is None else mask.to_record()
        record["routed_experts"] = (
            None if self.routed_experts is None else encode_experts(self.routed_experts)
        )
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Sample:
        """Make a sample from a record; keys added by a file (such as advantages) are ignored."""
        known = {name: record[name] for name in cls.__slots__ if name in record}
        if record.get("reward", 0.0) is None:
            # JSON has no NaN.
            known["reward"] = math.nan
        known["tokens"] = np.asarray(record["tokens"], dtype=np.int32)
        known["loss_mask"] = np.asarray(record["loss_mask"], dtype=np.uint8)
        # An excessive value becomes infinite, and is refused later.
        with np.errstate(over="ignore"):
            known["rollout_logprobs"] = np.asarray(record["rollout_logprobs"], dtype=np.float32)
            if known.get("token_rewards") is not None:
                known["token_rewards"] = np.asarray(record["token_rewards"], dtype=np.float32)
        known["versions"] = tuple(VersionSpan(*span) for span in record["versions"])
        known["turn_spans"] = tuple(TurnSpan(*span) for span in record.get("turn_spans", ()))
        if record.get(SAMPLING_MASK_KEY) is not None:
            known["sampling_mask"] = SamplingMasks.from_record(record[SAMPLING_MASK_KEY])
        if known.get("routed_experts") is not None:
            known["routed_experts"] = decode_experts(record["routed_experts"])
        return cls(**known)


@dataclass(frozen=True, slots=True)
class SamplingMasks:
    """m sets of tokens, concatenated. A count of 0 stands for the whole vocabulary.

        counts   2      0     1
        tokens   a c    .     b

    Here the first token was drawn from {a, c}, the second from all, and the third was certain.
    """

    tokens: NDArray[np.int32]  # [counts.sum()], ascending inside a set
    counts: NDArray[np.int32]  # [m]

    def __post_init__(self) -> None:
        for name in ("tokens", "counts"):
            array = getattr(self, name)
            if array.dtype != np.int32 or array.ndim != 1:
                raise ValueError(
                    f"token sets: {name} must be one int32 vector, got {array.dtype} {array.shape}"
                )
        if (self.counts < 0).any() or int(self.counts.sum(dtype=np.int64)) != len(self.tokens):
            raise ValueError(
                f"token sets: counts sum up to {self.counts.sum()}, but there are"
                f" {len(self.tokens)} tokens"
            )

    @classmethod
    def whole(cls, size: int) -> SamplingMasks:
        """Make `size` sets of the whole vocabulary."""
        return cls(np.zeros(0, dtype=np.int32), np.zeros(size, dtype=np.int32))

    @classmethod
    def joined(cls, parts: Sequence[SamplingMasks]) -> SamplingMasks:
        """Concatenate sets in order, for example of a sample with several turns."""
        if not parts:
            return cls.whole(0)
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.counts for part in parts]),
        )

    def missing(self, drawn: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return which of the `drawn` tokens [m] are not in their own set."""
        hits = self.tokens == np.repeat(drawn, self.counts)
        found = np.bincount(
            np.repeat(np.arange(len(self.counts)), self.counts),
            weights=hits,
            minlength=len(self.counts),
        )
        return ((self.counts > 0) & (found == 0)).nonzero()[0]

    def to_record(self) -> dict[str, Any]:
        """Return the sets as JSON-able values."""
        return {"tokens": self.tokens.tolist(), "counts": self.counts.tolist()}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> SamplingMasks:
        """Make the sets from a record."""
        return cls(*(np.asarray(record[name], dtype=np.int32) for name in ("tokens", "counts")))


def join_experts(records: Sequence[Experts]) -> Experts:
    """Join the records of the completions of a sample with several turns.

    A token's first record counts, since the token was made with it. A completion that was aborted
    before its first token has an empty record without layers and experts.
    """
    joined = records[0]
    for record in records[1:]:
        if len(record) > len(joined):
            joined = np.concatenate([joined, record[len(joined) :]]) if len(joined) else record
    return joined


def encode_experts(record: Experts) -> dict[str, Any]:
    """Encode a record as JSON-able values: base64 of little-endian bytes."""
    return {
        "shape": list(record.shape),
        "data": base64.b64encode(record.astype("<i2").tobytes()).decode(),
    }


def decode_experts(value: dict[str, Any]) -> Experts:
    """Decode the output of `encode_experts`."""
    flat = np.frombuffer(base64.b64decode(value["data"], validate=True), dtype="<i2")
    return flat.astype(np.int16).reshape(value["shape"])
