"""The network interface over which the ranks of several nodes reach each other."""

from __future__ import annotations

import os

from rlcore.launch.environment import INTERFACE
from rlcore.stores import Store
from rollout.weight_sync.process_group import interface_of, is_loopback, own_address

NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


def choose_interface(store: Store, rank: int, world_size: int) -> None:
    """Have gloo and NCCL listen on the interface of the route to the other nodes, unless it is set.

    By default gloo takes the interface of the host's name, which may be loopback or a slow network
    for administration.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if world_size == local or {INTERFACE, NCCL_INTERFACE} <= os.environ.keys():
        return
    interface = interface_of(address_for_others(store, rank, world_size))
    if interface is not None:
        os.environ.setdefault(INTERFACE, interface)
        # The sign stands for this name alone, not for all that begin with it.
        os.environ.setdefault(NCCL_INTERFACE, f"={interface}")


def address_for_others(store: Store, rank: int, world_size: int) -> str:
    """Return the address under which the other nodes reach this one.

    It is that of the route to MASTER_ADDR. On the master's own node a name may be an address of the
    loopback interface, so its ranks take the route to a rank of another node.
    """
    master = os.environ["MASTER_ADDR"]
    mine = route_to(master)
    store.set(f"address/{rank}", mine)
    if not is_loopback(mine) or is_loopback(master):
        return mine
    addresses = [store.get(f"address/{other}").decode() for other in range(world_size)]
    there = next((other for other in addresses if not is_loopback(other)), None)
    return mine if there is None else route_to(there)


def route_to(host: str) -> str:
    """Return the address of this machine from which packets go to another."""
    return own_address(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
