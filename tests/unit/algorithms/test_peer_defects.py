"""Defects of credit assignment that were found in other implementations, one test each.

Every test writes the defective formula down in a few lines, shows the wrong number that it gives,
and holds ours against a number worked out by hand or a closed form. Padded implementations see `[B,
T]` and a mask; ours see trainable tokens only.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlcore.algorithms import (
    EstimatorInputs,
    EstimatorMutationError,
    GuardedEstimator,
    Moments,
    PolicyLossInputs,
    approx_kl,
    build_estimator,
    build_policy_loss,
    estimator_keywords,
    expand_to_tokens,
    group_mean_std,
    loss_weights,
    normalize_advantages,
    rollout_metrics,
    whiten,
)
from rlcore.algorithms.types import Advantages

from .helpers import cu

GAMMA = 1.0
LAM = 0.95
TOOL_MASK = torch.tensor([1.0, 1, 0, 0, 1, 1])  # a a obs obs a a
# a critic scores observations too; nobody should read those
TOOL_VALUES = torch.tensor([0.2, 0.3, 0.31, 0.32, 0.33, 0.4])


def batch(
    lengths: tuple[int, ...],
    rewards: list[float],
    groups: list[int] | None = None,
    **fields: Tensor,
) -> EstimatorInputs:
    return EstimatorInputs(
        cu_seqlens=cu(lengths), rewards=torch.tensor(rewards), group_ids=torch.tensor(groups or list
        (range(len(lengths)))),
        **fields,
    )  # fmt: skip


def compact(x: Tensor, mask: Tensor) -> Tensor:
    return x[mask.bool()]


# GAE over several turns


def gae_over_every_position(rewards: Tensor, values: Tensor) -> Tensor:
    """One sequence, tool tokens treated as steps of the policy."""
    out = torch.zeros_like(values)
    running = 0.0
    following = 0.0
    for t in reversed(range(values.numel())):
        running = float(rewards[t]) + GAMMA * following - float(values[t]) + GAMMA * LAM * running
        out[t] = running
        following = float(values[t])
    return out


def gae_that_zeroes_observations(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """GAE with values 0 and masked advantages at observations, but a recursion over them."""
    return gae_over_every_position(rewards, values * mask) * mask


def test_gae_leaks_through_tool_tokens() -> None:
    rewards = torch.tensor([0, 0, 0, 0, 0, 1.0])
    # 1 - .4;  .4 - .33 + .95 * .6;  .33 - .3 + .95 * .64;  .3 - .2 + .95 * .638
    right = torch.tensor([0.7061, 0.638, 0.64, 0.6])
    for wrong in (
        gae_over_every_position(rewards, TOOL_VALUES), gae_that_zeroes_observations(rewards,
        TOOL_VALUES, TOOL_MASK)
    ):  # fmt: skip
        assert torch.equal(compact(wrong, TOOL_MASK)[2:], right[2:])  # the last turn is right
        # lambda^2 is lost on the way to the first
        assert (compact(wrong, TOOL_MASK)[:2] - right[:2]).abs().min() > 0.04
    ours = build_estimator("ppo", gamma=GAMMA, lam=LAM)(
        batch((4,), [1.0], values=compact(TOOL_VALUES, TOOL_MASK))
    )
    torch.testing.assert_close(ours.advantages, right)


def test_reinforce_pp_gives_the_first_turn_no_reward() -> None:
    rewards = torch.tensor([0, 0, 0, 0, 0, 1.0])
    gamma = 0.5
    wrong = torch.zeros(6)
    running = 0.0
    for t in reversed(range(6)):
        # an observation resets the sum
        running = (float(rewards[t]) + gamma * running) * float(TOOL_MASK[t])
        wrong[t] = running
    assert compact(wrong, TOOL_MASK).tolist() == [0, 0, 0.5, 1]
    ours = build_estimator("reinforce++", gamma=gamma)(batch((4,), [1.0]))
    assert ours.advantages.tolist() == [0.125, 0.25, 0.5, 1]


# KL in the reward


def shapes_in_place(inputs: EstimatorInputs) -> Advantages:
    """slime PR #2114: the token rewards are built inside the KL tensor that is logged later."""
    rewards = inputs.kl
    assert rewards is not None
    rewards.mul_(-0.1)
    rewards[inputs.cu_seqlens[1:] - 1] += inputs.rewards
    return Advantages(rewards)


