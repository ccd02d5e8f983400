from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
import torch

from rlcore.algorithms import (
    Advantages,
    AlgorithmError,
    DuplicateNameError,
    EstimatorInputs,
    KeywordError,
    PolicyLoss,
    PolicyLossInputs,
    UnknownNameError,
    build_estimator,
    build_policy_loss,
    estimator_keywords,
    estimator_names,
    estimator_plugin,
    policy_loss_names,
    policy_loss_plugin,
    register_estimator,
    register_policy_loss,
)

pytestmark = pytest.mark.usefixtures("clean_registry")


class Plain:
    """An estimator that nobody registered."""

    needs = ("kl",)

    def __init__(
        self, *, scale: float = 2.0, mode: Literal["a", "b"] = "a", top: int | None = None
    ) -> None:
        self.scale = scale

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        assert inputs.kl is not None
        assert inputs.values is None
        return Advantages(inputs.kl * self.scale)


class Bare(Plain):
    needs = ()

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        present = {name for name, value in vars(inputs).items() if value is not None}
        assert present == {"cu_seqlens", "rewards", "group_ids"}
        return Advantages(torch.zeros(inputs.num_tokens))


def batch(**changes: torch.Tensor) -> EstimatorInputs:
    return EstimatorInputs(
        cu_seqlens=torch.tensor([0, 2, 3]), rewards=torch.zeros(2), group_ids=torch.tensor([0, 0]),
        kl=torch.ones(3), values=torch.ones(3), **changes,
    )  # fmt: skip


def test_ours_are_known() -> None:
    assert {"ppo", "grpo", "reinforce++"} <= set(estimator_names())
    assert {"ppo_clip", "sft"} <= set(policy_loss_names())


@pytest.mark.parametrize(
    ("build", "name", "message"),
    [
        (build_estimator, "grppo", r"unknown estimator 'grppo'; known: .*ppo.*did you mean 'grpo'"),
        (build_policy_loss, "ppo_clp", r"unknown policy loss 'ppo_clp'.*did you mean 'ppo_clip'"),
        # an estimator in verl and slime
        (build_estimator, "gspo", r"a policy loss here, set algorithm\.loss\.name=gspo;"),
        (build_policy_loss, "grpo", r"set algorithm\.estimator\.name=grpo;"),
        (build_estimator, "cred.BestOfGroup", r"by its import path, 'cred:BestOfGroup'"),
        (build_estimator, "no_such_module:Mine", "no module 'no_such_module'"),
        (build_estimator, "rlcore.nothing:Mine", "no module 'rlcore.nothing'"),
        (build_estimator, "rlcore.algorithms.estimators.ppo:PPQ", "PPQ.*did you mean 'PPO'"),
        (build_estimator, ":Mine", "expected 'package.module:Name'"),
        (build_estimator, "rlcore:", "expected 'package.module:Name'"),
    ],
)
def test_a_wrong_name_says_what_is_right(
    build: Callable[[str], object], name: str, message: str
) -> None:
    with pytest.raises(UnknownNameError, match=message):
        build(name)


def plain_function(inputs: EstimatorInputs) -> Advantages:
    return Advantages(torch.zeros(inputs.num_tokens))


def test_a_plain_function_is_told_to_be_a_class() -> None:
    with pytest.raises(
        KeywordError,
        match=r"plain_function is a function that needs inputs.*make it a class with __call__",
    ):
        build_estimator(f"{__name__}:plain_function")


def test_a_missing_name_lists_what_the_module_defines() -> None:
    with pytest.raises(UnknownNameError) as refused:
        build_estimator(f"{__name__}:Plane")
    assert "did you mean 'Plain'" in str(refused.value)
    assert "Bare" in str(refused.value)
    assert "EstimatorInputs" not in str(refused.value), "it is imported there"


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(
        DuplicateNameError,
        match=r"'ppo' is already registered by rlcore\.algorithms\.estimators\.ppo",
    ):
        register_estimator("ppo")(Plain)


MODULE = """
from rlcore.algorithms import register_estimator, register_policy_loss


@register_estimator("loaded")
@register_policy_loss("loaded")
class Loaded:
    scale = {scale}

    def __call__(self, inputs):
        raise NotImplementedError
"""


