"""Draws small defects from a seed, puts each into a copy of the tree, and looks who notices.

    python tests/mutate.py --seed 1 --mutants 300 --jobs 1      a draw
    python tests/mutate.py --seed 1 --mutants 300 --list        what would be tried
    python tests/mutate.py --only ID ...                        these
    python tests/mutate.py --only ID ... --by TEST ...          by these, recorded or not

What can be drawn is in tests/mutations.py. The tests of a defect are the files that run its lines,
by a recording that is made first (build/mutate.json: minutes, and again for files of tests that
have changed), nearest folder first, in a forked child that has torch and Megatron loaded. A defect
whose tests go on for much longer than without it is killed: "timeout". Defects that change nothing
are named with a reason in tests/mutants_equivalent.txt. With --results FILE a draw that was cut
short goes on where it was. --by runs files of tests, or single tests (FILE::NAME), that take too
long to be recorded; in FILE of --results a mutant that was noticed before stays so.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import backend_mutants  # noqa: E402
import covered_lines  # noqa: E402
import mutants  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from mutations import Mutation, draw, mutations_of  # noqa: E402
from nearest_tests import (  # noqa: E402
    RECORDING,
    covering,
    digest,
    files_of_tests,
    near,
    read_lines,
    read_recording,
)

ROOT = HERE.parent
EQUIVALENT = HERE / "mutants_equivalent.txt"
RECORD_LIMIT_S = 600  # a folder of unit tests or another file that takes longer is never chosen
FIRST_S = 6  # seconds of the nearest files, which run by themselves first
BUDGET_S = 30
BY_LIMIT_S = 600  # tests that --by names
OPTIONS = ("-p", "pytest_timeout")
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__")
MADE = {"build", "dist", "runs", "wandb"}  # at the root
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NOTICED = ("killed", "timeout")


@dataclass(frozen=True)
class Verdict:
    """What became of a mutation.

    Args:
        status: killed, timeout, survived, uncovered (no recorded test runs the line), equivalent,
            or unsure, where its tests fail without it too.
        by: the test that failed, or the reason of an equivalent one.
        files: files of tests that ran; `left` cover the line too, and did not.
    """

    id: str
    where: str
    kind: str
    diff: str
    status: str
    by: str = ""
    files: int = 0
    left: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, one: Mutation, status: str, by: str = "", **counts: Any) -> Verdict:
        return cls(one.id, one.where, one.kind, one.diff, status, by, **counts)


class Reports:
    """A plugin of pytest: writes a line for each test, and tells the recording its file.

    Args:
        lines: a folder for what each file of tests covers; None records nothing.
    """

    def __init__(self, path: Path, lines: Path | None = None) -> None:
        self.path = path
        self.lines = lines
        self.test = ""
        self.cpu = sum(os.times()[:4])
        self.path.write_text("")

    def prepare(self) -> None:
        """Called in the child, before it imports anything of ours."""
        if self.lines is not None:
            os.environ["RECORD_LINES"] = str(
                self.lines / (self.test.replace("/", "|") or "imports")
            )
            covered_lines.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Called by pytest before a test."""
        test = nodeid.partition("::")[0]
        if test != self.test:
            self.test = test
            self.prepare()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest after each phase of a test."""
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Called by pytest after a file was imported."""
        seconds = getattr(report, "duration", 0.0)
        cpu = sum(os.times()[:4])
        entry = {"name": report.nodeid, "failed": report.failed, "seconds": seconds}
        entry["cpu"] = cpu - self.cpu
        self.cpu = cpu
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


class Tree:
    """A copy of the repository in a temporary folder, in which tests run."""

    def __init__(self, temporary: Path) -> None:
        self.folder = temporary / "tree"
        self.temporary = temporary
        shutil.copytree(ROOT, self.folder, ignore=not_copied)
        shutil.copy(HERE / "covered_lines.py", self.folder / "sitecustomize.py")
        for environment in ROOT.glob(".venv*"):
            (self.folder / environment.name).symlink_to(environment.resolve())

    def run(
        self, tests: Sequence[str], limit_s: float, *options: str, lines: Path | None = None
    ) -> tuple[int, list[dict[str, Any]]]:
        """Run tests; return pytest's exit code, negative at the limit, and a report of each."""
        reports = Reports(self.temporary / "reports.jsonl", lines)
        base = f"--basetemp={self.temporary / 'tmp'}"
        os.environ["RECORD_ROOT"] = str(self.folder)
        code, _ = mutants.run_tests(
            tests, self.folder, "", limit_s, (*OPTIONS, base, *options), [reports], reports.prepare
        )
        kill_orphans()
        return code, [json.loads(line) for line in reports.path.read_text().splitlines()]

    def record(self, tests: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Run files of tests and yield of each what it covers, how long it takes, what fails.

        They run in one process. What it runs while it imports counts for all. Where it takes too
        long, nothing is said of those that it has not begun.
        """
        lines = self.temporary / "lines"
        shutil.rmtree(lines, ignore_errors=True)
        lines.mkdir()
        code, reports = self.run(tests, RECORD_LIMIT_S, "--maxfail=1000", lines=lines)
        imported = read_lines(lines / "imports")
        run = [one["name"].partition("::")[0] for one in reports if "::" in one["name"]]
        cut_short = {*run[-1:]} or {*tests} if code < 0 else set()
        for test in tests:
            if code < 0 and test not in {*run, *cut_short}:
                continue
            covered = {file: set(found) for file, found in imported.items()}
            for file, found in read_lines(lines / test.replace("/", "|")).items():
                covered.setdefault(file, set()).update(found)
            ours = [one for one in reports if one["name"].partition("::")[0] == test]
            yield {
                "test": test,
                "hash": digest(test),
                "seconds": round(sum(one["seconds"] for one in ours), 1),
                "cpu": round(sum(one["cpu"] for one in ours), 1),
                "ended": test not in cut_short,
                "failed": [one["name"] for one in ours if one["failed"]],
                "lines": {file: [digest(file), *sorted(found)] for file, found in covered.items()},
            }


def not_copied(folder: str, names: list[str]) -> set[str]:
    """Return what a copy of the repository leaves out of a folder."""
    return NOT_COPIED(folder, names) | (MADE if Path(folder) == ROOT else set())


def kill_orphans() -> None:
    """Kill what a run has left, which this process has inherited."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while found := children.read_text().split():
        for child in map(int, found):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)


