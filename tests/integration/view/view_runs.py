"""Real runs for the page to show, and a run whose texts are hostile."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.data.sample import Sample, TurnSpan, VersionSpan
from rlcore.runs.directory import RunDirectory
from rlcore.runs.rollouts import write_rollouts
from rlcore.runs.sample_index import write_index
from rollout.conversation.conversation import Conversation
from rollout.conversation.reply import Reply
from rollout.workflows.env import Step
from tests.integration.workspace import ROOT, Run, Workspace

CALCULATOR = ROOT / "examples" / "calculator"
SINGLE = (
    "training.steps=4", "algorithm.minibatches=2", "algorithm.correction.name=tis",
    "evaluation.every=2", "evaluation.max_prompts=6", "policy.optimizer.lr=1e-2",
    "critic.optimizer.lr=1e-3", "algorithm.estimator.name=ppo",
)  # fmt: skip
TALKS = (
    "run.threads=1", "model.dtype=fp32", "policy.optimizer.lr=1e-3", "tracking.show_samples=0",
    "rollout.samples_per_prompt=4", "training.steps=2",
    "rollout.workflow={name: env, env: 'view_runs:Asking', max_turns: 3}",
    # half of the symbols end a turn, so that an untrained model ends its turns
    f"rollout.sampling={{max_new_tokens: 40, stop_token_ids: {[*range(0, 102, 2)]}}}",
    "reward.parts={asked: {source: workflow}}",
    "rollout.prompts_per_step=2", "data.as_chat=true",
)  # fmt: skip
SCRIPT = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
REVERSED = "safe \u202eevil\u202c \x1b[31mred\x1b[0m \u200bhidden"


class Asking:
    """Asks twice more, and rewards each turn."""

    def reset(self, row: dict[str, Any]) -> None:
        """Begin."""
        self.turns = 0

    def step(self, reply: Reply) -> Step:
        """Ask again until there were two answers."""
        self.turns += 1
        again = {"role": "user", "content": f"and {self.turns}?"}
        return Step([again], reward=0.5 * self.turns, done=self.turns == 2)

    def reward(self, conversation: Conversation) -> float:
        """Give every conversation the same."""
        return 1.0


def single_turn(workspace: Workspace) -> Run:
    """Train on single answers, under PPO with two updates a step, and evaluate."""
    held_out = f"evaluation.paths=[{workspace.folder / 'data' / 'heldout.jsonl'}]"
    critic = f"critic.path={workspace.reward_model}"
    run = workspace.train("single", *SINGLE, held_out, critic)
    assert run.code == 0, run.err
    return run


def conversations(workspace: Workspace, folder: Path) -> Run:
    """Train on conversations of several turns."""
    model = folder / "chat"
    made = workspace.command("init-model", str(model), "--preset=ascii", "--chat", "--hidden=32",
                             "--layers=1", "--intermediate=64")  # fmt: skip
    assert made.code == 0, made.err
    data = folder / "questions.jsonl"
    rows = [{"prompt": f"what is {k}?", "answer": str(k), "source": "counted"} for k in range(9)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = (f"run.dir={workspace.folder / 'runs'}", f"model.path={model}", f"data.paths={data}")
    run = workspace.command("train", *TALKS, "run.name=talks", *given, name="talks")
    assert run.code == 0, run.err
    return run


def measured(folder: Path, rows: Sequence[Mapping[str, float]]) -> RunDirectory:
    """Write a run that has metrics alone."""
    run = RunDirectory(folder)
    run.rollouts.mkdir(parents=True, exist_ok=True)
    run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def crowded(folder: Path, samples: int) -> Path:
    """Write a run whose only step has many samples, all with the same text."""
    return _recorded(folder, [_hostile(index) for index in range(samples)])


def branched(folder: Path) -> Path:
    """Write a run whose only draw has a rollout of three samples between two of one."""
    samples = [_hostile(index) for index in range(5)]
    for sample, rollout, correct in zip(samples, (0, 1, 1, 1, 2), (True, *[False] * 3, None)):
        sample.draw = sample.group_id = 7
        sample.rollout_id = (7 << 20) + rollout
        sample.metadata = {} if correct is None else {"correct": correct}
    return _recorded(folder, samples)


def _recorded(folder: Path, samples: list[Sample]) -> Path:
    run = measured(folder, [{"step": 1}])
    write_index(run.index_path(1), 1, write_rollouts(run.rollouts_path(1), 1, samples))
    return run.path


def hostile(folder: Path) -> Path:
    """Write a run, of one step, whose every text tries to be more than text."""
    run = RunDirectory(folder / "hostile")
    run.rollouts.mkdir(parents=True)
    run.evaluations.mkdir()
    run.config_path.write_text(f"model: {{path: {folder / 'none'}}}\n")
    row = {"step": 1, "rollout/reward": 0.5, SCRIPT: 1.0, f"x/{REVERSED}": 2.0}
    run.metrics_path.write_text(json.dumps(row) + "\n")
    run.result_path.write_text(json.dumps({"status": SCRIPT, "steps": 1, "reason": REVERSED}))
    ledger = [
        {"start": 0, "prompts": [3, SCRIPT], "max_staleness": 0},
        {"drawn": [0, 1, 2]},
        {"finished": [0, 1]},
        {"dropped": [1], "by": SCRIPT},
        {"failed": [2], "kind": REVERSED},
        {"consumed": [0], "step": 1},
        {"cut": 1},
    ]
    run.ledger_path.write_text("".join(json.dumps(line) + "\n" for line in ledger))
    samples = [_hostile(index) for index in range(4)]
    ones = [np.ones(4, np.float32)] * 4
    write_index(run.index_path(1), 1, write_rollouts(run.rollouts_path(1), 1, samples, ones))
    write_rollouts(run.evaluations_path(0), 0, samples)
    write_rollouts(run.evaluations_path(1), 1, samples)
    return run.path


def _hostile(index: int) -> Sample:
    call = {"id": "1", "function": {"name": SCRIPT, "arguments": {"x": SCRIPT}}}
    both = f"{SCRIPT} {REVERSED}"
    thought = f"<think>{SCRIPT}</think>calling"
    return Sample(
        draw=0, index=index, prompt_id=SCRIPT, group_id=0, rollout_id=index,
        tokens=np.arange(6, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1, 1], dtype=np.uint8),
        rollout_logprobs=np.full(4, -0.5, dtype=np.float32),
        versions=(VersionSpan(0, 0, 4),), finish_reason="stop",
        reward=float(index), reward_parts={SCRIPT: float(index), "fine": 1.0}, turns=2,
        prompt_text=both, response_text=f"{REVERSED} {SCRIPT}", label=SCRIPT,
        metadata={"source": SCRIPT, "reward_error": REVERSED},
        messages=(
            {"role": "user", "content": both},
            {"role": "assistant", "content": thought, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "name": SCRIPT, "content": f"{REVERSED} is 4"},
            {"role": SCRIPT, "content": "who am I?"},
            {"role": "assistant", "content": both, "reasoning_content": "so"},
        ),
        turn_spans=(TurnSpan(0, 1, 0, 2), TurnSpan(1, 4, 2, 4)),
    )  # fmt: skip
