"""Attention over packs with shared prefixes, both forms of it, against plain sums in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.megatron.cpu.shim import importing_megatron
from rlcore.data.packing.sharing import share_prefixes

with importing_megatron():
    from backends.megatron.batch.cp_layout import PackLayout
    from backends.megatron.batch.pack import lay_out
    from backends.megatron.model.attention import core
    from backends.megatron.model.attention.merged import VarlenKernel, merged_attention
    from backends.megatron.parallel.state import ALONE, CPRank

CPU = torch.device("cpu")
HEADS = 4
GROUPS = 2
SCALE = 0.3


def sequences_of(generator: torch.Generator) -> list[Tensor]:
    """Groups, a tree, one that is another's beginning, one twice, and one alone."""

    def drawn(count: int) -> Tensor:
        return torch.randint(0, 9, (count,), generator=generator)

    found: list[Tensor] = []
    for prompt in (drawn(40), drawn(7), drawn(90)):
        found += [torch.cat([prompt, drawn(3 + 4 * k)]) for k in range(4)]
    branches = [torch.cat([found[0], drawn(6)]) for _ in range(2)]
    found += [torch.cat([branch, drawn(5)]) for branch in branches for _ in range(2)]
    return [*found, found[8][:60], found[1], drawn(1), drawn(33)]


