"""The layouts, models and damages of the worlds of this folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor": 2},
    "tp2_sequence": {"tensor": 2, "sequence": True},
    # The models have two KV heads.
    "tp4": {"tensor": 4},
    "pp2": {"pipeline": 2},
    "vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "pp2_uneven": {"pipeline": 2, "first_stage_layers": 1},
    "dp2": {},
    "dp4": {},
    "ep2": {"expert": 2},
    "ep2_etp1": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1},
    "cp2": {"context": 2},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
    "tp2_dp2": {"tensor": 2},
    "ep2_pp2": {"expert": 2, "pipeline": 2},
}


@dataclass(frozen=True)
class World:
    layouts: tuple[str, ...]  # under each: convert every model, load checkpoints
    # before that, save a checkpoint of every variant under each
    saves: tuple[str, ...] = ()


WORLDS = {
    1: World(("one",), saves=("one",)),
    2: World(
        ("tp2", "tp2_sequence", "pp2", "vpp2", "pp2_uneven", "dp2", "cp2"),
        saves=("tp2", "vpp2", "dp2", "cp2"),
    ),
    4: World(("tp4", "dp4", "tp2_pp2", "tp2_dp2", "ep2_pp2"), saves=("tp4",)),
}

# How a policy and a critic (the reward model) are trained before they are saved.
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {"policy": "qwen2", "dtype": "fp32", "distributed": False},
    "fp32_distributed": {"policy": "qwen2_tied", "dtype": "fp32", "distributed": True},
    "bf16": {"policy": "llama_tied", "dtype": "bf16", "distributed": False},
    "bf16_distributed": {"policy": "qwen3_tied", "dtype": "bf16", "distributed": True},
    "gated_delta": {"policy": "qwen3_5", "dtype": "fp32", "distributed": True},
    "mamba": {"policy": "nemotron_h_dense", "dtype": "fp32", "distributed": True},
    # The policy is saved before its first step.
    "critic_warmup": {"policy": "qwen3", "dtype": "fp32", "distributed": False,
                      "critic_warmup": True},
}  # fmt: skip

# (saved under, loaded under)
PAIRS = [
    ("one", "one"), ("one", "tp2"), ("one", "pp2"), ("one", "vpp2"), ("one", "dp2"),
    ("one", "tp2_pp2"),
    ("tp2", "dp2"), ("vpp2", "tp2"), ("dp2", "vpp2"), ("tp2", "tp2_dp2"),
    ("dp2", "pp2_uneven"), ("vpp2", "pp2_uneven"), ("vpp2", "cp2"), ("cp2", "tp2"),
    ("one", "tp4"), ("tp4", "tp2_dp2"), ("tp4", "dp4"),
]  # fmt: skip

# Loaded into an optimizer of the other kind: distributed from plain, plain from distributed.
OTHER_KIND_PAIRS = [
    ("one", "dp2"), ("dp2", "tp2"), ("vpp2", "cp2"), ("tp2", "tp2_dp2"), ("tp4", "tp2_dp2"),
]  # fmt: skip
OTHER_KIND = "other_kind_"


# (variant, saved under, loaded as): the last is a layout, with `OTHER_KIND` before it for the other
# kind of optimizer.
LOADS = [
    (variant, source, target)
    for variant in VARIANTS
    for source, target in PAIRS + [(a, OTHER_KIND + b) for a, b in OTHER_KIND_PAIRS]
]
# Every pair has this one in every run of the tests, and a fifth of the others; the rest with
# --full.
ALWAYS = "bf16_distributed"


def is_usual(load: tuple[str, str, str]) -> bool:
    return load[0] == ALWAYS or LOADS.index(load) % 5 == 0


@dataclass(frozen=True)
class Refused:
    """A damaged checkpoint of variant `saved`, loaded into the models of variant `into`."""

    words: tuple[str, ...]  # that the error must have; none: it loads
    damage: str = "none"
    saved: str = "fp32"
    into: str = "fp32"
    models: dict[str, str] = field(default_factory=dict)
    weights_of: str = ""  # load only the weights, of this model of the checkpoint
    layout: str = "one"


REFUSED: dict[str, Refused] = {
    "shard_missing": Refused(("policy/__0_0.distcp is missing",), "shard_missing"),
    "shard_missing_tp2": Refused(("policy/__0_0.distcp is missing",), "shard_missing",
        layout="tp2"),
    "shard_truncated": Refused(("policy/__0_0.distcp has", "were written"), "shard_truncated"),
    "shard_overwritten": Refused(("policy", "cannot be loaded"), "shard_overwritten"),
    "shard_overwritten_tp2": Refused(("policy", "cannot be loaded"), "shard_overwritten",
        layout="tp2"),
    "metadata_overwritten": Refused(("policy", "cannot be loaded"), "metadata_overwritten"),
    "common_overwritten": Refused(("policy", "cannot be loaded"), "common_overwritten"),
    "common_missing": Refused(("policy/common.pt is missing",), "common_missing"),
    "manifest_missing": Refused(("not a complete checkpoint", "checkpoint.json"),
        "manifest_missing"),
    "manifest_truncated": Refused(("checkpoint.json is damaged",), "manifest_truncated"),
    "critic_missing": Refused(("holds no critic, only policy",), "critic_missing"),
    "other_family": Refused(("family 'qwen2'", "has 'qwen3'"), into="critic_warmup"),
    "other_dtype": Refused(("saved in float32", "bfloat16"), into="bf16",
        models={"policy": "qwen2"}),
    "value_head_as_policy": Refused(("value head",), models={"policy": "reward"},
        weights_of="critic"),
    "weights_in_bf16": Refused((), into="bf16", models={"policy": "qwen2"}, weights_of="policy"),
    "weights_at_tp2": Refused((), models={"policy": "qwen2"}, weights_of="policy", layout="tp2"),
    "critic_from_policy": Refused((), models={"critic": "qwen2"}, weights_of="policy"),
}  # fmt: skip
