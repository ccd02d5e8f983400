"""Angles of packs against transformers' rotary modules, far beyond the original length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.batch.pack import lay_out

from backends.megatron.batch.cp_layout import PackLayout, Prefixes
from backends.megatron.batch.rotary import Angles, RotaryPositions
from backends.megatron.convert.read import read_architecture
from backends.megatron.convert.rope import Rope
from backends.megatron.model.elementwise import rotate_heads
from backends.megatron.parallel.state import CPRank
from rlcore.data.packing.sharing import share_nothing
from rlcore.errors import ModelError

CPU = torch.device("cpu")
ORIGINAL = 64
# Up to eight times the original length, one token below, at and above it; an order that mixes them.
LENGTHS = [3, 8 * ORIGINAL, ORIGINAL, ORIGINAL + 1, ORIGINAL - 1, 3 * ORIGINAL + 7]
SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 8 * ORIGINAL,
}  # fmt: skip
SIGMOID = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 2, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaRotaryEmbedding, {}),
    "glm4_moe": (Glm4MoeRotaryEmbedding, {**SIGMOID, "head_dim": 16}),
    "deepseek_v3": (DeepseekV3RotaryEmbedding, {
        **SIGMOID, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 10}),
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = {
    "rope_type": "llama3", "factor": 5.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 2.5 * i for i in range(8)],
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_type": "default", "rope_theta": 500.0}),
    ("llama", {"rope_type": "linear", "factor": 3.0}),
    ("llama", LLAMA3),
    ("llama", {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}),
    ("llama", YARN),
    ("llama", {**YARN, "truncate": False, "beta_fast": 4, "beta_slow": 0.5}),
    ("llama", {**YARN, "attention_factor": 1.3, "rope_theta": 1000}),
    ("llama", {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}),
    ("llama", {**YARN, "beta_fast": None, "mscale": 1.0, "mscale_all_dim": 0}),
    ("llama", LONG),
    ("llama", {**LONG, "factor": 3.0}),
    ("llama", {**LONG, "attention_factor": 1.7}),
    # half of each head
    ("glm4_moe", {"rope_type": "default"}),
    ("glm4_moe", {**YARN, "partial_rotary_factor": 0.75}),
    ("glm4_moe", LLAMA3),
    ("glm4_moe", {**LONG, "short_factor": [1.5] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}),
    ("deepseek_v3", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8, "truncate": False}),
    ("deepseek_v3", {**YARN, "mscale": 0, "mscale_all_dim": 0.8, "attention_factor": 0.9}),
]


def read(folder: Path, family: str, **changes: Any) -> tuple[Any, Rope]:
    """The configuration of transformers, and our positions, the same in every layer."""
    config = {**SIZES, **FAMILIES[family][1], "model_type": family, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    arch = read_architecture(folder, weights=False)
    assert len(arch.ropes) == 2
    assert arch.ropes[0] == arch.ropes[1] is not None
    return CONFIG_MAPPING[family].from_dict(json.loads(json.dumps(config))), arch.ropes[0]


def expected_angles(family: str, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of transformers, which gets each sequence alone."""
    module = FAMILIES[family][0](config)
    found = [module(torch.zeros(1), torch.arange(n)[None]) for n in LENGTHS]
    cos, sin = (torch.cat([pair[i][0] for pair in found]) for i in (0, 1))
    # equal halves
    return cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(("family", "settings"), CASES)
def test_angles_are_those_of_transformers(
    family: str, settings: dict[str, Any], spelling: str, tmp_path: Path
) -> None:
    """To the bit: an angle of some radians less would be another position."""
    config, rope = read(tmp_path, family, **{spelling: settings})
    angles = RotaryPositions([rope], CPU).angles(PackLayout.of_lengths(LENGTHS, CPU))[rope]
    cos, sin = expected_angles(family, config)
    assert torch.equal(angles.cos[:, 0], cos)
    assert torch.equal(angles.sin[:, 0], sin)


