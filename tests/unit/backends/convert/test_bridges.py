"""`model.bridge`: mbridge's tables against ours, families of its registry, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.bridges.packages import MegatronBridge, open_mbridge
from backends.megatron.convert.hf_tensors import hf_shapes, model_entries
from backends.megatron.convert.layout import pack, tp_slice
from backends.megatron.convert.read import read_architecture
from backends.megatron.convert.table import FUSED_NORMS, Entry, Split
from rlcore.errors import ModelError

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    # behind the tied one: mbridge keeps what it changes for that on the class
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
GLM4_MOE: dict[str, Any] = {
    **SIZES, "head_dim": 16, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def write_config(folder: Path, config: str, **keys: Any) -> Path:
    """`config.json` as transformers writes it for a class of its own; `None` takes a key away."""
    import transformers

    made = getattr(transformers, config)(**{**SIZES, **keys})
    made.architectures = [config.replace("Config", "ForCausalLM")]
    made.save_pretrained(folder)
    return folder


def change_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def engine_spelling(name: str, *, dense: bool) -> str:
    """A parameter as Transformer Engine's layers name it, which is how mbridge knows it."""
    if not dense and name.endswith("pre_mlp_layernorm.weight"):
        return name
    for fused, plain in FUSED_NORMS.items():
        name = re.sub(rf"(\.\d+\.){re.escape(plain)}$", rf"\g<1>{fused}", name)
    return re.sub(
        r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r"experts.\2.weight\1", name
    )


def our_parts(arch: Architecture, entry: Entry, full: list[Tensor], tp: int) -> Iterator[Tensor]:
    """The parameter of each tensor-parallel rank, by our table."""
    for rank in range(tp):
        pieces = [
            tp_slice(entry.split, tuple(t.shape), rank, tp, arch.vocab_size).of(t) for t in full
        ]
        out = torch.empty(sum(piece.size(0) for piece in pieces), *pieces[0].shape[1:])
        pack(entry.split, pieces, arch.transformer["kv_channels"], out)
        yield out


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("tp", [1, 2])
def test_mbridge_makes_the_same_parameters(name: str, tp: int, tmp_path: Path) -> None:
    config, keys = OURS[name]
    arch = read_architecture(write_config(tmp_path, config, **keys), weights=False)
    theirs = open_mbridge(arch)._bridge
    torch.manual_seed(0)
    for entry in model_entries(arch, "lm"):
        spelled = engine_spelling(entry.megatron, dense=not arch.num_experts)
        assert tuple(theirs._weight_name_mapping_mcore_to_hf(spelled)) == entry.hf
        full = [torch.randn(shape) for shape in hf_shapes(arch, entry)]
        whole = theirs._weight_to_mcore_format(spelled, full)
        parts = list(our_parts(arch, entry, full, tp))
        for ours, their in zip(
            parts, theirs._weight_split_across_tp(spelled, whole, parts[0], tp), strict=True
        ):
            assert torch.equal(ours, their), entry.megatron
        names, back = theirs._weight_to_hf_format(spelled, whole)
        assert tuple(names) == entry.hf
        assert all(torch.equal(a, b) for a, b in zip(back, full, strict=True)), entry.megatron


@pytest.mark.parametrize("name", OURS)
def test_a_family_of_ours_through_mbridge_is_the_same_model(name: str, tmp_path: Path) -> None:
    config, keys = OURS[name]
    ours = read_architecture(write_config(tmp_path, config, **keys), weights=False)
    bridged = read_architecture(tmp_path, weights=False, bridge="mbridge")
    for key in ("transformer", "rope_theta", "rope_scaling", "hf_config"):
        assert getattr(bridged, key) == getattr(ours, key)
    assert bridged.table.classes == ours.table.classes
    for head in ("lm", "value"):
        rows = [
            {(e.megatron, e.hf, e.split, e.expert) for e in model_entries(arch, head)}
            for arch in (bridged, ours)
        ]
        assert rows[0] == rows[1]


def test_glm4_moe(tmp_path: Path) -> None:
    arch = read_architecture(
        write_config(tmp_path, "Glm4MoeConfig", **GLM4_MOE), weights=False, bridge="mbridge"
    )
    assert arch.rope_scaling == {"rotary_percent": 0.5}
    assert arch.moe_layers == [False, True, True]
    assert arch.table.classes[0] == "Glm4MoeForCausalLM"
    expected = {
        "moe_router_score_function": "sigmoid", "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": 1.7,
        "moe_router_num_groups": 1, "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": 24, "kv_channels": 16,
        "qk_layernorm": True, "add_qkv_bias": True,
    }  # fmt: skip
    assert {key: arch.transformer[key] for key in expected} == expected
    bias = next(
        entry
        for entry in arch.entries()
        if entry.megatron == "decoder.layers.1.mlp.router.expert_bias"
    )
    assert (bias.hf, bias.dtype) == (
        ("model.layers.1.mlp.gate.e_score_correction_bias",),
        "float32",
    )


