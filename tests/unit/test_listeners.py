"""Command lines of runs are found in the table of docs/ports.md."""

from __future__ import annotations

import pytest

from tests.listeners import PROGRAMS, documented, program_of


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python -m rlcore.launch.torchrun --nnodes 2 -m rlcore train a.yaml", "torchrun agent"),
        ("python -m torch.distributed.run --nproc-per-node 2 -m rlcore train", "torchrun agent"),
        ("python -u -m rlcore train a.yaml run.name=x", "trainer rank"),
        ("python /x/rank_driver.py", "trainer rank"),
        ("python -m rollout.engines.embedded.server", "embedded engine"),
        ("python /x/rollout/engines/sglang/entry.py --port=1", "SGLang server"),
        ("sglang::scheduler", "SGLang scheduler"),
        ("python -m rlcore.launch.service.child 7", "rollout service"),
        ("/x/ray/core/src/ray/raylet/raylet --y", "Ray itself"),
        ("nc -l 80", None),
    ],
)
def test_the_row_of_a_command_line(command: str, name: str | None) -> None:
    assert program_of(command) == name


def test_every_program_has_a_row() -> None:
    assert {name for name, _ in PROGRAMS} <= documented()
