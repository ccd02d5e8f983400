"""The most important metrics, and readable numbers, durations and samples."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

from rlcore.data.sample import Sample, verdict_word

# Each metric may have several names; the first present counts.
REWARD = ("rollout/reward", "objective/scores")
KL = ("objective/kl",)
LOSS = ("preference/loss", "loss/policy_avg", "objective/loss")
LENGTH = ("val/sequence_lengths",)
TOKENS_PER_SECOND = ("perf/tokens_per_second",)
STEP_SECONDS = ("time/step",)

TRAINING = "training sample"
HELD_OUT = "held-out sample"

_SET_SCORE = re.compile(r"eval/(?:([^/]+)/)?score")
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def first(metrics: Mapping[str, float], names: Sequence[str]) -> float | None:
    """Return the value of the first name in `names` that `metrics` holds."""
    return next((metrics[name] for name in names if name in metrics), None)


def evaluated_sets(metrics: Mapping[str, float]) -> list[str]:
    """Return the names of the sets that were scored, "" for the unnamed set."""
    found = (_SET_SCORE.fullmatch(name) for name in metrics)
    return [match[1] or "" for match in found if match]


def of_set(name: str, metric: str) -> str:
    """Return the full name of an evaluation set's metric."""
    return f"eval/{name}/{metric}" if name else f"eval/{metric}"


def curve(
    rows: Sequence[Mapping[str, float]], names: Sequence[str]
) -> tuple[list[int], list[float]]:
    """Return steps and values of the rows that hold any of `names`."""
    points = [(int(row["step"]), value) for row in rows if (value := first(row, names)) is not None]
    return [step for step, _ in points], [value for _, value in points]


def number(value: float) -> str:
    """Format a number to three digits: 0.412, 3.21, 1.23k, 4.56M, 3.1e-05."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    size = abs(value)
    if size < 1e-3:
        return f"{value:.1e}"
    if size >= 999.5e12:
        return f"{value:.2e}"
    for scale, prefix in _PREFIXES:
        if size >= 0.9995 * scale:
            return f"{value / scale:#.3g}".removesuffix(".") + prefix
    return f"{value:#.3g}".removesuffix(".")


def duration(seconds: float) -> str:
    """Format a duration: 0.42 s, 8.3 s, 42 s, 3m20s, 2h05m, 3d04h."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 9.95:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def pick_samples(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Pick `count` samples spread evenly from the best reward to the worst.

    The first samples of a step would all answer one prompt. Samples whose reward failed come last.
    """
    ranked = sorted(samples, key=lambda sample: -sample.reward if sample.is_scored else math.inf)
    if count >= len(ranked):
        return ranked
    if count <= 1:
        return ranked[:count]
    return [ranked[row * (len(ranked) - 1) // (count - 1)] for row in range(count)]


def sample_lines(sample: Sample, *, limit: int = 400) -> list[str]:
    """Format a sample as a head line, its prompt and its response, cut to `limit` characters.

    Each message of a conversation gets its own line, see `message_lines`.
    """
    parts = "".join(f", {name} {number(value)}" for name, value in sample.reward_parts.items())
    word = verdict_word(sample.verdict)
    head = f"{word}, " if word else ""
    head += f"reward {number(sample.reward)}{parts if len(sample.reward_parts) > 1 else ''}"
    head += f", {sample.num_trainable} tokens, ended by {sample.finish_reason}"
    if sample.label is not None:
        head += f", expected {clipped(str(sample.label), 80)!r}"
    if sample.turn_spans:
        return [head, *message_lines(sample, limit=limit)]
    return [
        head,
        f"> {_indented(sample.prompt_text, limit)}",
        f"< {_indented(sample.response_text, limit)}",
    ]


def message_lines(sample: Sample, *, limit: int = 400) -> list[str]:
    """Format the messages of a conversation; turns of the model begin with "<".

    A trained turn shows its number, its tokens and its reward; a turn that is context in this
    sample is marked as such.
    """
    spans = {span.message: span for span in sample.turn_spans}
    lines = []
    for index, message in enumerate(sample.messages or ()):
        title = str(message["role"])
        span = spans.get(index)
        if span is not None:
            title = f"turn {span.turn}, {span.end - span.start} tokens"
            if sample.token_rewards is not None:
                reward = float(sample.token_rewards[span.start : span.end].sum())
                title += f", reward {number(reward)}"
        elif title == "assistant":
            title = "context"
        mark = "<" if message["role"] == "assistant" else ">"
        parts = [str(message.get("reasoning_content") or ""), str(message.get("content") or "")]
        parts[0] = f"({parts[0].strip()})" if parts[0] else ""
        for call in message.get("tool_calls") or ():
            given = call["function"].get("arguments", {})
            text = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
            parts.append(f"{call['function']['name']} {text}")
        text = "\n".join(part for part in parts if part)
        lines.append(f"{mark} [{title}] {_indented(text, limit)}")
    return lines


def clipped(text: str, limit: int) -> str:
    """Shorten a text to its two ends, of `limit / 2` characters each."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def _indented(text: str, limit: int) -> str:
    return clipped(text.strip(), limit).replace("\n", "\n  ")
