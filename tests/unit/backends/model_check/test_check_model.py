"""`rlcore check-model` passes tiny models, and names what is wrong with wrong conversions."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.convert import load
    from backends.megatron.convert.families import FAMILIES
    from backends.megatron.model import moe
    from backends.megatron.model.attention import core
    from backends.megatron.model_check import check as checks
    from backends.megatron.model_check.check import StageReport, check_model
from rlcore import cli
from rlcore.hf_config.language import PREFIXES
from tests.language_models import VISION, draw
from tests.peak_bytes import peak_bytes

Break = Callable[[pytest.MonkeyPatch], None]

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "pad_token_id": None,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SIGMOID = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
           "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.7,
           "first_k_dense_replace": 1}  # fmt: skip
LATENT = {**SIGMOID, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
          "qk_rope_head_dim": 8, "v_head_dim": 10, "head_dim": 8, "n_group": 4,
          "topk_group": 2}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
         "linear_value_head_dim": 10, "layer_types": ["linear_attention", "full_attention"],
         **GROUPED}  # fmt: skip
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 40}
BLOCKS = {"num_hidden_layers": None, "mamba_num_heads": 4, "mamba_head_dim": 10, "n_groups": 2,
          "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
          "ssm_state_size": 6, "n_routed_experts": 4, "moe_intermediate_size": 24,
          "moe_shared_expert_intermediate_size": 40, **GROUPED}  # fmt: skip
INDEXER = {"index_n_heads": 2, "index_head_dim": 16}
# A family that is not here fails `test_every_family_agrees`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, **GROUPED, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v32": ("DeepseekV32", {**LATENT, **INDEXER}),
    "glm_moe_dsa": ("GlmMoeDsa", {**LATENT, **INDEXER, "n_group": 1, "topk_group": 1}),
    "minimax_m2": (
        "MiniMaxM2",
        {
            **GROUPED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gemma3_text": (
        "Gemma3Text",
        {**GROUPED, "query_pre_attn_scalar": 24, "sliding_window": 4, "pad_token_id": None},
    ),
    "gemma4_text": (
        "Gemma4Text",
        {
            "global_head_dim": 16,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "sliding_window": 4,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 3.0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "olmo3": (
        "Olmo3",
        {**GROUPED, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_oss": (
        "GptOss",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
    "qwen3_next": ("Qwen3Next", {**DELTA, **SHARED}),
    "qwen3_5_text": ("Qwen3_5Text", DELTA),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", {**DELTA, **SHARED}),
    "qwen3_5": ("Qwen3_5", {**DELTA, "vision_config": VISION}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA, **SHARED, "vision_config": VISION}),
    "nemotron_h": ("NemotronH", BLOCKS),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "glm4_moe": ("Glm4Moe", {**SIGMOID, "attention_bias": True, "use_qk_norm": True}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": None}),
    "ministral3": (
        "Ministral3",
        {
            **GROUPED,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 4,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "seed_oss": ("SeedOss", GROUPED),
    "smollm3": ("SmolLM3", {**GROUPED, "no_rope_layers": [1, 0]}),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {**{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}},
    ),
}


# Folders of these models' weights: the model, fields of `config.json`, and whether it is the
# language model of a larger one.
RENAMED: dict[str, tuple[str, dict[str, Any], bool]] = {
    "mimo": ("qwen2", {"model_type": "mimo", "architectures": ["MiMoForCausalLM"],
        "attention_bias": True}, False),
    "kimi_k2": ("deepseek_v3", {"model_type": "kimi_k2"}, False),
    "kimi_k25": ("deepseek_v3", {"model_type": "kimi_k25"}, True),
    "gemma3": ("gemma3_text", {"model_type": "gemma3"}, True),
    "gemma4": ("gemma4_text", {"model_type": "gemma4"}, True),
    "mistral3/mistral": ("mistral", {"model_type": "mistral3"}, True),
    "mistral3/ministral3": ("ministral3", {"model_type": "mistral3"}, True),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights large enough that every tensor matters, in half precision."""
    transformers.utils.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("check_model")
    for seed, (name, (kind, keys)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = draw(f"{kind}Config", {**SIZES, **keys})
        with torch.no_grad():
            for key, weight in (*model.named_parameters(), *model.named_buffers()):
                if "inv_freq" not in key:
                    weight.normal_(1.0 if "norm" in key else 0.0, 0.15)
        model.to(torch.bfloat16).save_pretrained(folder / name)
    for name in RENAMED:
        write_renamed(name, folder)
    return folder


def write_renamed(name: str, models: Path) -> None:
    """A model's weights under other names, for MiMo with a layer that is left out."""
    source, fields, inside = RENAMED[name]
    config = json.loads((models / source / "config.json").read_text())
    tensors = load_file(models / source / "model.safetensors")
    if name == "mimo":
        tensors["model.mtp_layers.0.input_proj.weight"] = torch.zeros(2, 2)
    if inside:
        config = {"text_config": config}
        table, own = PREFIXES[name.partition("/")[0]]
        tensors = {
            own + key.removeprefix(table) if key.startswith(table) else key: tensor
            for key, tensor in tensors.items()
        }
    (models / name).mkdir(parents=True)
    (models / name / "config.json").write_text(json.dumps({**config, **fields}))
    save_file(tensors, models / name / "model.safetensors")


def check_all(
    folder: Path, layers: int | None = None
) -> tuple[dict[str, StageReport], checks.Leftover]:
    reports: dict[str, StageReport] = {}
    leftover = check_model(
        folder, layers, lambda _: None, lambda found: reports.update({found.name: found})
    )
    return reports, leftover


def check(folder: Path, layers: int | None = None) -> dict[str, StageReport]:
    return check_all(folder, layers)[0]


def changed(folder: Path, source: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a folder with other tensors."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_agrees(name: str, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-model", str(models / name)]) == 0
    said = capsys.readouterr().out
    lines = {line[:18].strip(): line[18:].split() for line in said.splitlines()}
    assert {"embedding", "layer 0", "layer 1", "norm and head"} <= lines.keys()
    for layer in ("layer 0", "layer 1"):
        *apart, tensors = map(float, lines[layer])
        assert len(apart) == 3
        assert 0 < max(apart) < 1e-5
        assert tensors >= 9
    assert ("mtp_layers" in said) == (name == "mimo")


