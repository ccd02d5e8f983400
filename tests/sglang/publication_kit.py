"""Helpers for tests of publications: an engine on a real server, weights, log-probs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from server_kit import Served
from transformers import AutoModelForCausalLM

from rlcore.adapter_folder import read_policies
from rlcore.config import Config
from rlcore.config.derived import published_adapters
from rlcore.config.sections.policy import LoraConfig
from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.training import TLSConfig
from rlcore.data.generation import Completion, GenerateRequest, SamplingParams
from rlcore.data.sample import VersionSpan
from rlcore.weights import Bucket, TensorSpec, cut_buckets
from rollout.asyncio_utils import LoopThread
from rollout.engines.checks import language_config
from rollout.engines.embedded.model_weights import as_published
from rollout.engines.factories import Keys
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.external import ExternalServer
from rollout.engines.testing import check_engine
from tests.one_rank import OneRank
from tests.static_participants import StaticParticipants

BUCKET_BYTES = 20_000
TOLERANCE = 1e-4  # of log-probs
PROMPT = [3, 14, 15, 9, 26, 5]

Weights = dict[str, torch.Tensor]


def run_config(
    folder: str,
    run_dir: Path,
    engine: EngineConfig,
    *,
    on_update: str = "drain",
    lora: LoraConfig | None = None,
    policies: Mapping[str, str] = MappingProxyType({}),
    **changes: Any,
) -> Config:
    settings = engine.model_dump() | {"health_timeout_s": 60.0} | changes
    return Config.model_validate({
        "run": {"name": "test", "dir": str(run_dir)}, "model": {"path": folder, "dtype": "fp32"},
        "data": {"paths": "none.jsonl"}, "training": {"steps": 1}, "policy": {"lora": lora},
        "rollout": {"engine": settings, "on_update": on_update, "policies": policies},
    })  # fmt: skip


def connect(
    config: Config, url: str, keys: Keys, loop: LoopThread, name: str = "engine-0"
) -> SGLangEngine:
    """Connect to a server that runs already."""
    engine = config.rollout.engine
    model = config.model.path
    connected = SGLangEngine(
        ExternalServer(name, url, model, config=engine, keys=keys, tls=config.cluster.tls),
        config=engine,
        keys=keys,
        model_path=model,
        tls=config.cluster.tls,
        lora=published_adapters(config),
        policies=read_policies(config.rollout.policies),
    )
    loop.call(connected.start(), seconds=60, what="connecting to the server")
    return connected


def config_of(
    served: Served, run_dir: Path, *, tls: TLSConfig | None = None, **changes: Any
) -> Config:
    """The configuration of a run by `served`."""
    config = run_config(str(served.model), run_dir, served.config, **changes)
    config.cluster.tls = tls
    return config


class Client(NamedTuple):
    """An engine by a running server, and what publishes to it."""

    config: Config
    engine: SGLangEngine
    sink: OneRank
    participants: StaticParticipants


def client_of(served: Served, run_dir: Path, **changes: Any) -> Client:
    """Another client of the server; `changes` as of `config_of`."""
    config = config_of(served, run_dir, **changes)
    engine = connect(config, served.url, served.keys, served.loop)
    return Client(config, engine, *sink_over(config, [engine], served.loop))


@contextmanager
def publishing(served: Served, run_dir: Path, **changes: Any) -> Iterator[Client]:
    """A client of the server, while open."""
    client = client_of(served, run_dir, **changes)
    yield client
    client.sink.close()
    served.call(client.engine.close())


def sink_over(
    config: Config, engines: Sequence[SGLangEngine], loop: LoopThread
) -> tuple[OneRank, StaticParticipants]:
    participants = StaticParticipants(engines)
    return OneRank(config, participants, loop.loop), participants


def folder_weights(folder: Path) -> Weights:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def random_weights(folder: Path, seed: int) -> Weights:
    """Make other weights for a folder, large enough that two seeds disagree by nats."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.ones_like(w) if w.dim() == 1 else torch.randn(w.shape, generator=generator) * 0.3
        )
        for name, w in folder_weights(folder).items()
    }


def layout(weights: Mapping[str, torch.Tensor]) -> tuple[Bucket, ...]:
    specs = [
        TensorSpec(name, tuple(w.shape), str(w.dtype).removeprefix("torch."))
        for name, w in weights.items()
    ]
    return cut_buckets(specs, BUCKET_BYTES)


def flatten(bucket: Bucket, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[spec.name].reshape(-1).view(torch.uint8) for spec in bucket.tensors])


def publish(
    sink: OneRank, weights: Weights, version: int, buckets: Sequence[Bucket] | None = None
) -> None:
    """Publish in these buckets; else in several."""
    if buckets is None:
        buckets = layout(weights)
        assert len(buckets) > 1
    sink.prepare(buckets)
    for bucket in buckets:
        sink.send(bucket, flatten(bucket, weights))
    sink.finish(version)


