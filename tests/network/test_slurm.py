"""scripts/slurm under Slurm's real daemons, on nodes with networks of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.network.cluster import Cluster, why_not
from tests.network.slurm import Slurm, why_no_slurm
from tests.network.workload import ENVIRONMENT, Nodes

REASON = why_not() or why_no_slurm()
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(REASON), reason=f"no Slurm on this machine: {REASON}"),
]
TRAINED = {"torchrun.sbatch": (), "ray.sbatch": ("cluster.nodes=2",)}
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    cluster = Cluster(2, tmp_path)
    try:
        yield Slurm(cluster)
    finally:
        cluster.close()


class Submitted(Nodes):
    """A job of two nodes, by one of the templates."""

    def __init__(self, slurm: Slurm, script: str, model: Path, *given: str) -> None:
        super().__init__(slurm.cluster, model, "checkpoint.every=1", *TRAINED[script], *given)
        self.slurm = slurm
        self.script = f"scripts/slurm/{script}"
        self.submit()

    def submit(self, *more: str, options: str = "") -> None:
        self.number = self.slurm.submit(
            self.script, *self.arguments, *more, nodes=2, options=options,
            **{**ENVIRONMENT, "ENGINE_NODES": "0"},
        )  # fmt: skip

    @property
    def said(self) -> str:
        return self.slurm.said(self.number)

    @property
    def fields(self) -> dict[str, str]:
        return self.slurm.job(self.number)

    @property
    def is_over(self) -> bool:
        return self.fields["JobState"] in OVER

    def wait_for(self, *states: str) -> None:
        self.slurm.until(
            lambda: self.fields["JobState"] in states, f"job {self.number} is not {states}"
        )

    def check_nothing_is_left(self) -> None:
        """On the nodes, but Slurm's daemons."""
        self.slurm.until(lambda: not self.slurm.tasks(), "the job leaves processes")


@pytest.mark.parametrize("script", TRAINED)
def test_a_job_trains(slurm: Slurm, tiny_model: Path, script: str) -> None:
    job = Submitted(slurm, script, tiny_model, "training.steps=2")
    job.check(2)
    assert (job.fields["JobState"], job.fields["ExitCode"]) == ("COMPLETED", "0:0")
    assert "192.168.66." not in job.said
    job.check_nothing_is_left()


@pytest.mark.parametrize("script", TRAINED)
def test_a_job_whose_node_is_lost_is_requeued_and_resumes(
    slurm: Slurm, tiny_model: Path, script: str
) -> None:
    job = Submitted(slurm, script, tiny_model, "training.steps=60")
    job.until(lambda: job.steps >= 2)
    slurm.cluster.switch_off(1)
    job.wait_for("PENDING")
    job.check_nothing_is_left()
    slurm.join(1)
    job.check(60)
    assert job.fields["Restarts"] == "1"
    assert "resuming after step" in job.said


@pytest.mark.parametrize("script", TRAINED)
def test_a_cancelled_job_is_resumed_by_another(slurm: Slurm, tiny_model: Path, script: str) -> None:
    job = Submitted(slurm, script, tiny_model, "training.steps=60")
    job.until(lambda: job.steps >= 2)
    slurm.call("scancel", str(job.number))
    job.wait_for("CANCELLED")
    job.check_nothing_is_left()
    job.submit("--resume")
    job.check(60)
    assert "resuming after step" in job.said


@pytest.mark.parametrize("script", TRAINED)
def test_a_job_whose_time_is_over_ends_and_is_resumed_by_another(
    slurm: Slurm, tiny_model: Path, script: str
) -> None:
    job = Submitted(slurm, script, tiny_model, "training.steps=5000")
    job.until(lambda: job.steps >= 2)
    slurm.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=1")
    job.wait_for("TIMEOUT")
    job.check_nothing_is_left()
    reached = job.steps
    job.submit("--resume", f"training.steps={reached + 1}")
    job.check(reached + 1)


# An engine puts its URLs into the folder and goes on, or ends with $ENGINE_CODE; a trainer goes on
# for $TRAINER_S and ends with $TRAINER_CODE.
PYTHON = """#!/bin/bash
if [[ " $* " == *" engine "* ]]; then
    [ -z "$ENGINE_CODE" ] || exit "$ENGINE_CODE"
    while [ "$1" != --urls-file ]; do shift; done
    echo '["http://10.77.0.2:30000"]' > "$2"
    exec sleep 1000
fi
sleep "${TRAINER_S:-0}"
exit "${TRAINER_CODE:-0}"
"""


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"TRAINER_CODE": "3"}, "3:0"),
        ({"ENGINE_CODE": "7", "TRAINER_S": "1000"}, "7:0"),
        ({"PRELUDE": "(exit $((4 * (1 - SLURM_PROCID))))", "TRAINER_S": "1000"}, "4:0"),
    ],
    ids=["trainer", "engines", "prelude"],
)
def test_the_job_s_exit_code_is_that_of_what_ended_it(
    slurm: Slurm, given: dict[str, str], code: str
) -> None:
    """Trainer and engines are two steps of a job, on a node each; both end."""
    python = slurm.folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    number = slurm.submit(
        "scripts/slurm/torchrun.sbatch", "run.yaml", nodes=2,
        **{**ENVIRONMENT, "PYTHON": str(python), "ENGINE_NODES": "1", **given},
    )  # fmt: skip
    slurm.until(lambda: slurm.job(number)["JobState"] in OVER, "the job goes on")
    assert slurm.job(number)["ExitCode"] == code, slurm.said(number)
    slurm.until(lambda: not slurm.tasks(), "the job leaves processes")