def test_mimo_is_what_transformers_does_not_have(tmp_path: Path) -> None:
    write_config(tmp_path, "Qwen2Config")
    mimo = {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "num_nextn_predict_layers": 1,
    }
    change_config(tmp_path, **mimo, attention_bias=True)
    arch = read_architecture(tmp_path, weights=False, bridge="mbridge")
    assert (arch.family, arch.table.classes[0], arch.rope_scaling) == (
        "mimo",
        "MiMoForCausalLM",
        None,
    )
    assert arch.hf_config["num_nextn_predict_layers"] == 0  # an export has no such layers


# --- a family that the user registers with mbridge ------------------------------------------------


@pytest.fixture
def mistral(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type:
    """A bridge of the user's own for the folder in `tmp_path`."""
    from mbridge.core.bridge import _MODEL_REGISTRY
    from mbridge.models.llama import LLaMABridge

    class MistralBridge(LLaMABridge):
        pass

    monkeypatch.setitem(_MODEL_REGISTRY, "mistral", MistralBridge)
    write_config(tmp_path, "MistralConfig", sliding_window=None, head_dim=16)
    return MistralBridge


def read_mistral(tmp_path: Path, **changes: Any) -> Architecture:
    return read_architecture(change_config(tmp_path, **changes), weights=False, bridge="mbridge")


def test_a_registered_family_is_carried(mistral: type, tmp_path: Path) -> None:
    arch = read_mistral(tmp_path)
    assert arch.table.classes[0] == "MistralForCausalLM"
    assert (arch.transformer["num_layers"], arch.transformer["kv_channels"]) == (3, 16)
    assert {entry.split for entry in arch.entries()} == set(Split) - {Split.COLUMN}


def test_a_field_that_our_layers_lack_is_refused(mistral: Any, tmp_path: Path) -> None:
    mistral._build_config = lambda self: self._build_base_config(window_size=(64, 0))
    with pytest.raises(
        ModelError,
        match=r"MistralBridge sets window_size to \(64, 0\), which our layers do not carry",
    ):
        read_mistral(tmp_path)


def test_layers_of_its_own_are_refused(mistral: Any, tmp_path: Path) -> None:
    mistral._get_transformer_layer_spec = lambda self, vp_stage=None: None
    with pytest.raises(ModelError, match=r"MistralBridge \(mistral\) builds a model of its own"):
        read_mistral(tmp_path)


def test_another_conversion_is_refused(mistral: Any, tmp_path: Path) -> None:
    plain = mistral._weight_to_mcore_format

    def up_first(self: Any, name: str, tensors: list[Tensor]) -> Tensor:
        return plain(self, name, tensors[::-1] if "linear_fc1" in name else tensors)

    mistral._weight_to_mcore_format = up_first
    with pytest.raises(
        ModelError,
        match=r"mlp\.linear_fc1\.weight of .*gate_proj.* in another way than a gated split",
    ):
        read_mistral(tmp_path)


def test_a_head_that_is_tied_by_the_bridge_alone_is_refused(mistral: Any, tmp_path: Path) -> None:
    mistral._DIRECT_MAPPING = {
        **mistral._DIRECT_MAPPING,
        "output_layer.weight": "model.embed_tokens.weight",
    }
    with pytest.raises(
        ModelError, match=r"ties the output layer .* set its tie_word_embeddings to true"
    ):
        read_mistral(tmp_path)


def test_a_parameter_without_a_name_is_refused(mistral: Any, tmp_path: Path) -> None:
    mistral._MLP_MAPPING = {k: v for k, v in mistral._MLP_MAPPING.items() if "fc2" not in k}
    with pytest.raises(
        ModelError, match=r"has no tensor for the parameter .*mlp\.linear_fc2\.weight"
    ):
        read_mistral(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping: 30.0 is not known to be in mbridge's MistralBridge",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types: got ['full_attention', 'sliding_attention', 'full_attention']",
        ),
        ({"sliding_window": 8}, "sliding_window: got 8"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters.rope_type: got 'yarn'",
        ),
    ],
)
def test_options_that_change_the_model(
    mistral: type, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        read_mistral(tmp_path, **changes)


def test_a_tensor_without_a_place_is_refused(mistral: type, tmp_path: Path) -> None:
    arch = read_mistral(tmp_path)
    tensors = {name: torch.zeros(2) for entry in arch.entries() for name in entry.hf}
    unread = ("model.layers.3.enorm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    passed_over = {name: torch.zeros(2) for name in unread}
    save_file(tensors | passed_over, tmp_path / "model.safetensors")
    assert read_architecture(tmp_path, bridge="mbridge").entries() == arch.entries()
    save_file(
        tensors | {"model.layers.0.self_attn.o_proj.bias": torch.zeros(2)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        ModelError, match=r"'model\.layers\.0\.self_attn\.o_proj\.bias' has no place"
    ):
        read_architecture(tmp_path, bridge="mbridge")


# --- what mbridge has and our layers cannot carry, and what is not installed ----------------------


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("gemma3", "Gemma3Bridge (gemma3) builds a model of its own"),
        ("qwen2_5_vl", "Qwen2_5VLBridge (qwen2_5_vl) builds a model of its own"),
        ("phi3", "mbridge has no model_type 'phi3'; it has deepseek_v3, gemma3, glm4_moe"),
    ],
)
def test_families_that_cannot_be_carried(tmp_path: Path, model_type: str, message: str) -> None:
    write_config(tmp_path, "Qwen2Config")
    change_config(tmp_path, model_type=model_type, architectures=["SomeForCausalLM"])
    with pytest.raises(ModelError, match=re.escape(message)):
        read_architecture(tmp_path, weights=False, bridge="mbridge")


def test_dense_layers_among_experts_are_not_in_mbridge(tmp_path: Path) -> None:
    write_config(tmp_path, "Qwen3MoeConfig", **EXPERTS, mlp_only_layers=[1])
    with pytest.raises(ModelError, match="Qwen3MoEBridge has no tensor for the parameter"):
        read_architecture(tmp_path, weights=False, bridge="mbridge")


def test_without_a_bridge_the_family_is_unknown_and_the_way_out_named(tmp_path: Path) -> None:
    write_config(tmp_path, "Glm4MoeConfig", **GLM4_MOE)
    with pytest.raises(ModelError, match=r"Glm4MoeForCausalLM is not converted.*model\.bridge"):
        read_architecture(tmp_path, weights=False)


@pytest.mark.parametrize(
    ("bridge", "module", "message"),
    [
        ("mbridge", "mbridge.core", "install it by `pip install mbridge==0.15.1 einops`"),
        (
            "megatron-bridge",
            "megatron.bridge",
            "install it by `pip install megatron-bridge` beside Transformer Engine",
        ),
    ],
)
def test_a_package_that_is_not_there(
    bridge: Any, module: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, "LlamaConfig")
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=re.escape(message)):
        read_architecture(tmp_path, weights=False, bridge=bridge)


