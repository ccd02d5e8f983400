"""Named defects in the maths and in conversations, each of which must turn a test red.

    python tests/mutants.py                    all of tests/mutant_table.py; 1 unless all are caught
    python tests/mutants.py NAME ...          these

Each defect is applied to a copy of the packages and their tests in a temporary folder, and only the
tests that its row names are run, against the copy, in a forked child of this process, which has
torch and pytest loaded already.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hypothesis  # noqa: F401  (loaded once, here, for all children; so are numpy, pydantic and torch)
import numpy  # noqa: F401
import pydantic  # noqa: F401
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
ALGORITHM_TESTS = "tests/unit/algorithms/"
DEADLINE_S = 120
POLL_S = 0.05
# Without pytest-timeout its option in pyproject.toml is a warning.
WARNINGS = ("-W", "ignore::pytest.PytestConfigWarning")
PLUGINS = tuple(f"-pno:{name}" for name in ("cacheprovider", "unraisableexception", "faulthandler"))
NOT_IMPORTED = 90  # exit code of a child whose tests never imported the mutated file


@dataclass(frozen=True)
class Mutant:
    """One defect.

    Args:
        name: what is wrong, in words.
        file: path from the root of the repository.
        old: text that occurs in it exactly once.
        new: what stands there instead.
        tests: separated by spaces, as pytest takes them, in tests/unit/algorithms unless they begin
            with "tests/". At least one must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str

    @property
    def test_ids(self) -> list[str]:
        named = self.tests.split()
        return [test if test.startswith("tests/") else ALGORITHM_TESTS + test for test in named]

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class Verdict:
    """What became of a defect: `caught` by the test in `detail`, or why not."""

    status: str
    detail: str
    seconds: float


def read_table(path: Path) -> list[Mutant]:
    """Read the rows (name, file, old, new, tests) of `MUTANTS` in a file; names must differ."""
    mutants = [Mutant(*row) for row in runpy.run_path(str(path))["MUTANTS"]]
    names = [mutant.name for mutant in mutants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SystemExit(f"{path}: two defects of the same name: {', '.join(twice)}")
    return mutants


def stale(mutant: Mutant, root: Path) -> str:
    """Say why a row no longer fits the source, "" if it does."""
    path = root / mutant.file
    if not path.is_file():
        return f"there is no {mutant.file}"
    if (count := path.read_text().count(mutant.old)) != 1:
        return f"{mutant.file} has its text {count} times, expected once: {mutant.old!r}"
    named = [test.partition("::")[0] for test in mutant.test_ids]
    return next((f"there is no {file}" for file in named if not (root / file).exists()), "")


def copy_tree(folder: Path) -> None:
    """Copy what the tests import and read."""
    skip = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("rlcore", "backends", "rollout", "tests/unit", "tests/parity"):
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    for path in (ROOT / "pyproject.toml", *(ROOT / "tests").glob("*.py")):
        shutil.copy2(path, folder / path.relative_to(ROOT))


def judge(mutant: Mutant, folder: Path) -> Verdict:
    """Apply a defect to the copy, run its tests there, and take it back."""
    if why := stale(mutant, folder):
        return Verdict("STALE", why, 0.0)
    path = folder / mutant.file
    text = path.read_text()
    begin = time.perf_counter()
    try:
        write_source(path, text.replace(mutant.old, mutant.new))
        code, log = run_tests(mutant.test_ids, folder, mutant.module)
    finally:
        write_source(path, text)
    seconds = time.perf_counter() - begin
    if code == pytest.ExitCode.TESTS_FAILED:
        failed = re.search(r"^FAILED (?:tests/unit/(?:algorithms/)?)?(\S+)", log, re.MULTILINE)
        return Verdict("caught", failed[1] if failed else "", seconds)
    if code == pytest.ExitCode.OK:
        return Verdict("SURVIVED", f"{mutant.tests} stay green", seconds)
    if code == NOT_IMPORTED:
        why = f"{mutant.tests} never import {mutant.module} from the copy"
        return Verdict("UNTRIED", why, seconds)
    return Verdict("BROKEN", f"pytest ended with {code}\n{log[-2000:]}", seconds)


def run_tests(
    tests: Sequence[str],
    folder: Path,
    module: str | None,
    deadline_s: float = DEADLINE_S,
    options: Sequence[str] = (),
    plugins: Sequence[object] = (),
    prepare: Callable[[], object] = lambda: None,
) -> tuple[int, str]:
    """Run pytest in a forked child, in `folder`; return its exit code and output.

    The child is killed at the deadline, with its process group: the code is that of a signal then.
    It calls `prepare` first. With module "" nobody asks where the tests had their modules from.
    """
    log = folder / "log.txt"
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        _run_in_child([*options, *tests], folder, module, log, plugins, prepare)
    ends = time.monotonic() + deadline_s
    waited, status = os.waitpid(child, os.WNOHANG)
    try:
        while waited == 0 and time.monotonic() < ends:
            time.sleep(POLL_S)
            waited, status = os.waitpid(child, os.WNOHANG)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    if waited == 0:
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), log.read_text(errors="replace")


def _run_in_child(
    arguments: Sequence[str],
    folder: Path,
    module: str | None,
    log: Path,
    plugins: Sequence[object],
    prepare: Callable[[], object],
) -> None:
    """Never returns: the child must not go on with what its parent was doing."""
    code = 1000
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        ours = (ROOT, ROOT / "tests")
        elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() not in ours]
        sys.path[:] = [str(folder), *elsewhere]
        os.environ["PYTHONPATH"] = str(folder)
        prepare()
        common = ["-x", "-q", "--tb=short", *PLUGINS, *WARNINGS, "--rootdir", str(folder)]
        code = int(pytest.main([*common, *arguments], plugins=list(plugins)))
        imported = getattr(sys.modules.get(module or "rlcore"), "__file__", None) or ""
        judged = module != "" and code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if judged and not imported.startswith(f"{folder}{os.sep}"):
            code = NOT_IMPORTED
        sys.stdout.flush()
    finally:
        os._exit(code if code < 256 else 99)


def write_source(path: Path, text: str) -> None:
    """Write a source file and drop its bytecode, which would be taken for a file of equal size."""
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the defects and print one line each; 0 if the tests catch every one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="defects to try; all without")
    parser.add_argument("--table", type=Path, default=ROOT / "tests" / "mutant_table.py")
    options = parser.parse_args(arguments)
    mutants = read_table(options.table)
    unknown = sorted(set(options.names) - {mutant.name for mutant in mutants})
    if unknown:
        parser.error(f"no such defect: {', '.join(unknown)}")
    chosen = [mutant for mutant in mutants if not options.names or mutant.name in options.names]
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    gc.freeze()  # else every child looks through all of torch for garbage
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = Path(temporary).resolve()
        copy_tree(folder)
        tests = sorted({test for mutant in chosen for test in mutant.test_ids})
        clean, log = run_tests(tests, folder, None)
        if clean != pytest.ExitCode.OK:
            print(f"the tests do not pass without a defect (exit code {clean}):\n{log[-4000:]}")
            return 1
        width = max(len(mutant.name) for mutant in chosen)
        missed = 0
        for mutant in chosen:
            verdict = judge(mutant, folder)
            missed += verdict.status != "caught"
            judged = f"{verdict.status:<8} {verdict.seconds:4.1f} s  {verdict.detail}"
            print(f"{mutant.name:<{width}}  {judged}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} defects caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
