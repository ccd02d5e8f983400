"""Nodes that are namespaces of this machine, on one switch, with names as Debian has them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

READY_S = 30.0
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


class Cluster:
    """`count` nodes: node-K has the address 10.77.0.K+1.

    On the node itself its name stands for 127.0.1.1, on the others for its address.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.folder = folder
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
                [*self._inside(self.nodes[node]), *command],
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        self._started.append(process)
        return process

    def cut(self, node: int) -> None:
        """Take a node's cable out."""
        self._at(self._switch, f"ip link set port{node} down")

    def mend(self, node: int) -> None:
        """Put it in again."""
        self._at(self._switch, f"ip link set port{node} up")

    def shape(self, node: int, rule: str) -> None:
        """Delay, limit or lose what goes to a node, as netem says it: `delay 50ms rate 1gbit`."""
        self._at(self._switch, f"tc qdisc replace dev port{node} root netem {rule}")

    def close(self) -> None:
        """End everything that was started, and the nodes."""
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
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
        self._at(
            self._switch,
            f"ip link add port{number} type veth peer name {CARD} netns {pid}"
            f" && ip link set port{number} master br0 up",
        )
        self._at(pid, f"ip addr add {self.address(number)}/24 dev {CARD} && ip link set {CARD} up")
        return pid

    def _hold(self) -> int:
        """Keep new namespaces of network, mounts and host name. Returns a process in them."""
        before = os.readlink("/proc/self/ns/uts")
        holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "--propagation", "private", "sleep", "inf"]
        )
        self._holders.append(holder)
        deadline = time.monotonic() + READY_S
        while os.readlink(f"/proc/{holder.pid}/ns/uts") == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return holder.pid

    def _at(self, pid: int, script: str) -> None:
        command = [*self._inside(pid), "bash", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{script}: {done.stderr}"

    @staticmethod
    def _inside(pid: int) -> list[str]:
        return ["nsenter", "--target", str(pid), "--net", "--mount", "--uts"]
