"""Twenty steps with two real servers, one of which fails every third step. It takes minutes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import psutil
import pytest
from server_kit import START_S

from rollout.engines.sglang.server_process import ManagedServer
from tests.integration.accounting_checks import check_accounting
from tests.integration.engine_faults import Fault, FaultInjector
from tests.integration.workspace import LEARNING, Workspace

STEPS = 20
PLAN: dict[int, tuple[int, Fault]] = {
    3: (0, "SIGKILL"),
    6: (1, "SIGSTOP"),
    9: (0, "500"),
    12: (1, "garbage"),
    15: (0, "slow"),
    18: (1, "SIGKILL"),
}
TWO = (
    *LEARNING,
    f"training.steps={STEPS}",
    "rollout.engine.kind=sglang",
    "rollout.service=in_process",  # where the faults are injected
    "rollout.engine.count=2",
    "rollout.engine.threads=1",
    "rollout.engine.device=cpu",
    f"rollout.engine.start_timeout_s={START_S}",
    "rollout.engine.progress_timeout_s=40",
    "rollout.engine.update_timeout_s=60",
    "rollout.engine.health_every_s=1",
    "rollout.engine.health_timeout_s=20",
    "rollout.engine.restart={backoff_s: 0.1, max_backoff_s: 1.0}",
)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("more", [(), ("policy.lora.rank=4",)], ids=["weights", "adapters"])
def test_no_sample_is_lost_or_counted_twice(
    more: tuple[str, ...], tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"  # of its own: the session's server has the other, and runs on
    shutil.copytree(tiny_model, model)
    workspace = Workspace(tmp_path, model)
    sabotage = FaultInjector(dict(PLAN), settle=STEPS)
    sabotage.install(monkeypatch, ManagedServer)
    run = workspace.train("chaos", *TWO, *more)
    assert run.code == 0, run.err
    assert sabotage.done == [fault for _, fault in PLAN.values()]
    check_accounting(run, steps=STEPS)
    log = (run.folder / "logs" / "rank_0.log").read_text()
    failures = re.findall(r"engine (engine-\d) failed: .*", log)
    assert failures == [f"engine-{number}" for number, _ in PLAN.values()], log
    rows = [run.rows[step] for step in range(1, STEPS + 1)]
    assert [row["episode"] for row in rows] == [16 * step for step in range(1, STEPS + 1)]
    assert sum(row["rollout/engine_restarts"] for row in rows) == len(PLAN)
    assert sum(row["rollout/retried_requests"] for row in rows) >= 3
    assert all(row["rollout/train_rollout_logprob_diff"] < 1e-5 for row in rows), (
        "every sample from its own version"
    )
    running = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    assert not [line for line in running if str(model) in line and "entry.py" in line]
