"""The parts of the Megatron backend that need no second process."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.megatron.convert.architecture import Architecture
from backends.megatron.cpu.shim import (
    expected_warnings_off,
    importing_megatron,
    megatron_device,
    replaced,
)

with importing_megatron():
    from megatron.core.tensor_parallel import ColumnParallelLinear, layers
    from megatron.core.transformer import TransformerConfig

    from backends.megatron.backend import MegatronBackend
    from backends.megatron.checks.transformer_fields import (
        ALLOWED,
        ALLOWED_WITH_TE,
        REFUSED,
        check_overrides,
    )
    from backends.megatron.model.attention.core import bucketed_attention
    from backends.megatron.model.gpt import transformer_config
    from backends.megatron.training.optimizer import learning_rate
from cases import LENGTHS, make_batch, make_config

from backends.megatron.batch import local_batch
from backends.megatron.batch.cp_layout import PackLayout
from backends.megatron.batch.pack import make_micro_batch, pack_size
from backends.megatron.checks.layout import check_layout, layers_of_stages
from backends.megatron.model.layers import FUSIONS
from backends.megatron.parallel.state import CPRank
from rlcore.config.sections.policy import OptimizerConfig, ParallelConfig
from rlcore.data.packing.plan import padded_length, plan_minibatches
from rlcore.errors import ConfigError
from rlcore.planning.memory import padded_vocab_size

CPU = torch.device("cpu")
ARCH = Architecture(
    family="qwen3", hf_config={}, vocab_size=31, tie_word_embeddings=True,
    max_position_embeddings=64, ropes=(),
    transformer={"num_layers": 6, "hidden_size": 32, "num_attention_heads": 12,
        "num_query_groups": 4, "kv_channels": 16,
                 "ffn_hidden_size": 48},
)  # fmt: skip


# --- the CPU context ------------------------------------------------------------------------------


def test_nothing_is_installed_outside_the_context() -> None:
    stream = torch.cuda.Stream
    current = torch.cuda.current_device
    scatter = torch.distributed.scatter
    with megatron_device("cpu"), megatron_device("cpu"):
        assert torch.cuda.current_device() == CPU
        assert torch.zeros(1, device="cuda").device == CPU
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert not torch.cuda.is_available()
    assert (torch.cuda.Stream, torch.cuda.current_device, torch.distributed.scatter) == (
        stream,
        current,
        scatter,
    )
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_an_error_inside_leaves_nothing_installed() -> None:
    current = torch.cuda.current_device
    with pytest.raises(KeyError), megatron_device("cpu"):
        raise KeyError
    assert torch.cuda.current_device is current


def test_importing_the_package_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, backends.megatron; print([m for m in ('torch', 'megatron') if m in"
        " sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


# --- packs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[5, 0, 1, 40, 17, 16, 40], [7, 7, 7], [1]])
def test_bucketed_attention_is_attention_in_each_sequence(lengths: list[int]) -> None:
    torch.manual_seed(0)
    total = sum(lengths)
    scale = 0.3
    q, k, v = (
        torch.randn(total, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    layout = PackLayout.of_lengths(lengths, CPU)
    expected = []
    start = 0
    for n in lengths:
        qi, ki, vi = (x[start : start + n].transpose(0, 1) for x in (q, k, v))
        ki, vi = (x.repeat_interleave(2, 0) for x in (ki, vi))
        scores = (qi @ ki.transpose(1, 2) * scale).masked_fill(
            torch.ones(n, n).triu(1).bool(), float("-inf")
        )
        expected.append((scores.softmax(-1) @ vi).transpose(0, 1).reshape(n, 32))
        start += n
    want = torch.cat(expected)
    got = bucketed_attention(q, k, v, layout, scale)
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(want)
    got_gradients, want_gradients = (
        torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in (got, want)
    )
    torch.testing.assert_close(got_gradients, want_gradients)


def test_a_bucket_is_padded_by_less_than_half() -> None:
    lengths = list(range(1, 200))
    layout = PackLayout.of_lengths(lengths, CPU)
    assert len(layout.buckets.parts) <= 10
    assert sum(b.queries.numel() for b in layout.buckets.parts) < 1.5 * sum(lengths)
    assert layout.positions.tolist() == [p for n in lengths for p in range(n)]


def test_equal_lengths_need_no_gather() -> None:
    assert PackLayout.of_lengths([9, 9, 9], CPU).buckets.identity
    assert not PackLayout.of_lengths([9, 8, 9], CPU).buckets.identity


def test_a_micro_batch_shifts_its_targets_and_pads_at_the_end() -> None:
    batch = make_batch()
    micro = make_micro_batch(batch, 1, 5, 48, CPU)
    start = int(batch.cu_tokens[1])
    end = int(batch.cu_tokens[5])
    assert micro.num_tokens == end - start == sum(LENGTHS[1:5])
    assert micro.sequences == slice(1, 5)
    assert micro.num_slots == sum(micro.packed.layout.lengths) == 48  # type: ignore[union-attr]
    trainable = batch.loss_mask[start:end].nonzero()[:, 0]
    assert micro.target_index.tolist() == (trainable - 1).tolist()
    assert micro.target_tokens.tolist() == batch.tokens[start:end][trainable].tolist()
    assert micro.cu_seqlens.tolist() == [0, 11, 11, 11, 24]
    assert micro.input_ids[0, micro.num_tokens :].count_nonzero() == 0


@pytest.mark.parametrize(("first", "last"), [(2, 3), (4, 4), (2, 4)])
def test_a_micro_batch_without_trainable_tokens(first: int, last: int) -> None:
    micro = make_micro_batch(
        make_batch(), first, last, pack_size(0, 4) if first != 2 or last != 4 else 8, CPU
    )
    assert len(micro.target_index) == len(micro.target_tokens) == 0
    assert micro.rows.stop == micro.rows.start
    assert micro.cu_seqlens.tolist() == [0] * (last - first + 1)


# --- transfer -------------------------------------------------------------------------------------


def test_shares_arrive_as_they_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [
        {
            "bytes": [torch.tensor([True, False]), torch.tensor([True])],
            "longs": [torch.arange(5) + d],
            "none": [torch.zeros(0, dtype=torch.float64)],
            "doubles": [torch.randn(2, 3, dtype=torch.float64).t()],  # not contiguous
            "rows": [torch.randn(2, 3), torch.randn(0, 3), torch.randn(1, 3)],
            "halves": [torch.randn(3).bfloat16()],
            "number": [torch.tensor(2.5)],
        }
        for d in range(2)
    ]
    wire: list[Any] = []
    monkeypatch.setattr(
        local_batch, "broadcast_json", lambda value, *_: wire.append(value) or value
    )
    dist = SimpleNamespace(
        send=lambda data, to, group: wire.append(data.clone()),
        recv=lambda data, source, group: data.copy_(wire.pop(0)),
    )
    monkeypatch.setattr(local_batch, "dist", dist)

    def at(rank: int) -> Any:
        return SimpleNamespace(
            world_size=2, rank=rank, dp_rank=rank, replica_leaders=(0, 1), control_group=None,
            replica_group=SimpleNamespace(size=lambda: 1),
        )  # fmt: skip

    sent = local_batch._scatter(shares, at(0))
    layouts = wire.pop(0)
    monkeypatch.setattr(local_batch, "broadcast_json", lambda *_: layouts)
    received = local_batch._scatter(None, at(1))
    assert not wire
    for share, out in zip(shares, (sent, received), strict=True):
        assert out.keys() == share.keys()
        for name, parts in share.items():
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            assert out[name].dtype == whole.dtype
            assert torch.equal(out[name], whole)


@pytest.mark.parametrize("limit", [40, 41, 44, 47, 63])
def test_no_planned_pack_is_longer_than_the_budget(limit: int) -> None:
    """Sequences have pads of their own, and the pack too under SP: here to a multiple of 8."""
    config = make_config(
        {"model": "any", "parallel": {"context": 2, "tensor": 2, "sequence": True}}, Path("models")
    )
    config.policy.max_tokens_per_microbatch = limit
    backend: Any = SimpleNamespace(
        config=config,
        parallel=SimpleNamespace(cp=CPRank(2, 0), dp_size=1),
        policy=SimpleNamespace(arch=ARCH),
        _prefixes=lambda: SimpleNamespace(on=False),
    )
    rules = MegatronBackend.plan_rules.fget(backend)  # type: ignore[attr-defined]
    (plan,) = plan_minibatches(rules, make_batch(), [range(len(LENGTHS))])
    packs = [
        pack_size(sum(padded_length(LENGTHS[i], 4) for i in micro), 8)
        for micro in plan.microbatches[0]
    ]
    assert max(packs) <= limit
    assert len(packs) > 1


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "world_size", "message"),
    [
        ({"tensor": 2, "pipeline": 2}, 6, "does not divide the world size 6"),
        ({"pipeline": 3, "virtual_pipeline": 2, "last_stage_layers": 4}, 3, r"\[1, 1, 4\]"),
        ({"pipeline": 2, "last_stage_layers": 6}, 2, "0 are left for 1 stages"),
        ({"context": 2}, 3, "context 2 = 2 does not divide the world size 3"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    parallel: dict[str, Any], world_size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout(ARCH, ParallelConfig(**parallel), world_size)


def test_a_layout_that_fits() -> None:
    check_layout(ARCH, ParallelConfig(tensor=4, pipeline=3, sequence=True), 24)


@pytest.mark.parametrize(
    ("parallel", "stages"),
    [
        ({"pipeline": 2}, [3, 3]),
        ({"pipeline": 2, "first_stage_layers": 1}, [1, 5]),
        ({"pipeline": 2, "last_stage_layers": 2, "virtual_pipeline": 2}, [4, 2]),
        ({"pipeline": 4, "first_stage_layers": 1, "last_stage_layers": 1}, [1, 2, 2, 1]),
        ({"pipeline": 2, "first_stage_layers": 2, "last_stage_layers": 4}, [2, 4]),
    ],
)
def test_layers_of_stages(parallel: dict[str, Any], stages: list[int]) -> None:
    assert layers_of_stages(6, ParallelConfig(**parallel)) == stages


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("recompute_granularty", "did you mean 'recompute_granularity'"),
        ("num_layers", "the model folder decides it"),
        ("hidden_dropout", "dropout is off"),
        ("bf16", "model.dtype"),
        ("calculate_per_token_loss", "weighted losses"),
        ("mtp_num_layers", "not proven with packs; expected one of recompute_granularity"),
        ("window_size", "would do nothing"),
        ("fp8_recipe", "Transformer Engine"),
        ("tp_comm_overlap", "one size"),
        ("transformer_impl", "policy.transformer_engine"),
    ],
)
def test_overrides_that_are_refused(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"policy.megatron.{key}.*({message})"):
        check_overrides({key: 1}, ARCH)


@pytest.mark.parametrize("te_layers", [False, True])
def test_every_field_but_the_allowed_ones_is_refused(te_layers: bool) -> None:
    """Also one that a later megatron-core brings."""
    fields = {field.name for field in dataclasses.fields(TransformerConfig) if field.init}
    assert {*ALLOWED, *ALLOWED_WITH_TE, *chain(*REFUSED.values())} <= fields
    experts = replace(ARCH, transformer={**ARCH.transformer, "num_moe_experts": 4})
    allowed = {*ALLOWED, *(ALLOWED_WITH_TE if te_layers else ())}
    for key in fields - allowed:
        with pytest.raises(ConfigError, match="cannot be set here"):
            check_overrides({key: 1}, experts, te_layers=te_layers)
    check_overrides(dict.fromkeys(allowed, 1), experts, te_layers=te_layers)
    for key in (key for key in ALLOWED if key.startswith("moe_")):
        with pytest.raises(ConfigError, match="the model has no experts"):
            check_overrides({key: 1}, ARCH)


TE_FIELDS = {
    "transformer_impl": "transformer_engine",
    "use_te_activation_func": False,
    "bias_activation_fusion": True,
    "moe_grouped_gemm": False,
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gradient_accumulation_fusion", True), ("bias_activation_fusion", False),
        ("bias_dropout_fusion", True), ("cpu_offloading", True), ("moe_permute_fusion", True),
        ("moe_router_fusion", True), ("moe_enable_deepep", True), ("moe_deepep_num_sms", 16),
    ],
)  # fmt: skip
def test_transformer_engines_switches_are_taken_with_its_layers(key: str, value: Any) -> None:
    experts = replace(ARCH, transformer={**ARCH.transformer, "num_moe_experts": 4})
    with pytest.raises(ConfigError, match=f"policy.megatron.{key}.*Transformer Engine's layers"):
        check_overrides({key: value}, experts)
    check_overrides({key: value}, experts, te_layers=True)


def test_a_configuration_with_transformer_engines_switches() -> None:
    overrides = {"gradient_accumulation_fusion": True, "bias_dropout_fusion": True}
    with expected_warnings_off():
        config = transformer_config(ARCH, ParallelConfig(), "bf16", CPU, overrides, TE_FIELDS)
        local = transformer_config(ARCH, ParallelConfig(), "bf16", CPU, {})
    assert (config.gradient_accumulation_fusion, config.bias_dropout_fusion) == (True, True)
    assert not any(getattr(local, fusion) for fusion in FUSIONS)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    layer = partial(
        ColumnParallelLinear, 4, 8, config=config, init_method=torch.nn.init.zeros_, bias=False,
        skip_weight_param_allocation=True, tp_group=group,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="APEX"):
        layer()
    with replaced(layers, "_grad_accum_fusion_available", True):
        assert layer().gradient_accumulation_fusion


@pytest.mark.parametrize(
    ("vocab", "divisible", "tp", "padded"), [(31, 1, 2, 32), (31, 64, 2, 128), (32, 1, 4, 32)]
)
def test_padded_vocabulary(vocab: int, divisible: int, tp: int, padded: int) -> None:
    assert padded_vocab_size(vocab, divisible, tp) == padded


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        (
            "cosine",
            [0.5, 1.0, 1.0, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2 + 0.4 * (1 - 0.5**0.5), 0.2],
        ),
    ],
)
def test_learning_rate(schedule: Any, expected: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.2, schedule=schedule, warmup_steps=2)
    rates = [learning_rate(config, step, total_steps=6) for step in range(8)]
    assert rates[:7] == pytest.approx(expected)
    assert rates[7] == rates[6]
