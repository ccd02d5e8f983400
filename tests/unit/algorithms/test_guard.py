from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlcore.algorithms import (
    Advantages,
    EstimatorInputs,
    EstimatorMutationError,
    MissingInputError,
    OutputError,
    PolicyLoss,
    PolicyLossInputs,
    build_policy_loss,
    register_policy_loss,
)
from rlcore.algorithms.errors import UndeclaredInputError
from rlcore.algorithms.plugin_guard import (
    ESTIMATOR_OPTIONAL,
    ESTIMATOR_WHERE_GIVEN,
    POLICY_LOSS_OPTIONAL,
    SOURCES,
    GuardedEstimator,
    GuardedPolicyLoss,
)

Make = Callable[..., EstimatorInputs]


def guarded(function: Callable[[EstimatorInputs], Advantages], *needs: str) -> GuardedEstimator:
    return GuardedEstimator("mine", function, needs)


def writer(write: Callable[[torch.Tensor], object]) -> GuardedEstimator:
    def run(inputs: EstimatorInputs) -> Advantages:
        assert inputs.kl is not None
        write(inputs.kl)
        return Advantages(inputs.kl.clone())

    return guarded(run, "kl")


@pytest.mark.parametrize(
    "write",
    [
        lambda kl: kl.mul_(-0.1),
        lambda kl: kl.__setitem__(0, 5.0),
        lambda kl: kl[2:4].add_(1),
        lambda kl: kl.data.mul_(-0.1),
        lambda kl: kl.detach().numpy().__setitem__(0, 7.0),
        lambda kl: kl.view(-1).zero_(),
        lambda kl: kl.add_(0),
    ],
    ids=["mul_", "setitem", "slice", "data", "numpy", "view", "no-op"],
)
def test_a_write_is_an_error_and_does_not_reach_the_batch(
    make_inputs: Make, write: Callable[..., object]
) -> None:
    inputs = make_inputs()
    before = inputs.kl.clone()  # type: ignore[union-attr]
    with pytest.raises(EstimatorMutationError, match="'mine' wrote into its input 'kl'"):
        writer(write)(inputs)
    assert torch.equal(inputs.kl, before)


def test_an_assignment_in_place_names_the_field(make_inputs: Make) -> None:
    """Python writes into the tensor and then assigns it, which a frozen record refuses."""

    def run(inputs: EstimatorInputs) -> Advantages:
        inputs.rewards -= inputs.rewards.mean()  # type: ignore[misc]
        return Advantages(torch.zeros(inputs.num_tokens))

    inputs = make_inputs()
    before = inputs.rewards.clone()
    with pytest.raises(EstimatorMutationError, match=r"'mine' wrote into its input 'rewards'.*\*="):
        guarded(run)(inputs)
    assert torch.equal(inputs.rewards, before)


@pytest.mark.parametrize("field", ["rewards", "group_ids", "cu_seqlens"])
def test_the_fields_that_are_always_there_are_guarded_too(make_inputs: Make, field: str) -> None:
    def run(inputs: EstimatorInputs) -> Advantages:
        getattr(inputs, field).add_(1)
        return Advantages(torch.zeros(176))

    with pytest.raises(EstimatorMutationError, match=f"'{field}'"):
        guarded(run)(make_inputs())


def test_a_nan_in_an_input_is_no_write(make_inputs: Make) -> None:
    inputs = make_inputs(kl=torch.full((176,), float("nan"), dtype=torch.float64))
    guarded(lambda inputs: Advantages(torch.zeros(inputs.num_tokens)), "kl")(inputs)


def test_an_estimator_may_return_its_input(make_inputs: Make) -> None:
    inputs = make_inputs()
    result = guarded(lambda inputs: Advantages(inputs.kl), "kl")(inputs)  # type: ignore[arg-type]
    result.advantages.zero_()
    assert inputs.kl.abs().sum() > 0  # type: ignore[union-attr]


