"""Runs a command and forwards its output, unless a line is too long. Standard library only.

`python bounded_lines.py BYTES COMMAND...`: readers of an MCP server's output buffer whole lines.
"""

from __future__ import annotations

import subprocess
import sys

CHUNK = 1 << 16


def main(limit: int, command: list[str]) -> int:
    """Return the command's exit code; exit with an error if a line exceeds `limit` bytes."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=CHUNK)
    assert process.stdout is not None
    length = 0
    while chunk := process.stdout.read1():  # type: ignore[attr-defined]
        _, newline, rest = chunk.rpartition(b"\n")
        length = len(rest) if newline else length + len(chunk)
        if length > limit:
            sys.exit(f"{command[0]}: a line has more than {limit:,} bytes, which exceeds the limit")
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
    return process.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