# --- wrong conversions ----------------------------------------------------------------------------


def arch(**changed: Any) -> Break:
    """A folder that is read with other fields; those of `transformer` are changed one by one."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        read = checks.read_architecture

        def wrong(folder: Path) -> Any:
            right = read(folder)
            fields = {**changed, "transformer": right.transformer | changed.get("transformer", {})}
            return dataclasses.replace(right, **fields)

        patch.setattr(checks, "read_architecture", wrong)

    return apply


def rope(**changed: Any) -> Break:
    """Other rotary positions, in all layers."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        read = checks.read_architecture

        def wrong(folder: Path) -> Any:
            right = read(folder)
            ropes = tuple(dataclasses.replace(own, **changed) for own in right.ropes)
            return dataclasses.replace(right, ropes=ropes)

        patch.setattr(checks, "read_architecture", wrong)

    return apply


def tensors(rename: Callable[[str], str]) -> Break:
    """A table that takes other tensors of the same shape."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        read = load.SafetensorsFolder.read
        patch.setattr(
            load.SafetensorsFolder, "read",
            lambda self, name, shape, part: read(self, rename(name), shape, part),
        )  # fmt: skip

    return apply


def transposed(end: str) -> Break:
    def apply(patch: pytest.MonkeyPatch) -> None:
        read = load.SafetensorsFolder.read

        def wrong(self: Any, name: str, shape: Any, part: Any) -> torch.Tensor:
            found = read(self, name, shape, part)
            return found.t() if name.endswith(end) else found

        patch.setattr(load.SafetensorsFolder, "read", wrong)

    return apply


def scaled(patch: pytest.MonkeyPatch) -> None:
    """The scale of the hidden size, not of a head's."""
    init = core.CoreAttention.__init__

    def wrong(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, config, *args, **kwargs)
        self.scale = config.hidden_size**-0.5

    patch.setattr(core.CoreAttention, "__init__", wrong)


def without_bias(patch: pytest.MonkeyPatch) -> None:
    best = moe.SigmoidRouter._best
    patch.setattr(
        moe.SigmoidRouter, "_best",
        lambda self, biased, topk, **groups: best(self, biased - self.expert_bias, topk),
    )  # fmt: skip


