"""Asks for known vulnerabilities of what is locked: `python scripts/locks/audit.py`.

It needs `pip-audit` (`pip install pip-audit`, in an environment of its own) and the service that
answers it, PyPI's or, with `--service osv`, OSV's. The exit code is 0 only where the service has
answered for all locks and knows of nothing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
LOCKS = ("trainer-cpu", "trainer-gpu", "engine-cpu", "engine-gpu", "verifiers")
SECONDS = 600  # for one lock
_PIN = re.compile(r"^([A-Za-z0-9][\w.\-]*)={2,3}([^\s;\\+]+)", re.MULTILINE)


def pins(lock: str) -> list[str]:
    """Return every NAME==VERSION of a lock once, without hashes, markers and local versions."""
    return sorted({f"{name}=={version}" for name, version in _PIN.findall(lock)})


def batches(lock: str) -> list[list[str]]:
    """Return the pins in lists that have each package once: pip-audit takes no second version."""
    found: list[dict[str, str]] = []
    for pin in pins(lock):
        name = pin.partition("==")[0]
        batch = next((one for one in found if name not in one), None)
        if batch is None:
            found.append(batch := {})
        batch[name] = pin
    return [list(batch.values()) for batch in found]


def main() -> int:
    """Audit all locks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--service", choices=("pypi", "osv"), default="pypi")
    service = parser.parse_args().service
    program = shutil.which("pip-audit")
    if program is None:
        print("audit.py: there is no pip-audit on the path: pip install pip-audit", file=sys.stderr)
        return 2
    failed = []
    for name in LOCKS:
        for batch in batches((FOLDER / f"{name}.txt").read_text()):
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
                file.write("\n".join(batch) + "\n")
                file.flush()
                command = [program, "--strict", "--no-deps", "--disable-pip"]
                command += ["-s", service, "-r", file.name]
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=SECONDS, check=False
                )
            print(f"{name}: {len(batch)} pins", done.stdout.strip(), sep="\n")
            if done.returncode:
                failed.append(name)
                print(f"{name}: {(done.stderr.strip().splitlines() or ['?'])[-1]}", file=sys.stderr)
                break
    if failed:
        print(
            f"audit.py: {', '.join(failed)}: vulnerable, or {service} did not answer (see above)",
            file=sys.stderr,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
