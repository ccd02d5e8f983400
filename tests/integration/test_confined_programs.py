"""Programs in a sandbox: nothing leaks, nothing survives, and the next program runs.

`unshare` and `bubblewrap` are both needed: `scripts/install_debian.sh bubblewrap bwrap` brings the
second. What namespaces forbid is also tried under `rlimits`, which does not forbid it: so the
attempts are real ones.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlcore.config.sections.sandbox import SandboxConfig
from rlcore.errors import ConfigError
from rollout.sandbox import Outcome, Program
from rollout.sandbox.local import build_sandbox
from tests.limits import adopting_orphans
from tests.process_facts import command_of

NAMESPACES = ["unshare", "bubblewrap"]
ALL = [*NAMESPACES, "rlimits"]
LIMIT_S = 300.0


def run(kind: str, *programs: Program | str, **config: object) -> list[Outcome]:
    """Run programs one after the other in one sandbox, and one more to see that it still works."""

    async def scenario() -> list[Outcome]:
        sandbox = build_sandbox(SandboxConfig.model_validate({"kind": kind, **config}))
        await sandbox.start()
        try:
            found = [
                await sandbox.run(Program(p, timeout_s=20) if isinstance(p, str) else p)
                for p in programs
            ]
            last = await sandbox.run(Program("print('still here')", timeout_s=20))
            assert (last.status, last.stdout) == ("finished", "still here\n"), last
            return found
        finally:
            await sandbox.close()

    return asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def running(marker: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if marker in (p.info["cmdline"] or [])]


@pytest.fixture
def marker() -> Iterator[str]:
    """An argument by which a process that got away is found."""
    name = f"{os.getpid()}.{time.monotonic_ns()}"
    yield name
    for process in running(name):
        process.kill()


def nothing_runs(marker: str) -> bool:
    end = time.monotonic() + 60
    while running(marker) and time.monotonic() < end:
        time.sleep(0.02)
    return not running(marker)


@pytest.mark.parametrize("kind", ALL)
def test_a_program_has_input_files_output_and_an_exit_code(kind: str) -> None:
    code = (
        "import os, sys, helper\n"
        "print(input(), open('data/x.bin', 'rb').read(), helper.three())\n"
        "print('sad', file=sys.stderr)\n"
        "open('own', 'w').write('x'); os.mkdir('folder')\n"
        "sys.exit(7)\n"
    )
    files = {"helper.py": b"def three(): return 3", "data/x.bin": b"\x00\xff"}
    (found,) = run(kind, Program(code, stdin="grüß\nmore", files=files, timeout_s=20))
    assert found.status == "finished"
    assert found.stdout == "grüß b'\\x00\\xff' 3\n"
    assert (found.stderr, found.exit_code) == ("sad\n", 7)


@pytest.mark.parametrize("kind", ALL)
def test_bash_and_signals(kind: str) -> None:
    shell, killed = run(
        kind,
        Program("read word; echo $((6 * 7)) $word", language="bash", stdin="x\n", timeout_s=20),
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    )
    assert (shell.stdout, shell.exit_code) == ("42 x\n", 0)
    assert killed.exit_code == 128 + signal.SIGSEGV


ENVIRONMENTS = """
import glob, os
found = [v for v in os.environ.values() if 'SECRET' in v]
for path in glob.glob('/proc/[0-9]*/environ'):
    try:
        found += [path] if b'SECRET-OF-THE-PARENT' in open(path, 'rb').read() else []
    except OSError:
        pass
print(len(found))
"""


@pytest.mark.parametrize("kind", ALL)
def test_no_environment_but_its_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "SECRET-OF-THE-PARENT")
    # of this user, with the key, and with no more rights than the program has
    powerless = ["setpriv", "--bounding-set", "-all"] if os.geteuid() == 0 else []
    sleep = ["sleep", "600"]
    with subprocess.Popen([*powerless, *sleep]) as neighbour:
        while psutil.Process(neighbour.pid).cmdline() != sleep:  # it has its rights until then
            time.sleep(0.01)
        (found,) = run(kind, ENVIRONMENTS)
        neighbour.kill()
    # under rlimits it is in the neighbour, though not in the program
    assert found.stdout == ("1\n" if kind == "rlimits" else "0\n")


NETWORK = """
import socket, sys
reached = []
for host, port in {targets!r}:
    try:
        socket.create_connection((host, port), timeout=2).close()
        reached.append(host)
    except OSError:
        pass