def in_workers(work: Sequence[Sequence[Any]], do: Any) -> None:
    """Call do(tree, item) for the items of each share, in forked processes with a copy each."""
    ours = []
    for share in work:
        if child := os.fork():
            ours.append(child)
            continue
        code = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
            with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as path:
                tree = Tree(Path(path).resolve())
                for item in share:
                    do(tree, item)
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()
            os._exit(code)
    ended = [os.waitpid(child, 0)[1] for child in ours]
    if any(ended):
        raise SystemExit("a worker has failed; see above")


def record(tree: Tree, tests: Sequence[str], recording: dict[str, Any]) -> None:
    """Record what is missing of files of tests."""
    folders: dict[Path, list[str]] = {}
    for test in tests:
        if test not in recording:
            slow = "" if test.startswith("tests/unit") else test  # each by itself
            folders.setdefault(Path(test).parent / slow, []).append(test)
    while folders:
        key, missing = folders.popitem()
        found = list(tree.record(missing))
        if rest := [test for test in missing if test not in {entry["test"] for entry in found}]:
            folders[key] = rest
        for entry in found:
            recording[entry["test"]] = entry
            append(RECORDING, entry)
            problem = "" if entry["ended"] else f"more than {RECORD_LIMIT_S} s: never chosen"
            failed = " ".join(entry["failed"])
            print("recorded", entry["test"], entry["seconds"], problem, failed, flush=True)


def append(path: Path, entry: dict[str, Any]) -> None:
    """Append a line to a JSONL file; several processes may."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def run_mutated(
    tree: Tree, one: Mutation, tests: Sequence[str], limit_s: float, *options: str
) -> tuple[int, list[dict[str, Any]]]:
    """Run tests with a mutation in the copy, and take it back."""
    path = tree.folder / one.file
    text = path.read_text()
    mutants.write_source(path, one.apply(text))
    try:
        return tree.run(tests, limit_s, *options)
    finally:
        mutants.write_source(path, text)


def judge(tree: Tree, one: Mutation, recording: dict[str, Any], budget_s: float) -> Verdict:
    """Apply a mutation to the copy, run its tests there, and take it back."""
    tests = covering(one, recording)
    if not tests:
        return Verdict.of(one, "uncovered")
    begin = time.perf_counter()
    status, by, ran, spent = "survived", "", 0, 0.0
    for allowed in (FIRST_S, budget_s):
        batch = []
        while ran < len(tests) and (not ran or spent + recording[tests[ran]]["cpu"] <= allowed):
            batch.append(tests[ran])
            spent += recording[tests[ran]]["cpu"]
            ran += 1
        if not batch:
            continue
        skipped = [f"--deselect={name}" for test in batch for name in recording[test]["failed"]]
        limit = 60 + 3 * sum(recording[test]["seconds"] for test in batch)
        code, reports = run_mutated(tree, one, batch, limit, *skipped)
        if code == -signal.SIGKILL:
            clean, _ = tree.run(batch, limit, *skipped)
            status = "timeout" if clean == pytest.ExitCode.OK else "unsure"
            by = f"more than {limit:.0f} s"
            break
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            failed = [report["name"] for report in reports if report["failed"]]
            by = failed[0] if failed else f"exit code {code}"
            status = "killed"
            break
    seconds = round(time.perf_counter() - begin, 1)
    return Verdict.of(one, status, by, files=ran, left=len(tests) - ran, seconds=seconds)


def judge_by(tree: Tree, one: Mutation, tests: Sequence[str]) -> Verdict:
    """Apply a mutation to the copy, run tests that nobody recorded, and take it back.

    A test that fails runs again without the mutation: "unsure" where it fails then too.
    """
    begin = time.perf_counter()
    code, reports = run_mutated(tree, one, tests, BY_LIMIT_S)
    failed = [report["name"] for report in reports if report["failed"]]
    status, by = "survived", ""
    if code != pytest.ExitCode.OK:
        late = code == -signal.SIGKILL
        clean, _ = tree.run(failed or tests, BY_LIMIT_S)
        noticed = "timeout" if late else "killed"
        status = noticed if clean == pytest.ExitCode.OK else "unsure"
        by = failed[0] if failed else f"more than {BY_LIMIT_S} s" if late else f"exit code {code}"
    seconds = round(time.perf_counter() - begin, 1)
    return Verdict.of(one, status, by, files=len(tests), seconds=seconds)


def read_equivalent(path: Path = EQUIVALENT) -> dict[str, str]:
    """Return the reasons of mutations that change nothing, by id; lines are "ID FILE REASON"."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


