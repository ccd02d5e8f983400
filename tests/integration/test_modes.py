"""Debug modes, replays, evaluation, export, SFT and reward models, each in a whole run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accounting_checks import samples_of
from hf_logprobs import scores
from safetensors.torch import load_file
from workspace import LEARNING, Run, Workspace, learned, same, score_of

from rlcore.algorithms import METRICS, metric_spec
from rlcore.data.generation import Generate
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample
from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.runs.rollouts import read_rollouts
from rollout.workflows.context import WorkflowContext

PPO = (
    "algorithm.estimator={name: ppo, lam: 1.0}",
    "critic.optimizer.lr=1e-3",
    "algorithm.kl.reward_kind=k3",
)
EVERY_WEIGHT = ("checkpoint.every=1", "checkpoint.keep=9")
PROMPTS = "evaluation.max_prompts=8"


class AskTwice:
    """A conversation without a chat template."""

    def __init__(self, context: WorkflowContext) -> None:
        self.context = context

    async def rollout(
        self, prompt: Prompt, draw: int, index: int, generate: Generate
    ) -> list[Sample]:
        conversation = self.context.conversation(prompt, draw, index, generate)
        await conversation.generate()
        conversation.append_tokens(prompt.tokens[:1])
        await conversation.generate()
        return conversation.samples()


@pytest.fixture(scope="module")
def trained(workspace: Workspace) -> Run:
    """GRPO with a checkpoint of every step and evaluations before, during and after."""
    return workspace.train(
        "trained", *LEARNING, *EVERY_WEIGHT, workspace.heldout, PROMPTS, "evaluation.every=2"
    )


@pytest.fixture(scope="module")
def with_critic(workspace: Workspace) -> Run:
    """PPO from a reward model: two optimizer steps, KL in reward and loss, entropy bonus."""
    terms = (
        "algorithm.kl.reward_coef=0.1",
        "algorithm.kl.loss_coef=0.1",
        "algorithm.entropy_coef=0.01",
    )
    critic = (
        f"critic.path={workspace.reward_model}",
        "critic.value_clip=0.5",
        "algorithm.minibatches=2",
    )
    return workspace.train("critic", *LEARNING, *EVERY_WEIGHT, *PPO, *terms, *critic)


@pytest.fixture(scope="module")
def conversations(workspace: Workspace) -> Run:
    """Two turns a rollout; one of two evaluation sets asks once."""
    return workspace.train(
        "conversations", *LEARNING, *EVERY_WEIGHT, f"rollout.workflow={__name__}:AskTwice",
        "training.steps=2", workspace.heldout, PROMPTS,
        f"evaluation.sets.once.paths={workspace.folder / 'data' / 'heldout.jsonl'}",
        "evaluation.sets.once.workflow=single_turn", "evaluation.sets.once.max_prompts=2",
    )  # fmt: skip


# --- debug modes ----------------------------------------------------------------------------------


def test_rollout_only_generates_and_scores_and_trains_nothing(workspace: Workspace) -> None:
    run = workspace.train(
        "rollouts", *LEARNING, "training.debug=rollout_only", "algorithm.kl.monitor=true"
    )
    assert (run.code, run.result["status"], run.result["steps"]) == (0, "completed", 3)
    for row in run.metrics:
        assert {
            "rollout/reward",
            "val/sequence_lengths",
            "rollout/ess",
            "rollout/train_rollout_logprob_diff",
        } <= set(row)
        assert row["rollout/kl"] == 0.0
        assert not any(
            name.startswith(("loss/", "policy/", "train/", "time/training")) for name in row
        )
    assert all(len(samples_of(run, step)) == 16 for step in (1, 2, 3))
    before = load_file(workspace.model / "model.safetensors")
    after = run.weights
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def training_metrics(row: dict[str, Any]) -> dict[str, Any]:
    """Drop clocks, counters of the run, and what only an engine and its rewards can tell."""
    others = ("time/", "perf/", "episode", "epoch", "step", "eval/", "rollout/requeued",
              "rollout/excluded", "rollout/reward_e", "rollout/reward_t", "rollout/engine",
              "rollout/retried", "rollout/resumed", "rollout/overdue", "rollout/failed",
              "rollout/scored", "rollout/unscored")  # fmt: skip
    return {name: value for name, value in row.items() if not name.startswith(others)}


@pytest.mark.parametrize(
    ("source", "step"), [("trained", 2), ("with_critic", 2), ("conversations", 2)]
)
def test_a_replayed_step_is_the_step(
    workspace: Workspace, source: str, step: int, request: pytest.FixtureRequest
) -> None:
    """Bit for bit, from the checkpoint before: weights, optimizer, critic, mini-batches."""
    run: Run = request.getfixturevalue(source)
    replay = workspace.replay(run, step)
    assert replay.code == 0, replay.err
    again = training_metrics(replay.rows[1])
    first = training_metrics(run.rows[step])
    assert again == first
    assert {"loss/policy_avg", "train/grad_norm", "rollout/reward"} <= set(again)
    assert [record["tokens"] for record in read_rollouts(replay.rollouts(1))] == [
        record["tokens"] for record in read_rollouts(run.rollouts(step))
    ]


@pytest.mark.parametrize(
    ("source", "step"),
    [pytest.param("trained", 2, marks=pytest.mark.full), ("with_critic", 2), ("conversations", 2)],
)
def test_a_replay_without_sharing_is_the_step_but_for_round_off(
    workspace: Workspace, source: str, step: int, request: pytest.FixtureRequest
) -> None:
    """The same samples from the same checkpoint, each prompt computed for every sample."""
    run: Run = request.getfixturevalue(source)
    replay = workspace.replay(run, step, "policy.share_prefixes=off")
    assert replay.code == 0, replay.err
    assert run.rows[step]["perf/shared_tokens"] > 0
    assert "perf/shared_tokens" not in replay.rows[1]
    shared, alone = (training_metrics(row) for row in (run.rows[step], replay.rows[1]))
    # measured on the tokens of one micro-batch, and these hold other samples without sharing
    assert alone.pop("policy/step_kl") == pytest.approx(shared.pop("policy/step_kl"), rel=0.5)
    assert alone == pytest.approx(shared, rel=1e-3, abs=1e-6)


def test_a_set_of_an_evaluation_may_have_another_workflow(
    workspace: Workspace, conversations: Run
) -> None:
    assert conversations.code == 0, conversations.err
    for row in (conversations.rows[0], conversations.rows[2]):
        assert row["eval/turns"] == 2.0
        assert "eval/once/score" in row
        assert "eval/once/turns" not in row
    assert {sample.turns for sample in samples_of(conversations, 2)} == {2}
    done = workspace.command(
        "eval", str(conversations.folder / "config.yaml"), "--model", str(conversations.folder)
    )
    assert done.code == 0, done.err
    assert [line.split()[1] for line in done.lines("eval/turns")] == ["2"]


def test_a_step_is_trained_on_again_and_again(workspace: Workspace, trained: Run) -> None:
    """It starts from the initial weights, without an engine: the policy leaves the samples'."""
    again = (
        "training.debug=train_only",
        f"training.replay={trained.rollouts(1)}",
        "training.steps=6",
    )
    replay = workspace.train("again", *LEARNING, *again)
    assert replay.code == 0, replay.err
    losses = [row["loss/policy_avg"] for row in replay.metrics]
    assert losses[0] == trained.rows[1]["loss/policy_avg"]
    surprise = [row["rollout/train_rollout_logprob_diff"] for row in replay.metrics]
    assert surprise[0] < 1e-5 < surprise[-1]
    assert not (replay.folder / "versions.jsonl").exists()


