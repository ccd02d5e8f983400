from __future__ import annotations

import random

import numpy as np
import torch

from rlcore.runs.state_codec import decode_state, encode_state, restore_rng, rng_state, seed_rng


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.standard_normal()),
        float(torch.rand(())),
    ]


def test_generators_go_on_where_they_were_saved() -> None:
    random.gauss(0, 1)  # leaves a second value waiting, which is part of the state
    np.random.standard_normal()
    saved = encode_state(rng_state())
    expected = [draw() for _ in range(3)]
    restore_rng(decode_state(saved))
    assert [draw() for _ in range(3)] == expected
    assert draw() != expected[0]


def test_a_seed_fixes_every_generator() -> None:
    seed_rng(7)
    first = draw()
    seed_rng(8)
    assert all(a != b for a, b in zip(draw(), first))
    seed_rng(7)
    assert draw() == first