def generate(served: Served, engine: SGLangEngine, **asked: Any) -> Completion:
    [[completion]] = served.call(engine.generate([request(**asked)]))
    return completion


def check_generation(
    served: Served, engine: SGLangEngine, weights: Weights, version: int | None = None, n: int = 1
) -> None:
    """What the server generates is of these weights, and of this version."""
    oracle = Oracle(served.model, weights)
    for [completion] in served.call(engine.generate([request(draw=draw) for draw in range(n)])):
        if version is not None:
            assert completion.versions == (VersionSpan(version, 0, 12),)
        assert oracle.errors(PROMPT, completion).max() < TOLERANCE


def check_update_during_responses(
    served: Served, client: Client, mode: str, version: int, prompt: Sequence[int], *,
    responses: int, used: int,
) -> None:  # fmt: skip
    """Every token carries its weights' version; later requests never use old keys and values.

    The update comes when the responses hold `used` tokens in the cache; again, where a machine that
    stands still lets them end before it.
    """
    engine, sink = client.engine, client.sink
    first_weights, next_weights = (random_weights(served.model, seed) for seed in (1, 2))
    old, new = (Oracle(served.model, weights) for weights in (first_weights, next_weights))
    long = [request(prompt, draw=draw, tokens=300) for draw in range(1, 1 + responses)]

    def start() -> asyncio.Future[Any]:
        return asyncio.gather(*(engine.generate([one]) for one in long))

    for _ in range(5):
        publish(sink, first_weights, version)
        generate(served, engine, prompt=prompt, tokens=2)  # into the cache
        pending = served.call(served.started(start, used))
        publish(sink, next_weights, version + 1)
        later = generate(served, engine, prompt=prompt, draw=9)
        assert later.versions == (VersionSpan(version + 1, 0, 12),)
        assert new.errors(prompt, later).max() < TOLERANCE
        completions = [answer[0][0] for answer in served.call(served.ended(pending))]
        met = [one.finish_reason == "abort" or len(one.versions) > 1 for one in completions]
        if mode == "drain" or all(met):
            break
        version += 2
    for completion in completions:
        made = len(completion.tokens)
        first = completion.versions[0]
        assert first.version == version
        assert 0 < first.end <= made
        assert old.errors(prompt, completion)[: first.end].max() < TOLERANCE
        if mode in ("drain", "abort"):
            assert completion.versions == (first,)
            assert completion.finish_reason == ("length" if mode == "drain" else "abort")
            continue
        assert completion.finish_reason == "length"
        assert completion.versions == (first, VersionSpan(version + 1, first.end, made))
        errors = new.errors(prompt, completion)[first.end :]
        assert (errors.max() < TOLERANCE) == (mode == "retract")


def check_contract(served: Served, run_dir: Path) -> None:
    """By another client of the server, for which `kill` is to leave it."""
    config = config_of(served, run_dir)

    def another() -> SGLangEngine:
        return SGLangEngine(
            served.external(),
            config=config.rollout.engine,
            keys=served.keys,
            model_path=str(served.model),
        )

    report = check_engine(another, config=config)
    assert {rule.name for rule in report.skipped} == {"repeatable"}


def checksums(served: Served, engine: SGLangEngine) -> dict[str, str]:
    """Checksums of the tensors of a server of one rank."""
    asked = {"action": "checksum", "selector": "target"}
    [rank] = served.call(engine._control("/weights_checker", asked))["ranks"]
    return dict(rank["checksums"])


def request(prompt: Sequence[int] = PROMPT, *, draw: int = 0, tokens: int = 12) -> GenerateRequest:
    return GenerateRequest(
        np.array(prompt, dtype=np.int32), SamplingParams(max_new_tokens=tokens), draw=draw
    )


class Oracle:
    """A folder's model in transformers, with given weights."""

    def __init__(self, folder: Path, weights: Weights) -> None:
        self._model = AutoModelForCausalLM.from_config(
            language_config(str(folder)), dtype=torch.float32
        ).eval()
        with torch.no_grad():
            for name, held in as_published(self._model):
                held.copy_(weights[name])

    def distributions(self, prompt: Sequence[int], completion: Completion) -> torch.Tensor:
        """Log-probs [m, V] at temperature 1."""
        with torch.no_grad():
            logits = self._model(torch.tensor([[*prompt, *completion.tokens.tolist()]])).logits[0]
        return logits.log_softmax(-1)[len(prompt) - 1 : -1]

    def errors(self, prompt: Sequence[int], completion: Completion) -> NDArray[np.float64]:
        """|log-prob of the engine - of this model| of each token, [m]."""
        tokens = torch.tensor(completion.tokens.tolist())
        expected = self.distributions(prompt, completion)[torch.arange(len(tokens)), tokens].numpy()
        return np.abs(expected - completion.logprobs)
