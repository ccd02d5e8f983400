"""Samples as the embedded engine samples and records them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import TEMPERATURE, VOCAB
from numpy.typing import NDArray

from rlcore.config.sections.rollout import EngineConfig
from rlcore.data.generation import Completion, GenerateRequest, SamplingParams
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample, SamplingMasks, VersionSpan, join_experts
from rlcore.weights import TensorSpec, cut_buckets
from rollout.conversation.samples import make_sample
from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.engines.embedded.model_weights import as_published

TRUNCATED = SamplingParams(
    max_new_tokens=9, temperature=TEMPERATURE, top_p=0.8, top_k=12, sampling_mask=True
)
OTHERS = {
    3: replace(TRUNCATED, top_k=2),
    4: replace(TRUNCATED, top_p=1.0, top_k=-1),
    8: replace(TRUNCATED, top_p=0.3),
}
NOTHING = Completion(
    np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32), "abort", (), SamplingMasks.whole(0)
)
TOOL = np.array([3, 1, 4, 1, 5], dtype=np.int32)


async def publish(engine: EmbeddedEngine, model: torch.nn.Module) -> None:
    named = dict(as_published(model))
    buckets = cut_buckets(
        (TensorSpec(name, tuple(p.shape), "float32") for name, p in named.items()), 1 << 20
    )
    await engine.pause("drain")
    await engine.begin_update(buckets)
    for bucket in buckets:
        flat = torch.cat(
            [named[spec.name].detach().reshape(-1).view(torch.uint8) for spec in bucket.tensors]
        )
        await engine.receive_bucket(bucket.index, flat)
    await engine.end_update()
    await engine.set_version(1)
    await engine.resume()


def prompt(size: int) -> Prompt:
    tokens = np.random.default_rng(size).integers(0, VOCAB, size, dtype=np.int32)
    return Prompt(prompt_id=f"test:{size}", tokens=tokens, text="", label=None, row={})


def with_tool(first: Sample, second: Completion) -> Sample:
    """Two turns and, between them, tokens that nobody drew."""
    assert first.sampling_mask is not None
    assert second.sampling_mask is not None
    m = first.num_trainable
    records = [one.routed_experts for one in (first, second) if one.routed_experts is not None]
    return replace(
        first,
        tokens=np.concatenate([first.tokens, TOOL, second.tokens]),
        loss_mask=np.concatenate(
            [first.loss_mask, np.zeros_like(TOOL, np.uint8), np.ones_like(second.tokens, np.uint8)]
        ),
        rollout_logprobs=np.concatenate([first.rollout_logprobs, second.logprobs]),
        versions=(VersionSpan(1, 0, m + len(second.tokens)),),
        sampling_mask=SamplingMasks.joined([first.sampling_mask, second.sampling_mask]),
        routed_experts=join_experts(records) if records else None,
        turns=2,
    )


def draw_samples(
    folder: Path, model: torch.nn.Module, *, routed_experts: bool = False
) -> list[Sample]:
    """Nine samples: two with a tool's answer inside, two without a response, one without a mask."""

    async def main() -> list[Sample]:
        engine = EmbeddedEngine(
            str(folder), config=EngineConfig(device="cpu", request_timeout_s=60.0), dtype="fp32"
        )
        await engine.start()
        await publish(engine, model)

        async def ask(
            tokens: NDArray[np.int32], draw: int, turn: int, **changes: Any
        ) -> Completion:
            sampling = replace(
                OTHERS.get(draw, TRUNCATED), routed_experts=routed_experts, **changes
            )
            return (await engine.generate([GenerateRequest(tokens, sampling, draw, turn=turn)]))[0][
                0
            ]

        samples = []
        for draw, size in enumerate([4, 1, 6, 3, 5, 2, 7, 10, 3]):
            given = prompt(size)
            made = (
                NOTHING
                if draw in (2, 6)
                else await ask(given.tokens, draw, 0, max_new_tokens=5 + 2 * draw)
            )
            sample = make_sample(given, draw, 0, made)
            if draw in (5, 7):
                sample = with_tool(
                    sample, await ask(np.concatenate([sample.tokens, TOOL]), draw, 1)
                )
            sample.reward = float(draw % 3)
            sample.group_id = draw % 2
            samples.append(sample)
        await engine.close()
        return samples

    return asyncio.run(asyncio.wait_for(main(), 60))
