"""Starts a Ray cluster of several nodes on this machine for one command: `cluster.py
CPUS,CPUS,... COMMAND...`.

Every node is a raylet with an address of its own, so that Ray and the run take it for another
machine. The command is told the cluster's address; its exit code is this one's.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence

from ray.cluster_utils import Cluster

STORE_BYTES = 100 << 20  # of each node's objects


def main(cpus: Sequence[int], command: Sequence[str]) -> int:
    logging.getLogger("ray").setLevel(logging.ERROR)
    head = {"num_cpus": cpus[0], "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for number, count in enumerate(cpus[1:], start=2):
            cluster.add_node(
                num_cpus=count, node_ip_address=f"127.0.0.{number}", object_store_memory=STORE_BYTES
            )
        return subprocess.run([*command, f"cluster.ray.address={cluster.address}"]).returncode
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main([int(count) for count in sys.argv[1].split(",")], sys.argv[2:]))