def load(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def test_one_class_may_be_registered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first_name", "second_name"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    path = tmp_path / "loaded.py"
    for scale, name in enumerate(("first_name", "first_name", "second_name")):
        # of another length, so that no bytecode of the one before is taken
        path.write_text(MODULE.format(scale=scale) + "#" * scale)
        load(name, path)
        assert estimator_plugin("loaded").factory.scale == scale, "the newest counts"
        assert policy_loss_plugin("loaded").factory.scale == scale
    other = tmp_path / "other.py"
    other.write_text(path.read_text())
    monkeypatch.setitem(sys.modules, "third_name", ModuleType("third_name"))
    with pytest.raises(DuplicateNameError, match=r"second_name:Loaded; give third_name:Loaded"):
        load("third_name", other)


def test_the_very_same_object_may_be_registered_again() -> None:
    class Local(Plain):
        pass

    class Other(Plain):
        pass

    Other.__qualname__ = Local.__qualname__
    for needs in ({"kl"}, {"values"}):
        register_estimator("mine", needs=needs)(Local)
        assert build_estimator("mine").needs == needs
    with pytest.raises(DuplicateNameError):
        register_estimator("mine")(Other)


def test_registered_estimators_get_exactly_what_they_declared() -> None:
    register_estimator("mine", needs={"kl"})(Plain)
    estimator = build_estimator("mine", scale=3.0)
    assert estimator.name == "mine"
    assert estimator.needs == {"kl"}
    assert isinstance(estimator.estimator, Plain)
    assert estimator(batch()).advantages.tolist() == [3, 3, 3]


def test_needs_may_be_a_function_of_the_instance() -> None:
    register_estimator("mine", needs=lambda e: {"kl"} if e.scale else set())(Plain)
    assert build_estimator("mine").needs == {"kl"}
    assert build_estimator("mine", scale=0).needs == frozenset()


def test_needs_default_to_the_attribute_and_pass_to_a_subclass() -> None:
    register_estimator("mine")(Plain)
    assert build_estimator("mine").needs == {"kl"}
    assert build_estimator(f"{__name__}:Bare").needs == frozenset()
    register_estimator("theirs", needs={"values"})(
        type("Decorated", (), {"__call__": lambda s, i: None})
    )


@pytest.mark.parametrize(
    ("needs", "message"),
    [({"vals"}, "no field 'vals'.*did you mean 'values'"), ("kl", "the string")],
)
def test_needs_must_name_fields(needs: set[str], message: str) -> None:
    register_estimator("mine", needs=needs)(Plain)
    with pytest.raises(AlgorithmError, match=message):
        build_estimator("mine")


class Shaped(Plain):
    """An estimator with coefficients in its reward."""

    def __init__(self, *, kl_coef: float = 0.0, distill_coef: float = 0.0) -> None:
        super().__init__()
        self.kl_coef = kl_coef
        self.distill_coef = distill_coef


def test_a_plugin_declares_what_built_in_estimators_declare() -> None:
    register_estimator(
        "mine", {"values"}, shaped_rewards=True, compares_group=True, normalization="group"
    )(Shaped)
    plugin = estimator_plugin("mine")
    assert (plugin.compares_group, plugin.normalization) == (True, "group")
    assert build_estimator("mine").needs == {"values"}
    assert build_estimator("mine").optional == {"token_rewards"}
    assert build_estimator("mine", kl_coef=0.1).needs == {"values", "kl"}
    by_path = estimator_plugin(f"{__name__}:Shaped")
    assert (by_path.compares_group, by_path.normalization) == (False, "none")
    with pytest.raises(AlgorithmError, match="unknown normalization 'all'"):
        register_estimator("theirs", normalization="all")  # type: ignore[arg-type]


def test_an_import_path_needs_no_decorator() -> None:
    assert build_estimator(f"{__name__}:Plain")(batch()).advantages.tolist() == [2, 2, 2]
    build_estimator(f"{__name__}:Bare")(batch(token_rewards=torch.ones(3)))
    decorated = build_estimator("rlcore.algorithms.estimators.ppo:PPO", kl_coef=0.1)
    assert decorated.needs == {"values", "kl"}


def test_the_import_error_of_a_plugin_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_plugin.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        build_estimator("broken_plugin:Mine")


PLUGIN = """
import torch
from rlcore.algorithms import Advantages, PolicyLoss, register_estimator

class Undecorated:
    needs = {"kl"}
    def __init__(self, *, scale: float = 1.0): self.scale = scale
    def __call__(self, inputs): return Advantages(inputs.kl * self.scale)

@register_estimator("ep_decorated", needs={"values"})
class Decorated:
    def __call__(self, inputs): return Advantages(-inputs.values)

class Loss:
    def __call__(self, inputs): return PolicyLoss(-inputs.logprobs)
"""
ENTRY_POINTS = """
[rlcore.estimators]
ep_plain = tiny_rlcore_plugin:Undecorated
ep_decorated = tiny_rlcore_plugin:Decorated
{more}
[rlcore.policy_losses]
ep_loss = tiny_rlcore_plugin:Loss
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, more: str = "") -> None:
    """Put a real distribution on the path."""
    (folder / "tiny_rlcore_plugin.py").write_text(PLUGIN)
    info = folder / "tiny_rlcore_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tiny-rlcore-plugin\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(ENTRY_POINTS.format(more=more))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "tiny_rlcore_plugin", raising=False)


def test_an_installed_package_brings_algorithms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    assert {"ep_plain", "ep_decorated"} <= set(estimator_names())
    assert "ep_loss" in policy_loss_names()
    assert "tiny_rlcore_plugin" not in sys.modules  # listing imports nothing
    for _ in range(2):
        assert build_estimator("ep_plain", scale=3.0)(batch()).advantages.tolist() == [3, 3, 3]
        assert build_estimator("ep_decorated")(batch()).advantages.tolist() == [-1, -1, -1]
    assert build_estimator("ep_decorated").needs == {"values"}
    zeros = torch.zeros(3)
    inputs = PolicyLossInputs(
        cu_seqlens=torch.tensor([0, 3]), logprobs=zeros - 1, old_logprobs=zeros, advantages=zeros
    )
    assert build_policy_loss("ep_loss")(inputs).per_token.tolist() == [1, 1, 1]


def test_an_installed_package_cannot_take_our_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, more="ppo = tiny_rlcore_plugin:Undecorated")
    with pytest.raises(
        DuplicateNameError, match=r"'ppo' is claimed by.*tiny_rlcore_plugin:Undecorated"
    ):
        build_estimator("ppo")
    assert build_estimator("grpo").name == "grpo"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"scael": 1.0},
            r"unknown keyword 'scael'.*did you mean 'scale'.*accepted: scale: float = 2\.0",
        ),
        ({"scale": "1e-3"}, "'scale' expected float, got '1e-3' \\(str\\)"),
        ({"scale": True}, "'scale' expected float, got True"),
        ({"scale": None}, "'scale' expected float, got None"),
        ({"mode": "c"}, "'mode' expected Literal"),
        ({"top": 1.0}, "'top' expected int | None, got 1.0"),
        ({"top": False}, "'top' expected int | None, got False"),
    ],
)
def test_keywords_are_checked(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(KeywordError, match=message):
        build_estimator(f"{__name__}:Plain", **kwargs)


def test_an_int_is_a_float_and_none_is_none() -> None:
    build_estimator(f"{__name__}:Plain", scale=1, mode="b", top=None)
    assert build_policy_loss("ppo_clip", dual_clip=None, clip_low=0).loss.dual_clip is None  # type: ignore[attr-defined]
    assert [str(k) for k in estimator_keywords("grpo").values()] == [
        "normalize_std: bool = True", "eps: float = 1e-06", "leave_one_out: bool = False",
    ]  # fmt: skip


def test_a_required_keyword_is_asked_for() -> None:
    class Strict(Plain):
        def __init__(self, *, beta: float) -> None:
            super().__init__()

    register_estimator("strict")(Strict)
    with pytest.raises(KeywordError, match="missing keyword 'beta'; accepted: beta: float"):
        build_estimator("strict")


def test_keywords_that_swallow_are_refused() -> None:
    class Swallows(Plain):
        def __init__(self, **kwargs: float) -> None:
            super().__init__()

    with pytest.raises(KeywordError, match=r"takes \*\*kwargs.*name every keyword"):
        register_estimator("swallows")(Swallows)


def test_a_policy_loss_registers_the_same_way() -> None:
    @register_policy_loss("mine", needs={"entropy"})
    class Mine:
        def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
            return PolicyLoss(-inputs.logprobs)

    assert build_policy_loss("mine").needs == {"entropy"}
    with pytest.raises(DuplicateNameError):
        register_policy_loss("mine")(type("Mine", (Mine,), {}))
