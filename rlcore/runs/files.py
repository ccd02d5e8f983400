"""Files that are either whole or absent, and growing files of JSON lines."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import DataError

logger = logging.getLogger(__name__)

BLOCK = 1 << 16  # bytes per read
LOG_BYTES = 100 << 20  # per log; a process has at most two logs


def write_atomic(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace `path` by `content` in one rename; a kill leaves either the old or the new file.

    Args:
        mode: permissions of the new file, before the process's umask.

    Raises:
        FileExistsError: another process is creating the temporary file, which is left untouched.
    """
    aside = path.with_name(f".{path.name}.tmp")
    # Remove the remains of a killed write. A link is removed, not its target.
    aside.unlink(missing_ok=True)
    # O_EXCL does not follow a link that another user has placed there, for example in /tmp.
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync(path.parent)


def cut_torn_line(path: Path) -> None:
    """Cut off everything after the last newline of a file of lines.

    A kill tore this last line, so nothing relied on it.
    """
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        whole = size
        # Search from the end: the file may be larger than memory.
        while whole > 0:
            begin = max(0, whole - BLOCK)
            file.seek(begin)
            newline = file.read(whole - begin).rfind(b"\n")
            whole = begin + newline + 1
            if newline >= 0:
                break
        if whole < size:
            file.truncate(whole)


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append an object to a file. Once this returns, a kill of the process does not lose it."""
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a file, one a line; [] without a file.

    A last line without newline is left out: it is still being written, or was torn by a kill.

    Raises:
        DataError: a line is no JSON object; names it.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}:{number}: not JSON ({error}); delete the line to continue without it"
            ) from None
        if not isinstance(row, dict):
            text = line[:80].decode(errors="replace")
            raise DataError(f"{path}:{number}: expected a JSON object, got {text!r}")
        rows.append(row)
    return rows


def rotate_logs(folder: Path) -> None:
    """Move the content of each oversized log to NAME.log.1, over the previous one.

    The log's process keeps appending to the emptied file. Lines written during the copy are lost.
    """
    for path in folder.glob("*.log"):
        if path.stat().st_size <= LOG_BYTES:
            continue
        try:
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)
        except OSError as error:
            # A log problem must not end the run.
            logger.warning("the log %s could not be moved aside: %s", path, error)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until everything in `folder` is on disk."""
    for path in files_in(folder):
        sync(path)
    for name, _, _ in os.walk(folder):
        sync(Path(name))


def files_in(folder: Path) -> Iterator[Path]:
    """Yield every regular file below `folder`, in sorted order."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path


def remove_tree(folder: Path, *, ignore_errors: bool = False) -> None:
    """Delete a folder. It is first renamed to `.<name>.trash`, so readers never see half of it."""
    trash = folder.with_name(f".{folder.name.lstrip('.')}.trash")
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(folder, trash)
    shutil.rmtree(trash, ignore_errors=ignore_errors)