def test_a_replay_that_cannot_be_says_so(
    workspace: Workspace, trained: Run, tmp_path: Path
) -> None:
    (tmp_path / "damaged.parquet").write_bytes(trained.rollouts(1).read_bytes()[:100])
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"prompt": ["12+34="]}), other)
    given = f"training.replay={trained.rollouts(1)}"
    for overrides, text in (
        ([f"training.replay={tmp_path / 'none.zst'}", "training.debug=train_only"], "none.zst"),
        (
            [f"training.replay={tmp_path / 'damaged.parquet'}", "training.debug=train_only"],
            "not a readable recording",
        ),
        (
            [given, "training.debug=train_only", f"training.replay_from={tmp_path / 'none'}"],
            "training.replay_from",
        ),
        (
            [f"training.replay={other}", "training.debug=train_only"],
            "other.parquet: not a readable recording",
        ),
        ([given], "training.debug"),
        (["training.debug=train_only"], "training.replay"),
        ([f"training.replay_from={trained.folder}"], "training.replay_from"),
    ):
        refused = workspace.train("no replay", *overrides)
        assert refused.code == 2, overrides
        assert text in refused.err
        assert len(refused.err.strip().splitlines()) <= 2
        assert not refused.folder.exists()


# --- evaluation and export ------------------------------------------------------------------------


