"""Activation recomputation gives the same gradients in less memory; other choices are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
from spawn import Results

from backends.megatron.convert.architecture import Architecture
from backends.megatron.cpu.shim import importing_megatron
from rlcore.config.sections.policy import ParallelConfig
from rlcore.errors import ConfigError

with importing_megatron():
    from backends.megatron.checks.transformer_fields import check_recompute

RANKS = Path(__file__).with_name("recompute_ranks.py")
EQUAL = 1e-6  # relative, over each whole tensor
LOSSES = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.05}


def full(method: str, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": layers,
        **more,
    }


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


# Four layers; those of the models with experts have a shared one, but for the second layer, which
# is dense.
CHOICES: dict[str, dict[str, Any]] = {
    "uniform_1": full("uniform", 1), "uniform_2": full("uniform", 2), "block_1": full("block", 1),
    "block_3": full("block", 3),
    "distributed": full("uniform", 1, distribute_saved_activations=True),
    **{part: selective(part) for part in ("core_attn", "mlp", "moe", "shared_experts")},
    "core_attn_mlp": selective("core_attn", "mlp"),
    "every_part": selective("core_attn", "mlp", "moe", "shared_experts"),
}  # fmt: skip
SP2 = {"tensor": 2, "sequence": True}
PP2 = {"pipeline": 2}
VPP2 = PP2 | {"virtual_pipeline": 2}


def cases(layout: str, model: str, *choices: str, **keys: Any) -> list[dict[str, Any]]:
    """Cases without recomputation, named by the layout, and for each choice."""
    megatron = keys.pop("megatron", {})
    common = {"model": model, "plan": "uneven", **keys}
    chosen = {layout: {}} | {f"{layout}-{choice}": CHOICES[choice] for choice in choices}
    return [{"name": name, "megatron": megatron | one, **common} for name, one in chosen.items()]


REPLAY: dict[str, Any] = {"megatron": LOSSES, "replay": "logprobs"}
CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        *cases("dense", "qwen3", "uniform_1", "uniform_2", "block_1", "block_3", "core_attn", "mlp",
               "core_attn_mlp"),
        *cases("moe", "qwen2_moe", "uniform_1", "uniform_2", "core_attn", "mlp", "moe",
               "shared_experts", "every_part", megatron=LOSSES),
        *cases("moe_plain", "qwen2_moe", "block_1", "block_3"),
        *cases("latent", "deepseek_v3", "uniform_2", "every_part", replay="logprobs"),
        *cases("replay", "qwen2_moe", "uniform_1", "uniform_2", "every_part", **REPLAY),
    ],
    2: [
        *cases("tp2_sp", "qwen3", "uniform_2", "block_1", "core_attn_mlp", parallel=SP2),
        *cases("tp2", "qwen3", "distributed", parallel={"tensor": 2}),
        *cases("tp2_sp_mqa", "qwen3_mqa", "uniform_2", "core_attn_mlp", parallel=SP2),
        *cases("pp2", "qwen3", "uniform_1", "block_1", "core_attn_mlp", parallel=PP2),
        *cases("vpp2", "qwen3", "uniform_1", "core_attn_mlp", plan="pairs", parallel=VPP2),
        *cases("moe_tp2_sp", "qwen2_moe", "uniform_2", "every_part", parallel=SP2, **REPLAY),
        *cases("moe_pp2", "qwen2_moe", "uniform_1", "every_part", parallel=PP2, **REPLAY),
        *cases("moe_vpp2", "qwen2_moe", "uniform_1", "every_part", plan="pairs", parallel=VPP2,
               **REPLAY),
        *cases("moe_ep2", "qwen2_moe", "uniform_2", "every_part", plan="dp2",
               parallel={"expert": 2}, **REPLAY),
        *cases("moe_cp2", "qwen2_moe", "uniform_2", "every_part", parallel={"context": 2},
               **REPLAY),
    ],
}  # fmt: skip
NAMES = [
    pytest.param(case["name"], marks=pytest.mark.full if size > 1 else ())
    for size, of_size in CASES.items() for case in of_size if "-" in case["name"]
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("recompute")
    oracle.write_models(folder / "models", only=("qwen3", "qwen3_mqa", "qwen2_moe", "deepseek_v3"))
    return Results(folder, CASES, (), script=RANKS)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_gradients_in_less_memory(name: str, results: Results) -> None:
    got = results[name]
    expected = results[name.partition("-")[0]]
    far = [
        weight
        for weight, want in expected["gradients"].items()  # an expert without tokens has none
        if not (got["gradients"][weight] - want).double().norm() <= EQUAL * want.double().norm()
    ]
    assert not far, f"relative distance of gradients above {EQUAL}: {far}"
    assert got["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
    assert all(
        ours < theirs
        for ours, theirs in zip(got["saved_bytes"], expected["saved_bytes"], strict=True)
    )
    assert all(got["inputs"])
    assert not any(got["kept_inputs"]), "a layer's input is still in memory after the step"


# --- what is refused ------------------------------------------------------------------------------

DENSE_ARCH = Architecture("llama", {}, 31, False, 64, (), {"num_layers": 4})
MOE_ARCH = Architecture("qwen3_moe", {}, 31, False, 64, (), {"num_layers": 4, "num_moe_experts": 4})
FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}

REFUSED: list[tuple[Architecture, dict[str, Any], dict[str, Any], str]] = [
    # what it is
    (DENSE_ARCH, {}, {"recompute_granularity": "some"},
     "recompute_granularity: got 'some', expected full or selective"),
    (DENSE_ARCH, {}, {"recompute_modules": ["mlp"]},
     "recompute_modules: does nothing without recompute_granularity; set that to selective"),
    (DENSE_ARCH, {}, {"recompute_num_layers": 1},
     "recompute_num_layers: does nothing without recompute_granularity; set that to full"),
    (DENSE_ARCH, {}, {"moe_layer_recompute": True},
     "moe_layer_recompute: Megatron gives it up; set recompute_granularity=selective and "
     "recompute_modules=[moe]"),
    # whole layers
    (DENSE_ARCH, {}, FULL,
     "recompute_method: got None, expected uniform or block"),
    (DENSE_ARCH, {}, {**FULL, "recompute_method": "uniform"},
     "recompute_num_layers: got None, expected a number from 1 to 4"),
    (DENSE_ARCH, VPP2, full("uniform", 2),
     "recompute_num_layers: got 2, expected a number from 1 to 1"),
    (DENSE_ARCH, {}, full("block", 5),
     "recompute_num_layers: got 5, expected a number from 1 to 4"),
    (DENSE_ARCH, {}, full("uniform", 3),
     "recompute_num_layers: 3 does not divide the layers of a model chunk (4); set it to 2"),
    (DENSE_ARCH, PP2 | {"first_stage_layers": 1}, full("uniform", 3),
     "recompute_num_layers: 3 does not divide the layers of a model chunk (1, 3); set it to 1"),
    (DENSE_ARCH, {}, {**full("uniform", 1), "recompute_modules": ["mlp"]},
     "recompute_modules: belongs to recompute_granularity=selective; leave it out, or set that"),
    (DENSE_ARCH, SP2, full("uniform", 1, distribute_saved_activations=True),
     "distribute_saved_activations: sequence parallelism does it already; leave it out"),
    (DENSE_ARCH, {}, full("uniform", 1, distribute_saved_activations=True),
     "distribute_saved_activations: there is no tensor parallelism to do it over; leave it out"),
    (MOE_ARCH, {}, full("block", 3) | LOSSES,
     "recompute_method: block, with moe_aux_loss_coeff: in layers that are not recomputed "
     "megatron-core then counts pads in the routers' losses; set it to uniform"),
    # parts of layers
    (DENSE_ARCH, {}, {**SELECTIVE, "recompute_method": "block"},
     "recompute_method: belongs to recompute_granularity=full; leave it out, or set that"),
    (DENSE_ARCH, {}, selective(),
     "recompute_modules: got [], expected some of core_attn, mlp"),
    (DENSE_ARCH, {}, selective("mpl"),
     "recompute_modules: got 'mpl', expected some of core_attn, mlp; did you mean 'mlp'?"),
    (DENSE_ARCH, {}, selective("moe"),
     "recompute_modules: moe: the llama model has no experts; expected some of core_attn, mlp"),
    (MOE_ARCH, {}, selective("mlp"),
     "recompute_modules: mlp: no layer of the qwen3_moe model has a dense MLP; expected some of "
     "core_attn, moe"),
    (MOE_ARCH, {}, selective("shared_experts"),
     "recompute_modules: shared_experts: the qwen3_moe model has no shared experts; expected some "
     "of core_attn, moe"),
    *((MOE_ARCH, {}, selective(module),
       f"recompute_modules: {module}: megatron-core needs Transformer Engine's layers for it; "
       f"expected some of core_attn, moe")
      for module in ("layernorm", "moe_act")),
    (MOE_ARCH, {}, selective("mla_up_proj"),
     "recompute_modules: mla_up_proj: it has not been proven right; expected some of core_attn, "
     "moe"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "parallel", "given", "message"),
    REFUSED,
    ids=[row[-1].partition(":")[0] for row in REFUSED],
)
def test_what_would_fail_be_wrong_or_do_nothing_is_refused(
    arch: Architecture, parallel: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_recompute(given, arch, ParallelConfig(**parallel), te_layers=False)
    assert str(caught.value) == f"policy.megatron.{message}"


def test_transformer_engine_has_more() -> None:
    for te_layers in (True, None):
        check_recompute(
            selective("layernorm", "moe_act"), MOE_ARCH, ParallelConfig(), te_layers=te_layers
        )
    with pytest.raises(
        ConfigError,
        match="layernorm: Transformer Engine's layers have their norms inside the matmuls",
    ):
        check_recompute(selective("layernorm"), DENSE_ARCH, ParallelConfig(), te_layers=True)


def test_a_block_of_all_layers_is_right_with_losses_too() -> None:
    check_recompute(full("block", 4) | LOSSES, MOE_ARCH, ParallelConfig())
