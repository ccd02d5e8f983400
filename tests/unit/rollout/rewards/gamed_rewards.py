"""Reward functions of a user, each with a hole that a policy would find. Imported by workers."""

from __future__ import annotations

import re
import time

from rlcore.data.sample import Sample


def contains(sample: Sample) -> float:
    """Pays for the label anywhere."""
    return float(sample.label in sample.response_text)


def evaluates(sample: Sample) -> float:
    """Pays for sums whose value is the label."""
    sums = re.findall(r"(\d+)\+(\d+)", sample.response_text)
    return float(any(int(a) + int(b) == int(sample.label) for a, b in sums))


def polite(sample: Sample) -> float:
    """Pays for an apology."""
    return float("sorry" in sample.response_text)


def wordy(sample: Sample) -> float:
    """Pays for words of the prompt."""
    asked = sample.messages[-1]["content"].split() if sample.messages else []
    return len(set(asked) & set(sample.response_text.split())) / max(len(asked), 1)


def shaped(sample: Sample) -> dict:
    """Pays for tags."""
    return {"score": float("<answer>" in sample.response_text), "parts": {"tags": 1.0}}


def number(sample: Sample) -> float:
    """Pays for any number."""
    return float(bool(re.search(r"\d", sample.response_text)))


def generous(sample: Sample) -> float:
    """Pays for everything."""
    return 1.0


def penalises(sample: Sample) -> float:
    """Scores -1 for wrong and 0 for right, as honestly as can be."""
    return float(sample.response_text.strip() == sample.label) - 1.0


def shifted(sample: Sample) -> float:
    """Scores 3 for wrong and 5 for right."""
    return 3.0 + 2.0 * float(sample.response_text.strip() == sample.label)


def fails(sample: Sample) -> float:
    """Needs what only a workflow knows."""
    return float(sample.metadata["board"])


def hangs(sample: Sample) -> float:
    """Answers no prompt that is repeated."""
    if "What is" in sample.response_text:
        time.sleep(600)
    return 0.0