def test_a_run_is_evaluated_before_during_and_after(trained: Run) -> None:
    assert [step for step, row in trained.rows.items() if "eval/score" in row] == [0, 2, 3]
    assert all(row["time/evaluation"] > 0 for row in trained.metrics if "eval/score" in row)
    assert trained.rows[0]["eval/score"] != trained.rows[3]["eval/score"]
    assert trained.lines("| eval ")


def test_eval_agrees_on_run_checkpoint_and_folder(
    workspace: Workspace, trained: Run, tmp_path: Path
) -> None:
    scores = {}
    for name, model in (("run", trained.folder), ("checkpoint", trained.checkpoint(3)),
                        ("hf", trained.folder / "hf"), ("step 2", trained.checkpoint(2)),
                        ("before", workspace.model)):  # fmt: skip
        # The configuration names other weights, which --model must win over.
        given = (
            str(trained.folder / "config.yaml"),
            f"policy.checkpoint={trained.checkpoint(1)}",
            "tracking.show_samples=1",
        )
        done = workspace.command(
            "eval", *given, "--model", str(model), "--output", str(tmp_path / "scores.json")
        )
        assert done.code == 0, done.err
        scores[name] = json.loads((tmp_path / "scores.json").read_text())
        assert len(scores[name].pop("answers")) == 8
        assert done.lines("eval/score")
        assert "< " in done.out, "a sample is shown"
    assert scores["run"] == scores["checkpoint"] == scores["hf"]
    assert scores["run"]["samples"] == 8
    for name, step in (("run", 3), ("step 2", 2), ("before", 0)):
        logged = {
            key: value for key, value in trained.rows[step].items() if key.startswith("eval/")
        }
        assert {key: value for key, value in scores[name].items() if key != "samples"} == logged


