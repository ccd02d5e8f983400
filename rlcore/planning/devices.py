"""Published peaks of GPUs: dense bf16, without sparsity, in FLOP/s."""

from __future__ import annotations

import re
from dataclasses import dataclass

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Gpu:
    """A GPU. Its bandwidths are what it can send inside its node and to other nodes, in bytes/s."""

    name: str
    bf16_flops: float
    node_bandwidth: float
    multiprocessors: int
    network_bandwidth: float = 50e9  # one 400 Gbit/s adapter a GPU


# By words of `torch.cuda.get_device_name`; the longest match counts. From NVIDIA's data sheets;
# figures with sparsity are halved.
_PEAKS = {
    "A100": 312e12, "A800": 312e12,
    "H100": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H800": 989e12,
    "H20": 148e12, "H200": 989e12, "H200 NVL": 835e12, "GH200": 989e12,
    "B200": 2250e12, "GB200": 2500e12,
    "L40S": 362e12, "L4": 121e12, "A10": 125e12,
}  # fmt: skip

# SXM versions of A100 and H100/H200, B200 on the HGX board. NVLink's bandwidth is half of the data
# sheet's, which counts both directions.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", _PEAKS["A100"], 300e9, 108, 25e9),
        Gpu("H100", _PEAKS["H100"], 450e9, 132),
        Gpu("H200", _PEAKS["H200"], 450e9, 132),
        Gpu("B200", _PEAKS["B200"], 900e9, 148),
    )
}


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of a GPU such as "NVIDIA H100 80GB HBM3".

    None for a partition of a GPU, or a GPU that is not in the table.
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if "MIG" in words:
        return None
    known = [name for name in _PEAKS if words.issuperset(name.upper().split())]
    return _PEAKS[max(known, key=lambda name: len(name.split()))] if known else None