def leaking(patch: pytest.MonkeyPatch) -> None:
    """A pack is one sequence to attention."""
    attend = core.bucketed_attention

    def wrong(query: Any, key: Any, value: Any, layout: Any, *others: Any) -> torch.Tensor:
        whole = core.PackLayout.of_lengths([sum(layout.lengths)], query.device)
        return attend(query, key, value, whole, *others)

    patch.setattr(core, "bucketed_attention", wrong)


def without_gradient(patch: pytest.MonkeyPatch) -> None:
    forward = core.PackedAttention.forward
    patch.setattr(
        core.PackedAttention, "forward",
        lambda self, query, key, value, *args, **kwargs: forward(
            self, query, key, value.detach(), *args, **kwargs),
    )  # fmt: skip


def table(family: str, rename: Callable[[str], str]) -> Break:
    """A table with other names in its rows."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = FAMILIES[family]
        rows = tuple(row.renamed(rename) for row in right.entries)
        patch.setitem(FAMILIES, family, dataclasses.replace(right, entries=rows))

    return apply


def swap(one: str, other: str) -> Callable[[str], str]:
    return lambda name: name.replace(one, "#").replace(other, one).replace("#", other)


# model, defect, the stage that parts, where it parts first, tensors that are named
DEFECTS: dict[str, tuple[str, Break, str, str, str]] = {
    "q and k swapped": (
        "qwen2", table("qwen2", swap("q_proj", "k_proj")),
        "layer 0", "self_attn: query after norm and rotation", "self_attn.q_proj.weight"),
    "gate and up swapped": (
        "qwen2", table("qwen2", swap("gate_proj", "up_proj")),
        "layer 0", "mlp.down_proj input", "mlp.gate_proj.weight"),
    "k loaded as q": (
        "qwen2", tensors(swap("q_proj", "k_proj")),
        "layer 0", "self_attn.q_proj", "self_attn.q_proj.weight"),
    "epsilon of the norms": (
        "qwen3", arch(transformer={"layernorm_epsilon": 1e-4}),
        "layer 0", "input_layernorm", "layers.0.input_layernorm.weight"),
    "rotary base": (
        "llama", rope(theta=5e5),
        "layer 1", "self_attn: query after norm and rotation", "self_attn.q_proj.weight"),
    "interleaved rotation": (
        "llama", rope(interleaved=True),
        "layer 0", "self_attn: query after norm and rotation", "self_attn.q_proj.weight"),
    "part of a head that is rotated": (
        "glm4_moe", rope(dim=8),
        "layer 0", "self_attn: query after norm and rotation", "self_attn.q_norm.weight"),
    "no norms of q and k": (
        "qwen3", arch(transformer={"qk_layernorm": False}),
        "layer 0", "self_attn: query after norm and rotation", "self_attn.q_proj.weight"),
    "no biases of q, k and v": (
        "qwen2", arch(transformer={"add_qkv_bias": False}),
        "layer 0", "self_attn.q_proj", "self_attn.q_proj.weight"),
    "scale of a head": (
        "qwen3", scaled,
        "layer 0", "self_attn: scale of the scores", ""),
    "o_proj transposed": (
        "qwen3", transposed("o_proj.weight"),
        "layer 0", "self_attn.o_proj", "self_attn.o_proj.weight"),
    "experts in another order": (
        "qwen3_moe", tensors(swap("experts.1.", "experts.2.")),
        "layer 1", "mlp.experts", "mlp.experts.0.gate_proj.weight"),
    "no bias of the router": (
        "deepseek_v3", without_bias,
        "layer 1", "mlp: choice of experts", "mlp.gate.e_score_correction_bias"),
    "weights of experts as they are": (
        "qwen3_moe", arch(transformer={"moe_router_pre_softmax": True}),
        "layer 0", "mlp: weights of experts", "mlp.gate.weight"),
    "factor of the experts": (
        "deepseek_v3", arch(transformer={"moe_router_topk_scaling_factor": 1.0}),
        "layer 1", "mlp: weights of experts", "mlp.gate.weight"),
    "head tied to the embedding": (
        "qwen3", arch(tie_word_embeddings=True),
        "norm and head", "lm_head", "lm_head.weight"),
    "another norm before the head": (
        "qwen2", tensors(lambda name: name.replace("model.norm", "model.layers.0.input_layernorm")),
        "norm and head", "model.norm", "model.norm.weight"),
    "the layer before": (
        "qwen3", tensors(lambda name: name.replace("layers.1.", "layers.0.")),
        "layer 1", "input_layernorm", "layers.1.input_layernorm.weight"),
    "sequences that see each other": (
        "llama", leaking,
        "layer 0", "self_attn.o_proj input", "self_attn.v_proj.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_wrong_conversion_is_named(
    name: str, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, defect, stage, where, tensor = DEFECTS[name]
    defect(monkeypatch)
    assert cli.main(["check-model", str(models / model)]) == 1
    out, said = capsys.readouterr()
    line = next(line for line in said.splitlines() if f"{stage} parts" in line)
    assert f"{stage} parts first at {where}" in line, out
    assert tensor in line, out


def test_a_wrong_part_does_not_blur_the_next(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arch(transformer={"layernorm_epsilon": 1e-3})(monkeypatch)
    found = {part.name: part.distance for part in check(models / "llama")["layer 0"].parts}
    assert found["input_layernorm"] > 1e-3
    assert found["post_attention_layernorm"] > 1e-4
    assert max(found["self_attn"], found["mlp"]) < 1e-5


def test_a_gradient_that_parts_is_named(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_gradient(monkeypatch)
    found = check(models / "llama")["layer 1"]
    assert not found.agrees
    assert found.inside < 1e-5
    assert found.gradients["model.layers.1.self_attn.v_proj.weight"] == pytest.approx(1)
    assert not any("q_proj" in name for name in found.gradients)


def test_a_weight_that_loses_bits_is_named(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = load.pack

    def wrong(split: Any, pieces: Any, head_dim: int, out: torch.Tensor) -> None:
        pack(split, pieces, head_dim, out)
        if out.dim() == 2 and out.size(0) == SIZES["hidden_size"]:
            out[3, 5] = out[3, 5].nextafter(torch.tensor(9.0)) * (1 + 2**-7)

    monkeypatch.setattr(load, "pack", wrong)
    found = check(models / "llama")["layer 0"]
    names = {name.rpartition("layers.0.")[2] for name in found.changed}
    assert names == {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
    assert not found.agrees


def test_a_tensor_that_transformers_uses_and_we_do_not_fails(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arch(transformer={"qk_layernorm": False})(monkeypatch)
    assert cli.main(["check-model", str(models / "qwen3")]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "not converted, though transformers uses it" in said
    assert "model.layers.0.self_attn.k_norm.weight" in said


def test_a_tie_between_experts_is_no_difference(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router gives one token's second and third expert the same score."""
    name = "model.layers.1.mlp.gate.weight"
    seen: list[torch.Tensor] = []
    layer = checks._Check.layer

    def look(self: Any, number: int, theirs: Any) -> None:
        seen.append(theirs.parts.get("mlp.gate", [None])[0])
        layer(self, number, theirs)

    monkeypatch.setattr(checks._Check, "layer", look)
    check(models / "qwen3_moe")
    token = seen[1][7].double()

    def tie(tensors: dict[str, torch.Tensor]) -> None:
        gate = tensors[name].double()
        scores = gate @ token
        second, third = scores.argsort(descending=True)[1:3].tolist()
        gate[third] += (scores[second] - scores[third]) / token.square().sum() * token
        tensors[name] = gate.float()

    folder = changed(tmp_path / "tied", models / "qwen3_moe", tie)
    gating = moe.PackRouter.gating
    for sign in (1, -1):
        other = torch.arange(4) * sign * 3e-6
        monkeypatch.setattr(
            moe.PackRouter, "gating", lambda self, x, other=other: gating(self, x) + other
        )
        found = check(folder)["layer 1"]
        assert found.agrees, found
        if found.ties:
            return
    pytest.fail("neither order of the experts is another than transformers'")