def read_results(path: Path) -> dict[str, Verdict]:
    """Return the newest verdict of each mutation in a file of results."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {entry["id"]: Verdict(**entry) for entry in map(json.loads, lines)}


def line_of(verdict: Verdict) -> str:
    """Return a verdict as a line of the table."""
    left = f" ({verdict.left} files more run it)" if verdict.status == "survived" else ""
    return f"{verdict.id} {verdict.status:<10} {verdict.where} {verdict.diff} | {verdict.by}{left}"


def summary(verdicts: Sequence[Verdict]) -> tuple[str, float]:
    """Return the counts in words, and the share that was noticed of what could be."""
    counts = Counter(verdict.status for verdict in verdicts)
    judged = len(verdicts) - counts["equivalent"]
    share = sum(counts[status] for status in NOTICED) / judged if judged else 0.0
    words = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return f"{len(verdicts)} mutants: {words}; {share:.1%} of {judged} noticed", share


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutants", type=int, default=300, help="how many are drawn")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1)
    parser.add_argument("--only", nargs="+", metavar="ID", help="these, in place of a draw")
    parser.add_argument("--list", action="store_true", help="print the draw, try nothing")
    parser.add_argument("--results", type=Path, help="JSONL to append to; skip what it has")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="CPU seconds of tests a mutant"
    )
    parser.add_argument("--near", action="store_true", help="tests of the mirrored folder alone")
    parser.add_argument("--by", nargs="+", metavar="TEST", help="these, without a recording")
    parser.add_argument("--least", type=float, default=0.0, help="share that must be noticed")
    options = parser.parse_args(arguments)
    if options.by and not options.only:
        parser.error("--by needs --only")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge a draw and print its table; 0 unless fewer than --least of it are noticed."""
    options = parsed(arguments)
    every = mutations_of(ROOT)
    unknown = sorted(set(options.only or ()) - set(every))
    if unknown:
        raise SystemExit(f"no such mutants: {', '.join(unknown)}; --list prints those of a draw")
    chosen = [every[name] for name in options.only or ()]
    chosen = chosen or list(draw(every, ROOT, options.seed, options.mutants))
    if options.list:
        print(*(f"{one.id} {one.kind} {one.where} {one.diff}" for one in chosen), sep="\n")
        return 0
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    os.environ.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", OMP_NUM_THREADS="1")
    backend_mutants.preload()
    gc.freeze()
    equivalent = read_equivalent()
    results = options.results or Path(tempfile.mkstemp(prefix="mutate-", suffix=".jsonl")[1])
    recording = read_recording()
    known = read_results(results)
    print(f"seed {options.seed}: {len(chosen)} of {len(every)} mutants; results in {results}")

    def verdict_of(tree: Tree, one: Mutation) -> Verdict:
        if options.by:
            return judge_by(tree, one, options.by)
        tests = near(one.file) if options.near else files_of_tests()
        record(tree, tests, recording)
        return judge(tree, one, {test: recording[test] for test in tests}, options.budget)

    def do(tree: Tree, one: Mutation) -> None:
        verdict = verdict_of(tree, one)
        before = known.get(one.id)
        if before is None or before.status not in NOTICED or verdict.status in NOTICED:
            append(results, asdict(verdict))
        print(line_of(verdict), f"{verdict.seconds} s", flush=True)

    done = {name for name, one in known.items() if options.near or one.status in NOTICED}
    tried = [one for one in chosen if one.id not in equivalent]
    tried = [one for one in tried if options.only or one.id not in done]
    # one process has a folder, so that no two record it
    share = {file: at for at, file in enumerate(sorted({str(near(one.file)) for one in tried}))}
    shares = [
        [one for one in tried if share[str(near(one.file))] % options.jobs == job]
        for job in range(options.jobs)
    ]
    in_workers(shares, do)
    found = read_results(results)
    for one in chosen:
        if one.id in equivalent:
            found[one.id] = Verdict.of(one, "equivalent", equivalent[one.id])
    verdicts = [found[one.id] for one in chosen]
    rest = [one for one in verdicts if one.status not in NOTICED]
    print("", "Not noticed:", *map(line_of, rest), "", sep="\n")
    words, share = summary(verdicts)
    print(words)
    return 0 if share >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
