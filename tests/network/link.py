"""A slow cable that loses frames: two TAP devices, from one to the other late or never.

The kernel's own queue for this, netem, is not in every kernel; TAP devices are. They take no
segments larger than the MTU, so what is lost is what a network would lose.

    python link.py PID CARD PORT DELAY_S LOSS BYTES_PER_S SEED

makes PORT in its own network namespace, CARD in that of PID, prints a line and carries frames until
its standard input ends.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
FRAME = 1 << 16
STDIN = 0


def tap(name: str) -> int:
    """Make a TAP device. It lives as long as the returned file."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


class Wire:
    """One direction: frames that wait for the end of their way."""

    def __init__(self, end: int, delay_s: float, loss: float, bytes_per_s: float) -> None:
        self.end = end
        self.delay_s = delay_s
        self.loss = loss
        self.bytes_per_s = bytes_per_s
        self.waiting = deque[tuple[float, bytes]]()
        self.free_at = 0.0

    def send(self, frame: bytes, chance: random.Random) -> None:
        if chance.random() >= self.loss:
            began = max(time.monotonic(), self.free_at)
            self.free_at = began + len(frame) / self.bytes_per_s
            self.waiting.append((self.free_at + self.delay_s, frame))

    def deliver(self) -> float:
        """Write what is due. Returns the seconds until the next frame is."""
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            # a device that is down takes nothing: the cable is cut
            with suppress(OSError):
                os.write(self.end, self.waiting[0][1])
            self.waiting.popleft()
        return max(0.0, self.waiting[0][0] - time.monotonic()) if self.waiting else 1.0


def main() -> None:
    pid, card, port = sys.argv[1:4]
    delay_s, loss, bytes_per_s = map(float, sys.argv[4:7])
    chance = random.Random(sys.argv[7])
    outside = tap(port)
    inside = tap(f"{port}-in")
    subprocess.run(
        ["ip", "link", "set", f"{port}-in", "netns", pid, "name", card], check=True, timeout=30
    )
    print("ready", flush=True)
    wires = {
        outside: Wire(inside, delay_s, loss, bytes_per_s),
        inside: Wire(outside, delay_s, loss, bytes_per_s),
    }
    while True:
        wait_s = min(wire.deliver() for wire in wires.values())
        ready = select.select([*wires, STDIN], [], [], wait_s)[0]
        if STDIN in ready:
            return
        for device in ready:
            # a device that is down has nothing
            with suppress(OSError):
                wires[device].send(os.read(device, FRAME), chance)


if __name__ == "__main__":
    main()