@pytest.mark.parametrize("name", ["qwen3_moe", "glm_moe_dsa"])
def test_the_first_layers_alone(name: str, models: Path) -> None:
    found = check(models / name, 1)
    assert list(found) == ["embedding", "layer 0", "norm and head"]
    assert all(stage.agrees for stage in found.values())


@pytest.mark.parametrize(
    ("window", "longest"), [(None, 23), (8, 23), (40, 48), (60, 64), (4096, 23)]
)
def test_a_sequence_is_longer_than_a_window(window: int | None, longest: int, models: Path) -> None:
    """As far as the model has positions, and as long as it takes no time to speak of."""
    right = checks.read_architecture(models / "llama")
    windowed = dataclasses.replace(right, hf_config={"sliding_window": window})
    assert max(checks._lengths(windowed)) == longest


def test_experts_in_one_tensor(models: Path, tmp_path: Path) -> None:
    """As transformers 5 may write them: gates above ups."""

    def stack(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(SIZES["num_hidden_layers"]):
            experts = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([
                    tensors.pop(f"{experts}.{n}.{name}_proj.weight")
                    for n in range(EXPERTS["num_experts"])
                ])
                for name in ("gate", "up", "down")
            )  # fmt: skip
            tensors[f"{experts}.gate_up_proj"] = torch.cat((gate, up), 1)
            tensors[f"{experts}.down_proj"] = down

    folder = changed(tmp_path / "stacked", models / "qwen3_moe", stack)
    found, leftover = check_all(folder)
    assert all(stage.agrees for stage in found.values()), found
    assert leftover == checks.Leftover([], [], [])


