"""What SGLang's layers with a gated delta rule call on a CPU, against transformers' functions."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as reference

import rollout.engines.sglang as sglang_package

SLOTS, KEY_HEADS, HEADS, KEY, VALUE, WIDTH = 6, 2, 4, 8, 12, 4
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE
# Slots and lengths of sequences that lie one behind the other; the second pads the batch.
SEQUENCES = [(4, 7), (-1, 2), (0, 1), (2, 70)]


@pytest.fixture(scope="module")
def mamba() -> Any:
    """Loaded by its path: only SGLang's processes have its folder on theirs."""
    place = Path(sglang_package.__file__).parent / "cpu" / "sgl_kernel" / "mamba.py"
    spec = importlib.util.spec_from_file_location("rlcore_sgl_kernel_mamba", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def layout() -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, slice]]]:
    """(slots, starts, the sequences with a slot)."""
    starts = [0]
    for _, length in SEQUENCES:
        starts.append(starts[-1] + length)
    real = [
        (slot, slice(start, start + length))
        for (slot, length), start in zip(SEQUENCES, starts)
        if slot >= 0
    ]
    return torch.tensor([slot for slot, _ in SEQUENCES]), torch.tensor(starts), real


def others_are_unchanged(before: torch.Tensor, after: torch.Tensor, used: list[int]) -> bool:
    rest = [slot for slot in range(SLOTS) if slot not in used]
    return torch.equal(before[rest], after[rest])


def test_convolutions_of_sequences_and_of_single_tokens(mamba):
    torch.manual_seed(0)
    slots, starts, real = layout()
    x = torch.randn(CHANNELS, int(starts[-1]))
    weight = torch.randn(CHANNELS, WIDTH)
    states = torch.randn(SLOTS, CHANNELS, WIDTH - 1)
    before = states.clone()
    has_state = torch.tensor([True, False, False, True])
    made = mamba.causal_conv1d_fn_cpu(
        x,
        weight,
        None,
        activation="silu",
        conv_states=states,
        has_initial_state=has_state,
        cache_indices=slots,
        query_start_loc=starts,
    )
    for slot, part in real:
        past = before[slot] if has_state[slots.tolist().index(slot)] else 0 * before[slot]
        whole = torch.cat([past, x[:, part]], dim=1)
        expected = reference.causal_conv1d_fn(whole[None], weight, activation="silu")[0]
        torch.testing.assert_close(made[:, part], expected[:, WIDTH - 1 :])
        assert torch.equal(states[slot], whole[:, 1 - WIDTH :])
    assert others_are_unchanged(before, states, [slot for slot, _ in real])

    tokens = torch.randn(len(SEQUENCES), CHANNELS)
    before = states.clone()
    one = mamba.causal_conv1d_update_cpu(
        tokens, states, weight, None, "silu", conv_state_indices=slots
    )
    for row, (slot, _) in enumerate(SEQUENCES):
        if slot >= 0:
            state = before[slot][None].clone()
            expected = reference.causal_conv1d_update(
                tokens[row][None, :, None], state, weight, activation="silu"
            )
            torch.testing.assert_close(one[row], expected[0, :, 0])
            assert torch.equal(states[slot], state[0])
    assert others_are_unchanged(before, states, [slot for slot, _ in real])


