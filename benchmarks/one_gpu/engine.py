"""A publication into the embedded engine on the same device, its speed, and how well both agree."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import torch
from one_gpu.models import SHAPES
from one_gpu.section import Found, Setting
from one_gpu.step import Trainer, random_trainer

from rlcore.config.sections.rollout import EngineConfig
from rlcore.data.batch import RolloutBatch
from rlcore.data.generation import Completion, GenerateRequest, SamplingParams
from rlcore.data.packing.plan import plan_minibatches
from rlcore.weights import fingerprint
from rollout.engines.embedded.engine import EmbeddedEngine

MODEL = "1.5B"
PROMPT = 512
NEW = 512
ROWS = (64, 256)
MEAN_GAP = {"fp32": 1e-5, "bf16": 0.02}  # of a log-prob, engine against trainer


def engine_beside(setting: Setting) -> Found:
    """Publish, generate at several batch sizes, and score what was generated."""
    found = Found()
    vocabulary = SHAPES["toy" if setting.toy else MODEL].vocab
    with random_trainer(setting, MODEL) as made:
        engine = EmbeddedEngine(
            made.config.model.path,
            config=EngineConfig(device=setting.device, max_batch=max(ROWS)),
            dtype=setting.size.dtype,
        )
        asyncio.run(_serve(made, engine, setting, found, vocabulary))
    return found


async def _serve(
    made: Trainer, engine: EmbeddedEngine, setting: Setting, found: Found, vocabulary: int
) -> None:
    await engine.start()
    await _publish(made, engine, setting, found)
    prompt, new, rows = (8, 8, (2, 4)) if setting.toy else (PROMPT, NEW, ROWS)
    completions: list[Completion] = []
    requests: list[GenerateRequest] = []
    for count in rows:
        requests = _requests(count, prompt, new, vocabulary)
        began = time.perf_counter()
        completions = [one for [one] in await engine.generate(requests)]
        seconds = time.perf_counter() - began
        made_tokens = sum(len(one.tokens) for one in completions)
        found.number(f"generation, {count} rows", made_tokens / seconds, "tokens/s")
    await engine.close()
    _compare(made, requests, completions, setting, found)


async def _publish(made: Trainer, engine: EmbeddedEngine, setting: Setting, found: Found) -> None:
    published: dict[str, str] = {}
    for version in (1, 2):
        began = time.perf_counter()
        sent = 0
        await engine.pause("drain")
        await engine.begin_update(made.backend.buckets())
        for bucket, flat in made.backend.export_buckets():
            assert flat is not None
            await engine.receive_bucket(bucket.index, flat)
            sent += bucket.num_bytes
            if version == 2:
                published |= {name: fingerprint(tensor) for name, tensor in bucket.views(flat)}
        await engine.end_update()
        await engine.set_version(version)
        await engine.resume()
        if setting.cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        if version == 1:
            found.number("publication by copy", sent / seconds / 1e9, "GB/s", f"{seconds:.3g} s")
    held = engine._started()[1].tensors
    differ = sum(fingerprint(held[name]) != one for name, one in published.items())
    found.check("publication: tensors of the engine that differ", float(differ), 0.0)


def _requests(count: int, prompt: int, new: int, vocabulary: int) -> list[GenerateRequest]:
    generator = np.random.default_rng(6)
    return [
        GenerateRequest(
            generator.integers(0, vocabulary, prompt, dtype=np.int32),
            SamplingParams(max_new_tokens=new),
            draw=row,
            seed=1,
        )
        for row in range(count)
    ]


def _compare(
    made: Trainer,
    requests: list[GenerateRequest],
    completions: list[Completion],
    setting: Setting,
    found: Found,
) -> None:
    """Score the responses with the trainer."""
    batch = _batch_of(requests, completions)
    plans = plan_minibatches(made.backend.plan_rules, batch, [range(batch.num_sequences)])
    made.backend.load_batch(batch, plans)
    gap = (made.score()["logprobs"] - batch.vectors["rollout_logprobs"]).abs()
    found.number("log-prob gap, worst", float(gap.max()), "nats")
    found.check("log-prob gap, mean", float(gap.mean()), MEAN_GAP[setting.size.dtype])


def _batch_of(requests: list[GenerateRequest], completions: list[Completion]) -> RolloutBatch:
    pairs = list(zip(requests, completions))
    tokens = np.concatenate([np.concatenate([r.prompt, c.tokens]) for r, c in pairs])
    lengths = [len(r.prompt) + len(c.tokens) for r, c in pairs]
    mask = np.concatenate(
        [np.repeat([False, True], [len(r.prompt), len(c.tokens)]) for r, c in pairs]
    )
    count = len(pairs)
    vectors: dict[str, Any] = {
        "rollout_logprobs": torch.from_numpy(np.concatenate([c.logprobs for c in completions])),
        "versions": torch.zeros(int(mask.sum()), dtype=torch.int64),
        "rewards": torch.zeros(count),
        "group_ids": torch.arange(count),
        "rollout_ids": torch.arange(count),
        "sequence_ids": torch.arange(count),
    }
    cu_tokens = torch.tensor([0, *lengths]).cumsum(0)
    return RolloutBatch(torch.from_numpy(tokens), cu_tokens, torch.from_numpy(mask), vectors)