def test_a_language_model_inside_another(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors have a prefix, its fields are an object of config.json."""
    prefix = ("model.", "model.language_model.")

    def inside(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(prefix[0])]:
            tensors[prefix[1] + name.removeprefix(prefix[0])] = tensors.pop(name)
        tensors["model.visual.patches.weight"] = torch.zeros(2, 2)

    folder = changed(tmp_path / "inside", models / "qwen3", inside)
    whole = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    whole["text_config"] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(whole))
    family = dataclasses.replace(FAMILIES["qwen3"], prefix=prefix, within="text_config")
    monkeypatch.setitem(FAMILIES, "qwen3", family)
    found, leftover = check_all(folder)
    assert all(stage.agrees for stage in found.values()), found
    assert leftover == checks.Leftover([], [], ["model.visual.patches.weight"])


def test_a_value_model(models: Path, tmp_path: Path) -> None:
    def head(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        tensors["score.weight"] = torch.randn(1, SIZES["hidden_size"]).bfloat16()

    folder = changed(tmp_path / "value", models / "qwen3", head)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config))
    found = check(folder)
    assert all(stage.agrees for stage in found.values()), found


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_it_holds_one_layer_at_a_time(name: str, tmp_path: Path) -> None:
    """Even its gradients and the copies that join experts make no second one."""
    kind, keys = MODELS[name]
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    experts = {"moe_intermediate_size": 256} if "moe" in name else {}
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **keys, **wide, **experts})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / name)
    layer = sum(4 * weight.numel() for weight in model.model.layers[0].parameters())
    # The file is mapped twice, which the profiler takes for memory.
    mapped = 2 * (tmp_path / name / "model.safetensors").stat().st_size
    peak = peak_bytes(lambda: check(tmp_path / name)) - mapped
    assert layer < peak < 2 * layer, peak / layer


# --- bad input ------------------------------------------------------------------------------------


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def narrowed(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()})


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(NORM), f"no tensor for {NORM}, which Qwen3ForCausalLM of transformers has"),
        (narrowed(NORM), f"{NORM} has the shape (31,), Qwen3ForCausalLM of transformers makes it"),
        (dict.clear, "no tensor for model.embed_tokens.weight"),
    ],
)
def test_a_folder_without_its_tensors(
    change: Any, message: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = changed(tmp_path / "broken", models / "qwen3", change)
    assert cli.main(["check-model", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"rlcore: {folder}: ")
    assert message in said


def test_an_unknown_family(models: Path, tmp_path: Path, capsys: Any) -> None:
    folder = changed(tmp_path / "unknown", models / "qwen3", lambda tensors: None)
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    assert cli.main(["check-model", str(folder)]) == 2
    assert "'unheard_of' is not converted; converted are: Llama" in capsys.readouterr().err


def test_more_layers_than_there_are(models: Path, capsys: Any) -> None:
    assert cli.main(["check-model", str(models / "qwen3"), "--layers", "3"]) == 2
    assert "--layers: got 3, expected at most the model's 2" in capsys.readouterr().err


def test_a_family_that_transformers_has_not(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(FAMILIES, "mimo", dataclasses.replace(FAMILIES["mimo"], known_as=""))
    assert cli.main(["check-model", str(models / "mimo")]) == 2
    assert "has no model_type 'mimo'" in capsys.readouterr().err


def test_an_old_transformers(models: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    assert cli.main(["check-model", str(models / "qwen3")]) == 2
    assert "needs transformers 5: installed is" in capsys.readouterr().err
