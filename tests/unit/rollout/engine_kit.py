"""Tiny models, their weights in buckets, and an engine that holds them."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from patient_loop import run_steadily
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.training import TLSConfig
from rlcore.data.generation import GenerateRequest, SamplingParams
from rlcore.weights import Bucket, TensorSpec, cut_buckets
from rollout.engines.checks import language_config
from rollout.engines.embedded.client import RemoteEngine
from rollout.engines.embedded.decoding import Decoding
from rollout.engines.embedded.engine import EmbeddedEngine, PauseGate
from rollout.engines.embedded.factory import EmbeddedServer
from rollout.engines.embedded.model_weights import as_published
from rollout.engines.embedded.server import ServerConfig
from rollout.engines.factories import Keys
from rollout.engines.server_client import ServerClient

VOCAB = 31


def remote_engine(
    folder: Path | str,
    *,
    config: EngineConfig,
    log: Path,
    name: str = "engine-0",
    tls: TLSConfig | None = None,
) -> RemoteEngine:
    """An engine that is a child of this process."""
    server = ServerConfig(name, str(folder), config, "the-key", dtype="fp32", tls=tls)
    return RemoteEngine(EmbeddedServer(server, log), config=config, key="the-key", tls=tls)


def tiny_qwen3(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
    }
    return Qwen3ForCausalLM(Qwen3Config(**settings | changes)).eval()


def layout(model: torch.nn.Module, bucket_bytes: int = 20_000) -> tuple[Bucket, ...]:
    return cut_buckets(
        (
            TensorSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."))
            for name, p in as_published(model)
        ),
        bucket_bytes,
    )


def flatten(bucket: Bucket, model: torch.nn.Module) -> torch.Tensor:
    named = dict(as_published(model))
    return torch.cat(
        [named[spec.name].detach().reshape(-1).view(torch.uint8) for spec in bucket.tensors]
    )


async def load(engine: Any, model: torch.nn.Module, version: int) -> None:
    """The steps of a publication between pause and resume."""
    if isinstance(engine, EmbeddedEngine):
        held: Any = model
        held.config.published_prefix = language_config(engine.model_path).published_prefix
    buckets = layout(model)
    await engine.begin_update(buckets)
    for bucket in buckets:
        await engine.receive_bucket(bucket.index, flatten(bucket, model))
    await engine.end_update()
    await engine.set_version(version)


async def publish(engine: Any, model: torch.nn.Module, version: int, mode: Any = "drain") -> None:
    await engine.pause(mode)
    await load(engine, model, version)
    await engine.resume()


def request(
    prompt: Sequence[int], *, draw: int = 0, n: int = 1, first_sample: int = 0, **sampling: Any
) -> GenerateRequest:
    settings = SamplingParams(**{"max_new_tokens": 8, **sampling})
    return GenerateRequest(np.array(prompt, dtype=np.int32), settings, draw, n, first_sample)


def logprobs_under(
    model: torch.nn.Module, prompt: Any, completion: Any, temperature: float = 1.0
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Log-probs of the tokens behind a prompt, by one forward pass without a cache."""
    ids = torch.tensor([[*map(int, prompt), *map(int, completion.tokens)]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()


class Steps:
    """Holds decoding threads between two tokens, behind so many: a test meets them in the middle
    of a response, however late it comes.

    A pause or an abort lets them go on, as it would without this.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: float, *, once: bool) -> None:
        """Hold them behind `most` steps; `once`: and no more when they have been let go."""
        self.made = 0
        self.most = most
        self._once = once
        self._changed = threading.Condition()
        self._step = Decoding.step
        self._pass_through = PauseGate.pass_through
        count, hold = self._count, self._hold
        monkeypatch.setattr(Decoding, "step", lambda made, version: count(made, version))
        monkeypatch.setattr(PauseGate, "pass_through", lambda gate, *given: hold(gate, *given))

    def let(self, more: float = math.inf) -> None:
        """Let them make so many more steps."""
        with self._changed:
            self.most = self.made + more
            self._changed.notify_all()

    async def are_made(self) -> None:
        """Wait until they have made all that they may."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: self.made >= self.most, 60)

        assert await asyncio.to_thread(wait)

    def _count(self, decoding: Decoding, version: int) -> None:
        self._step(decoding, version)
        with self._changed:
            self.made += 1
            self._changed.notify_all()

    def _hold(self, gate: PauseGate, ticket: int, on_retract: Callable[[], None]) -> None:
        with self._changed:
            while held := self.made >= self.most:
                if gate.mode is not None or gate.closed or gate.aborted(ticket):
                    break
                self._changed.wait(0.002)
            if held and self._once:
                self.most = math.inf
        self._pass_through(gate, ticket, on_retract)


def with_engine(
    folder: Path,
    model: torch.nn.Module | None,
    use: Callable[[EmbeddedEngine], Coroutine[Any, Any, Any]],
    **config: Any,
) -> Any:
    """Run `use(engine)` on an event loop of its own; `model` is published as version 1."""

    async def main() -> Any:
        settings = EngineConfig(device="cpu", **{"request_timeout_s": 30.0, **config})
        engine = EmbeddedEngine(str(folder), config=settings, dtype="fp32")
        await engine.start()
        try:
            if model is not None:
                await publish(engine, model, 1)
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


def with_client(
    handler: Callable[[web.Request], Any], use: Callable[[ServerClient], Coroutine[Any, Any, Any]]
) -> Any:
    """Run `use(client)` against a server in this process that answers everything with `handler`;
    its result.
    """

    async def serve(asked: web.Request) -> web.StreamResponse:
        return await handler(asked)

    async def main() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        client = ServerClient(
            "engine-3", url, Keys("the-api-key", "the-admin-key"), config=EngineConfig()
        )
        try:
            return await use(client)
        finally:
            await client.close()
            await runner.cleanup()

    return run_steadily(asyncio.wait_for(main(), 30))
