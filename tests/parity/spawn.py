"""Real ranks: one process each, one deadline for all, and a failing rank's own words."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tests.interpreters import start

ROOT = Path(__file__).parents[2]
PARITY_RANKS = Path(__file__).with_name("parity_ranks.py")


def run_ranks(
    script: Path,
    size: int,
    folder: Path,
    payload: Any,
    *,
    deadline_s: float,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run `script FOLDER` as ranks 0..size-1, with `payload` in FOLDER/payload.json.

    `environment` is added to this process's own; `nccl_rules.ON` makes ranks keep NCCL's rules,
    `rank_main.ON_CUDA` has them compute on GPUs.
    The first rank that fails, or the deadline, ends all of them; the test fails with the logs' last
    lines.
    """
    folder.mkdir(parents=True)
    (folder / "payload.json").write_text(json.dumps(payload))
    ranks = []
    for rank in range(size):
        variables = {
            **os.environ,
            **environment,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "OMP_NUM_THREADS": "1",
        }
        given = filter(None, [os.environ.get("PYTHONPATH")])
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(script.parent), *given])
        ranks.append(start(script, [str(folder)], variables, folder / f"rank{rank}.log"))
    end = time.monotonic() + deadline_s
    try:
        while (
            any(p.poll() is None for p in ranks)
            and not any(p.poll() for p in ranks)
            and time.monotonic() < end
        ):
            time.sleep(0.05)
        late = [i for i, p in enumerate(ranks) if p.poll() is None]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    failed = [i for i, p in enumerate(ranks) if p.returncode]
    if failed:
        tails = "\n".join(
            f"--- rank {i}\n{(folder / f'rank{i}.log').read_text()[-3000:]}" for i in failed
        )
        what = (
            f"{script.name}: ranks {failed} failed (still running then: {late}; limit"
            f" {deadline_s} s)"
        )
        raise AssertionError(f"{what}\n{tails}")


@dataclass
class Results:
    """Results of a script by the names of cases; a world runs when a case is first used.

    Cases that the same tier of tests needs share a launch of their world.
    """

    folder: Path
    cases: Mapping[int, Sequence[dict[str, Any]]]  # world size -> its cases
    launches: Sequence[Collection[str]]  # names of cases; the cases left over share one more
    deadline_s: float = 500.0
    environment: Mapping[str, str] = field(default_factory=dict)  # as of `run_ranks`
    script: Path = PARITY_RANKS
    _launched: dict[str, Path] = field(default_factory=dict)

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in self._launched:
            size = next(
                size for size, cases in self.cases.items() for one in cases if one["name"] == name
            )
            launch = self._launch_of(name)
            cases = [one for one in self.cases[size] if self._launch_of(one["name"]) == launch]
            kind = "_".join(self.environment.values())
            folder = self.folder / f"world{size}_launch{launch}{kind}"
            run_ranks(
                self.script,
                size,
                folder,
                cases,
                deadline_s=self.deadline_s,
                environment=self.environment,
            )
            self._launched.update((one["name"], folder / f"{one['name']}.pt") for one in cases)
        result: dict[str, Any] = torch.load(self._launched[name], weights_only=False)
        return result

    def _launch_of(self, name: str) -> int:
        """The first launch that names it."""
        for number, names in enumerate(self.launches):
            if name in names:
                return number
        return len(self.launches)
