"""The fused LM head on one process, against the same formulas in float64."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from backends.megatron.cpu.kernels import assuming_kernels
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
    cap: float | None = None,
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
        logits = weight[allowed] @ hidden[row]
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        log_p = (logits / temperature).log_softmax(0)
        logprobs.append(log_p[allowed.tolist().index(token)])
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("tile", [None, 1, 7, 50])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cap", [None, 2.5])
def test_values_and_gradients_are_those_of_the_dense_formula(
    tile: int | None, temperature: float, masked: bool, cap: float | None
) -> None:
    hidden, weight, tokens = inputs()
    sampling_mask = mask_around(tokens) if masked else None
    a, b = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    want = dense(hidden, weight, tokens, temperature, sampling_mask, cap)
    got = fused_logprobs(
        hidden,
        weight,
        tokens,
        vocab_size=VOCAB,
        tp=TP,
        temperature=temperature,
        cap=cap,
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


# --- an fp32 head ---------------------------------------------------------------------------------

PAGE = Path(__file__).parents[4] / "docs" / "configuration.md"
WIDE = {"rows": 64, "hidden": 512, "vocab": 4096}


def trained_like(largest: float) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 hidden states [64, 512], weight [4096, 512] and sampled tokens.

    The largest logit is about `largest`.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(WIDE["rows"], WIDE["hidden"], generator=generator)
    weight = torch.randn(WIDE["vocab"], WIDE["hidden"], generator=generator)
    weight *= largest / float((hidden @ weight.t()).abs().max())
    logits = hidden @ weight.t()
    tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    return hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), tokens


def outputs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) of whole logits."""
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def far(got: Tensor, want: Tensor) -> float:
    """The distance by the norm."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def head_errors(largest: float, *, fp32: bool) -> dict[str, float]:
    """Largest errors of logits and log-probs, distances of the gradients."""
    hidden, weight, tokens = trained_like(largest)
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits = leaves[0] @ leaves[1].t()
    want = outputs(logits, tokens)
    tiles = head_module._Tiles(
        hidden.detach(),
        weight.detach(),
        head_module._Shard(0, WIDE["vocab"], 1.0, None, 1 << 22, fp32, None),
    )
    tile = tiles.product(slice(0, WIDE["rows"]), slice(0, WIDE["vocab"])).double()
    got = fused_logprobs(
        hidden, weight, tokens, vocab_size=WIDE["vocab"], tp=TP, fp32=fp32, tile_elements=10_000
    )
    assert got[1] is not None
    scale = torch.linspace(-1, 1, WIDE["rows"])
    gradients = [
        torch.autograd.grad((scale * of[0] + 0.1 * of[1]).sum(), of_leaves, retain_graph=True)
        for of, of_leaves in ((got, (hidden, weight)), (want, leaves))
    ]
    return {
        "logits": float((tile - logits.detach()).abs().max()),
        "log-probs": float((got[0] - want[0]).detach().abs().max()),
        "entropy": float((got[1] - want[1]).detach().abs().max()),
        "gradient of hidden states": far(gradients[0][0], gradients[1][0]),
        "gradient of the weight": far(gradients[0][1], gradients[1][1]),
    }


@pytest.mark.parametrize("largest", [8, 30])
def test_the_page_says_how_far_logits_are_from_float64(largest: int) -> None:
    """Rows of the page: largest logit | head | numbers, in the order of `head_errors`."""
    for name, fp32 in (("bf16", False), ("fp32", True)):
        [row] = re.findall(rf"^\| {largest} \| {name} \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
        said = [float(number) for number in row.split(" | ")]
        got = list(head_errors(largest, fp32=fp32).values())
        # Sums in another order end in another last digit of fp32.
        assert got == pytest.approx(said, rel=0.5 if fp32 else 0.1)


@pytest.mark.parametrize("largest", [8, 30, 100])
def test_in_fp32_nothing_is_rounded_but_what_is_returned_in_bf16(largest: float) -> None:
    rounded = head_errors(largest, fp32=False)
    kept = head_errors(largest, fp32=True)
    for name in ("logits", "log-probs", "entropy"):
        assert kept[name] < 2e-6 * largest < rounded[name] / 50, name
    # The gradients of the logits are rounded for the matmuls, and their sums as they are returned.
    for name in ("gradient of hidden states", "gradient of the weight"):
        assert kept[name] < 3e-3, name
        assert largest < 30 or rounded[name] > 4 * kept[name], name


class Rank:
    """One of several tensor-parallel ranks, which are threads."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.count = size

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count