print(reached)
"""


@pytest.mark.parametrize("kind", ALL)
def test_no_network(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        targets = [("127.0.0.1", server.getsockname()[1])]
        (found,) = run(kind, NETWORK.format(targets=targets))
    assert found.stdout == ("['127.0.0.1']\n" if kind == "rlimits" else "[]\n")


KEYS = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
join, search, read, session = 1, 10, 11, -3
def keyctl(*args): return libc.syscall({number}, *args)
if len(sys.argv) > 1:
    keyctl(join, b"of-the-trainer")
    libc.syscall({add}, b"user", b"ticket", b"SECRET", 6, session)
    import os
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
buffer = ctypes.create_string_buffer(64)
keyctl(read, keyctl(search, session, b"user", b"ticket", 0), buffer, 64)
print(buffer.value)
"""
NUMBERS = {"x86_64": {"number": 250, "add": 248}, "aarch64": {"number": 219, "add": 217}}

PRINTS = """
import asyncio, sys
from rlcore.config.sections.sandbox import SandboxConfig
from rollout.sandbox import Program
from rollout.sandbox.local import build_sandbox

async def main():
    sandbox = build_sandbox(SandboxConfig(kind=sys.argv[1]))
    print((await sandbox.run(Program(sys.argv[2], timeout_s=20))).stdout, end="")

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ALL)
def test_no_key_of_the_session_is_read(kind: str) -> None:
    """No namespace has keyrings of its own. The key is there: who has it reads it."""
    keys = KEYS.format(**NUMBERS[os.uname().machine])
    holder = [sys.executable, "-c", keys]
    found = subprocess.run([*holder, keys], capture_output=True, text=True, check=True)
    assert found.stdout == "b'SECRET'\n"
    found = subprocess.run(
        [*holder, PRINTS, kind, keys], capture_output=True, text=True, check=True
    )
    assert found.stdout == "b''\n", found.stderr


FILES = """
import os
written, read = [], []
for folder in {folders!r}:
    try:
        open(folder + '/rlcore-was-here', 'w').write('x')
        written.append(folder)
    except OSError:
        pass
for path in {secrets!r}:
    try:
        read.append(open(path).read())
    except OSError:
        pass
print(written, read)
"""


@pytest.mark.parametrize("kind", ALL)
def test_no_file_of_the_machine_is_read_or_written(kind: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("SECRET")
    os.chmod(secret, 0o644)
    folders = [
        str(tmp_path),
        *([] if kind == "rlimits" else ["/", "/usr", "/etc", "/dev", "/proc"]),
    ]
    (found,) = run(kind, FILES.format(folders=folders, secrets=[str(secret)]))
    reached = kind == "rlimits"
    assert found.stdout == (f"{[str(tmp_path)]} ['SECRET']\n" if reached else "[] []\n")
    assert (tmp_path / "rlcore-was-here").exists() == reached


LEAVES = """
import os, subprocess, sys, time
subprocess.Popen(['setsid', 'sleep', '600'])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', {marker!r}])
    os._exit(0)
