"""Adapters of a real server, published as versions, against W + scale B A in transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from publication_kit import (
    PROMPT,
    TOLERANCE,
    Client,
    Oracle,
    Weights,
    flatten,
    folder_weights,
    generate,
    layout,
    publish,
    publishing,
    random_weights,
    request,
)
from safetensors.torch import save_file
from server_kit import Served, serving

from rlcore.adapter_folder import ADAPTER_FILE, SETTINGS_FILE, AdapterFolder, read_policies
from rlcore.config.sections.policy import LoraConfig
from rlcore.data.generation import Completion
from rlcore.data.sample import VersionSpan
from rlcore.errors import RunFailed, UserError
from rlcore.weights import PEFT_PREFIX, Bucket, cut_buckets
from rollout.engines.sglang.adapters import server_arguments
from rollout.engines.sglang.engine import SGLangEngine

ATTENTION = ["q_proj", "v_proj", "o_proj"]
TARGETS = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
LORA = LoraConfig(rank=4, alpha=6.0, targets=TARGETS)
SEED = 50


@pytest.fixture(scope="module")
def earlier(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A frozen policy of another rank and other targets: a PEFT folder."""
    folder = tmp_path_factory.mktemp("earlier")
    factors = adapters(folder_weights(tiny_model), SEED)
    own = {PEFT_PREFIX + name: f.clone() for name, f in factors.items() if "self_attn" in name}
    save_file(own, folder / ADAPTER_FILE)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": LORA.alpha, "target_modules": ATTENTION}
    (folder / SETTINGS_FILE).write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def adapting(
    tiny_model: Path, earlier: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("adapting") / "server.log"
    policies = read_policies({"earlier": str(earlier)}).values()
    # All linear layers, named one by one: the versions' own targets are among them.
    given = server_arguments(LoraConfig(rank=4, alpha=6.0), "cpu", str(tiny_model), policies)
    assert given["lora_target_modules"] == sorted([*TARGETS, "k_proj"])
    with serving(tiny_model, log, server=given) as served:
        yield served


@pytest.fixture
def client(adapting: Served, earlier: Path, tmp_path: Path) -> Iterator[Client]:
    """Another trainer of the server: it publishes the base again."""
    policies = {"earlier": str(earlier)}
    with publishing(adapting, tmp_path, lora=LORA, policies=policies) as client:
        yield client


def adapters(base: Weights, seed: int) -> Weights:
    """Factors of every targeted matrix, so large that two seeds disagree by nats."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS:
            rows, width = weight.shape
            rank = LORA.rank if "mlp" in module else 2
            a = torch.randn(rank, width, generator=generator)
            found[f"{module}.lora_A.weight"] = a / rank
            found[f"{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) / rank
    return found


def merged(base: Weights, factors: Weights) -> Weights:
    found = dict(base)
    for name, a in factors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            product = factors[f"{module}.lora_B.weight"] @ a * (LORA.alpha / len(a))
            found[f"{module}.weight"] = base[f"{module}.weight"] + product
    return found


def one_bucket(factors: Weights) -> tuple[Bucket, ...]:
    buckets = cut_buckets([spec for bucket in layout(factors) for spec in bucket.tensors], 1 << 30)
    assert len(buckets) == 1
    return buckets


def publish_base(client: Client, base: Weights) -> bool:
    buckets = layout(base)
    if not client.sink.prepare(buckets, is_base=True):
        return False
    for bucket in buckets:
        client.sink.send(bucket, flatten(bucket, base))
    client.sink.finish(None)
    return True


def publish_adapters(client: Client, factors: Weights, version: int) -> None:
    publish(client.sink, factors, version, one_bucket(factors))


def loaded(served: Served, engine: SGLangEngine) -> set[str]:
    """The names of the adapters that the server has."""
    models = served.call(engine._running.get("/v1/models"))["data"]
    return {model["id"] for model in models if model["id"].startswith("policy-")}


@pytest.mark.timeout(900)
def test_ten_versions_over_one_base(adapting: Served, client: Client) -> None:
    """The base is published once; every token is of its request's adapter; memory stays flat."""
    base = random_weights(adapting.model, SEED)
    assert publish_base(client, base)
    assert not publish_base(client, base), "the engine holds it"
    sizes = []
    for version in range(1, 11):
        factors = adapters(base, SEED + version)
        publish_adapters(client, factors, version)
        oracle = Oracle(adapting.model, merged(base, factors))
        for draw in (0, 1):
            # the second one finds the prompt in the cache of this version alone
            completion = generate(adapting, client.engine, draw=draw)
            assert completion.versions == (VersionSpan(version, 0, 12),)
            assert oracle.errors(PROMPT, completion).max() < TOLERANCE
        names = {name.split(".")[0] for name in loaded(adapting, client.engine)}
        assert names <= {"policy-earlier", f"policy-{version - 1}", f"policy-{version}"}
        sizes.append(memory(adapting))
    assert sizes[-1] < 1.1 * sizes[2]


def test_a_frozen_policy_answers_beside_every_version(
    adapting: Served, client: Client, earlier: Path
) -> None:
    """It is loaded once for a base, and no request of one policy sees another's keys and values."""
    engine = client.engine
    frozen = AdapterFolder.read(str(earlier), "rollout.policies.earlier").factors()
    base = random_weights(adapting.model, SEED)
    publish_base(client, base)
    oracle = Oracle(adapting.model, merged(base, frozen))
    for version in (1, 2):
        factors = adapters(base, version)
        publish_adapters(client, factors, version)
        asked = [request(), replace(request(), policy="earlier", draw=1), request(draw=2)]
        own, other, again = adapting.call(engine.generate(asked))
        assert oracle.errors(PROMPT, other[0]).max() < TOLERANCE
        trained = Oracle(adapting.model, merged(base, factors))
        for completion in (*own, *again):
            assert trained.errors(PROMPT, completion).max() < TOLERANCE
    names = [name.split(".")[0] for name in loaded(adapting, engine)]
    assert names.count("policy-earlier") == 1
    with pytest.raises(
        UserError, match=r"asks for the policy 'later', but rollout\.policies has ear"
    ):
        adapting.call(engine.generate([replace(request(), policy="later")]))


def memory(served: Served) -> int:
    process = psutil.Process(served.server.pid)
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


def test_a_request_in_flight_keeps_its_adapter(adapting: Served, client: Client) -> None:
    base = random_weights(adapting.model, SEED)
    publish_base(client, base)
    first, second = (adapters(base, seed) for seed in (1, 2))
    publish_adapters(client, first, 1)
    engine = client.engine
    long = [request(draw=draw, tokens=300) for draw in range(3)]

    def start() -> asyncio.Future[Any]:
        return asyncio.gather(*(engine.generate([one]) for one in long))

    # `drain` would wait for them
    client.sink.publication._mode = "retract"
    running = adapting.call(adapting.started(start, 3 * 20))
    publish_adapters(client, second, 2)
    later = generate(adapting, engine)
    assert later.versions == (VersionSpan(2, 0, 12),)
    assert Oracle(adapting.model, merged(base, second)).errors(PROMPT, later).max() < TOLERANCE
    completions: list[Completion] = [one[0][0] for one in adapting.call(adapting.ended(running))]
    oracle = Oracle(adapting.model, merged(base, first))
    for completion in completions:
        assert completion.versions == (VersionSpan(1, 0, 300),)
        assert oracle.errors(PROMPT, completion).max() < TOLERANCE


def test_the_base_of_a_folder_is_not_trusted(adapting: Served, client: Client) -> None:
    """A new trainer publishes the base, whatever the server holds."""
    base = folder_weights(adapting.model)
    assert publish_base(client, base)
    factors = adapters(base, 4)
    publish_adapters(client, factors, 1)
    completion = generate(adapting, client.engine)
    oracle = Oracle(adapting.model, merged(base, factors))
    assert oracle.errors(PROMPT, completion).max() < TOLERANCE


def test_a_damaged_adapter_is_never_served(adapting: Served, client: Client) -> None:
    """Its checksum ends the server, which a run starts again. Keep this test the last one."""
    base = random_weights(adapting.model, SEED)
    publish_base(client, base)
    engine = client.engine
    factors = adapters(base, 3)
    versions = engine._adapters
    assert versions is not None
    publish_adapters(client, factors, 1)
    [bucket] = one_bucket(factors)
    client.sink.prepare([bucket])
    client.sink.send(bucket, flatten(bucket, factors))
    received = versions._received
    assert received is not None
    whole = dict(received.checksums)
    whole[next(iter(whole))] = "0" * 64
    versions.receive(type(received)(received.payload, received.rank, whole))
    with pytest.raises(RunFailed, match="/load_lora_adapter_from_tensors"):
        client.sink.finish(2)
    assert "adapter sync MISMATCH" in adapting.server.log.read_text()
