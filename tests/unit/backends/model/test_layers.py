"""The choice of layers, Megatron's fields for it, and Transformer Engine's parameter names."""

from __future__ import annotations

from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from backends.megatron.convert.table import FUSED_NORMS, local_spelling
from backends.megatron.model.layers import (
    LOCAL_FIELDS,
    Layers,
    choose_layers,
    layer_fields,
    layers_of,
)
from rlcore.config.load import load_config
from rlcore.config.sections.policy import Fp8Config
from rlcore.errors import ConfigError

TE = Layers("transformer_engine", "installed")
KEYS = ("run.name=x", "model.path=x", "data.paths=x", "training.steps=1", "model.dtype=bf16")


@pytest.mark.parametrize(
    ("wanted", "device", "installed", "deterministic", "kind", "reason"),
    [
        ("auto", "cuda", True, False, "transformer_engine", "installed"),
        ("auto", "cuda", False, False, "local", "not installed"),
        ("auto", "cpu", True, False, "local", "does not run on cpu"),
        ("auto", "cuda", True, True, "local", "run.deterministic"),
        ("off", "cuda", True, False, "local", "policy.transformer_engine: off"),
    ],
)
def test_the_choice_and_its_reason(
    wanted: Any, device: str, installed: bool, deterministic: bool, kind: str, reason: str
) -> None:
    layers = choose_layers(wanted, device=device, installed=installed, deterministic=deterministic)
    assert layers.kind == kind
    assert reason in str(layers)
    assert ("Transformer Engine (" in str(layers)) == layers.transformer_engine


def test_an_installed_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config([], KEYS).config
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(
        "raise RuntimeError('looked for, never imported')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert layers_of(config, "cuda") == TE
    assert (
        layers_of(load_config([], [*KEYS, "policy.transformer_engine=off"]).config, "cuda").kind
        == "local"
    )
    assert layers_of(config, "cpu").kind == "local"


def test_fp8_without_its_layers_is_refused() -> None:
    config = load_config([], [*KEYS, "policy.fp8.format=e4m3"]).config
    with pytest.raises(
        ConfigError, match=r"policy\.fp8: needs Transformer Engine.*does not run on cpu"
    ):
        layers_of(config, "cpu")


def test_every_field_is_one_of_megatron() -> None:
    import dataclasses

    from backends.megatron.cpu.shim import importing_megatron

    with importing_megatron():
        from megatron.core.transformer import TransformerConfig

    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    fields = layer_fields(
        TE, experts=True, fp8=Fp8Config(recipe="delayed", amax_history=16, amax_compute="max")
    )
    assert set(fields) | set(LOCAL_FIELDS) <= known
    assert (fields["fp8"], fields["fp8_recipe"], fields["fp8_amax_history_len"]) == (
        "hybrid",
        "delayed",
        16,
    )
    assert fields["moe_grouped_gemm"]
    assert fields["moe_permute_fusion"]
    assert "fp8" not in layer_fields(TE, experts=False, fp8=None)
    assert layer_fields(Layers("local", ""), experts=True, fp8=None) == LOCAL_FIELDS


def test_the_extra_is_what_megatron_wants() -> None:
    project = (Path(__file__).parents[4] / "pyproject.toml").read_text()
    ours = Requirement(project[project.index('"transformer-engine[') :].split('"')[1])
    theirs = [Requirement(line) for line in requires("megatron-core") or []]
    wanted = next(r.specifier for r in theirs if r.name == "transformer-engine")
    assert [v for v in ("2.8.0", "2.9.0", "2.11.0", "2.12.0") if v in ours.specifier] == [
        v for v in ("2.8.0", "2.9.0", "2.11.0", "2.12.0") if v in wanted
    ]


def te_spelling(name: str, *, experts: bool) -> str:
    """The name of a layer's parameter in Transformer Engine's spec: `local_spelling` inverted."""
    fused = {local: te for te, local in FUSED_NORMS.items()}
    if experts:
        # the router reads the normed input too: the norm stays a module
        fused.pop("pre_mlp_layernorm.weight")
    parts = name.split(".")
    if parts[:3] == ["mlp", "experts", "local_experts"]:
        return f"mlp.experts.{parts[4]}.{parts[5]}{parts[3]}"
    return fused.get(name, name)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "qwen2_moe"])
def test_names_of_both_specs_meet_in_the_table(family: str) -> None:
    from backends.megatron.convert.families import FAMILIES

    entries = [entry for entry in FAMILIES[family].entries if entry.per_layer]
    for experts in {entry.layers != "dense" and entry.per_expert for entry in entries}:
        names = [
            entry.at(0, 13 if entry.per_expert else None).megatron.removeprefix("decoder.layers.0.")
            for entry in entries
            if entry.layers in ("all", "moe" if experts else "dense")
        ]
        te_names = [te_spelling(name, experts=experts) for name in names]
        assert [local_spelling(name) for name in te_names] == names
        assert [local_spelling(name) for name in names] == names
        assert len(set(te_names)) == len(names)
        assert te_names != names
