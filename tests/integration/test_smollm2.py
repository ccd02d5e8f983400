"""A real model: BPE of 49,152 tokens, a chat template, tied embeddings, grouped queries."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlcore.data.sample import Sample
from rlcore.data.tokenizer import load_tokenizer
from rollout.workflows.env import Step
from tests.integration.accounting_checks import samples_of
from tests.integration.hf_logprobs import gaps_by_version
from tests.integration.workspace import Workspace
from tests.real_model import smollm2_folder

SPEAKER = "<|im_start|>assistant\n"
END = "<|im_end|>"


@pytest.fixture(scope="module")
def model() -> Path:
    return smollm2_folder()


@pytest.fixture(autouse=True)
def no_files_left(workspace: Workspace) -> Iterator[None]:
    """A run of this model leaves gigabytes."""
    yield
    for kind in ("runs", "exports"):
        for folder in (workspace.folder / kind).glob("smollm2*"):
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2") / "rows.jsonl"
    pairs = [(12, 34), (7, 5), (60, 48), (99, 1)]
    lines = [
        {"prompt": f"What is {a}+{b}? Answer with the number only.", "label": str(a + b)}
        for a, b in pairs
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def given(model: Path, rows: Path, *more: str) -> tuple[str, ...]:
    return (
        f"model.path={model}",
        f"data.paths={rows}",
        "data.as_chat=true",
        "rollout.prompts_per_step=2",
        "rollout.sampling.max_new_tokens=16",
        "policy.max_tokens_per_microbatch=512",
        *more,
    )


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_every_log_prob_is_that_of_transformers(
    workspace: Workspace, model: Path, rows: Path, engine: str
) -> None:
    """The engine's, of both versions, and through them the trainer's."""
    run = workspace.train(
        f"smollm2 {engine}",
        *given(
            model,
            rows,
            f"rollout.engine.kind={engine}",
            "rollout.engine.device=cpu",
            "policy.optimizer.lr=2e-5",
            "training.steps=2",
            "checkpoint.every=1",
        ),
    )
    assert run.code == 0, run.err
    samples = [sample for step in (1, 2) for sample in samples_of(run, step)]
    gaps = gaps_by_version(workspace, run, samples, start=model)
    assert sorted(gaps) == [1, 2]
    assert max(gaps.values()) < 1e-4
    for row in run.metrics:
        assert row["rollout/train_rollout_logprob_diff_max"] < 1e-4
    before = load_file(model / "model.safetensors")
    assert any(not weight.equal(before[name]) for name, weight in run.weights.items())


def test_a_step_of_rate_zero_exports_the_weights_that_were_read(
    workspace: Workspace, model: Path, rows: Path
) -> None:
    run = workspace.train(
        "smollm2 rate zero", *given(model, rows, "policy.optimizer.lr=0", "training.steps=1")
    )
    assert run.code == 0, run.err
    before = load_file(model / "model.safetensors")
    after = run.weights
    assert after.keys() == before.keys()
    assert all(after[name].equal(weight) for name, weight in before.items())


CHATS: tuple[list[dict[str, str]], ...] = (
    [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Vermilion, a bright red."},
        {"role": "user", "content": "And in French? Ça existe?"},
        {"role": "assistant", "content": "Oui: « vermillon »."},
    ],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "3 + 4?"},
        {"role": "assistant", "content": "7"},
    ],
)


def answer_nll(model: Path, chat: list[dict[str, str]]) -> list[float]:
    """-log-prob, in float64, of each token of the assistant's turns with their end, found in the
    template's text by its marks.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = []
    at = 0
    while (begin := text.find(SPEAKER, at)) >= 0:
        at = text.index(END, begin) + len(END)
        spans.append((begin + len(SPEAKER), at))
    trained = [
        any(begin <= start and stop <= end for begin, end in spans)
        for start, stop in encoded["offset_mapping"]
    ]
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    tokens = torch.tensor(encoded["input_ids"])
    with torch.no_grad():
        logprobs = network(tokens[None]).logits[0, :-1].log_softmax(-1)
    nll = -logprobs.gather(1, tokens[1:, None])[:, 0]
    return [float(value) for value, own in zip(nll, trained[1:]) if own]


def test_fine_tuning_trains_on_the_turns_of_the_assistant_alone(
    workspace: Workspace, model: Path, tmp_path: Path
) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    run = workspace.sft(
        "smollm2 sft",
        f"model.path={model}",
        f"data.paths={chats}",
        "data.prompt_key=messages",
        "data.label_key=auto",
        "training.batch_size=2",
        "training.steps=1",
        "policy.max_tokens_per_microbatch=512",
    )
    assert run.code == 0, run.err
    nll = [value for chat in CHATS for value in answer_nll(model, chat)]
    assert run.rows[1]["loss/policy_avg"] == pytest.approx(sum(nll) / len(nll), rel=1e-5)


class AsksAgain:
    """Wants another number after each answer."""

    def step(self, reply: Any) -> Step:
        return Step(messages=[{"role": "user", "content": "And one more?"}])

    def reward(self, conversation: Any) -> float:
        return float(len(conversation.messages[-1]["content"]))


def test_a_conversation_is_what_the_template_renders_of_its_messages(
    workspace: Workspace, model: Path, rows: Path
) -> None:
    """Three turns in one sequence; what the model wrote is trained on, and nothing else."""
    run = workspace.train(
        "smollm2 conversation",
        *given(
            model,
            rows,
            "rollout.workflow={name: env, env: 'tests.integration.test_smollm2:AsksAgain',"
            " max_turns: 3}",
            "reward.parts={liked: null, long: {source: workflow}}",
            "training.steps=1",
        ),
    )
    assert run.code == 0, run.err
    samples = samples_of(run, 1)
    tokenizer = load_tokenizer(model)
    ended = [sample for sample in samples if check_conversation(sample, tokenizer)]
    assert ended, "no conversation came to its third turn"
    assert max(gaps_by_version(workspace, run, samples, start=model).values()) < 1e-4


def check_conversation(sample: Sample, tokenizer: Any) -> bool:
    """Compare the tokens with the template's text; return whether there are several turns."""
    assert sample.messages is not None
    text = tokenizer.decode(sample.tokens.tolist())
    rendered = tokenizer.apply_chat_template([*sample.messages], tokenize=False)
    # The last turn may have been cut off by its limit.
    assert rendered.startswith(text.removesuffix(END))
    own = "".join(
        tokenizer.decode(sample.tokens[start:end].tolist()).removesuffix(END)
        for start, end in runs_of_ones(sample.loss_mask.tolist())
    )
    written = [m["content"] for m in sample.messages if m["role"] == "assistant"]
    assert own == "".join(written)
    return len(written) > 1


def runs_of_ones(mask: list[int]) -> list[tuple[int, int]]:
    edges = [i for i in range(len(mask) + 1)
             if (mask[i] if i < len(mask) else 0) != (mask[i - 1] if i else 0)]  # fmt: skip
    return list(zip(edges[::2], edges[1::2]))
