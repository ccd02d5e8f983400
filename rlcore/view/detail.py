"""A sample as the page shows it: conversation, tokens, and all vectors of trained tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.errors import DataError
from rlcore.runs.rollouts import Record
from rlcore.view.run import RunView

EXCERPT = 240  # characters of a text shown in a table
# The columns that `excerpt_of` needs.
EXCERPT_COLUMNS = ("prompt_text", "response_text", "prompt_id", "label", "messages", "turn_spans")
# The columns that `sample_page` passes on.
FIELDS = (
    *("step", "draw", "index", "group_id", "rollout_id", "prompt_id", "reward"),
    *("reward_parts", "finish_reason", "policy_version", "baseline_reward", "label"),
    *("metadata", "outcome", "measured"),
)
Vector = NDArray[Any]
# Name, title, definition and scale of each vector of the trainable tokens.
VECTORS: tuple[tuple[str, str, str, str], ...] = (
    ("advantage", "advantage", "what the update multiplied the token's log-prob by", "around 0"),
    ("logprob", "log-prob", "of the trainer before the update", "up to 0"),
    ("engine_logprob", "log-prob of the engine", "with which the token was drawn", "up to 0"),
    ("gap", "trainer - engine", "log-prob of the trainer less that of the engine", "around 0"),
    ("ratio", "ratio", "probability at the last update over that before the step", "around 1"),
    ("clipped", "clipped", "1 where the clip changed the policy loss at that update", "from 0"),
    ("entropy", "entropy", "of the policy at this token, in nats", "from 0"),
    ("value", "value", "of the critic", "around 0"),
    ("return", "return", "what the critic learns", "around 0"),
    ("weight", "loss weight", "share of the token in its optimizer step; 0: masked", "from 0"),
    ("correction", "correction", "factor of the loss for the engine's log-probs", "around 1"),
    ("ref_gap", "policy - reference", "log-prob of the trainer less the reference's", "around 0"),
    ("teacher_gap", "policy - teacher", "log-prob of the trainer less the teacher's", "around 0"),
    ("token_reward", "token reward", "reward that the workflow gave the token", "around 0"),
    ("version", "version", "of the weights that made the token", "steps"),
    ("staleness", "staleness", "training steps since those weights", "from 0"),
    ("turn", "turn", "of the conversation that made the token", "steps"),
)
# The columns or vectors of a record with the values that are not computed here.
KEYS = {
    "advantage": "advantages", "logprob": "logprobs", "engine_logprob": "rollout_logprobs",
    "ratio": "ratio", "clipped": "clipped", "entropy": "entropy", "value": "values",
    "return": "returns", "weight": "weights", "correction": "correction",
    "token_reward": "token_rewards",
}  # fmt: skip


def sample_page(run: RunView, record: Record) -> dict[str, Any]:
    """Return the page's data of a sample. Raises DataError if the record is damaged."""
    try:
        tokens = [int(token) for token in record["tokens"]]
        mask = [int(bit) for bit in record["loss_mask"]]
        vectors = _vectors(record)
        return {
            "record": {name: record.get(name) for name in FIELDS},
            "messages": _messages(record),
            "turns": _turns(record, vectors),
            "tokens": tokens,
            "texts": run.texts.of(tokens),
            "trouble": run.texts.trouble,
            "mask": mask,
            "vectors": [
                {"name": n, "title": title, "text": text, "scale": scale, "values": vectors[n]}
                for n, title, text, scale in VECTORS
                if n in vectors
            ],
            "masked": _masked(vectors),
        }
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise DataError(
            f"step {record.get('step')}: a sample cannot be shown: {type(error).__name__}: {error}"
        ) from error