def test_the_logged_kl_is_the_shaped_reward() -> None:
    inputs = batch((2, 1), [1.0, 2.0], kl=torch.tensor([0.5, 0.1, 0.3]))
    spoilt = replace(inputs, kl=inputs.kl.clone())  # type: ignore[union-attr]
    shapes_in_place(spoilt)
    assert rollout_metrics(spoilt)["rollout/kl"] == pytest.approx((-0.05 + 0.99 + 1.97) / 3)

    build_estimator("ppo", kl_coef=0.1)(replace(inputs, values=torch.zeros(3)))
    with pytest.raises(EstimatorMutationError, match="wrote into its input 'kl'"):
        GuardedEstimator("theirs", shapes_in_place, {"kl"})(inputs)
    assert rollout_metrics(inputs)["rollout/kl"] == pytest.approx(0.9 / 3)


def test_kl_coef_is_a_silent_no_op_for_grpo() -> None:
    for name in ("grpo", "dr_grpo", "opo", "gpg", "max_rl"):
        assert "kl_coef" not in estimator_keywords(name)
        with pytest.raises(ValueError, match=r"unknown keyword 'kl_coef'"):
            build_estimator(name, kl_coef=0.1)
    inputs = batch((1, 1), [1.0, 2.0], [0, 0], kl=torch.tensor([0.5, 0.0]))
    for name in ("rloo", "reinforce++", "reinforce++_baseline"):  # those that take it use it
        plain, shaped = (
            build_estimator(name, kl_coef=coef)(inputs).advantages for coef in (0.0, 0.1)
        )
        assert float(shaped[0] - plain[0]) == pytest.approx(-0.05, abs=1e-6)


