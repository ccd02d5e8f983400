"""The service over the real embedded engine: what a resumed run depends on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from rlcore.config.sections.rollout import EngineConfig
from rlcore.data.loading import load_prompts
from rlcore.data.tokenizer import load_tokenizer
from rlcore.weights import TensorSpec, cut_buckets
from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.fleet.fleet import Fleet
from rollout.service import RolloutService


async def publish(fleet: Fleet, folder: Path) -> None:
    """The folder's own weights, as version 1."""
    weights = load_file(folder / "model.safetensors")
    buckets = cut_buckets(
        [
            TensorSpec(name, tuple(w.shape), str(w.dtype).removeprefix("torch."))
            for name, w in weights.items()
        ],
        1 << 20,
    )
    [engine] = await fleet.candidates()
    fleet.draining(engine)
    await engine.pause("drain")
    await engine.begin_update(buckets)
    for bucket in buckets:
        flat = torch.cat(
            [weights[spec.name].contiguous().flatten().view(torch.uint8) for spec in bucket.tensors]
        )
        await engine.receive_bucket(bucket.index, flat)
    await engine.end_update()
    await engine.set_version(1)
    await engine.resume()
    fleet.published(engine, 1)


def test_a_resumed_service_draws_the_same_tokens_and_logprobs(make_config, tiny_model: Path):
    sampling = {"max_new_tokens": 6, "temperature": 1.0}
    config = make_config(
        model={"path": str(tiny_model)},
        rollout={
            "prompts_per_step": 3,
            "samples_per_prompt": 4,
            "sampling": sampling,
            "engine": {"max_batch": 8},
        },
    )

    def run(steps: range, state=None):
        engine = EmbeddedEngine(
            str(tiny_model), config=EngineConfig(device="cpu", max_batch=8), dtype="fp32"
        )
        tokenizer = load_tokenizer(tiny_model)
        prompts = load_prompts(config, tokenizer)
        service = RolloutService(config, tokenizer, [engine], prompts)
        try:
            service.start()
            asyncio.run_coroutine_threadsafe(
                publish(service.fleet, tiny_model), service.loop
            ).result(30)
            if state is not None:
                service.restore(state)
            return [service.next_step(step) for step in steps]
        finally:
            service.close()

    def exact(rollouts):
        return [
            (s.draw, s.index, s.tokens.tolist(), s.rollout_logprobs.tolist(), s.reward)
            for s in rollouts.samples
        ]

    whole = run(range(1, 4))
    resumed = run(range(2, 4), json.loads(json.dumps(whole[0].snapshot)))
    assert [exact(step) for step in resumed] == [exact(step) for step in whole[1:]]
    assert len({tuple(s.tokens.tolist()) for s in whole[0].samples}) > 3, (
        "samples of a prompt differ"
    )
    assert all((s.rollout_logprobs < 0).all() for s in whole[0].samples)
