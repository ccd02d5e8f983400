"""tests/mutate.py draws the same defects each time, leaves texts alone, and knows its tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import cast

import nearest_tests
import pytest
from mutations import Finder, Mutation, compiles, draw, mutations_of

ROOT = Path(__file__).parents[2]
EQUIVALENT = ROOT / "tests" / "mutants_equivalent.txt"

SOURCE = '''"""A module: 1 + 1 < 3."""
from __future__ import annotations
from typing import TYPE_CHECKING, Literal
if TYPE_CHECKING:
    LIMIT = 3
SIZE: Literal[1, 2] = 2
class Part:
    @property
    def size(self) -> int:
        return self.rows * self.columns
    def __repr__(self) -> str:
        return f"{self.rows + 1}" if not self.empty else "nothing"
async def work(parts: list[Part], least: int = 4, *, fast: bool = False) -> None:
    """Adds 2 numbers, if not none."""
    if not parts or fast:
        raise ValueError(f"{len(parts) + 1} parts, expected {2 - 1}")
    async with parts.lock:
        logger.warning("%d parts", len(parts) - 1)
        parts.best = copy(parts, least)
    while parts.more():
        if parts[0] is None:
            continue
        await parts.drop(0.5)
        total += [part for part in parts if part.good]
'''
EXPECTED = """
2 -> 3
self.rows * self.columns -> self.rows / self.columns
4 -> 5
False -> True
total += [part for part in parts if part.good] -> total -= [part for part in parts if part.good]
not parts or fast -> not parts and fast
not parts or fast -> not (not parts or fast)
not parts -> (parts)
async with parts.lock -> if True
parts.best = copy(parts, least) -> pass
copy(parts, least) -> copy(least, parts)
parts.more() -> not (parts.more())
parts[0] is None -> parts[0] is not None
0 -> 1
continue -> break
await parts.drop(0.5) -> pass
0.5 -> 1.0
part.good -> (not (part.good))
"""


@pytest.fixture(scope="module")
def every() -> dict[str, Mutation]:
    return mutations_of(ROOT, ["rlcore/data/packing"])


def test_what_a_file_can_have_wrong() -> None:
    found = [one.diff.replace("  ->  ", " -> ") for one in Finder("a.py", SOURCE).find()]
    wanted = EXPECTED.strip().splitlines()
    (block,) = (one for one in found if one.startswith("while parts.more(): "))
    assert block.endswith(" -> return")
    assert sorted(found) == sorted([*wanted, block])


def test_ids_survive_changes_elsewhere() -> None:
    before = {one.id: one.diff for one in Finder("a.py", SOURCE).find()}
    moved = SOURCE.replace("class Part:", "OTHER = 'new'\n\n\nclass Part:")
    assert {one.id: one.diff for one in Finder("a.py", moved).find()} == before
    assert len(before) == len(Finder("a.py", SOURCE).find()), "no two have the same"
    assert not before.keys() & {one.id for one in Finder("b.py", SOURCE).find()}


def test_each_is_another_program_of_one_changed_place(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    for one in Finder("a.py", SOURCE).find():
        changed = one.apply(SOURCE)
        assert compiles(one, tmp_path), one.diff
        first, last = one.span
        assert (changed[:first], changed[-(len(SOURCE) - last) :]) == (
            SOURCE[:first],
            SOURCE[last:],
        )
        assert not compiles(Mutation(**{**vars(one), "new": one.old}), tmp_path)


def test_a_draw_is_that_of_its_seed(every: dict[str, Mutation]) -> None:
    first = [one.id for one in draw(every, ROOT, 1, 12)]
    assert len(set(first)) == 12
    assert [one.id for one in islice(draw(every, ROOT, 1, 300), 5)] == first[:5]
    assert not set(first) & {one.id for one in draw(every, ROOT, 2, 12)}
    without = {name: one for name, one in every.items() if name != first[3]}
    assert [one.id for one in draw(without, ROOT, 1, 11)] == first[:3] + first[4:]


def test_named_equivalents_are_mutants_of_today() -> None:
    lines = [line.split(maxsplit=2) for line in EQUIVALENT.read_text().splitlines()]
    rows = [line for line in lines if line[0] != "#"]
    assert len({row[0] for row in rows}) == len(rows)
    for name, file, reason in rows:
        today = {one.id for one in Finder(file, (ROOT / file).read_text()).find()}
        assert name in today, f"{name} ({file}) is no mutant any more: delete the line"
        assert len(reason) > 20, f"{name}: say why nobody can notice"


def test_tests_of_a_line_are_those_that_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(cpu: float, *lines: int, ended: bool = True, known: str = "now") -> dict[str, object]:
        return {"cpu": cpu, "ended": ended, "lines": {"rollout/fleet/router.py": [known, *lines]}}

    monkeypatch.setattr(nearest_tests, "digest", lambda file: "now")
    one = Mutation("1", "rollout/fleet/router.py", "", (5, 6), (0, 0), "", "")
    recording = {
        "tests/integration/test_router.py": entry(1.0, 5),
        "tests/unit/rollout/fleet/test_fleet.py": entry(3.0, 4, 6),
        "tests/unit/rollout/fleet/test_dispatch.py": entry(2.0, 5),
        "tests/unit/rollout/test_service.py": entry(0.5, 5, 6),
        "tests/unit/rollout/fleet/test_other_lines.py": entry(0.1, 4, 7),
        "tests/unit/rollout/fleet/test_endless.py": entry(0.1, 5, ended=False),
        "tests/unit/config/test_moved.py": entry(0.1, 99, known="before"),
        "tests/unit/data/test_elsewhere.py": {"cpu": 0.1, "ended": True, "lines": {}},
    }
    assert [Path(test).stem for test in nearest_tests.covering(one, recording)] == [
        "test_dispatch",
        "test_fleet",
        "test_service",
        "test_router",
        "test_moved",
    ]


@pytest.mark.parametrize(
    ("changed", "clean", "status", "by"),
    [
        (0, 0, "survived", ""),
        (1, 0, "killed", "a::test"),
        (1, 1, "unsure", "a::test"),
        (4, 0, "killed", "exit code 4"),
        (-signal.SIGKILL, 0, "timeout", "more than 600 s"),
        (-signal.SIGKILL, -signal.SIGKILL, "unsure", "more than 600 s"),
    ],
)
def test_named_tests_notice_what_they_do_not_fail_at_anyway(
    tmp_path: Path, changed: int, clean: int, status: str, by: str
) -> None:
    import mutate

    source = tmp_path / "a.py"
    source.write_text("x = 1\n")

    class Tree:
        folder = tmp_path

        def run(self, tests: list[str], limit_s: float) -> tuple[int, list[dict[str, object]]]:
            code = clean if source.read_text() == "x = 1\n" else changed
            return code, [{"name": "a::test", "failed": code == 1}]

    (one,) = Finder("a.py", source.read_text()).find()
    verdict = mutate.judge_by(cast(mutate.Tree, Tree()), one, ["a"])
    assert (verdict.status, verdict.by) == (status, by)
    assert source.read_text() == "x = 1\n"


def test_lines_of_children_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "__init__.py").touch()
    (tmp_path / "rollout" / "part.py").write_text(
        "import subprocess, sys, threading\n"
        "def own():\n"
        "    return 1\n"
        "def thread():\n"
        "    return 2\n"
        "def child():\n"
        "    return 3\n"
        "def nobody():\n"
        "    return 4\n"
        "def all():\n"
        "    threading.Thread(target=thread).start()\n"
        "    subprocess.run([sys.executable, '-c', 'import rollout.part as p; p.child()'])\n"
        "    return own()\n"
    )
    shutil.copy(ROOT / "tests" / "covered_lines.py", tmp_path / "sitecustomize.py")
    lines = tmp_path / "lines"
    given = {"RECORD_LINES": str(lines), "RECORD_ROOT": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", "import rollout.part; rollout.part.all()"],
        env=os.environ | given,
        cwd=tmp_path,
        timeout=60,
        check=True,
    )
    run = {int(line.rpartition(":")[2]) for line in lines.read_text().splitlines()}
    assert {3, 5, 7, 11, 12, 13} <= run
    assert 9 not in run


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_defects_that_nobody_chose_are_noticed(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "tests" / "mutate.py"), "--seed", "3", "--mutants", "8"),
            *("--near", "--least", "0.7", "--results", str(tmp_path / "results.jsonl")),
        ],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("8 mutants: ")
