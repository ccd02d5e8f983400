"""A real server keeps the contract of an engine."""

from __future__ import annotations

from pathlib import Path

from publication_kit import run_config
from server_kit import Served

from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.testing import check_engine


def test_a_server_keeps_the_contract(served: Served, tmp_path: Path) -> None:
    """By a second client of the session's server, for which `kill` is to leave it."""
    config = run_config(str(served.model), tmp_path, served.config)

    def connect() -> SGLangEngine:
        return SGLangEngine(
            served.external(),
            config=config.rollout.engine,
            keys=served.keys,
            model_path=str(served.model),
        )

    report = check_engine(connect, config=config)
    assert {rule.name for rule in report.skipped} == {"repeatable"}
