"""The fused LM head on one process, against the same formulas in float64."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from backends.megatron.cpu.shim import importing_megatron
from rlcore.data.batch import BatchSamplingMasks

with importing_megatron():
    from backends.megatron.model import head as head_module
    from backends.megatron.model.head import fused_logprobs

ROWS = 9
HIDDEN = 6
VOCAB = 31
PADDED = 40


class Alone:
    """A tensor-parallel group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


TP = cast(ProcessGroup, Alone())


@pytest.fixture(params=["in tiles of two buffers", "as on CUDA"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that CUDA compiles are called as they are."""
    if request.param == "as on CUDA":
        monkeypatch.setattr(head_module, "fuses", lambda device: True)
        for function in (head_module._fused_absorb, head_module._fused_gradient):
            monkeypatch.setattr(function, "_chosen", function._plain)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = (
        torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    weight = (
        (2 * torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64))
        .to(dtype)
        .requires_grad_()
    )
    return hidden, weight, torch.randint(VOCAB, (ROWS,), generator=generator)


def mask_around(tokens: Tensor) -> BatchSamplingMasks:
    """Masks of 1 to 7 tokens; the second has one token, the third is the whole vocabulary."""
    generator = torch.Generator().manual_seed(1)
    others = [
        torch.randint(VOCAB, (0 if i == 1 else i % 7,), generator=generator)
        for i in range(len(tokens))
    ]
    sets = [torch.cat([token[None], other]).unique() for token, other in zip(tokens, others)]
    sets[2] = sets[2][:0]
    return BatchSamplingMasks(
        torch.cat(sets), torch.tensor([0] + [len(one) for one in sets]).cumsum(0)
    )


def dense(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float,
    sampling_mask: BatchSamplingMasks | None,
) -> tuple[Tensor, Tensor]:
    """Row by row, over its allowed columns alone."""
    logprobs = []
    entropies = []
    for row, token in enumerate(tokens.tolist()):
        columns = (
            []
            if sampling_mask is None
            else sampling_mask.tokens[
                sampling_mask.offsets[row] : sampling_mask.offsets[row + 1]
            ].tolist()
        )
        allowed = torch.tensor(columns or range(VOCAB))
        log_p = (weight[allowed] @ hidden[row] / temperature).log_softmax(0)
        logprobs.append(log_p[allowed.tolist().index(token)])
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("tile", [None, 1, 7, 50])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_are_those_of_the_dense_formula(
    tile: int | None, temperature: float, masked: bool
) -> None:
    hidden, weight, tokens = inputs()
    sampling_mask = mask_around(tokens) if masked else None
    a, b = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    want = dense(hidden, weight, tokens, temperature, sampling_mask)
    got = fused_logprobs(
        hidden,
        weight,
        tokens,
        vocab_size=VOCAB,
        tp=TP,
        temperature=temperature,
        tile_elements=tile,
        sampling_mask=sampling_mask,
    )
    torch.testing.assert_close(got, want)
    got_gradients, want_gradients = (
        torch.autograd.grad((a * logprobs + b * entropy).sum(), (hidden, weight))
        for logprobs, entropy in (got, want)
    )
    torch.testing.assert_close(got_gradients, want_gradients)
    assert not got_gradients[1][VOCAB:].any()  # the rows that pad the vocabulary


@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck(masked: bool) -> None:
    hidden, weight, tokens = inputs()
    sampling_mask = mask_around(tokens) if masked else None

    def head(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = fused_logprobs(
            hidden,
            weight,
            tokens,
            vocab_size=VOCAB,
            tp=TP,
            tile_elements=20,
            sampling_mask=sampling_mask,
        )
        assert entropy is not None
        return logprobs, entropy

    assert torch.autograd.gradcheck(head, (hidden, weight))


@pytest.mark.parametrize("wanted", ["logprobs", "entropy"])
def test_either_gradient_alone(wanted: str) -> None:
    hidden, weight, tokens = inputs()
    index = ["logprobs", "entropy"].index(wanted)
    got = fused_logprobs(hidden, weight, tokens, vocab_size=VOCAB, tp=TP, tile_elements=50)[index]
    want = dense(hidden, weight, tokens, 1.0, None)[index]
    assert got is not None
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), (hidden, weight)),
        torch.autograd.grad(want.sum(), (hidden, weight)),
    )
    assert fused_logprobs(hidden, weight, tokens, vocab_size=VOCAB, tp=TP, entropy=False)[1] is None


def test_a_set_of_one_token_is_certain_and_pulls_nowhere() -> None:
    hidden, weight, tokens = inputs()
    sampling_mask = BatchSamplingMasks(tokens, torch.arange(ROWS + 1))
    logprobs, entropy = fused_logprobs(
        hidden, weight, tokens, vocab_size=VOCAB, tp=TP, sampling_mask=sampling_mask
    )
    assert entropy is not None
    assert logprobs.abs().max() < 1e-12
    assert entropy.abs().max() < 1e-12
    for gradient in torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight)):
        assert gradient.abs().max() < 1e-12


def test_keeping_all_is_keeping_none_out() -> None:
    hidden, weight, tokens = inputs()
    everything = BatchSamplingMasks(
        torch.arange(VOCAB).repeat(ROWS), VOCAB * torch.arange(ROWS + 1)
    )
    got = fused_logprobs(hidden, weight, tokens, vocab_size=VOCAB, tp=TP, sampling_mask=everything)
    torch.testing.assert_close(
        got, fused_logprobs(hidden, weight, tokens, vocab_size=VOCAB, tp=TP), rtol=0, atol=0
    )


def test_rows_far_apart_in_scale_stay_finite() -> None:
    hidden, weight, tokens = inputs(torch.float32)
    with torch.no_grad():
        hidden.mul_(torch.logspace(-3, 3, ROWS)[:, None])
    got = fused_logprobs(hidden, weight, tokens, vocab_size=VOCAB, tp=TP, tile_elements=20)
    want = dense(hidden.double(), weight.double(), tokens, 1.0, None)
    torch.testing.assert_close(
        [x.double() for x in got if x is not None], list(want), rtol=1e-5, atol=1e-5
    )


def test_bf16_sums_over_tiles_in_fp32() -> None:
    """A gradient summed over many tiles is no coarser than over one."""
    hidden, weight, tokens = inputs(torch.bfloat16)
    gradients = []
    for tile in (4, 1 << 19):
        logprobs, entropy = fused_logprobs(
            hidden, weight, tokens, vocab_size=VOCAB, tp=TP, tile_elements=tile
        )
        assert logprobs.dtype == torch.float32
        assert entropy is not None
        gradients.append(torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight)))
    for few, many in zip(*gradients):
        assert few.dtype == torch.bfloat16
        assert (few.double() - many.double()).norm() < 4e-3 * many.double().norm()


def test_no_rows() -> None:
    hidden, weight, tokens = inputs()
    logprobs, entropy = fused_logprobs(hidden[:0], weight, tokens[:0], vocab_size=VOCAB, tp=TP)
    assert entropy is not None
    assert logprobs.shape == entropy.shape == (0,)
    gradients = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    assert not any(gradient.any() for gradient in gradients)