def test_a_bug_of_an_estimator_is_its_own_exception(make_inputs: Make) -> None:
    """With its traceback, by which it is found."""

    def run(inputs: EstimatorInputs) -> Advantages:
        return Advantages({}["nothing"])

    with pytest.raises(KeyError, match="nothing"):
        guarded(run)(make_inputs())


def test_reading_what_was_not_declared_says_what_to_declare(make_inputs: Make) -> None:
    def run(inputs: EstimatorInputs) -> Advantages:
        return Advantages(inputs.values * 2)  # type: ignore[operator]

    with pytest.raises(
        UndeclaredInputError,
        match=r"'mine' raised TypeError: .*test_guard\.py:\d+ in run\).* are None: .*values",
    ) as caught:
        guarded(run, "kl")(make_inputs())
    told = str(caught.value).partition("are None: ")[2]
    assert "kl" not in told.partition(". ")[0].split(", "), "it was declared"
    assert 'needs = {"values"}' in told


def test_gradients_stay_outside(make_inputs: Make) -> None:
    def run(inputs: EstimatorInputs) -> Advantages:
        assert inputs.values is not None
        assert not inputs.values.requires_grad
        return Advantages(inputs.values * 2)

    inputs = make_inputs(values=torch.ones(176, requires_grad=True))
    assert not guarded(run, "values")(inputs).advantages.requires_grad
    leaf = torch.ones(176, requires_grad=True)
    with pytest.raises(OutputError, match="expected no gradient"):
        guarded(lambda inputs: Advantages(leaf))(inputs)


def test_inference_tensors_are_welcome(make_inputs: Make) -> None:
    with torch.inference_mode():
        inputs = make_inputs()
    assert writer(lambda kl: None)(inputs).advantages.shape == (176,)
    with pytest.raises(EstimatorMutationError):
        writer(lambda kl: kl.mul_(2))(inputs)


@pytest.mark.parametrize(
    ("first", "sequence", "token"), [(0, 0, 0), (4, 0, 4), (5, 2, 0), (6, 3, 0), (8, 3, 2)]
)
def test_the_first_bad_number_is_located(
    make_inputs: Make, first: int, sequence: int, token: int
) -> None:
    def run(inputs: EstimatorInputs) -> Advantages:
        out = torch.zeros(inputs.num_tokens)
        out[first] = float("nan")  # lengths 5, 0, 1, 70: sequence 3 owns tokens 6 to 75
        out[20] = float("inf")
        return Advantages(torch.zeros(inputs.num_tokens), returns=out)

    message = (
        rf"returns: expected finite.*nan first in sequence {sequence} at its token {token} \(2"
        r" of 176"
    )
    with pytest.raises(OutputError, match=message):
        guarded(run)(make_inputs())


def test_finite_numbers_whose_sum_is_not_are_finite(make_inputs: Make) -> None:
    huge = Advantages(torch.full((176,), 3e38))
    assert guarded(lambda inputs: huge)(make_inputs()).advantages is huge.advantages


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (Advantages(torch.zeros(9)), r"advantages: expected shape \[M\] = \[176\], got \[9\]"),
        (Advantages(torch.zeros(176, 1)), r"got \[176, 1\]"),
        (Advantages(torch.zeros(176), torch.zeros(1)), "returns: expected shape"),
        (Advantages(torch.zeros(176, dtype=torch.int64)), "floating dtype, got torch.int64"),
        (torch.zeros(176), "expected Advantages, got Tensor"),
        (None, "expected Advantages, got NoneType"),
    ],
)
def test_a_wrong_result_is_refused(make_inputs: Make, result: Advantages, message: str) -> None:
    with pytest.raises(OutputError, match=message):
        guarded(lambda inputs: result)(make_inputs())


def test_availability_can_be_asked_before_any_rollout() -> None:
    estimator = guarded(
        lambda inputs: Advantages(inputs.rewards), "values", "rollout_logprobs", "rewards"
    )
    estimator.check_available({"values", "rollout_logprobs"})
    with pytest.raises(
        MissingInputError, match=r"'mine' needs.*'rollout_logprobs' is missing: rollout\.engine"
    ):
        estimator.check_available({"values"})