os.wait()
time.sleep(0.3)
print('gone')
sys.stdout.flush()
{then}
"""


@pytest.mark.parametrize("kind", ALL)
def test_what_a_program_leaves_ends_with_it(kind: str, marker: str) -> None:
    (found,) = run(kind, LEAVES.format(marker=marker, then=""))
    assert (found.status, found.stdout, found.exit_code) == ("finished", "gone\n", 0)
    assert nothing_runs(marker)


def run_long_enough(kind: str, code: str, limit_s: int, **config: object) -> tuple[int, Outcome]:
    """Run a program without end: again, for longer, if it said nothing. Returns the limit too."""
    for times in (1, 4, 16):
        (found,) = run(kind, Program(code, timeout_s=times * limit_s), **config)
        if found.stdout:
            break
    return times * limit_s, found


@pytest.mark.parametrize("kind", ALL)
def test_a_program_that_does_not_end_is_ended_as_a_tree(kind: str, marker: str) -> None:
    code = LEAVES.format(marker=marker, then="while True: pass")
    limit_s, found = run_long_enough(kind, code, 3)
    assert (found.status, found.reason) == ("timeout", f"had not ended after {limit_s} s")
    assert (found.stdout, found.exit_code) == ("gone\n", None)
    assert limit_s <= found.seconds < limit_s + 60
    assert nothing_runs(marker)


@pytest.mark.parametrize("kind", NAMESPACES)
def test_a_fork_bomb_ends(kind: str, marker: str) -> None:
    code = (
        "import os, sys\n"
        "print('go', flush=True)\n"
        "most = 0\n"
        "while True:\n"
        "    try:\n"
        "        os.fork()\n"
        "    except OSError:\n"
        "        pass\n"
    )
    _, found = run_long_enough(kind, code, 2, processes=20)
    assert found.status in ("timeout", "limit")
    assert found.stdout.startswith("go")


@pytest.mark.parametrize("kind", NAMESPACES)
def test_the_number_of_processes_has_a_limit(kind: str) -> None:
    code = (
        "import os, time\n"
        "for n in range(200):\n"
        "    try:\n"
        "        if os.fork() == 0: time.sleep(60); os._exit(0)\n"
        "    except BlockingIOError:\n"
        "        print(n); break\n"
    )
    (found,) = run(kind, code, processes=20)
    assert found.status == "finished"
    assert 15 <= int(found.stdout) <= 20


@pytest.mark.parametrize("kind", ALL)
def test_memory_has_a_limit(kind: str, marker: str) -> None:
    alone, together, files = run(
        kind,
        Program("len(bytearray(1 << 30))", memory_mb=256, timeout_s=20),
        Program(
            "import os, time\n"
            "for _ in range(6):\n"
            "    if os.fork() == 0: break\n"
            "held = bytearray(os.urandom(1)) * (80 << 20)\n"
            f"time.sleep(60) # {marker}\n",
            memory_mb=256,
            timeout_s=60,
        ),
        Program(
            "import os, time\n"
            "for _ in range(8): os.write(os.memfd_create('held'), bytes(40 << 20))\n"
            "time.sleep(60)\n",
            memory_mb=256,
            timeout_s=60,
        ),
    )
    assert alone.exit_code == 1
    assert alone.stderr.endswith("MemoryError\n")
    for found in (together, files):
        assert (found.status, found.reason) == ("limit", "used more than 256 MiB of memory")


@pytest.mark.parametrize("kind", ALL)
def test_a_gigabyte_of_output_is_not_kept(kind: str) -> None:
    code = "import sys\nfor _ in range(1024): sys.stdout.write('x' * (1 << 20))"
    before = psutil.Process().memory_info().rss
    (found,) = run(kind, Program(code, timeout_s=30), output_kb=64)
    assert (found.status, found.reason) == ("limit", "wrote more than 64 KiB")
    assert found.stdout == "x" * (64 << 10)
    assert psutil.Process().memory_info().rss - before < 100 << 20


@pytest.mark.parametrize("kind", NAMESPACES)
def test_files_have_a_limit_together(kind: str) -> None:
    code = (
        "import os\n"
        "for folder in ('.', '/tmp', '/dev/shm'):\n"
        "    total = 0\n"
        "    try:\n"
        "        for n in range(100):\n"
        "            with open(f'{folder}/{n}', 'wb', buffering=0) as file:\n"
        "                total += file.write(bytes(1 << 20))\n"
        "    except OSError as error:\n"
        "        print(total >> 20, error.strerror)\n"
    )
    (found,) = run(kind, code, files_mb=8)
    lines = found.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert line.endswith("No space left on device")
        assert int(line.split()[0]) <= 8


@pytest.mark.parametrize("kind", ALL)
def test_no_descriptor_is_left_open(kind: str) -> None:
    code = (
        "import os\n"
        "hits = []\n"
        "for fd in range(3, 4096):\n"
        "    try:\n"
        "        os.write(fd, b'ready'); hits.append(fd)\n"
        "    except OSError: pass\n"
        "print(hits)\n"
    )
    (found,) = run(kind, code)
    assert found.stdout == "[]\n"


@pytest.mark.parametrize("kind", NAMESPACES)
def test_a_program_has_no_rights_and_sees_no_process(kind: str) -> None:
    code = (
        "import os\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "pids = [int(p) for p in os.listdir('/proc') if p.isdigit()]\n"
        "print(status['CapEff'].strip(), status['CapBnd'].strip(), status['NoNewPrivs'].strip(),"
        " len(pids) < 5)\n"
        "outside = int(open('/proc/self/uid_map').read().split()[1]) + os.getuid()\n"
        "print(outside)\n"
    )
    (found,) = run(kind, code)
    rights, outside = found.stdout.splitlines()
    assert rights.split()[0] == "0" * 16
    assert rights.split()[2:] == ["1", "True"]
    if os.geteuid() == 0:
        assert int(outside) > 1000


SLEEPS = """
import os, sys
os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(90)', {marker!r}])
"""


def test_a_cancelled_run_ends_its_program(marker: str) -> None:
    async def scenario() -> None:
        sandbox = build_sandbox(SandboxConfig())
        await sandbox.start()
        code = SLEEPS.format(marker=marker)
        work = asyncio.ensure_future(sandbox.run(Program(code, timeout_s=60)))
        while not running(marker):
            await asyncio.sleep(0.05)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        await sandbox.close()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert nothing_runs(marker)


def test_a_run_that_is_cancelled_at_any_moment_leaves_nothing() -> None:
    async def scenario() -> None:
        sandbox = build_sandbox(SandboxConfig(concurrency=1))
        await sandbox.start()
        for at in range(24):
            work = asyncio.ensure_future(sandbox.run(Program("while True: pass", timeout_s=60)))
            await asyncio.sleep(at / 2000)
            work.cancel()
            await asyncio.wait({work}, timeout=20)
            assert work.cancelled()
        await sandbox.close()

    with adopting_orphans():  # so that those of other tests are told from them
        asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
        assert [p for p in psutil.Process().children(recursive=True) if is_of_a_sandbox(p)] == []


def is_of_a_sandbox(process: psutil.Process) -> bool:
    """Whether it is the first process in a sandbox, or what started one."""
    return any("The first process inside a sandbox" in word for word in command_of(process))


KILLED = """
import asyncio, sys
from rlcore.config.sections.sandbox import SandboxConfig
from rollout.sandbox import Program
from rollout.sandbox.local import build_sandbox