def test_a_length_outside_the_settings_is_that_of_transformers(tmp_path: Path) -> None:
    """Phi-3 writes `original_max_position_embeddings` next to `rope_scaling`."""
    settings = {key: LONG[key] for key in ("rope_type", "short_factor", "long_factor")}
    outer = {"original_max_position_embeddings": ORIGINAL, "rope_scaling": settings}
    _, rope = read(tmp_path, "llama", **outer)
    _, inside = read(tmp_path, "llama", rope_scaling=LONG)
    assert rope == inside
    with pytest.raises(ModelError, match="original_max_position_embeddings and rope_scaling"):
        read(tmp_path, "llama", original_max_position_embeddings=32, rope_scaling=LONG)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_a_sequence_as_long_without_its_pads(rank: int, tmp_path: Path) -> None:
    """A sequence of the original length stays short where context parallelism pads it."""
    original = 61
    settings = {**LONG, "original_max_position_embeddings": original}
    config, rope = read(tmp_path, "llama", rope_scaling=settings)
    lengths = torch.tensor([original, original + 1])
    multiple = 4
    sharing = share_nothing(lengths, multiple=multiple)
    layout, own = lay_out(sharing, lengths, sharing.size + 8, CPU, CPRank(2, rank))
    angles = RotaryPositions([rope], CPU).angles(layout)[rope]
    module = LlamaRotaryEmbedding(config)
    start = 0
    for n in lengths.tolist():
        cos = module(torch.zeros(1), torch.arange(n)[None])[0][0, :, :8]
        mine = (own >= start) & (own < start + n)
        assert mine.any()
        assert torch.equal(angles.cos[mine, 0], cos[own[mine] - start])
        start += -(-n // multiple) * multiple


def test_positions_behind_a_prefix_go_on(tmp_path: Path) -> None:
    _, rope = read(tmp_path, "llama", rope_scaling=LLAMA3)
    prefixes = Prefixes(torch.tensor([0, 40]), torch.arange(40), longest=90)
    layout = PackLayout.of_lengths([60, 50], CPU, prefixes=prefixes)
    positions = RotaryPositions([rope], CPU)
    whole = positions.angles(PackLayout.of_lengths([90], CPU))[rope]
    assert torch.equal(positions.angles(layout)[rope].cos[60:], whole.cos[40:])


def test_layers_have_positions_by_their_type(tmp_path: Path) -> None:
    """Each type of layer its own theta and scaling, every set computed once."""
    both = {
        "full_attention": {**LLAMA3, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    config = {**SIZES, "model_type": "qwen3", "head_dim": 16, "rope_parameters": both}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"rope_parameters.full_attention: got .*layer_types"):
        read_architecture(tmp_path, weights=False)
    config["layer_types"] = ["full_attention"] * 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = read_architecture(tmp_path, weights=False)
    assert arch.ropes[0] is arch.ropes[1] is not None
    assert (arch.ropes[0].kind, arch.ropes[0].theta) == ("llama3", 1e6)
    other = Rope("default", 100.0, 16)
    layout = PackLayout.of_lengths([9], CPU)
    found = RotaryPositions([*arch.ropes, None, other], CPU).angles(layout)
    assert list(found) == [arch.ropes[0], other]
    alone = RotaryPositions([other], CPU).angles(layout)[other]
    assert torch.equal(found[other].sin, alone.sin)


@pytest.mark.parametrize("rotated", [16, 8])
def test_interleaved_pairs(rotated: int) -> None:
    """Scores are those of rotating pair (2i, 2i + 1) by angle i as complex numbers; v is not."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 5, 3, 16, dtype=torch.float64)
    turns = torch.randn(5, 1, rotated // 2, dtype=torch.float64)

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x[..., :rotated].unflatten(-1, (-1, 2)).contiguous())
        spun = torch.view_as_real(pairs * torch.polar(torch.ones_like(turns), turns)).flatten(-2)
        return torch.cat((spun, x[..., rotated:]), -1)

    expected = torch.einsum("qhd,khd->hqk", turned(query), turned(key))
    angles = Angles(turns.cos(), turns.sin(), interleaved=True)
    got = torch.einsum("qhd,khd->hqk", *rotate_heads(query, key, angles))
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "angle whenever its sequence grows"),
        ({**LLAMA3, "high_freq_factor": 1.5}, "high_freq_factor: got 1.5, expected more than"),
        ({**LONG, "long_factor": [1.0] * 7}, "long_factor: got .* expected 8 numbers"),
        ({**LONG, "short_factor": [1.0] * 7 + [0.0]}, "short_factor: got .*positive numbers"),
        ({**LONG, "original_max_position_embeddings": 1}, "expected at least 2, or an attention"),
    ],
)
def test_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        read(tmp_path, "llama", rope_parameters=settings)