def excerpt_of(record: Record) -> dict[str, Any]:
    """Return the beginnings of prompt and response, for a row of a table."""
    prompt = record.get("prompt_text", "")
    response = record.get("response_text", "")
    if (messages := _conversation(record)) is not None:
        # The prompt is the last message before the first answer, the response all answers.
        roles = [message.get("role") for message in messages]
        first = roles.index("assistant") if "assistant" in roles else len(roles)
        if first and isinstance(messages[first - 1].get("content"), str):
            prompt = messages[first - 1]["content"]
        answers = (m for m, role in zip(messages, roles) if role == "assistant")
        response = " | ".join(map(_words, answers))
    return {
        "prompt": str(prompt)[:EXCERPT],
        "response": str(response)[:EXCERPT],
        "label": str(record.get("label", ""))[:EXCERPT],
        "prompt_id": str(record.get("prompt_id", ""))[:EXCERPT],
    }


def _conversation(record: Record) -> list[dict[str, Any]] | None:
    messages = record.get("messages")
    if not isinstance(messages, list) or not record.get("turn_spans"):
        return None
    return [message for message in messages if isinstance(message, dict)]


def _words(message: Mapping[str, Any]) -> str:
    words = str(message.get("content") or message.get("reasoning_content") or "")
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            words += f" {function.get('name')}({function.get('arguments')})"
    return words.strip()


def _messages(record: Record) -> list[dict[str, Any]]:
    """Return the conversation; a plain prompt and its response become two messages."""
    return _conversation(record) or [
        {"role": "prompt", "content": str(record.get("prompt_text", ""))},
        {"role": "assistant", "content": str(record.get("response_text", ""))},
    ]


def _vectors(record: Record) -> dict[str, Vector]:
    """Return every vector of the trainable tokens, float32 or int64 [m]."""
    m = len(record["rollout_logprobs"])
    given = record.get("vectors") or {}
    found: dict[str, Vector] = {}
    for name, key in KEYS.items():
        values = given.get(key, record.get(key))
        if isinstance(values, list) and len(values) == m:
            # JSON's null, which stands for NaN, becomes NaN.
            found[name] = np.array(values, dtype=np.float32)
    if "logprob" in found:
        found["gap"] = found["logprob"] - found["engine_logprob"]
        for name, key in (("ref_gap", "ref_logprobs"), ("teacher_gap", "teacher_logprobs")):
            if isinstance(given.get(key), list):
                found[name] = found["logprob"] - np.array(given[key], dtype=np.float32)
    lengths = [int(end) - int(start) for _, start, end in record["versions"]]
    if sum(lengths) == m and m:
        found["version"] = np.repeat([int(span[0]) for span in record["versions"]], lengths)
        steps = record.get("policy_steps")
        if steps and len(steps) == len(lengths):
            ages = [int(record["step"]) - 1 - int(step) for step in steps]
            found["staleness"] = np.repeat(ages, lengths)
    if spans := record.get("turn_spans"):
        found["turn"] = np.repeat([s[0] for s in spans], [s[3] - s[2] for s in spans])
    return found


def _turns(record: Record, vectors: Mapping[str, Vector]) -> list[dict[str, Any]]:
    """Return message, tokens, reward and credit of each trained turn."""

    def reduced(how: Callable[[Vector], Any], name: str, start: int, end: int) -> float | None:
        part = vectors[name][start:end] if name in vectors else np.empty(0)
        return None if np.isnan(part).all() else float(how(part))

    spans: Sequence[Sequence[int]] = record.get("turn_spans") or [
        [0, 1, 0, len(record["rollout_logprobs"])]
    ]
    return [
        {
            "turn": turn,
            "message": message,
            "start": start,
            "end": end,
            "reward": reduced(np.nansum, "token_reward", start, end),
            "advantage": reduced(np.nanmean, "advantage", start, end),
            "entropy": reduced(np.nanmean, "entropy", start, end),
        }
        for turn, message, start, end in spans
    ]


def _masked(vectors: Mapping[str, Vector]) -> dict[str, int]:
    """Count the tokens that the update did not learn from, by reason."""
    found = {"trainable": len(vectors["engine_logprob"])}
    for name, reason in (
        ("weight", "no weight"),
        ("correction", "dropped by the correction"),
        ("advantage", "no advantage"),
    ):
        if name in vectors:
            found[reason] = int((vectors[name] == 0).sum())
    if "clipped" in vectors:
        found["clipped"] = int((vectors["clipped"] > 0).sum())
    return found
