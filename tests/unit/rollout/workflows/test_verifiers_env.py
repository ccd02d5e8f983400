"""The workflow `verifiers`: what is refused at the start. tests/integration has the package."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.sections.rollout import WorkflowConfig
from rlcore.errors import ConfigError
from rollout.workflows import verifiers_runner
from rollout.workflows.registry import build_workflow, check_options
from tests.unit.rollout.conversation.kit import make_context, make_prompt, make_tokenizer


def build(tokenizer: Any, **options: Any) -> Any:
    settings = WorkflowConfig.model_validate({"name": "verifiers", **options})
    return build_workflow(make_context(tokenizer, settings=settings))


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Stands for an interpreter that has the package."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 0.4.0\n")
    script.chmod(0o755)
    return str(script)


def test_what_cannot_work_is_refused_at_the_start(python: str) -> None:
    tokenizer = make_tokenizer()
    missing = r"workflow\.python: there is no /nowhere; run scripts/install_verifiers\.sh"
    with pytest.raises(ConfigError, match=missing):
        build(tokenizer, env="words", python="/nowhere")
    with pytest.raises(ConfigError, match=r"has no verifiers; run scripts/install_verifiers"):
        build(tokenizer, env="words", python=sys.executable)
    with pytest.raises(ConfigError, match=r"got \{'agent': \{\}\}, expected the id of a taskset"):
        build(tokenizer, env={"agent": {}}, python=python)
    check_options("verifiers", {"env": "words", "python": python})
    with pytest.raises(ConfigError, match=r"verifiers: got an unexpected keyword argument 'enf'"):
        check_options("verifiers", {"env": "words", "enf": 1})
    with pytest.raises(ConfigError, match="expected the id of a taskset"):
        check_options("verifiers", {"env": {}, "python": python})
    Path(python).write_text("#!/bin/sh\necho 0.1.14\n")
    with pytest.raises(ConfigError, match=r"has verifiers 0\.1\.14, expected 0\.4"):
        build(tokenizer, env="words", python=python)


def test_the_configuration_is_on_no_command_line(python: str) -> None:
    """It may hold the key of a judge; the program reads it from its standard input."""
    env = {"taskset": {"id": "words"}, "judge": {"api_key": "hidden"}}
    tokenizer = make_tokenizer()
    workflow = build(tokenizer, env=env, python=python)
    assert "hidden" not in str(workflow._program)
    prompt = make_prompt(tokenizer, "1+2?", {"verifiers": {"word": "a"}})
    assert workflow._row == {verifiers_runner.ENV: env}, "of every task"
    assert verifiers_runner.ENV not in prompt.row, "nothing of it is recorded"


def test_a_row_without_a_task_is_refused(python: str) -> None:
    tokenizer = make_tokenizer()
    workflow = build(tokenizer, env="words", python=python)
    prompt = make_prompt(tokenizer, "1+2?", {"label": 3})
    with pytest.raises(ConfigError, match=r"no column 'verifiers' .* verifiers_runner\.py rows"):
        asyncio.run(workflow.rollout(prompt, 0, 0, None))