def test_two_ranks_of_an_fp32_head_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(2, timeout=60)
    given: dict[int, Tensor] = {}

    def all_reduce(tensor: Tensor, op: Any = torch.distributed.ReduceOp.SUM, *, group: Any) -> None:
        given[group.rank()] = tensor.clone()
        barrier.wait()
        both = torch.stack([given[0], given[1]])
        tensor.copy_(both.amax(0) if op == torch.distributed.ReduceOp.MAX else both.sum(0))
        barrier.wait()

    monkeypatch.setattr(head_module.dist, "all_reduce", all_reduce)
    hidden, weight, tokens = trained_like(30)
    scale = torch.linspace(-1, 1, WIDE["rows"])

    def passes(shard: Tensor, group: object) -> list[Tensor]:
        own = shard.detach().requires_grad_()
        rows = hidden.detach().requires_grad_()
        logprobs, entropy = fused_logprobs(
            rows, own, tokens, vocab_size=WIDE["vocab"], tp=cast(ProcessGroup, group), fp32=True
        )
        assert entropy is not None
        loss = (scale * logprobs + 0.1 * entropy).sum()
        return [logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, (rows, own))]

    whole = passes(weight, TP)
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(passes, weight.chunk(2), (Rank(0, 2), Rank(1, 2))))
    for part in parts:
        torch.testing.assert_close(part[:2], whole[:2], rtol=0, atol=1e-5)
    # Each rank rounds its part of the hidden states' gradient to bf16.
    assert far(parts[0][2].double() + parts[1][2].double(), whole[2]) < 4e-3
    assert far(torch.cat([parts[0][3], parts[1][3]]), whole[3]) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wider_model_keeps_every_bit(dtype: torch.dtype) -> None:
    hidden, weight, tokens = inputs(dtype)
    results = []
    for fp32 in (False, True):
        got = fused_logprobs(hidden, weight, tokens, vocab_size=VOCAB, tp=TP, fp32=fp32)
        assert got[1] is not None
        loss = (got[0] + got[1]).sum()
        results.append([*got, *torch.autograd.grad(loss, (hidden, weight))])
    for one, other in zip(*results):
        assert one.equal(other)


def test_off_the_cpu_no_matmul_of_the_head_rounds_to_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors stand for those of a GPU, in both passes."""
    seen: list[tuple[torch.dtype, Any]] = []
    real = torch.addmm

    def addmm(*matrices: Tensor, **options: Any) -> Tensor:
        assert all(factor.dtype is torch.bfloat16 for factor in matrices[1:])
        seen.append((options["out"].dtype, options["out_dtype"]))
        return real(*matrices, **options)

    monkeypatch.setattr(torch, "addmm", addmm)
    hidden = torch.empty(8, 6, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(40, 6, dtype=torch.bfloat16, device="meta", requires_grad=True)
    tokens = torch.zeros(8, dtype=torch.int64, device="meta")
    with assuming_kernels("cuda"):
        logprobs, entropy = fused_logprobs(
            hidden, weight, tokens, vocab_size=VOCAB, tp=TP, fp32=True, tile_elements=1 << 10
        )
        assert entropy is not None
        (logprobs + entropy).sum().backward()
    # The logits, the logits again, and the gradients of hidden states and weight.
    assert seen == [(torch.float32, torch.float32)] * 4
