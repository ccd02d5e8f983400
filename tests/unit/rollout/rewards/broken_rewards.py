"""Reward functions that a newcomer gets wrong. Imported by worker processes."""

from __future__ import annotations


def two_arguments(sample, label):
    return 1.0


async def coroutine(sample):
    return 1.0


class NotCallable:
    pass


class Picky:
    """Gives `reward` to samples whose response is as long as `length`."""

    def __init__(self, length, reward=1.0):
        if length < 0:
            raise ValueError(f"length {length} is negative")
        self.length = length
        self.reward = reward
        self.calls = 0

    def __call__(self, sample):
        self.calls += 1
        return {
            "score": self.reward * (len(sample.response_text) == self.length),
            "correct": len(sample.response_text) == self.length,
            "parts": {"calls": self.calls},
            "info": {"length": len(sample.response_text)},
        }


class TwoCalls:
    def __call__(self, sample, label):
        return 1.0


def scaled(sample, factor=1.0):
    return factor * len(sample.response_text)


def on_a_line(sample):
    response = sample.response_text
    return response["score"]


def nothing(sample):
    pass
