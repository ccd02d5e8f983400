"""Runs environments of `verifiers` in the interpreter that has it; imports nothing of rlcore.

    python verifiers_runner.py rows ENV [LIMIT] > rows.jsonl    the tasks as rows for `data.paths`
    python verifiers_runner.py run < TASK                       one rollout, as an agent program

ENV is the environment's configuration as JSON: {"taskset": {"id": ...}, "agent": {...}}. A rollout
reads it from its row, since a command line would show its keys to every user of the machine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLUMN = "verifiers"
"""The column of a row that holds its task."""
ENV = "verifiers_env"
"""The column with the configuration of the environment."""


def rows(env: dict[str, Any], limit: int | None) -> Iterator[dict[str, Any]]:
    """Yield the tasks of an environment: the prompt for the model, and the task itself."""
    import verifiers.v1 as vf

    taskset = vf.load_taskset(vf.resolve_env_config(env).taskset)
    if limit is None and not taskset.bounded:
        sys.exit("the taskset is infinite: give the number of rows after ENV")
    for task in itertools.islice(taskset, limit):
        data = task.data.model_dump(mode="json", exclude_none=True)
        system = data.get("system_prompt")
        # missing if the environment's user speaks first
        prompt = data.get("prompt", "")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        yield {"messages": messages, COLUMN: data}


async def run(env: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    """Play one task against OPENAI_BASE_URL; return rewards and metrics by name."""
    import verifiers.v1 as vf

    config = vf.resolve_env_config(env)
    environment = vf.load_environment(config)
    task_type = vf.task_type(config.taskset.id)
    task = task_type(task_type.data_type().model_validate(row[COLUMN]), config.taskset.task)
    client = vf.EvalClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    context = vf.ModelContext(model=os.environ["OPENAI_MODEL"], client=client)
    async with environment.serving():
        episode = await environment.run_episode(task, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        said = "; ".join(f"{error.type}: {error.message}" for error in errors)
        sys.exit(f"the episode failed: {said or 'no reason was given'}")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        sys.exit(f"an episode must have one agent that is trained, this one has {len(trained)}")
    (trace,) = trained
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    found = {**trace.metrics, **scores, "reward": trace.reward}
    return {name: float(number) for name, number in found.items() if number is not None}


def main(what: str, given: str = "", limit: str | None = None) -> None:
    """Write rows, or the outcome of a rollout on the last line."""
    # sibling modules of this file must not shadow packages of that interpreter
    sys.path[:] = [path for path in sys.path if Path(path) != Path(__file__).parent]
    if what == "rows":
        for row in rows(json.loads(given), None if limit is None else int(limit)):
            print(json.dumps(row))
        return
    row = json.load(sys.stdin)["row"]
    print(json.dumps(asyncio.run(run(row.pop(ENV), row))))


if __name__ == "__main__":
    main(*sys.argv[1:])
