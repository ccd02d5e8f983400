"""Published peaks of GPUs: dense bf16, without sparsity, in FLOP/s."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Bandwidths are what one GPU can send, in bytes/s: to those of its node, and to other nodes."""

    name: str
    bf16_flops: float
    node_bandwidth: float
    network_bandwidth: float = 50e9     # one 400 Gbit/s adapter a GPU


# NVIDIA's data sheets: A100 and H100/H200 of the SXM form, B200 of the HGX board. Half of NVLink's figure is one direction.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 312e12, 300e9, 25e9),
        Gpu("H100", 989e12, 450e9),
        Gpu("H200", 989e12, 450e9),
        Gpu("B200", 2250e12, 900e9),
    )
}