def test_states_of_sequences_and_of_single_tokens(mamba):
    torch.manual_seed(0)
    slots, starts, real = layout()
    tokens = int(starts[-1])
    q, k = torch.randn(2, 1, tokens, KEY_HEADS, KEY).unbind(0)
    v = torch.randn(1, tokens, HEADS, VALUE)
    a, b = torch.randn(2, tokens, HEADS).unbind(0)
    log_decay, bias = torch.randn(2, HEADS).unbind(0)
    g, beta = mamba.fused_gdn_gating_cpu(log_decay, a, b, bias)
    expected_g = -log_decay.exp() * torch.nn.functional.softplus(a + bias)
    torch.testing.assert_close(g[0], expected_g)
    torch.testing.assert_close(beta[0], b.sigmoid())
    states = torch.randn(SLOTS, HEADS, VALUE, KEY)
    before = states.clone()
    made, _, _ = mamba.chunk_gated_delta_rule_cpu(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=states,
        initial_state_indices=slots,
        cu_seqlens=starts,
        head_first=False,
        use_qk_l2norm_in_kernel=True,
    )
    rule = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    for slot, part in real:
        expected, state = reference.torch_chunk_gated_delta_rule(
            *(x[:, part] for x in (q, k, v)),
            g=g[:, part],
            beta=beta[:, part],
            initial_state=before[slot][None].transpose(-1, -2),
            **rule,
        )
        torch.testing.assert_close(made[:, part], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(states[slot], state[0].transpose(-1, -2), atol=1e-5, rtol=1e-5)
    assert others_are_unchanged(before, states, [slot for slot, _ in real])

    before = states.clone()
    rows = slice(0, len(SEQUENCES))
    one = mamba.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=log_decay,
        dt_bias=bias,
        q=q[:, rows],
        k=k[:, rows],
        v=v[:, rows],
        a=a[rows],
        b=b[rows],
        initial_state_source=states,
        initial_state_indices=slots,
        cu_seqlens=torch.arange(len(SEQUENCES) + 1),
        use_qk_l2norm_in_kernel=True,
    )
    for row, (slot, _) in enumerate(SEQUENCES):
        if slot >= 0:
            own = slice(row, row + 1)
            expected, state = reference.torch_recurrent_gated_delta_rule(
                *(x[:, own] for x in (q, k, v)),
                g=g[:, own],
                beta=beta[:, own],
                initial_state=before[slot][None].transpose(-1, -2),
                **rule,
            )
            torch.testing.assert_close(one[row], expected[0])
            torch.testing.assert_close(states[slot], state[0].transpose(-1, -2))
    assert others_are_unchanged(before, states, [slot for slot, _ in real])


def test_norms_gates_and_divided_projections(mamba):
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16
    )
    attention = reference.Qwen3_5Attention(config, 3)
    for norm in (attention.q_norm, attention.k_norm):
        torch.nn.init.normal_(norm.weight)
    hidden = torch.randn(5, 32)
    with torch.no_grad():
        projected = attention.q_proj(hidden)
        keys = attention.k_proj(hidden)
        query, gate = projected.view(5, 4, 32).chunk(2, dim=-1)
        got = mamba.fused_qk_gemma_rmsnorm_with_gate_cpu(
            projected,
            keys,
            attention.q_norm.weight,
            attention.k_norm.weight,
            attention.q_norm.eps,
            16,
            4,
        )
        expected = (
            attention.q_norm(query).reshape(-1, 16),
            attention.k_norm(keys.view(5, 2, 16)).reshape(-1, 16),
            gate.reshape(-1, 16),
        )
        for mine, its in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, its)
        norm = reference.Qwen3_5RMSNormGated(16)
        torch.nn.init.normal_(norm.weight)
        x, z = torch.randn(2, 7, 16).unbind(0)
        mine = mamba.fused_rmsnorm_gated_cpu(x, norm.weight, z, norm.variance_epsilon)
        torch.testing.assert_close(mine, norm(x, z))
    product = x.clone()
    mamba.fused_sigmoid_mul_cpu(product, z)
    torch.testing.assert_close(product, x * z.sigmoid())
    qkvz = torch.randn(5, CHANNELS + HEADS * VALUE)
    ba = torch.randn(5, 2 * HEADS)
    qkv, z, b, a = mamba.fused_qkvzba_split_reshape_cat_contiguous_cpu(
        qkvz, ba, KEY_HEADS, HEADS, KEY, VALUE
    )
    assert torch.equal(torch.cat([qkv, z.flatten(1)], dim=1), qkvz)
    assert torch.equal(torch.cat([b, a], dim=1), ba)
    assert z.shape == (5, HEADS, VALUE)
