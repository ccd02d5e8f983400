"""An engine of another package, named by its import path."""

from __future__ import annotations

from pathlib import Path

import pytest
from workspace import LEARNING, Workspace

ENGINE = """\
from rlcore.config.engine_registry import EngineKind
from rollout.engines.embedded.engine import EmbeddedEngine


class MyEngine(EmbeddedEngine):
    kind = EngineKind(title="my engine", batches=True, repeatable=True)
    calls = 0

    @classmethod
    def build(cls, site):
        config = site.config
        assert config.rollout.engine.server == {"greeting": "hello"}
        engine = config.rollout.engine
        return [cls(config.model.path, config=engine, dtype=config.model.dtype, name="mine")]

    @classmethod
    def check(cls, config):
        from rlcore.config.messages import ConfigIssue

        if "greeting" not in config.rollout.engine.server:
            yield ConfigIssue("rollout.engine.server.greeting", "missing: say hello")

    async def generate(self, requests):
        type(self).calls += len(requests)
        return await super().generate(requests)


def no_engine():
    pass
"""
MINE = ("rollout.engine.kind=my_pkg:MyEngine", "rollout.engine.server={greeting: hello}")


@pytest.fixture
def my_pkg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_pkg.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("my_pkg")
@pytest.mark.everyday
def test_a_run_trains_with_it_and_gets_the_same_numbers_as_with_ours(workspace: Workspace) -> None:
    import my_pkg

    mine = workspace.train("my engine", *LEARNING, *MINE)
    assert mine.code == 0, mine.out + mine.err
    assert my_pkg.MyEngine.calls == 3 * 4
    ours = workspace.train("our engine", *LEARNING)
    for step in (1, 2, 3):
        for name in ("train/grad_norm", "rollout/train_rollout_logprob_diff"):
            if name in ours.rows[step]:
                assert mine.rows[step][name] == ours.rows[step][name]
    assert mine.rows[3]["train/grad_norm"] > 0


@pytest.mark.usefixtures("my_pkg")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["rollout.engine.kind=my_pkg:MyEngine"], "rollout.engine.server.greeting: missing"),
        (["rollout.engine.kind=my_pkg:Mine"], "rollout.engine.kind (override): engine"),
        (["rollout.engine.kind=my_pkg:no_engine"], "expected a class with `kind`, an EngineKind"),
        (["rollout.engine.kind=other_pkg:MyEngine"], "no module 'other_pkg'"),
        (
            ["rollout.engine.kind=sglan"],
            "got 'sglan', expected one of 'embedded' or 'sglang', or the import path"
            " 'package.module:Class'; did you mean 'sglang'?",
        ),
        ([*MINE, "rollout.engine.max_batch=4"], "max_batch (override): got 4, but my engine does"),
        ([*MINE, "rollout.sampling.stop=[x]"], "rollout.sampling.stop (override): my engine knows"),
        ([*MINE, "rollout.engine.colocated=true"], "my engine cannot give its memory back"),
        ([*MINE, "policy.routing_replay=engine"], "my engine does not report routed experts"),
    ],
)
def test_what_it_cannot_do_is_refused(workspace: Workspace, given: list[str], said: str) -> None:
    refused = workspace.train("refused engine", *given)
    assert refused.code == 2
    assert said in refused.err
    assert "Traceback" not in refused.err
    assert not refused.folder.exists()


@pytest.mark.usefixtures("my_pkg")
def test_in_the_process_of_the_service_it_needs_a_way_for_weights_to_another_process(
    workspace: Workspace,
) -> None:
    refused = workspace.train("refused engine", *MINE, "rollout.service=process")
    assert refused.code == 2
    assert "takes weights only inside its own process" in refused.err
    assert "set rollout.service to in_process" in refused.err
