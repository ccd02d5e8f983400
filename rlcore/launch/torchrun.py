"""torchrun whose store listens only on `--master-addr`: `python -m rlcore.launch.torchrun ...`.

torch's own store listens on every interface and needs no key. Only the agent of node 0 has a store,
and only if the nodes are numbered by hand (`--node-rank`).
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
from torch.distributed.run import main

from rlcore.stores import listen_at


def store_of_agents(
    host: str, port: int, world_size: int, is_master: bool, timeout: timedelta, **_: Any
) -> TCPStore:
    """Make the store of torchrun's agents, or connect to it. Raises OSError as `listen_at`."""
    if not is_master or not reaches_us(host):
        return TCPStore(host, port, world_size, is_master, timeout)
    with listen_at(host, port) as listener:
        return TCPStore(host, port, world_size, True, timeout, master_listen_fd=listener.detach())


def reaches_us(host: str) -> bool:
    """Return whether other nodes reach the address that `host` has here; print a warning if not.

    Some systems resolve the machine's own name to an address of the loopback interface.
    """
    address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    if not ipaddress.ip_address(address).is_loopback or host in (address, "localhost"):
        return True
    print(
        f"note: {host} is {address} here, where other nodes do not reach it, so the store of"
        " torchrun's agents listens on every interface: give the address itself (MASTER_ADDR)",
        file=sys.stderr,
        flush=True,
    )
    return False


if __name__ == "__main__":
    static_tcp_rendezvous.TCPStore = store_of_agents  # type: ignore[misc, assignment]
    main()
