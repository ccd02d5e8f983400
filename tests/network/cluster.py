"""Nodes that are namespaces of this machine, on one switch, with names as Debian has them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.integration.workspace import ROOT

READY_S = 30.0
LINK = Path(__file__).with_name("link.py")
CARD = "eth0"
NOWHERE = "card0"  # a second network card, listed first, that leads to nobody


def why_not() -> str:
    """Why this machine lets nobody make such nodes; "" if it does."""
    if os.geteuid() != 0:
        return "network namespaces with links between them need root"
    probe = "ip link add name br0 type bridge && ip link add port0 type veth peer name port1"
    made = subprocess.run(
        ["unshare", "-n", "-m", "-u", "bash", "-c", f"mount --make-rprivate / && {probe}"],
        capture_output=True,
        text=True,
    )
    return "" if made.returncode == 0 else f"no namespaces, bridges or veth: {made.stderr.strip()}"


@dataclass(frozen=True)
class Cable:
    """What a node's cable does to each frame, in each direction."""

    delay_s: float
    loss: float
    bytes_per_s: float
    seed: int = 0  # of the losses


class Cluster:
    """`count` nodes: node-K has the address 10.77.0.K+1.

    On the node itself its name stands for 127.0.1.1, on the others for its address.

    Args:
        cable: of every node but the first; None: as fast as the machine.
    """

    def __init__(self, count: int, folder: Path, cable: Cable | None = None) -> None:
        self.folder = folder
        self.cable = cable
        self._holders: list[subprocess.Popen[bytes]] = []
        self._started: list[subprocess.Popen[bytes]] = []
        self._switch = self._hold()
        self._at(self._switch, "ip link add name br0 type bridge && ip link set br0 up")
        self.nodes = [self._node(number, count) for number in range(count)]

    @staticmethod
    def address(node: int) -> str:
        return f"10.77.0.{node + 1}"

    def start(
        self, node: int, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a command on a node."""
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*self.inside(self.nodes[node]), *command],
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        self._started.append(process)
        return process

    def run(
        self, node: int, command: Sequence[str], environment: Mapping[str, str], limit_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node to its end."""
        return subprocess.run(
            [*self.inside(self.nodes[node]), *command],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=limit_s,
        )

    def processes(self, node: int) -> list[psutil.Process]:
        """All that runs on a node, whoever started it."""
        here = os.readlink(f"/proc/{self.nodes[node]}/ns/uts")
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.NoSuchProcess):
                ours = os.readlink(f"/proc/{process.pid}/ns/uts") == here
                if ours and process.pid != self.nodes[node]:
                    found.append(process)
        return found

    def switch_off(self, node: int) -> None:
        """End all that runs on a node, at once."""
        for process in self.processes(node):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def cut(self, node: int) -> None:
        """Take a node's cable out."""
        self._at(self._switch, f"ip link set port{node} down")

    def mend(self, node: int) -> None:
        """Put it in again."""
        self._at(self._switch, f"ip link set port{node} up")

    def close(self) -> None:
        """End everything that was started, and the nodes."""
        for node in range(len(self.nodes)):
            self.switch_off(node)
        for process in (*self._started, *self._holders):
            process.kill()
            process.wait()

    def _node(self, number: int, count: int) -> int:
        pid = self._hold()
        hosts = self.folder / f"hosts-{number}"
        names = [f"{self.address(one)} node-{one}" for one in range(count) if one != number]
        hosts.write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 node-{number}", *names, ""]))
        self._at(
            pid,
            f"hostname node-{number} && mount --bind {hosts} /etc/hosts && ip link set lo up"
            f" && ip link add {NOWHERE} type veth peer name unplugged && ip link set {NOWHERE} up"
            f" && ip addr add 192.168.66.{number + 1}/32 dev {NOWHERE}",
        )
        if self.cable is not None and number:
            self._lay(number, pid, self.cable)
        else:
            pair = f"ip link add port{number} type veth peer name {CARD} netns {pid}"
            self._at(self._switch, pair)
        self._at(self._switch, f"ip link set port{number} master br0 up")
        self._at(pid, f"ip addr add {self.address(number)}/24 dev {CARD} && ip link set {CARD} up")
        return pid

    def _lay(self, number: int, pid: int, cable: Cable) -> None:
        what = (cable.delay_s, cable.loss, cable.bytes_per_s, cable.seed + number)
        given = [str(pid), CARD, f"port{number}", *map(str, what)]
        link = subprocess.Popen(
            [*self.inside(self._switch), sys.executable, "-S", str(LINK), *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._holders.append(link)
        assert link.stdout is not None
        assert link.stdout.readline() == b"ready\n"

    def _hold(self) -> int:
        """Keep new namespaces of network, mounts and host name. Returns a process in them."""
        before = os.readlink("/proc/self/ns/uts")
        # it ends with this process, however this ends: with the pipe
        holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "--propagation", "private", "cat"],
            stdin=subprocess.PIPE,
        )
        self._holders.append(holder)
        deadline = time.monotonic() + READY_S
        while os.readlink(f"/proc/{holder.pid}/ns/uts") == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return holder.pid

    def _at(self, pid: int, script: str) -> None:
        command = [*self.inside(pid), "bash", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{script}: {done.stderr}"

    @staticmethod
    def inside(pid: int) -> list[str]:
        # entering a mount namespace leaves the working directory
        namespaces = ["nsenter", "--target", str(pid), "--net", "--mount", "--uts"]
        return [*namespaces, "env", f"--chdir={ROOT}"]