def test_eval_on_the_ranks_of_a_layout(
    workspace: Workspace, trained: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A model that is larger than a GPU is split as in training; the scores are the same."""
    command = ("eval", str(trained.folder / "config.yaml"), "--model", str(trained.folder))
    output = tmp_path / "scores.json"
    layout = ("cluster.processes_per_node=2", "policy.parallel.tensor=2")
    done = workspace.command(*command, "--all-ranks", *layout, "--output", str(output))
    assert done.code == 0, done.err
    assert json.loads(output.read_text())["eval/score"] == trained.rows[3]["eval/score"]
    assert capfd.readouterr().out.count("eval/score") == 1, "rank 0 alone shows it"
    refused = workspace.command(*command, "--all-ranks", "cluster.launcher=torchrun")
    assert refused.code == 2
    assert "start `rlcore eval` itself by torchrun" in refused.err


@pytest.mark.everyday
def test_export_of_a_run_is_its_hf_folder(
    workspace: Workspace, trained: Run, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for source, name in ((trained.folder, "of run"), (trained.checkpoint(3), "of checkpoint")):
        done = workspace.command("export", str(source), str(tmp_path / name))
        assert done.code == 0, done.err
        assert files(tmp_path / name) == files(trained.folder / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "of run")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "of run")
    answer = model.generate(
        **tokenizer("12+34=", return_tensors="pt"), max_new_tokens=4, do_sample=False
    )
    assert answer.shape[1] > 6

    again = workspace.command("export", str(trained.folder), str(tmp_path / "of run"))
    assert again.code == 2
    assert "not empty" in again.err
    assert workspace.command("export", str(tmp_path / "nowhere"), str(tmp_path / "x")).code == 2


def test_an_export_keeps_the_models_dtype(workspace: Workspace) -> None:
    """An engine in bf16 beside a trainer in fp32: publications are rounded, exports are not."""
    run = workspace.train("bf16 engine", *LEARNING, "rollout.engine.dtype=bf16", "training.steps=1")
    assert run.code == 0, run.err
    assert {tensor.dtype for tensor in run.weights.values()} == {torch.float32}
    assert run.rows[1]["rollout/train_rollout_logprob_diff"] > 1e-5


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- supervised fine-tuning -----------------------------------------------------------------------


def test_supervised_fine_tuning(workspace: Workspace) -> None:
    run = workspace.sft(
        "sft",
        "training.steps=25",
        "policy.optimizer.lr=5e-3",
        "tracking.show_samples=2",
        "tracking.show_every=1",
    )
    assert (run.code, run.result["status"]) == (0, "completed")
    losses = [row["loss/policy_avg"] for row in run.metrics]
    assert losses[-1] < 0.7 * losses[0]
    assert 2.5 < run.rows[1]["val/sequence_lengths"] < 4.5, "the answer and its end, not the prompt"
    for row in run.metrics:
        generated = {
            name
            for name in row
            if name.startswith(("rollout/", "objective/scores", "objective/rlhf", "eval/"))
        }
        assert generated <= {"rollout/excluded_prompts"}
    assert not run.lines("training sample of step")
    assert not run.lines("reward")
    assert run.lines("loss")
    assert not list((run.folder / "rollouts").iterdir())


def test_a_supervised_run_can_be_evaluated_and_scores_labels_itself(workspace: Workspace) -> None:
    run = workspace.sft("sft with prompts", workspace.heldout, "training.steps=1")
    assert [row["step"] for row in run.metrics if "eval/loss" in row] == [0, 1]
    few = (PROMPTS, "evaluation.max_new_tokens=4")
    done = workspace.command(
        "eval", str(run.folder / "config.yaml"), "--model", str(run.folder), *few
    )
    assert done.code == 0, done.err
    assert done.lines("eval/accuracy")


# --- reward models --------------------------------------------------------------------------------


def test_a_reward_model_scores_prompt_and_response(trained: Run) -> None:
    for sample in samples_of(trained, 2)[:6]:
        assert same(sample.reward, score_of(sample.prompt_text + sample.response_text))
        assert sample.reward_parts == {"liked": sample.reward}


def test_a_critic_starts_as_the_reward_model(workspace: Workspace) -> None:
    """Its first loss and explained variance are those of the reward model before each token."""
    run = workspace.train(
        "critic start", *PPO, f"critic.path={workspace.reward_model}", "training.steps=1"
    )
    assert run.code == 0, run.err
    values = []
    returns = []
    for sample in samples_of(run, 1):
        positions = torch.from_numpy(sample.loss_mask).nonzero()[:, 0]
        values.append(scores(workspace.reward_model, sample)[positions - 1])
        # gamma = lambda = 1, no KL in the reward
        returns.append(torch.full_like(values[-1], sample.reward))
    v = torch.cat(values).double()
    r = torch.cat(returns).double()
    row = run.rows[1]
    assert same(row["val/explained_variance"], float(1 - (r - v).var() / r.var()), rel=1e-3)
    assert same(row["loss/value_avg"], float(0.5 * (v - r).square().mean()), rel=1e-3)


# --- one thing each -------------------------------------------------------------------------------


@pytest.fixture
def torchs_choice() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("torchs_choice")
def test_deterministic_runs_are_bit_equal(workspace: Workspace) -> None:
    runs = [
        workspace.train(f"deterministic {i}", *LEARNING, "run.deterministic=true", "run.threads=2")
        for i in (1, 2)
    ]
    assert torch.are_deterministic_algorithms_enabled()
    assert learned(runs[0].metrics) == learned(runs[1].metrics)
    assert files(runs[0].folder / "hf") == files(runs[1].folder / "hf")


def model_with_experts(workspace: Workspace) -> Path:
    folder = workspace.folder / "with_experts"
    init_model(
        folder,
        ModelSpec(
            family="qwen3_moe", hidden=32, layers=2, heads=4, kv_heads=2, intermediate=32, experts=4
        ),
    )
    return folder


# Of models with a layer for multi-token prediction (tests/parity/test_mtp.py), and of SGLang with
# speculative decoding (tests/unit/rollout/test_service.py).
WITH_DRAFTS = {*("loss/mtp_avg", "rollout/draft_acceptance", "rollout/tokens_per_verification")}


def test_every_metric_is_defined_and_every_definition_is_written(
    workspace: Workspace, trained: Run, with_critic: Run, conversations: Run
) -> None:
    verified = workspace.train(
        "verified", *LEARNING, workspace.heldout, PROMPTS, "rollout.filters=[zero_variance]",
        "algorithm.loss.dual_clip=3.0", "algorithm.epochs=2",
        "reward.parts.right.function=exact_match",
        "algorithm.old_logprobs=recompute", "training.steps=3", "checkpoint.every=1",
        "checkpoint.async_save=true", "tracking.peak_tflops=0.1", "algorithm.estimator.name=remax",
        "algorithm.correction={name: tis, max_staleness: 0}", "data.curriculum.name=pass_rate",
    )  # fmt: skip
    assert verified.code == 0, verified.err
    experts = workspace.train(
        "experts", f"model.path={model_with_experts(workspace)}", "policy.routing_replay=logprobs",
        "training.steps=1", "policy.megatron={moe_aux_loss_coeff: 0.01, moe_z_loss_coeff: 0.001}",
        "rollout.engine.colocated=true",
    )  # fmt: skip
    assert experts.code == 0, experts.err
    asynchronous = workspace.train(
        "ahead of its trainer", "rollout.max_staleness=1", "training.steps=1",
        "rollout.workflow={name: 'failing_environments:Faulty', how: raises}",
    )  # fmt: skip
    assert asynchronous.code == 0, asynchronous.err
    supervised = workspace.sft("held-out labels", workspace.heldout, "training.steps=1")
    assert supervised.code == 0, supervised.err
    preferred = workspace.train(
        "preferred", "algorithm.estimator.name=dpo", "training.steps=1", "training.batch_size=8",
        f"data.paths={workspace.folder / 'data' / 'preferences.jsonl'}",
    )  # fmt: skip
    assert preferred.code == 0, preferred.err
    runs = (trained, with_critic, verified, experts, asynchronous, conversations)
    written = {
        name for run in (*runs, supervised, preferred) for row in run.metrics for name in row
    }
    assert {name for name in written if metric_spec(name) is None} == set()
    everything = {name for name in METRICS if "<" not in name}
    assert everything - written == WITH_DRAFTS
    assert {"rollout/dropped_zero_variance", "rollout/failed_tries_error"} <= written


def test_runs_of_this_session_write_nothing_undefined(workspace: Workspace, trained: Run) -> None:
    rows = [
        row
        for path in (workspace.folder / "runs").glob("*/metrics.jsonl")
        for row in Run(0, "", "", path.parent).metrics
    ]
    assert len(rows) > 3
    assert {name for row in rows for name in row if metric_spec(name) is None} == set()


def test_a_run_can_be_moved_before_it_is_exported(
    workspace: Workspace, trained: Run, tmp_path: Path
) -> None:
    shutil.copytree(trained.folder, tmp_path / "moved")
    assert workspace.command("export", str(tmp_path / "moved"), str(tmp_path / "hf")).code == 0
    assert files(tmp_path / "hf") == files(trained.folder / "hf")
