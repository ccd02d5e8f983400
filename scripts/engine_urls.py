"""`engine_urls.py FOLDER NODES SECONDS` prints the URLs in a folder as one JSON list.

`rlcore engine --urls-file` writes them. The script waits until NODES nodes have written theirs, or
until the calling script ends. It needs only the standard library.
"""

from __future__ import annotations

import json
import os
import select
import stat
import sys
import time
from pathlib import Path

POLL_S = 1.0


def main(folder: Path, nodes: int, seconds: float) -> int:
    """Wait for the files and print the list; return the exit code."""
    deadline = time.monotonic() + seconds
    if folder.is_dir() and folder.stat().st_mode & stat.S_IWOTH:
        print(
            f"engine_urls.py: everybody may write to {folder}, and so send the engines' keys"
            f" anywhere: chmod o-w {folder}, or take another folder",
            file=sys.stderr,
        )
        return 1
    while len(files := sorted(folder.glob("*.json"))) < nodes:
        if time.monotonic() > deadline:
            found = ", ".join(file.name for file in files) or "none"
            print(
                f"engine_urls.py: {len(files)} of {nodes} engine nodes are ready after {seconds:g}"
                f" s (ENGINES_TIMEOUT_S) in {folder}: {found}; look at the output of engines.sh on"
                " the others",
                file=sys.stderr,
            )
            return 1
        if output_is_closed():
            return 1
        time.sleep(POLL_S)
    if others := [file.name for file in files if file.stat().st_uid != os.getuid()]:
        print(
            f"engine_urls.py: {others[0]} in {folder} is another user's, who would get the engines'"
            " keys: delete it, or take another folder",
            file=sys.stderr,
        )
        return 1
    if len(files) > nodes:
        print(
            f"engine_urls.py: {folder} has {len(files)} files, expected {nodes}: use a new folder",
            file=sys.stderr,
        )
        return 1
    print(json.dumps([url for file in files for url in json.loads(file.read_text())]))
    return 0


def output_is_closed() -> bool:
    """Whether the other end of the output is closed, because the caller was killed."""
    output = select.poll()
    output.register(sys.stdout, 0)
    return bool(output.poll(0))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