async def main():
    sandbox = build_sandbox(SandboxConfig(kind=sys.argv[1]))
    await sandbox.start()
    code = sys.argv[3].format(marker=sys.argv[2])
    await sandbox.run(Program(code, timeout_s=90))

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", NAMESPACES)
def test_programs_die_with_a_killed_parent(kind: str, marker: str) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, kind, marker, SLEEPS]) as parent:
        end = time.monotonic() + 60
        # the parent itself has it as an argument too
        while len(running(marker)) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(running(marker)) == 2
        parent.kill()
    assert nothing_runs(marker)


def test_programs_run_side_by_side() -> None:
    async def scenario() -> list[Outcome]:
        sandbox = build_sandbox(SandboxConfig(concurrency=3))
        program = Program("import time; time.sleep(1); print(1)", timeout_s=30)
        try:
            return list(await asyncio.gather(*(sandbox.run(program) for _ in range(6))))
        finally:
            await sandbox.close()

    begin = time.monotonic()
    found = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert [outcome.stdout for outcome in found] == ["1\n"] * 6
    assert time.monotonic() - begin >= 2


def test_a_tool_that_fails_is_quoted_and_the_next_one_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho '--size'; echo 'No permissions' >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    import rollout.sandbox.confinement as confinement

    confinement.bwrap_options.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"bubblewrap: .*No permissions"):
            run("bubblewrap")
        (found,) = run("namespaces", "print(1)")  # unshare's
        assert found.stdout == "1\n"
    finally:
        confinement.bwrap_options.cache_clear()


def test_more_folders_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "table").write_text("7")
    tmp_path.chmod(0o755)
    (found,) = run("namespaces", f"print(open('{tmp_path}/table').read())", folders=[str(tmp_path)])
    assert found.stdout == "7\n"


def test_an_interpreter_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"reward.sandbox.python: /bin/false is no interpreter"):
        run("namespaces", python="/bin/false")


def test_a_language_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match="no rust on this machine, only python and bash"):
        run("namespaces", Program("fn main() {}", language="rust"))


def test_without_a_tool_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ConfigError, match=r"nothing is installed for it.*install bubblewrap.*fusion"
    ):
        run("namespaces")
