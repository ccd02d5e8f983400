"""Whether packs hold shared prefixes once, and what is said where they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.megatron.convert.read import read_architecture
from backends.megatron.model.layers import Layers, choose_prefix_sharing
from rlcore.config import Config
from rlcore.config.load import load_config
from rlcore.errors import ConfigError

EXAMPLES = Path(__file__).parents[4] / "examples/models"
KEYS = ["run.name=x", "data.paths=x", "model.path=x", "training.steps=1"]
LAYERS: dict[bool, Any] = {True: "transformer_engine", False: "local"}
ROUTER = "policy.megatron.moe_aux_loss_coeff=0.01"


def config(*overrides: str) -> Config:
    return load_config([], [*KEYS, *overrides]).config


@pytest.mark.parametrize("written", ["on", "true", "'on'"])
def test_yaml_reads_on_and_off_as_booleans(written: str) -> None:
    assert config(f"policy.share_prefixes={written}").policy.share_prefixes == "on"
    assert config("policy.share_prefixes=off").policy.share_prefixes == "off"


@pytest.mark.parametrize(
    ("overrides", "engine", "on", "said"),
    [
        ((), False, True, "once (policy.share_prefixes: auto)"),
        (("policy.share_prefixes=off",), False, False, "in every sequence (policy.share_prefixes"),
        ((), True, False, "Transformer Engine's layers has no mask for it (policy.transformer_eng"),
        ((ROUTER,), False, False, "policy.megatron.moe_aux_loss_coeff: a router's loss would"),
        (("policy.megatron.moe_aux_loss_coeff=0.0",), False, True, "auto"),
    ],
)
def test_the_choice_and_its_reason(
    overrides: tuple[str, ...], engine: bool, on: bool, said: str
) -> None:
    choice = choose_prefix_sharing(config(*overrides), Layers(LAYERS[engine], ""))
    assert choice.on is on
    assert said in str(choice)


@pytest.mark.parametrize(("overrides", "engine"), [((), True), ((ROUTER,), False)])
def test_what_cannot_share_refuses_on(overrides: tuple[str, ...], engine: bool) -> None:
    with pytest.raises(
        ConfigError, match=r"policy.share_prefixes: on, but .*; set it to auto or of"
    ):
        choose_prefix_sharing(
            config("policy.share_prefixes=on", *overrides), Layers(LAYERS[engine], "")
        )


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64,
            "original_max_position_embeddings": 4096, "factor": 4.0}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        ("Qwen3-Next-80B-A3B", {}, "the model's layers carry a state"),
        # The same beginning of a short and of a long sequence has other angles.
        ("Qwen3-8B", {"rope_scaling": LONGROPE}, "with longrope a token's angle depends"),
    ],
)
def test_models_that_share_nothing(
    model: str, given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    sizes = json.loads((EXAMPLES / model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **given}))
    reason = read_architecture(tmp_path, weights=False).why_whole
    local = Layers(LAYERS[False], "")
    choice = choose_prefix_sharing(config(), local, reason)
    assert not choice.on
    assert said in str(choice)
    with pytest.raises(ConfigError, match=f"policy.share_prefixes: on, but {said}"):
        choose_prefix_sharing(config("policy.share_prefixes=on"), local, reason)


def test_other_models_share() -> None:
    assert read_architecture(EXAMPLES / "Qwen3-8B", weights=False).why_whole is None
