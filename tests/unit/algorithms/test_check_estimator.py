"""The contract tests for estimators: ours keep every rule, each wrong one breaks its own."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
import torch

from rlcore.algorithms import (
    EstimatorInputs,
    KeywordError,
    PolicyLossInputs,
    build_estimator,
    estimator_keywords,
    estimator_names,
    register_estimator,
)
from rlcore.algorithms.testing import ContractError, check_estimator
from rlcore.algorithms.testing import estimator as estimator_rules
from rlcore.algorithms.testing.batches import PER_SEQUENCE, Layout, full_batch, tensors

from .helpers import plugin_id
from .wrong_estimators import (
    WRONG_ESTIMATORS,
    Estimator,
    Mean,
    bare_tensor,
    batch_mean,
    by_fixed_size,
    by_pairs,
    integers,
    noisy,
    one_pass_variance,
    right,
    whitened,
    writes,
)

# the scale of gpg counts the groups that teach nothing, gdpo whitens, kto has a mean of the step
OF_THE_WHOLE_BATCH = {"gpg", "gdpo", "kto"}


@pytest.mark.parametrize("name", estimator_names())
def test_our_estimators_keep_the_contract(name: str) -> None:
    report = check_estimator(name, uses_batch=name in OF_THE_WHOLE_BATCH)
    skipped = ["group-split"] if name in OF_THE_WHOLE_BATCH else []
    if "values" in build_estimator(name).needs:
        skipped.append("rollout-split")
    assert [rule.name for rule in report.skipped] == skipped
    assert len(report.kept) + len(report.skipped) == 12


@pytest.mark.parametrize(
    "name", [name for name in estimator_names() if "kl_coef" in estimator_keywords(name)]
)
def test_and_so_they_do_with_rewards_of_tokens(name: str) -> None:
    check_estimator(name, kl_coef=0.3, distill_coef=0.2)


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("grpo", {"leave_one_out": True}), ("grpo", {"normalize_std": False}), ("ppo", {"gamma":
         0.99, "lam": 0.0}),
        ("reinforce++", {"gamma": 0.9, "discounts": True}),
    ],
)  # fmt: skip
def test_their_options_keep_it_too(name: str, keywords: dict[str, Any]) -> None:
    check_estimator(name, seed=3, **keywords)


def test_what_looks_at_the_whole_batch_must_say_so() -> None:
    with pytest.raises(ContractError, match="breaks the rule 'group-split'"):
        check_estimator("gpg")


@pytest.mark.parametrize(("estimator", "rule"), WRONG_ESTIMATORS, ids=plugin_id)
@pytest.mark.filterwarnings("ignore:std")
def test_a_wrong_estimator_is_caught(estimator: Estimator, rule: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_estimator(estimator)
    assert caught.value.rule.name == rule, str(caught.value)
    name = getattr(estimator, "__qualname__", "")
    assert str(caught.value).startswith(
        f"estimator {name!r} breaks the rule {rule!r}: {caught.value.rule.sentence}\n"
    )
    assert f"to do: {caught.value.rule.advice}" in str(caught.value)


def test_a_tensor_instead_of_advantages_is_told_what_to_return() -> None:
    with pytest.raises(ContractError, match=r"expected Advantages, got Tensor\n.*return Advant"):
        check_estimator(bare_tensor)
    with pytest.raises(ContractError) as caught:
        check_estimator(integers)
    assert "change:" not in str(caught.value), "the author has changed nothing"


@pytest.mark.parametrize("estimator", [batch_mean, whitened])
def test_an_estimator_may_declare_that_it_uses_the_batch(estimator: Estimator) -> None:
    assert [rule.name for rule in check_estimator(estimator, uses_batch=True).skipped] == [
        "group-split"
    ]


def test_a_random_estimator_is_held_to_the_rules_that_remain() -> None:
    report = check_estimator(noisy, random=True)
    assert {rule.name for rule in report.kept} >= {"outputs", "read-only", "finite", "no-tokens"}
    assert {rule.name for rule in report.skipped} >= {"deterministic", "permutation", "float32"}
    with pytest.raises(ContractError, match="'read-only'"):
        check_estimator(writes(lambda x: x.mul_(torch.rand(1))), random=True)


def test_the_message_shows_the_smallest_example() -> None:
    with pytest.raises(ContractError) as caught:
        check_estimator(by_pairs)
    lines = str(caught.value).splitlines()
    assert lines[1] == "  lengths [1, 1, 1, 1]"
    assert lines[2].startswith("  rewards [")
    assert lines[3] == "  group_ids [0, 1, 0, 1]"
    assert lines[4] == "  change: sequences in the order [0, 2, 1, 3]"
    assert re.match(
        r"  advantages of sequence 0, token 0: expected -?0.\d+, got -?\d.\d+ \(4 of 4 tokens",
        lines[5],
    )
    assert lines[6].startswith("  to do: number the groups with group_index(inputs.group_ids)")


def test_the_cause_of_an_exception_is_kept() -> None:
    with pytest.raises(ContractError, match="RuntimeError: shape") as caught:
        check_estimator(by_fixed_size)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_report_can_be_printed() -> None:
    lines = str(check_estimator(whitened, uses_batch=True)).splitlines()
    assert lines[0] == "estimator 'whitened' keeps 11 rules, 1 skipped"
    assert lines[1].split() == ["kept", "outputs", *lines[1].split()[2:]]
    assert lines[-1].split() == ["skipped", "group-split", "uses_batch=True"]


@pytest.mark.usefixtures("clean_registry")
def test_an_estimator_comes_in_any_form() -> None:
    register_estimator("registered mean")(Mean)
    forms: list[Any] = [
        Mean, Mean(scale=3.0), "registered mean", f"{__name__}:Mean",
        build_estimator("registered mean"),
    ]  # fmt: skip
    for form in forms:
        assert len(check_estimator(form, random=True).kept) == 5
    assert len(check_estimator(right).kept) == 12
    assert check_estimator(Mean, scale=2.0).plugin == "estimator 'Mean'"
    with pytest.raises(KeywordError, match="unknown keyword 'scael'"):
        check_estimator(Mean, scael=2.0)
    with pytest.raises(TypeError, match="scale: this is built already"):
        check_estimator(Mean(), scale=2.0)


def test_the_declaration_of_a_decorated_class_goes_with_its_instances() -> None:
    from rlcore.algorithms.estimators.ppo import PPO

    assert len(check_estimator(PPO(kl_coef=0.2), random=True).kept) == 5


def test_a_seed_gives_one_verdict() -> None:
    messages = set()
    for _ in range(2):
        with pytest.raises(ContractError) as caught:
            check_estimator(one_pass_variance, seed=5)
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_batches_have_every_field_and_know_what_belongs_to_a_sequence() -> None:
    layout = Layout((2, 0, 3), (0, 0, 1))
    for record, absent in (
        (full_batch(EstimatorInputs, layout, 0), set()),
        (full_batch(PolicyLossInputs, layout, 0), {"batch_stats"}),
    ):
        present = dict(tensors(record))
        assert {field.name for field in fields(record)} - set(present) == absent
        per_sequence = {name for name, value in present.items() if len(value) == 3}
        assert per_sequence == PER_SEQUENCE & set(present)


def test_it_needs_torch_alone() -> None:
    others = {"pytest", "hypothesis", "scipy", "megatron"}
    code = f"import sys, rlcore.algorithms.testing; print(sorted({others} & set(sys.modules)))"
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert out.stdout.strip() == "[]"


def test_no_rule_is_without_an_estimator_that_breaks_it() -> None:
    assert {rule for _, rule in WRONG_ESTIMATORS} == {rule.name for rule in estimator_rules._RULES}
