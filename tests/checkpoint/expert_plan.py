"""The layouts under which a model with experts is saved, and loaded with its optimizer."""

from __future__ import annotations

from typing import Any

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {},
    "pp2_uneven": {"pipeline": 2, "first_stage_layers": 1},
    "tp2_sequence": {"tensor": 2, "sequence": True},
    "ep2": {"expert": 2},
    "ep2_cp2": {"expert": 2, "context": 2},
    "ep2_etp1": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1},
    "ep2_etp2": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2},
    "ep2_pp2": {"expert": 2, "pipeline": 2},
    # no experts on the first stage
    "ep2_pp2_uneven": {"expert": 2, "pipeline": 2, "first_stage_layers": 1},
}

# The first layer is dense.
MODEL: tuple[str, dict[str, Any]] = ("qwen3_moe", {"decoder_sparse_step": 2})

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32", "distributed": False},
    "fp32_distributed": {"dtype": "fp32", "distributed": True},
    "bf16": {"dtype": "bf16", "distributed": False},
    "bf16_distributed": {"dtype": "bf16", "distributed": True},
}

# (variant saved, under, variant loaded, under)
Case = tuple[str, str, str, str]

# Worlds one after the other, each going through its layouts in order: (ranks, layouts to save
# under, layouts to load under).
Worlds = list[tuple[int, tuple[str, ...], tuple[str, ...]]]

DEFAULT_WORLDS: Worlds = [(2, ("dp2", "ep2"), ("dp2", "ep2"))]
DEFAULT_CASES: list[Case] = [
    ("fp32", "dp2", "fp32_distributed", "ep2"),
    ("bf16_distributed", "ep2", "bf16_distributed", "dp2"),
    ("bf16", "dp2", "bf16_distributed", "ep2"),
    ("bf16_distributed", "ep2", "bf16", "dp2"),
]

# What is saved where a rank cannot write.
UNWRITABLE = ("bf16_distributed", "ep2")

FULL_WORLDS: Worlds = [
    (1, ("one",), ()),
    (4, ("ep2_pp2", "ep2_pp2_uneven", "ep2_etp2"), ("ep2_pp2", "ep2_pp2_uneven", "ep2_etp2")),
    (2, ("ep2", "ep2_etp1", "ep2_cp2", "pp2_uneven", "tp2_sequence"),
     ("ep2", "ep2_etp1", "ep2_cp2", "pp2_uneven", "tp2_sequence")),
    (1, (), ("one",)),
]  # fmt: skip
_FULL_PAIRS = [
    ("one", "ep2"), ("ep2", "one"), ("one", "ep2_pp2"), ("ep2_pp2", "one"),
    ("one", "ep2_pp2_uneven"),
    ("ep2_pp2_uneven", "ep2"),
    ("ep2_etp2", "ep2_cp2"), ("ep2_pp2", "ep2_etp1"), ("ep2_etp1", "pp2_uneven"),
    ("pp2_uneven", "ep2_cp2"),
    ("ep2_cp2", "tp2_sequence"), ("tp2_sequence", "ep2"), ("one", "ep2_etp2"), ("ep2_etp1", "one"),
]  # fmt: skip
# Every pair of layouts once in each dtype, half of them into an optimizer of the other kind.
_KINDS = [
    (variant, into)
    for variant in VARIANTS
    for into in VARIANTS
    if VARIANTS[variant]["dtype"] == VARIANTS[into]["dtype"]
]
FULL_CASES: list[Case] = [
    (variant, source, into, target)
    for number, (source, target) in enumerate(_FULL_PAIRS)
    for variant, into in (_KINDS[number % 4], _KINDS[4 + (number // 2 + number) % 4])
] + [("bf16_distributed", "ep2_pp2", "bf16", "one")]


def variant_of(name: str) -> dict[str, Any]:
    return {**VARIANTS[name], "optimizer_state": True}
