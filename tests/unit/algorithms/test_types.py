from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from rlcore.algorithms import Advantages, EstimatorInputs, InputError, PolicyLossInputs


def fields(**changes: object) -> dict[str, object]:
    good = {
        "cu_seqlens": torch.tensor([0, 2, 3]),
        "rewards": torch.zeros(2),
        "group_ids": torch.tensor([0, 0]),
    }
    return {**good, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": [0, 2, 3]}, "cu_seqlens: expected an integer tensor.*got list"),
        ({"cu_seqlens": torch.tensor([1, 2, 3])}, "cu_seqlens: expected to start at 0, got 1"),
        ({"cu_seqlens": torch.tensor([0, 3, 2])},
         "cu_seqlens: expected never to fall, got 3 -> 2 at sequence 1"),
        ({"cu_seqlens": torch.tensor([0.0, 2.0, 3.0])}, "cu_seqlens: expected dtype int64"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int64)}, r"cu_seqlens: expected shape \[B\+1\]"),
        ({"rewards": torch.zeros(3)}, r"rewards: expected shape \[B\] = \[2\].*got \[3\]"),
        ({"rewards": torch.zeros(2, 1)}, r"rewards: expected shape \[B\] = \[2\].*got \[2, 1\]"),
        ({"rewards": torch.tensor([0, 1])}, "rewards: expected a floating dtype, got torch.int64"),
        ({"rewards": None}, "rewards: expected a tensor.*got NoneType"),
        ({"group_ids": torch.zeros(2)}, "group_ids: expected an integer dtype, got torch.float32"),
        ({"values": torch.zeros(4)}, r"values: expected shape \[M\] = \[3\].*got \[4\]"),
        ({"versions": torch.zeros(3)}, "versions: expected an integer dtype"),
        ({"reward_parts": torch.zeros(2)},
         r"reward_parts: expected shape \[B, P\] = \[2, P\].*got \[2\]"),
        ({"reward_parts": torch.zeros(3, 2)}, r"reward_parts: expected shape .*got \[3, 2\]"),
        ({"kl": 0.0}, "kl: expected a tensor.*got float"),
        ({"kl": torch.zeros(3, device="meta")}, "kl: expected device cpu"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=f"EstimatorInputs.{message}"):
        EstimatorInputs(**fields(**changes))  # type: ignore[arg-type]


def test_policy_loss_inputs_are_checked_too() -> None:
    good = {name: torch.zeros(3) for name in ("logprobs", "old_logprobs", "advantages")}
    PolicyLossInputs(cu_seqlens=torch.tensor([0, 2, 3]), **good)
    with pytest.raises(InputError, match=r"PolicyLossInputs.entropy: expected shape \[M\] = \[3\]"):
        PolicyLossInputs(cu_seqlens=torch.tensor([0, 2, 3]), entropy=torch.zeros(2), **good)
    with pytest.raises(
        InputError, match=r"PolicyLossInputs.logprobs: expected shape \[M\] = \[4\]"
    ):
        PolicyLossInputs(cu_seqlens=torch.tensor([0, 2, 4]), **good)


def test_records_are_frozen_and_take_keywords_only() -> None:
    inputs = EstimatorInputs(**fields())  # type: ignore[arg-type]
    assert (inputs.num_sequences, inputs.num_tokens) == (2, 3)
    with pytest.raises(FrozenInstanceError):
        inputs.rewards = torch.ones(2)  # type: ignore[misc]
    with pytest.raises(TypeError):
        EstimatorInputs(*fields().values())  # type: ignore[misc]


def test_advantages_holds_tensors() -> None:
    with pytest.raises(
        InputError, match=r"Advantages.advantages: expected a tensor \[M\], got list"
    ):
        Advantages([1.0])  # type: ignore[arg-type]


def test_a_batch_without_sequences_is_fine() -> None:
    none = torch.zeros(0)
    inputs = EstimatorInputs(
        cu_seqlens=torch.tensor([0]), rewards=none, group_ids=none.long(), values=none
    )
    assert (inputs.num_sequences, inputs.num_tokens) == (0, 0)
