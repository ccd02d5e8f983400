"""A process in the place of the rollout service's: it answers, dies or talks nonsense."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from rlcore.errors import ConfigError
from rlcore.launch.service import frames
from rlcore.launch.service.frames import LINE

LOST = 3  # its exit code


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))

    def send(number: int, answer: Any) -> None:
        frames.send(connection, frames.encode((number, answer)))

    begin = frames.receive(connection)
    late: list[int] = []
    beats = 0
    while True:
        number, part, given = frames.receive(connection)
        if part == "die":
            os._exit(LOST)
        elif part == "nonsense":
            connection.sendall(b"a print into the socket, of a library that knows its number")
        elif part == "raise":
            send(number, (False, ConfigError("rollout.filters: no such filter")))
        elif part == "late":
            late.append(number)
        elif part == "beat":
            beats += 1
            send(number, (True, None))
        elif part == "beats":
            send(number, (True, beats))
        elif part == "echo":
            send(LINE, ("out", "heard\x1b[2J\n"))
            send(number, (True, given))
            for one in late:
                send(one, (True, "late"))
        elif part == "open":
            opened = {"greedy_baseline": begin.greedy_baseline, "again": begin.again}
            send(number, (True, opened))
        elif part == "publication":
            send(number, (True, given))
        elif part == "start":
            send(number, (True, None))
        elif part == "close":
            send(number, (True, None))
            os._exit(0)


if __name__ == "__main__":
    main()