def test_every_field_has_a_source() -> None:
    fields = {*ESTIMATOR_WHERE_GIVEN, *ESTIMATOR_OPTIONAL, *POLICY_LOSS_OPTIONAL}
    assert set(SOURCES) == fields


def loss_inputs(**changes: object) -> PolicyLossInputs:
    fields = {name: torch.zeros(3) for name in ("logprobs", "old_logprobs", "advantages")}
    return PolicyLossInputs(cu_seqlens=torch.tensor([0, 2, 3]), **{**fields, **changes})  # type: ignore[arg-type]


class ReadsEntropy:
    """A policy loss whose parts work on what may be None."""

    def batch_stats(self, inputs: PolicyLossInputs) -> dict[str, torch.Tensor]:
        return {"mean": inputs.entropy.mean()}  # type: ignore[union-attr]

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        return PolicyLoss(inputs.entropy * inputs.logprobs, {})  # type: ignore[operator]


def test_a_policy_loss_that_reads_what_it_did_not_declare_is_told_so() -> None:
    loss = GuardedPolicyLoss("mine", ReadsEntropy(), ())
    with pytest.raises(UndeclaredInputError, match=r"'mine' raised .* in __call__\).*: .*entropy"):
        loss(loss_inputs(batch_stats={}))
    with pytest.raises(UndeclaredInputError, match=r"raised .* in batch_stats\).*: .*entropy"):
        loss.batch_stats(loss_inputs())


@pytest.mark.usefixtures("clean_registry")
def test_batch_stats_come_from_the_whole_step() -> None:
    @register_policy_loss("mean_shift")
    class MeanShift:
        def batch_stats(self, inputs: PolicyLossInputs) -> dict[str, torch.Tensor]:
            return {"mean": inputs.logprobs.mean()}

        def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
            assert inputs.batch_stats is not None
            return PolicyLoss(inputs.logprobs - inputs.batch_stats["mean"])

    loss = build_policy_loss("mean_shift")
    whole = loss_inputs(logprobs=torch.tensor([1.0, 2.0, 6.0], requires_grad=True))
    with pytest.raises(MissingInputError, match="'mean_shift' needs 'batch_stats'"):
        loss(whole)
    stats = loss.batch_stats(whole)
    assert not stats["mean"].requires_grad
    assert loss(loss_inputs(batch_stats=stats)).per_token.tolist() == [-3, -3, -3]
    assert build_policy_loss("sft").batch_stats(whole) == {}


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (lambda i: PolicyLoss(i.logprobs.mean()), OutputError,
         r"per_token: expected shape \[M\] = \[3\], got \[\]"),
        (lambda i: PolicyLoss(-i.logprobs, {"x": i.logprobs.mean()}), OutputError,
         "metrics\\['x'\\].*not reduced"),
        (lambda i: i.logprobs, OutputError, "expected PolicyLoss, got Tensor"),
        (lambda i: PolicyLoss(i.advantages.neg_()), EstimatorMutationError,
         "wrote into its input 'advantages'"),
    ],
)  # fmt: skip
def test_a_wrong_policy_loss_is_refused(
    run: Callable, error: type[Exception], message: str
) -> None:
    register_policy_loss("wrong")(lambda: run)
    with pytest.raises(error, match=message):
        build_policy_loss("wrong")(loss_inputs())


@pytest.mark.usefixtures("clean_registry")
def test_metrics_are_detached_and_carry_the_entropy() -> None:
    register_policy_loss("plain")(
        lambda: lambda i: PolicyLoss(-i.logprobs, {"x": i.logprobs, "y": torch.zeros(2)})
    )
    result = build_policy_loss("plain")(
        loss_inputs(logprobs=torch.zeros(3, requires_grad=True), entropy=torch.ones(3))
    )
    assert result.per_token.requires_grad
    assert not result.metrics["x"].requires_grad
    assert result.metrics["entropy"].tolist() == [1, 1, 1]
