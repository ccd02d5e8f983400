"""Runs that train adapters, from the command line: what they leave is what PEFT makes of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcore.config.evaluation_sets import SET_KEY
from rlcore.data.sample import Sample
from rlcore.runs.rollouts import read_rollouts
from tests.integration.accounting_checks import samples_of
from tests.integration.hf_logprobs import logprobs
from tests.integration.workspace import LEARNING, ROOT, Run, Workspace

GIVEN = (
    *LEARNING,
    "policy.lora={rank: 4, targets: [q_proj, v_proj, down_proj]}",
    "algorithm.kl.loss_coef=0.1",
    "checkpoint.every=1",
    "checkpoint.keep=9",
)


def evaluated(run: Run, step: int) -> list[Sample]:
    path = run.folder / "evaluations" / f"step_{step:06d}.parquet"
    return [Sample.from_record(record) for record in read_rollouts(path)]


@pytest.fixture(scope="module")
def run(workspace: Workspace) -> Run:
    run = workspace.train("adapters", *GIVEN)
    assert run.code == 0, run.err
    return run


def merged(workspace: Workspace, run: Run, step: int) -> Path:
    """The whole model of a checkpoint; of step 0 the one that it began with."""
    if not step:
        return workspace.model
    folder = workspace.folder / f"{run.folder.name} merged {step}"
    if not folder.exists():
        source = str(run.checkpoint(step))
        assert workspace.command("export", source, str(folder), "--merged").code == 0
    return folder


def test_every_log_prob_is_that_of_the_merged_weights(workspace: Workspace, run: Run) -> None:
    """The engine's, of each version; the trainer's are equal to it, as its metric says."""
    for step in (1, 2, 3):
        samples = samples_of(run, step)
        found = logprobs(merged(workspace, run, step - 1), samples)
        for sample, expected in zip(samples, found, strict=True):
            assert {span.version for span in sample.versions} <= {step}
            own = torch.from_numpy(sample.rollout_logprobs).double()
            torch.testing.assert_close(own, expected, atol=1e-4, rtol=0)
    rows = run.rows
    assert rows[1]["objective/kl"] == pytest.approx(0, abs=1e-6)
    assert rows[3]["objective/kl"] != 0
    assert max(row["rollout/train_rollout_logprob_diff_max"] for row in run.metrics) < 1e-4


# which peft calls
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_the_folder_is_peft_s(workspace: Workspace, run: Run, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(workspace.model, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, str(run.folder / "hf"))
    by_peft = dict(model.merge_and_unload().named_parameters())
    ours = load_file(merged(workspace, run, 3) / "model.safetensors")
    plain = load_file(workspace.model / "model.safetensors")
    moved = [name for name in ours if not torch.equal(ours[name], plain[name])]
    assert {name.split(".")[-2] for name in moved} == {"q_proj", "v_proj", "down_proj"}
    for name, weight in ours.items():
        torch.testing.assert_close(by_peft[name].detach(), weight, atol=1e-7, rtol=1e-6)

    begun = workspace.train("from peft", *GIVEN, f"policy.lora.path={run.folder / 'hf'}")
    assert begun.code == 0, begun.err
    samples = samples_of(begun, 1)
    for sample, expected in zip(samples, logprobs(merged(workspace, run, 3), samples), strict=True):
        own = torch.from_numpy(sample.rollout_logprobs).double()
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=0)
    wrong = tmp_path / "wrong"
    shutil.copytree(run.folder / "hf", wrong)
    text = (wrong / "adapter_config.json").read_text().replace('"v_proj"', '"k_proj"')
    (wrong / "adapter_config.json").write_text(text)
    refused = workspace.train("wrong peft", *GIVEN, f"policy.lora.path={wrong}")
    assert refused.code == 2
    assert "k_proj" in refused.err


def test_a_run_goes_on_from_another_one_s_adapters(workspace: Workspace, run: Run) -> None:
    start = f"policy.checkpoint={run.folder}"
    further = workspace.train("further", *GIVEN, start)
    assert further.code == 0, further.err
    samples = samples_of(further, 1)
    for sample, expected in zip(samples, logprobs(merged(workspace, run, 3), samples), strict=True):
        own = torch.from_numpy(sample.rollout_logprobs).double()
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=0)
    # the reference is what the run began with, adapters included
    assert further.rows[1]["objective/kl"] == pytest.approx(0, abs=1e-6)
    for wrong, said in (
        ((*GIVEN, "policy.lora.rank=2"), "rank 4"),
        (LEARNING, "has adapters alone"),
    ):
        refused = workspace.train("refused adapters", *wrong, start)
        assert refused.code == 2
        assert said in refused.err


def test_other_weights_below_are_refused(workspace: Workspace, tmp_path: Path) -> None:
    """By samples of their bytes: names and sizes are those of the weights that were there."""
    model = tmp_path / "model"
    shutil.copytree(workspace.model, model)
    given = (*GIVEN, f"model.path={model}")
    assert workspace.train("adapters moved", *given, "training.steps=1").code == 0
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    refused = workspace.train("adapters moved", *given, "training.steps=2", "--resume")
    assert refused.code == 2
    assert "base_digest" in refused.err


def test_a_target_that_is_not_there_is_refused(workspace: Workspace) -> None:
    refused = workspace.train("no target", "policy.lora.targets=[query_proj]")
    assert refused.code == 2
    assert "'query_proj'" in refused.err
    assert "q_proj" in refused.err


@pytest.mark.parametrize("service", ["in_process", "process"])
def test_an_earlier_policy_drafts_and_the_trained_one_learns_from_its_own_answer(
    workspace: Workspace, run: Run, monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    """examples/addition/revise.yaml: each token is of the policy that was named, none else."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "addition"))
    revised = workspace.train(
        f"revised {service}",
        *GIVEN,
        f"rollout.policies.earlier={run.folder / 'hf'}",
        "rollout.workflow={name: 'revise:Revise', draft: earlier}",
        f"rollout.service={service}",
        f"evaluation.sets={{drafts: {{paths: [{workspace.folder / 'data' / 'heldout.jsonl'}],"
        " policy: earlier, workflow: single_turn, max_prompts: 4}}",
        "training.steps=2",
    )
    assert revised.code == 0, revised.err
    assert not revised.lines("was trained on")
    earlier = merged(workspace, run, 3)
    for step in (1, 2):
        samples = samples_of(revised, step)
        own = logprobs(merged(workspace, revised, step - 1), samples)
        for sample, expected in zip(samples, own, strict=True):
            found = torch.from_numpy(sample.rollout_logprobs).double()
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        row = revised.rows[step]
        assert row["conversation/turns"] == 2
        assert row["conversation/untrained_earlier"] > 0
        assert row["rollout/train_rollout_logprob_diff_max"] < 1e-4
    scores = [row["eval/drafts/score"] for row in revised.metrics if "eval/drafts/score" in row]
    assert len(scores) == 2, "before the first step and after the last"
    assert scores[0] == scores[1], "nothing trains it"
    drafts = [s for s in evaluated(revised, 2) if s.metadata[SET_KEY] == "drafts"]
    assert len(drafts) == 4
    for sample, expected in zip(drafts, logprobs(earlier, drafts), strict=True):
        found = torch.from_numpy(sample.rollout_logprobs).double()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_the_reference_is_a_frozen_policy(workspace: Workspace, run: Run, tmp_path: Path) -> None:
    """The KL of the first step is that of the policy, still the model, to the earlier one."""
    given = (f"rollout.policies.earlier={run.folder / 'hf'}", "reference.policy=earlier")
    run_to = workspace.train("to a frozen policy", *GIVEN, *given, "training.steps=2")
    assert run_to.code == 0, run_to.err
    for step in (1, 2):
        samples = samples_of(run_to, step)
        own = logprobs(merged(workspace, run_to, step - 1), samples)
        other = logprobs(merged(workspace, run, 3), samples)
        kl = torch.stack([(a - b).sum() for a, b in zip(own, other, strict=True)]).mean()
        assert run_to.rows[step]["objective/kl"] == pytest.approx(float(kl), rel=1e-3, abs=1e-5)
        assert abs(float(kl)) > 1e-3
    rank = workspace.train("to another rank", *GIVEN, *given, "policy.lora.rank=8")
    assert rank.code == 2
    assert rank.lines("rollout.policies.earlier: "), rank.err


