"""The choice of transport and of a group's back end, and the payload of a request."""

from __future__ import annotations

import base64
import pickle

import pytest
import torch

from rlcore.config.sections.rollout import EngineConfig
from rlcore.errors import ConfigError
from rlcore.weights import Bucket, TensorSpec
from rollout.weight_sync import tensor
from rollout.weight_sync.choose import choose_name
from rollout.weight_sync.process_group import choose_backend

SGLANG = ("distributed", "tensor", "disk", "delta")


@pytest.mark.parametrize(("offered", "asked", "expected"), [
    ([SGLANG, SGLANG], {}, "distributed"),
    ([SGLANG], {"transport": "disk"}, "disk"),
    ([SGLANG], {"colocated": True}, "tensor"),
    ([SGLANG], {"colocated": True, "transport": "distributed"}, "distributed"),
    ([("distributed",)], {"colocated": True}, "distributed"),
    ([("copy",)], {"transport": "distributed"}, "copy"),        # in this process there is no other
])  # fmt: skip
def test_the_way_of_the_weights(offered, asked, expected):
    assert choose_name(EngineConfig(**asked), offered) == expected


def test_a_way_that_an_engine_does_not_have_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"transport: delta does not reach this run's engines; they take distributed",
    ):
        choose_name(EngineConfig(transport="delta"), [("distributed",)])
    with pytest.raises(ConfigError, match="no transport reaches all engines of this run"):
        choose_name(EngineConfig(), [("copy",), SGLANG])


@pytest.mark.parametrize(
    ("trainer", "engine", "backend"),
    [
        ("GPU-1", "GPU-2", "nccl"),
        ("GPU-1", "GPU-1", "gloo"),
        ("GPU-1", None, "gloo"),
        (None, "GPU-2", "gloo"),
        (None, None, "gloo"),
    ],
)
def test_nccl_between_different_gpus_alone(trainer, engine, backend):
    assert choose_backend(trainer, engine) == backend


def bucket_of(tensors):
    return Bucket(
        0, tuple(TensorSpec(name, tuple(t.shape), "float32") for name, t in tensors.items())
    )


def test_a_body_of_bytes_holds_the_tensors_and_no_more_than_them():
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    buffer = torch.zeros(1 << 16, dtype=torch.uint8)
    flat = buffer[:68]
    flat.copy_(torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors.values()]))
    payload = base64.b64decode(tensor.by_value(bucket_of(tensors), flat))
    assert len(payload) < 4096
    body = pickle.loads(payload)
    for meta in body["metadata"]:
        got = (
            body["flattened_tensor"][meta.start_idx : meta.end_idx]
            .view(meta.dtype)
            .reshape(meta.shape)
        )
        assert meta.numel == meta.end_idx - meta.start_idx
        assert torch.equal(got, tensors[meta.name])
