"""The recipe for search at toy size, on rows of the data's shape, against a retrieval server.

A model of 2 layers is warmed up on conversations with searches. What is replaced: model, data,
layout, engine, sizes, and the prompt's instructions, which `rlcore data` shows.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from json_server import answering
from test_recipe_runs import TOY
from workspace import ROOT, Workspace

from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.runs.rollouts import read_rollouts
from rollout.json_client import NoAnswer
from rollout.workflows.env import tools_of

sys.path.insert(0, str(ROOT / "tests" / "unit" / "data"))
from public_rows import write_parquet

FOLDER = ROOT / "examples" / "recipes" / "search"
RECIPE = str(FOLDER / "qwen2.5-7b.yaml")
DIGITS = [1 + i % 3 for i in range(24)]


def row(digit: int) -> dict[str, Any]:
    """A row as those of PeterJinGo/nq_hotpotqa_train."""
    question = f"{digit}+0?"
    return {
        "id": f"train_{digit}",
        "question": question,
        "golden_answers": [str(digit), f"number {digit}"],
        "data_source": "nq",
        "prompt": [{"role": "user", "content": f"Search by <search>. Question: {question}"}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": [str(digit), f"number {digit}"]},
                         "style": "rule"},
        "extra_info": {"index": digit, "split": "train"},
    }  # fmt: skip


def shown(query: str) -> str:
    return f'Doc 1 (title: "{query}") is {query}'


def conversation(digit: int, answer: int, tools: list[dict[str, Any]]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": str(digit)}}}
    messages = [
        {"role": "user", "content": f"{digit}+0?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": shown(str(digit))},
        {"role": "assistant", "content": f"<answer> {answer} </answer>"},
    ]
    return {"messages": messages, "tools": tools}


@dataclass
class Retrieval:
    """Search-R1's retrieval server, whose corpus has a document for each query."""

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    result: Any = None  # instead of documents

    def answer(self, path: str, headers: Mapping[str, str], body: Any) -> tuple[int, Any]:
        assert path == "/retrieve"
        self.asked.append(body)
        (query,) = body["queries"]
        document = {"id": "7", "contents": f'"{query}"\nis {query}'}
        return 200, self.result or {"result": [[{"document": document, "score": 0.9}]]}


@pytest.fixture
def retrieval() -> Iterator[Retrieval]:
    made = Retrieval()
    with answering(made.answer) as url:
        made.url = f"{url}/retrieve"
        yield made


def warmed_up(workspace: Workspace, model: Path) -> Path:
    """Teach the model to search, and then to guess."""
    from search import Search

    tools = [*tools_of(Search).values()]
    talks = [conversation(d, DIGITS[i // 3], tools) for i, d in enumerate(DIGITS)]
    path = workspace.folder / "searches.jsonl"
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    run = workspace.sft(
        "search-warmup", f"model.path={model}", f"data.paths={path}", "training.steps=80",
        "training.batch_size=12", "policy.optimizer.lr=5e-3",
        "policy.max_tokens_per_microbatch=8192",
    )  # fmt: skip
    assert run.code == 0, run.err
    return run.folder / "hf"


def test_the_recipe_searches_and_answers(
    workspace: Workspace, retrieval: Retrieval, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    model = workspace.folder / "search_model"
    sizes = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128}
    init_model(model, ModelSpec.preset("ascii", chat=True, max_positions=4096, **sizes))
    data = write_parquet(workspace.folder / "search.parquet", [row(digit) for digit in DIGITS])
    given = [
        RECIPE, *TOY, f"run.dir={workspace.folder / 'runs'}", "run.name=search",
        f"data.paths={data}", f"evaluation.paths=[{data}]", "evaluation.max_prompts=2",
        f"model.path={model}", f"rollout.workflow.options.url={retrieval.url}",
        "evaluation.every=2", "rollout.samples_per_prompt=4", "rollout.sampling.max_new_tokens=90",
        "policy.optimizer.warmup_steps=0",
    ]  # fmt: skip
    asked = workspace.command("data", *given)
    assert asked.code == 0, asked.err
    assert "call the\ntool search" in asked.out
    assert "prompt in 'question', label in 'reward_model.ground_truth.target'" in asked.out
    given += [f"model.path={warmed_up(workspace, model)}", "data.prompt_template=null"]
    run = workspace.command("train", *given, name="search")
    assert run.code == 0, run.err
    samples = [sample for step in (1, 2) for sample in read_rollouts(run.rollouts(step))]
    searches = [sample for sample in samples if sample["turns"] > 1]
    assert searches, "the warm-up was too short for calls"
    for sample in searches:
        tool = next(message for message in sample["messages"] if message["role"] == "tool")
        if not tool["content"].startswith("error"):
            query = tool["content"].rpartition(" is ")[2]
            assert tool["content"] == shown(query)
    for body in retrieval.asked:
        assert (body["topk"], body["return_scores"]) == (3, True)
    for sample in samples:
        answer = f"<answer> {sample['label'][0]} </answer>"
        assert sample["reward_parts"] == {"em": float(answer in sample["response_text"])}
    assert {sample["metadata"]["correct"] for sample in samples} == {True, False}
    assert run.rows[2]["train/grad_norm"] > 0


def test_an_answer_of_another_form_is_not_told_to_the_model(
    retrieval: Retrieval, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from search import Search

    async def ask(url: str) -> str:
        search = Search(url=url)
        try:
            return str(await search.search("5"))
        finally:
            await search.close()

    assert asyncio.run(ask(retrieval.url)) == shown("5")
    retrieval.result = {"error": "index not loaded"}
    with pytest.raises(NoAnswer, match=r"answered .*index not loaded.*, expected"):
        asyncio.run(ask(retrieval.url))