def test_policies_without_adapters_or_of_another_shape_are_refused(
    workspace: Workspace, run: Run, tmp_path: Path
) -> None:
    policies = f"rollout.policies.earlier={run.folder / 'hf'}"
    wrong = workspace.train("policies of whole weights", *LEARNING, policies)
    assert (wrong.code, wrong.lines("rollout.policies: ")) != (0, [])
    unknown = workspace.train(
        "policies unknown", *GIVEN, "evaluation.sets={a: {paths: [x], policy: b}}"
    )
    assert unknown.lines("got 'b', but rollout.policies has none")
    shutil.copytree(workspace.model, tmp_path / "copy")
    given = (f"model.path={tmp_path / 'copy'}", "training.steps=1", policies)
    other = workspace.train("policies on another base", *GIVEN, *given)
    assert other.lines("was trained on") != []
    given = (f"policy.checkpoint={run.checkpoint(2)}", "training.steps=1", policies)
    same = workspace.train("policies on the same base", *GIVEN, *given)
    assert (same.code, same.lines("was trained on")) == (0, [])
    whole = workspace.train("whole weights", *LEARNING, "training.steps=1", "checkpoint.every=1")
    given = (f"policy.checkpoint={whole.checkpoint(1)}", "training.steps=1", policies)
    moved = workspace.train("policies on moved weights", *GIVEN, *given)
    assert moved.lines("was trained on") != []
    half = tmp_path / "half"
    shutil.copytree(run.folder / "hf", half)
    tensors = load_file(half / "adapter_model.safetensors")
    name = next(name for name in tensors if ".lora_B." in name)
    for content in (
        {key: value for key, value in tensors.items() if key != name},
        {**tensors, name: tensors[name][:-1].contiguous()},
        {**tensors, name.replace("layers.0", "layers.7"): tensors[name].clone()},
    ):
        save_file(content, half / "adapter_model.safetensors")
        refused = workspace.train("half a policy", *GIVEN, f"rollout.policies.earlier={half}")
        assert refused.code == 2
        assert refused.lines("rollout.policies.earlier: ")