class Pack:
    """A pack with pads, its tensors, and each sequence's slots."""

    def __init__(self, *, multiple: int = 1) -> None:
        generator = torch.Generator().manual_seed(2)
        sequences = sequences_of(generator)
        self.lengths = torch.tensor([len(tokens) for tokens in sequences])
        self.sharing = share_prefixes(torch.cat(sequences).int(), self.lengths, multiple=multiple)
        self.real = self.sharing.slots.unique()
        self.size = self.sharing.size + 11
        self.layout, _ = lay_out(self.sharing, self.lengths, self.size, CPU, ALONE)
        self.inputs = [
            torch.randn(self.size, heads, 16, generator=generator)
            for heads in (HEADS, GROUPS, GROUPS)
        ]
        self.weight = torch.randn(self.size, HEADS * 16, generator=generator)
        # what a pad sees is nobody's business
        pads = torch.ones(self.size).index_fill(0, self.real, 0).bool()
        self.weight[pads] = 0

    def results(self, attend: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Output at real slots, and the gradients of q, k and v."""
        inputs = [x.to(dtype).requires_grad_() for x in self.inputs]
        out = attend(*inputs, self.layout, SCALE)
        gradients = torch.autograd.grad((out * self.weight.to(dtype)).sum(), inputs)
        return [out[self.real].detach(), *gradients]

    def with_sinks(self, attend: Any, sinks: Tensor, window: int | None) -> list[Tensor]:
        """`results` with sinks, and their gradient at the end."""
        sinks = sinks.clone().requires_grad_()
        inputs = [x.to(sinks.dtype).requires_grad_() for x in self.inputs]
        out = attend(*inputs, self.layout, SCALE, window=window, sinks=sinks)
        gradients = torch.autograd.grad((out * self.weight.to(sinks.dtype)).sum(), [*inputs, sinks])
        return [out[self.real].detach(), *gradients]

    def by_hand(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: PackLayout,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Each token sees the slots of its own sequence up to its own."""
        rows = dict.fromkeys(range(self.size), torch.zeros(HEADS * 16, dtype=q.dtype))
        for slots in self.sharing.slots.split(self.lengths.tolist()):
            for position, slot in enumerate(slots.tolist()):
                first = 0 if window is None else max(position + 1 - window, 0)
                seen = slots[first : position + 1]
                keys, values = (x[seen].repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
                scores = torch.einsum("hd,nhd->hn", q[slot], keys) * scale
                if sinks is not None:
                    scores = torch.cat([scores, sinks[:, None]], dim=1)
                shares = scores.softmax(-1)[:, : len(seen)]
                rows[slot] = torch.einsum("hn,nhd->hd", shares, values).flatten()
        return torch.stack([rows[slot] for slot in range(self.size)])


@pytest.fixture(scope="module")
def pack() -> Pack:
    return Pack()


@pytest.fixture(scope="module")
def expected(pack: Pack) -> list[Tensor]:
    return pack.results(pack.by_hand, torch.float64)


def merged(*given: Any, **options: Any) -> Tensor:
    return merged_attention(*given, varlen=False, **options)


@pytest.mark.parametrize("attend", [core.bucketed_attention, merged])
def test_both_forms_equal_plain_sums(attend: Any, pack: Pack, expected: list[Tensor]) -> None:
    assert pack.sharing.num_shared > 300
    for got, want in zip(pack.results(attend), expected, strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)


WINDOW = 12


def with_window(q: Tensor, k: Tensor, v: Tensor, layout: PackLayout, scale: float) -> Tensor:
    return core.bucketed_attention(q, k, v, layout, scale, WINDOW)


def merged_with_window(*given: Any) -> Tensor:
    return merged_attention(*given, varlen=False, window=WINDOW)


@pytest.mark.parametrize("attend", [with_window, merged_with_window])
def test_a_window_ends_in_the_middle_of_a_prefix(attend: Any, pack: Pack) -> None:
    want = pack.results(partial(pack.by_hand, window=WINDOW), torch.float64)
    for got, one in zip(pack.results(attend), want, strict=True):
        torch.testing.assert_close(got.double(), one, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_sink_takes_its_share_and_learns(pack: Pack, window: int | None) -> None:
    sinks = torch.tensor([-1.0, 0.5, 2.0, 4.0])
    got, want = (
        pack.with_sinks(attend, sinks.to(dtype), window)
        for attend, dtype in ((merged, torch.float32), (pack.by_hand, torch.float64))
    )
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=0)
    narrow = pack.with_sinks(merged, sinks.bfloat16(), window)
    for one, other in zip(narrow, want, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 0.02


def test_half_precision_sums_in_single(pack: Pack, expected: list[Tensor]) -> None:
    for got, want in zip(pack.results(merged, torch.bfloat16), expected, strict=True):
        assert float((got.double() - want).norm() / want.norm()) < 0.01


@pytest.mark.parametrize("attend", [core.bucketed_attention, merged])
def test_context_parallel_ranks_see_the_prefixes_of_all(attend: Any) -> None:
    """Two ranks, each with its slots of queries and all keys, rank behind rank."""
    pack = Pack(multiple=4)
    want = pack.results(pack.by_hand, torch.float64)
    ranks = [CPRank(2, rank) for rank in range(2)]
    size = pack.size + -pack.size % 4
    inputs = [torch.zeros(size, *x.shape[1:]) for x in pack.inputs]
    for wide, x in zip(inputs, pack.inputs, strict=True):
        wide[: pack.size] = x
        wide.requires_grad_()
    query, key, value = inputs
    laid = [lay_out(pack.sharing, pack.lengths, size, CPU, rank) for rank in ranks]
    held = torch.cat([slots for _, slots in laid])
    parts = [attend(query[slots], key[held], value[held], layout, SCALE) for layout, slots in laid]
    out = torch.cat(parts)[held.argsort()]
    gradients = torch.autograd.grad((out[: pack.size] * pack.weight).sum(), inputs)
    torch.testing.assert_close(out[pack.real].double(), want[0], atol=1e-5, rtol=0)
    for got, expected in zip(gradients, want[1:], strict=True):
        torch.testing.assert_close(got[: pack.size].double(), expected, atol=1e-5, rtol=0)


# --- CUDA's variable-length kernel, with sums in the place of its two operators -------------------


def runs(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    for (a, b), (c, d) in zip(
        itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True
    ):
        yield slice(a, b), slice(c, d)


def probabilities(q: Tensor, k: Tensor, scale: float, left: int, right: int) -> Tensor:
    """Scores [heads, queries, keys], -inf where a query does not see; aligned to the end."""
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.size(1) // k.size(1), 1)) * scale
    if right == 0:
        hidden = torch.ones(len(q), len(k)).triu(1 + len(k) - len(q)).bool()
        if left >= 0:
            hidden |= torch.ones(len(q), len(k)).tril(len(k) - len(q) - left - 1).bool()
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    dropout: float, is_causal: bool, return_debug_mask: bool, *, scale: float,
    window_size_left: int, window_size_right: int, **unused: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert is_causal == (window_size_left == -1 and window_size_right == 0)
    out = torch.empty_like(q)
    lse = torch.empty(q.size(1), len(q))
    for mine, seen in runs(cu_q, cu_k):
        scores = probabilities(q[mine], k[seen], scale, window_size_left, window_size_right)
        lse[:, mine] = scores.logsumexp(-1)
        values = v[seen].repeat_interleave(q.size(1) // v.size(1), 1)
        out[mine] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    nothing = torch.empty(0)
    return out, lse, nothing, nothing, nothing


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor,
    cu_k: Tensor, max_q: int, max_k: int, dropout: float, is_causal: bool, rng: Tensor,
    unused: Tensor, *, scale: float, window_size_left: int, window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As the kernel: from the log-sum-exp and the output that it is given (FlashAttention-2)."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    share = q.size(1) // k.size(1)
    for mine, seen in runs(cu_q, cu_k):
        p = (
            probabilities(q[mine], k[seen], scale, window_size_left, window_size_right)
            - lse[:, mine, None]
        ).exp()
        delta = (grad[mine] * out[mine]).sum(-1).t()[..., None]
        values = v[seen].repeat_interleave(share, 1)
        ds = p * (torch.einsum("qhd,khd->hqk", grad[mine], values) - delta) * scale
        dq[mine] = torch.einsum("hqk,khd->qhd", ds, k[seen].repeat_interleave(share, 1))
        for total, part in (
            (dk, torch.einsum("hqk,qhd->khd", ds, q[mine])),
            (dv, torch.einsum("hqk,qhd->khd", p, grad[mine])),
        ):
            total[seen] = part.unflatten(1, (-1, share)).sum(2)
    return dq, dk, dv


@pytest.fixture(scope="module")
def kernel() -> Iterator[None]:
    """The two operators behind torch's own Python, on the CPU."""
    import torch.nn.attention.varlen

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    yield
    library._destroy()


def test_the_variable_length_kernel_merges_alike(
    kernel: None, pack: Pack, expected: list[Tensor]
) -> None:
    got = pack.results(lambda *given: merged_attention(*given, varlen=True))
    for one, want in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), want, atol=2e-6, rtol=0)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_the_variable_length_kernel_has_windows_and_sinks(
    kernel: None, pack: Pack, window: int | None
) -> None:
    sinks = torch.tensor([-1.0, 0.5, 2.0, 4.0])
    got = pack.with_sinks(partial(merged_attention, varlen=True), sinks, window)
    want = pack.with_sinks(pack.by_hand, sinks.double(), window)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=0)


def test_autograd_through_its_log_sum_exp_is_wrong(
    kernel: None, pack: Pack, expected: list[Tensor]
) -> None:
    """Torch drops the gradient of the log-sum-exp without a word, so we need a backward pass."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    def naive(q: Tensor, k: Tensor, v: Tensor, layout: PackLayout, scale: float) -> Tensor:
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:2], float("-inf"))
        for part in layout.parts:
            one = VarlenKernel.of_part(part, CPU)
            own, own_lse = varlen_attn(
                q[one.slots], k[one.keys], v[one.keys], one.cu_queries, one.cu_keys,
                one.longest_queries, one.longest_keys, scale=scale, enable_gqa=True,
                window_size=(-1, 0) if one.causal else (-1, -1),
                return_aux=AuxRequest(lse=True),
            )  # fmt: skip
            before = lse[one.slots]
            both = torch.logaddexp(before, own_lse.t())
            mixed = (
                out[one.slots] * (before - both).exp()[..., None]
                + own * (own_lse.t() - both).exp()[..., None]
            )
            out = out.index_put((one.slots,), mixed)
            lse = lse.index_put((one.slots,), both)
        return out.flatten(1)

    out, *gradients = pack.results(naive)
    torch.testing.assert_close(out.double(), expected[0], atol=2e-6, rtol=0)
    wrong = [
        float((got.double() - want).norm() / want.norm())
        for got, want in zip(gradients, expected[1:], strict=True)
    ]
    assert max(wrong) > 0.05


def test_merging_is_chosen_where_copies_of_keys_would_be_many() -> None:
    def chosen(prompt: int, response: int, n: int, device: str = "cpu", **how: Any) -> bool:
        begin = torch.arange(prompt)
        each = [torch.cat([begin, torch.full((response,), 10_000 + k)]) for k in range(n)]
        lengths = torch.tensor([len(tokens) for tokens in each])
        sharing = share_prefixes(torch.cat(each).int(), lengths)
        layout, _ = lay_out(sharing, lengths, sharing.size, CPU, ALONE)
        given: Any = {"same_heads": True, "varlen": False} | how
        return core.merges(layout, torch.device(device), **given)

    assert chosen(1024, 100, 16)
    assert chosen(64, 10, 64, varlen=True)
    assert not chosen(64, 100, 2, varlen=True)
    assert not chosen(1024, 100, 2), "one copy"
    assert not chosen(64, 10, 64), "short ones: many small calls"
    assert not chosen(1024, 100, 16, same_heads=False)
    assert not chosen(0, 100, 4)
    assert chosen(1024, 100, 16, "cuda", varlen=True)
    assert not chosen(1024, 100, 16, "cuda"), "in single precision the CPU alone has a kernel"
