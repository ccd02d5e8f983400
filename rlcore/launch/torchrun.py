"""torchrun whose store listens only on `--master-addr`: `python -m rlcore.launch.torchrun ...`.

torch's own store listens on every interface and needs no key. Only the agent of node 0 has a store,
and only if the nodes are numbered by hand (`--node-rank`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
from torch.distributed.run import main

from rlcore.stores import listen_at, reaches_us


def store_of_agents(
    host: str, port: int, world_size: int, is_master: bool, timeout: timedelta, **_: Any
) -> TCPStore:
    """Make the store of torchrun's agents, or connect to it. Raises OSError as `listen_at`."""
    if not is_master or not reaches_us(host):
        return TCPStore(host, port, world_size, is_master, timeout)
    with listen_at(host, port) as listener:
        return TCPStore(host, port, world_size, True, timeout, master_listen_fd=listener.detach())


if __name__ == "__main__":
    static_tcp_rendezvous.TCPStore = store_of_agents  # type: ignore[misc, assignment]
    main()