def test_megatron_bridge_joins_queries_keys_and_values_by_the_heads_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The package is not here: its table and its functions are stood in for."""
    asked: list[Any] = []

    def merging(name: str) -> Any:
        def merge(sizes: Any, *tensors: Tensor) -> Tensor:
            asked.append((name, vars(sizes)))
            return torch.cat(tensors)

        return merge

    theirs = ModuleType("megatron.bridge.models.conversion.param_mapping")
    vars(theirs).update(merge_qkv_weights=merging("weights"), merge_qkv_biases=merging("biases"))
    parts = theirs.__name__.split(".")
    for count in range(2, len(parts)):
        name = ".".join(parts[:count])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)

    class QKVMapping:
        def __init__(self, kind: str) -> None:
            self.hf_param = {piece: f"layers.0.{piece}_proj.{kind}" for piece in "qkv"}

    class OneMapping:
        hf_param = "layers.0.o_proj.weight"

    known = {
        "linear_qkv.weight": QKVMapping("weight"),
        "linear_qkv.bias": QKVMapping("bias"),
        "linear_proj.weight": OneMapping(),
    }
    auto = SimpleNamespace(
        _model_bridge=SimpleNamespace(
            mapping_registry=lambda: SimpleNamespace(megatron_to_hf_lookup=known.get)
        ),
        to_megatron_provider=lambda load_weights: SimpleNamespace(),
    )
    heads = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16}
    arch: Any = SimpleNamespace(transformer={**heads, "hidden_size": 32})
    bridge = MegatronBridge(auto, arch)
    names = [f"layers.0.{piece}_proj.weight" for piece in "qkv"]
    assert bridge.hf_names("linear_qkv.weight") == names
    pieces = [torch.full((2, 1), float(k)) for k in range(3)]
    assert bridge.to_megatron("linear_qkv.weight", pieces)[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    bridge.to_megatron("linear_qkv.bias", [piece[:, 0] for piece in pieces])
    assert asked == [(kind, {"hidden_size": 1, **heads}) for kind in ("weights", "biases")]
    for unknown, message in (("linear_proj.weight", "by a OneMapping"), ("x", "no tensor for")):
        with pytest.raises(ModelError, match=message):
            bridge.hf_names(unknown)
