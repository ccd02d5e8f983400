"""The fused head over two TP ranks, with and without sampling masks, against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from head_ranks import ROWS, TEMPERATURE, VOCAB, make
from spawn import run_ranks
from torch import Tensor

# The vocabulary of 31 padded to 34, so that a shard ends in padding, and to 64, so that one is
# nothing else.
CASES = [
    {"padded": padded, "tile": tile, "keep": keep}
    for padded in (34, 64)
    for tile in (None, 20)
    for keep in (False, True)
]


def dense(padded: int, keep: bool) -> dict[str, Tensor]:
    given = make(padded)
    hidden = given["hidden"].requires_grad_()
    weight = given["weight"].requires_grad_()
    logprobs = []
    entropies = []
    for row, token in enumerate(given["tokens"].tolist()):
        first, last = given["keep"].offsets[row : row + 2].tolist()
        allowed = given["keep"].tokens[first:last] if keep else torch.arange(VOCAB)
        log_p = (weight[allowed] @ hidden[row] / TEMPERATURE).log_softmax(0)
        logprobs.append(log_p[allowed.tolist().index(token)])
        entropies.append(-(log_p.exp() * log_p).sum())
    values = torch.stack([torch.stack(logprobs), torch.stack(entropies)])
    d_hidden, d_weight = torch.autograd.grad((given["upstream"] * values).sum(), (hidden, weight))
    return {
        "logprobs": values[0].detach(),
        "entropy": values[1].detach(),
        "hidden": d_hidden,
        "weight": d_weight,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("head") / "ranks"
    run_ranks(Path(__file__).with_name("head_ranks.py"), 2, folder, CASES, deadline_s=120)
    loaded: list[dict[str, Tensor]] = torch.load(folder / "results.pt")
    return loaded


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_two_ranks_are_the_dense_head(results: list[dict[str, Tensor]], number: int) -> None:
    case: dict[str, Any] = CASES[number]
    assert len(results[number]["logprobs"]) == ROWS
    torch.testing.assert_close(results[number], dense(case["padded"], case["keep"]))
