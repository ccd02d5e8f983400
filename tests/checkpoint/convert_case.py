"""A case of test_convert.py or test_to_hf.py on a rank: import, then export or save."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from backends.megatron.convert.load import load_hf
from backends.megatron.convert.read import read_architecture
from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.checkpoint.save_load import Saved, save_checkpoint
    from backends.megatron.model.gpt import build_chunks, in_dtype, transformer_config
    from backends.megatron.parallel.state import ParallelState
    from backends.megatron.weights import export
    from backends.megatron.weights.export import WeightExporter
    from backends.megatron.weights.folder import export_hf
from rlcore.config.sections.policy import ParallelConfig
from rlcore.planning.memory import padded_vocab_size
from rlcore.weights import DTYPES
from tests.parity.rank_main import load_chunks


def convert(case: dict[str, Any], layout: ParallelConfig, parallel: ParallelState) -> None:
    source = Path(case["source"])
    head = case["head"]
    arch = read_architecture(source)
    config = transformer_config(arch, layout, case["dtype"], torch.device("cpu"), {})
    padded = padded_vocab_size(arch.vocab_size, case["divisible_by"], layout.tensor)
    chunks = in_dtype(
        build_chunks(arch, config, padded_vocab=padded, value_head=head == "value"), config
    )
    value_head = [p for n, p in chunks[-1].named_parameters() if n.endswith("value_head.weight")]
    initial = [weight.detach().clone() for weight in value_head]
    load_hf(chunks, arch, source, parallel)
    for weight, before in zip(value_head, initial, strict=True):
        # a language model's folder leaves it as it is
        assert torch.equal(weight, before) == (arch.head == "lm")
    export._ALONE_BYTES = case["alone_bytes"]
    exporter = WeightExporter(
        chunks,
        arch,
        parallel,
        dtype=DTYPES[case["dtype"]],
        head=head,
        bucket_bytes=case["bucket_bytes"],
    )
    export_hf(exporter, Path(case["target"]), max_shard_bytes=case["shard_bytes"])
    # The second round goes through the reused buffers; the next bucket must not be put together in
    # the one that is in use.
    fine = {}
    for number, (bucket, flat) in enumerate(exporter.export_buckets()):
        assert bucket.index == number
        assert (flat is not None) == (parallel.rank == 0)
        if flat is not None:
            before = flat.clone()
            time.sleep(0.001)
            assert torch.equal(flat, before)
            fine |= bucket.views(before)
    assert number == len(exporter.buckets) - 1
    coarse = WeightExporter(
        chunks, arch, parallel, dtype=torch.float16, head=head, bucket_bytes=case["bucket_bytes"]
    )
    for bucket, flat in coarse.export_buckets():
        for name, tensor in bucket.views(flat) if flat is not None else ():
            assert torch.equal(tensor, fine[name].to(tensor.dtype)), name


def save_weights(case: dict[str, Any], layout: ParallelConfig, parallel: ParallelState) -> None:
    """Import, then save a checkpoint without an optimizer."""
    arch, _, chunks = load_chunks(
        Path(case["source"]), layout, parallel, case["dtype"], value_head=case["head"] == "value"
    )
    save_checkpoint(Path(case["save"]), [Saved("policy", arch, chunks)], parallel)
