"""Whether packs hold shared prefixes once, and what is said where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from backends.megatron.model.layers import Layers, choose_prefix_sharing
from rlcore.config import Config
from rlcore.config.load import load_config
from rlcore.errors import ConfigError

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


def test_positions_by_length_share_nothing() -> None:
    """The same beginning of a short and of a long sequence has other angles."""
    local = Layers(LAYERS[False], "")
    choice = choose_prefix_sharing(config(), local, by_length=True)
    assert not choice.on
    assert "longrope" in str(choice)
    with pytest.raises(ConfigError, match=r"policy.share_prefixes: on, but with longrope"):
        choose_prefix_sharing(config("policy.share_prefixes=on"), local, by_length=True)