def test_the_critic_targets_leave_out_the_kl() -> None:
    kl = torch.tensor([0.5, 0.25])
    values = torch.tensor([0.1, 0.2])
    inputs = batch((2,), [1.0], kl=kl, values=values)
    actor = build_estimator("ppo", lam=1.0, kl_coef=0.4)(inputs)
    wrong = build_estimator("ppo", lam=1.0)(inputs).returns
    assert wrong is not None
    assert actor.returns is not None
    torch.testing.assert_close(wrong, torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(actor.returns, torch.tensor([1 - 0.2 - 0.1, 1 - 0.1]))
    torch.testing.assert_close(actor.returns, actor.advantages + values)  # one call, one reward


# Groups


def normalised_by_reshape(rewards: Tensor, samples_per_prompt: int, prompts: int) -> Tensor:
    """slime: rows of n samples if the count is right, else one row.

    torch's std of one value is NaN.
    """
    if rewards.numel() == samples_per_prompt * prompts:
        rows = rewards.view(-1, samples_per_prompt)
    else:
        rows = rewards.view(-1, rewards.shape[-1])
    centred = rows - rows.mean(-1, keepdim=True)
    return (centred / (rows.std(-1, keepdim=True).nan_to_num() + 1e-6)).flatten()


def test_group_norm_turns_into_batch_norm() -> None:
    # one sample of the first prompt was lost
    rewards = [1.0, 0.0, 11.0, 10.0, 12.0]
    groups = [4, 4, 9, 9, 9]
    wrong = normalised_by_reshape(torch.tensor(rewards), 3, 2)
    # the easy prompt pushes down both answers to the hard one, the right one too
    assert (wrong[:2] < 0).all()
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    ours = build_estimator("grpo")(batch((1,) * 5, rewards, groups)).advantages
    torch.testing.assert_close(
        ours, torch.tensor([half, -half, 0.0, -1 / (1 + 1e-6), 1 / (1 + 1e-6)])
    )


def test_whitening_on_the_wrong_group_when_groups_are_not_neighbours() -> None:
    rewards = [1.0, 10.0, 0.0, 12.0]
    groups = [0, 1, 0, 1]
    wrong = normalised_by_reshape(torch.tensor(rewards), 2, 2)
    assert wrong[0] < 0  # the better answer to its prompt
    ours = build_estimator("dr_grpo")(batch((1,) * 4, rewards, groups)).advantages
    assert ours.tolist() == [0.5, -1.0, -0.5, 1.0]
    advantages = torch.tensor(rewards)
    by_group = normalize_advantages(advantages, cu((1,) * 4), torch.tensor(groups), "group")
    root = math.sqrt(0.5)
    torch.testing.assert_close(by_group, torch.tensor([root, -root, -root, root]))


@pytest.mark.filterwarnings("ignore:std")
def test_one_sample_a_prompt_makes_every_reward_zero() -> None:
    rewards = [1.0, 0.0, 3.0]
    # and nothing says so
    assert normalised_by_reshape(torch.tensor(rewards), 1, 3).tolist() == [0, 0, 0]
    inputs = batch((1, 1, 1), rewards)
    assert build_estimator("grpo")(inputs).advantages.tolist() == [0, 0, 0]  # defined, and counted:
    assert rollout_metrics(inputs)["rollout/singleton_groups"] == 3
    # no group, so the reward is whole
    assert build_estimator("reinforce++")(inputs).advantages.tolist() == rewards


def test_an_empty_rank_skips_the_collective_of_whitening() -> None:
    """miles whitens on each rank its own tokens; ours whitens the whole batch once."""
    advantages = torch.tensor([1.0, 2.0, 3.0, 6.0])
    ranks = [advantages[:2], advantages[2:], advantages[:0]]
    apart = torch.cat([whiten(part) for part in ranks])
    whole = normalize_advantages(advantages, cu((2, 0, 2)), torch.tensor([0, 1, 2]), "batch")
    root = math.sqrt(14 / 3)  # mean 3, squares 4 + 1 + 0 + 9 over n - 1 = 3
    torch.testing.assert_close(whole, torch.tensor([-2.0, -1, 0, 3]) / root)
    assert float((apart - whole).abs().max()) > 0.4
    assert whiten(ranks[2]).shape == (0,)


# Where the reward stands


def zigzag(x: Tensor, ranks: int) -> list[Tensor]:
    """Context parallelism: rank r has chunks r and 2 * ranks - 1 - r; pads of 0 at the end."""
    size = -(-x.numel() // (2 * ranks))
    chunks = torch.cat([x, x.new_zeros(2 * ranks * size - x.numel())]).split(size)
    return [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)]


def undo_zigzag(parts: list[Tensor]) -> Tensor:
    halves = [part.chunk(2) for part in parts]
    return torch.cat([*(first for first, _ in halves), *(second for _, second in reversed(halves))])


def where_the_reward_lands(length: int, prompt: int, ranks: int) -> int | None:
    """slime: the reward goes to the last response token of rank 0.

    Rank 0 has the last chunk, but that may be all padding.
    """
    position = torch.arange(1, length + 1)  # 0 is a pad
    held = zigzag(position, ranks)[0]
    held = held[held > prompt]
    return int(held[-1]) - 1 if held.numel() else None


@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
@pytest.mark.parametrize("length", [5, 31, 33, 100])
def test_the_terminal_reward_is_on_the_wrong_token_under_context_parallelism(
    length: int, ranks: int
) -> None:
    prompt = 1
    size = -(-length // (2 * ranks))
    filled = (2 * ranks - 1) * size < length  # the last chunk has a token
    assert (where_the_reward_lands(length, prompt, ranks) == length - 1) == filled

    mask = torch.arange(length) >= prompt
    parts = zigzag(torch.arange(length), ranks)
    masks = zigzag(mask.float(), ranks)
    # compaction restores the order of the tokens
    trainable = compact(undo_zigzag(parts), undo_zigzag(masks))
    assert trainable.tolist() == list(range(prompt, length))
    ours = build_estimator("reinforce++", gamma=0.0)(batch((trainable.numel(),), [1.0])).advantages
    assert ours.tolist() == [0.0] * (length - prompt - 1) + [1.0]


def test_it_was_wrong_for_many_lengths() -> None:
    wrong = {
        ranks: sum(where_the_reward_lands(n, 1, ranks) != n - 1 for n in range(2, 201))
        for ranks in (1, 2, 8, 16)
    }
    assert wrong == {1: 0, 2: 5, 8: 116, 16: 178}  # of 199


def test_reinforce_pp_asserts_on_a_fully_masked_sample() -> None:
    mask = torch.tensor([[1.0, 1], [0, 0]])

    def theirs() -> Tensor:
        rewards = torch.zeros(2, 2)
        for row, outcome in enumerate((1.0, float("nan"))):
            trainable = mask[row].nonzero()
            assert trainable.numel(), "a sample without a trainable token"
            rewards[row, trainable[-1]] = outcome
        return rewards

    with pytest.raises(AssertionError, match="without a trainable token"):
        theirs()
    ours = build_estimator("reinforce++")(batch((2, 0), [1.0, float("nan")]))
    assert ours.advantages.tolist() == [1.0, 1.0]


# Numbers that are not finite


def test_infinity_times_zero_of_a_masked_token() -> None:
    # the second is padding, its log-prob garbage
    log_ratio = torch.tensor([0.0, 200.0])
    mask = torch.tensor([1.0, 0.0])
    assert (log_ratio.exp() * mask).sum().isnan()
    inputs = PolicyLossInputs(
        cu_seqlens=cu((1,)),
        logprobs=compact(log_ratio, mask),
        old_logprobs=torch.zeros(1),
        advantages=torch.ones(1),
    )
    assert build_policy_loss("ppo_clip")(inputs).per_token.tolist() == [-1.0]


def test_exp_before_clamp() -> None:
    """The value survives; the gradient is 0 * inf."""
    wrong = torch.tensor([200.0], requires_grad=True)
    wrong.exp().clamp(max=10.0).backward()
    assert wrong.grad is not None
    assert wrong.grad.isnan()
    for kind in ("k1", "k2", "k3"):
        ours = torch.tensor([200.0, -200.0, 1e4, -1e4], requires_grad=True)
        approx_kl(ours, torch.zeros(4), kind).sum().backward()  # type: ignore[arg-type]
        assert ours.grad is not None
        assert ours.grad.tolist() == [0, 0, 0, 0]
    assert approx_kl(torch.tensor([-200.0]), torch.zeros(1)).item() == pytest.approx(
        math.exp(20) - 21, rel=1e-6
    )


def test_whitening_by_the_mean_of_squares() -> None:
    x = 50 + 1e-3 * torch.randn(4096, generator=torch.Generator().manual_seed(0))
    # of 2500, whose spacing in float32 is 2.4e-4, or of less than nothing
    wrong = ((x**2).mean() - x.mean() ** 2).sqrt()
    assert not abs(float(wrong) - 1e-3) < 5e-4  # NaN is not close either
    ours = whiten(x, eps=0.0).double()
    assert float(ours.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(ours.var()) == pytest.approx(1.0, abs=1e-5)
    _, std = group_mean_std(x, torch.zeros(4096, dtype=torch.int64))
    assert float(std[0]) == pytest.approx(1e-3, rel=0.05)


# Numbers that change with the layout


def test_rollout_kl_is_multiplied_by_the_context_parallel_size() -> None:
    kl = torch.tensor([9.0, 0.1, 0.2, 9.0, 0.3, 9.0, 9.0, 9.0])
    mask = torch.tensor([0.0, 1, 1, 0, 1, 0, 0, 0])
    for ranks in (1, 2):
        parts = zigzag(kl, ranks)
        # every rank adds its mean, prompt and pads included
        wrong = sum(float(part.mean()) for part in parts)
        assert wrong == pytest.approx(ranks * float(kl.mean()))
        moments = Moments()
        for part, trainable in zip(parts, zigzag(mask, ranks)):
            moments.add("rollout/kl", compact(part, trainable))
        assert moments.reduce()["rollout/kl"] == pytest.approx(0.2)


def test_the_loss_changes_with_micro_batching() -> None:
    lengths = (1, 3)
    loss = torch.tensor([1.0, 2.0, 3.0, 6.0])
    parts = [loss[:1], loss[1:]]
    expected = {
        "token-mean": 12 / 4,
        "seq-mean-token-sum": (1 + 11) / 2,
        "seq-mean-token-mean": (1 + 11 / 3) / 2,
    }
    for mode, whole in expected.items():
        weights = loss_weights(mode, cu(lengths))  # type: ignore[arg-type]
        ours = sum(
            float(weight @ part) for weight, part in zip(weights.split(list(lengths)), parts)
        )
        assert ours == pytest.approx(whole)
    # the mean of the means of the micro-batches
    wrong = sum(float(part.mean()) for part in parts) / len(parts)
    assert wrong == pytest.approx(7 / 3)
    assert wrong != pytest.approx(3.0)


def test_statistics_of_the_micro_batch_change_the_loss() -> None:
    """verl chooses the tokens of kl_cov by the covariance inside each micro-batch."""
    advantages = torch.tensor([4.0, 3.0, 0.0, -1.0])
    old = torch.tensor([-0.1, -0.2, -3.0, -0.3])
    step = PolicyLossInputs(
        cu_seqlens=cu((2, 2)),
        logprobs=old,
        old_logprobs=old,
        advantages=advantages,
        sequence_ids=torch.tensor([3, 8]),
    )

    def chosen(inputs: PolicyLossInputs, whole: PolicyLossInputs) -> list[float]:
        loss = build_policy_loss("kl_cov", kl_cov_ratio=0.25)
        result = loss(
            replace(
                inputs, batch_stats=loss.batch_stats(replace(whole, logprobs=whole.old_logprobs))
            )
        )
        return result.metrics["cov_klfrac"].tolist()

    parts = [
        replace(
            step,
            cu_seqlens=cu((2,)),
            logprobs=old[rows],
            old_logprobs=old[rows],
            advantages=advantages[rows],
            sequence_ids=step.sequence_ids[[b]],
        )  # type: ignore[index]
        for b, rows in enumerate((slice(0, 2), slice(2, 4)))
    ]
    # covariance over the step, with means 1.5 and -0.9: 2, 1.05, 3.15 and a negative one
    assert [*chosen(parts[0], step), *chosen(parts[1], step)] == chosen(step, step) == [0, 0, 1, 0]
    # inside the second micro-batch no token has a positive one, and the first gives one of its own
    # away
    assert sum(chosen(parts[0], parts[0])) == 1
    assert chosen(parts[1], parts[1]) == [0, 0]


def test_the_outcome_is_credited_to_each_token_of_its_sequence_alone() -> None:
    """A running sum without borders gives the first sequence the rewards of all behind it."""
    rewards = torch.tensor([0.0, 1.0, 0.0, 10.0])
    wrong = rewards.flip(0).cumsum(0).flip(0)
    assert wrong.tolist() == [11, 11, 10, 10]
    inputs = batch((2, 2), [1.0, 10.0])
    assert build_estimator("reinforce++")(inputs).advantages.tolist() == [1, 1, 10, 10]
    assert expand_to_tokens(inputs.rewards, inputs.cu_seqlens).tolist() == [1, 1, 10, 10]
