"""Trainer and server share a GPU: real release and resume routes, an offloaded trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from server_kit import START_S, Served
from torch.distributed import HashStore
from transformers import AutoModelForCausalLM

from backends.megatron import MegatronBackend
from rlcore.config import Config
from rlcore.data.generation import Completion, GenerateRequest, SamplingParams
from rlcore.errors import EngineFailed
from rlcore.runs.versions import VersionJournal
from rlcore.trainer.gpu_sharing import GpuPhase, GpuSharing
from rlcore.trainer.objective import Objective
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.weight_publisher import WeightPublisher
from rollout.engines.sglang.engine import SGLangEngine
from rollout.fleet.engine_memory import FleetMemory
from rollout.fleet.fleet import Fleet
from tests.integration.workspace import LEARNING, Workspace
from tests.one_rank import OneRank

PROMPT = np.array([5, 6, 7, 8, 9], dtype=np.int32)


@dataclass
class Shared:
    served: Served
    engine: SGLangEngine
    fleet: Fleet
    backend: MegatronBackend
    publisher: WeightPublisher
    sharing: GpuSharing

    def generate(self, draw: int) -> Completion:
        request = GenerateRequest(PROMPT, SamplingParams(max_new_tokens=8), draw)
        [[completion]] = self.served.call(self.engine.generate([request]))
        return completion

    def expected_logprobs(self, completion: Completion) -> torch.Tensor:
        """Compute log-probs by transformers, with the weights that the trainer publishes."""
        model = AutoModelForCausalLM.from_pretrained(self.served.model, dtype=torch.float32).eval()
        weights = {
            n: t
            for bucket, flat in self.backend.export_buckets()
            if flat is not None
            for n, t in bucket.views(flat)
        }
        model.load_state_dict(weights, strict=False)
        tokens = torch.from_numpy(np.concatenate([PROMPT, completion.tokens])).long()
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)
        return logprobs[len(PROMPT) - 1 : -1].gather(1, tokens[len(PROMPT) :, None])[:, 0]

    def move_the_policy(self) -> None:
        with torch.no_grad():
            for parameter in self.backend.policy.chunks[0].parameters():
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05
                )


@pytest.fixture
def shared(served: Served, tmp_path: Path) -> Iterator[Shared]:
    engine_config = served.config.model_copy(update={"colocated": True})
    config = Config.model_validate({
        "run": {"name": "colocated"}, "data": {"paths": ["unused"]}, "training": {"steps": 1},
        "model": {"path": str(served.model), "dtype": "fp32"},
    })  # fmt: skip
    config.rollout.engine = engine_config
    backend = MegatronBackend(
        config,
        Objective(config.algorithm),
        with_reference=False,
        with_critic=False,
        total_steps=1,
        device="cpu",
    )
    engine = SGLangEngine(
        served.external(), config=engine_config, keys=served.keys, model_path=str(served.model)
    )
    fleet = Fleet([engine], engine_config)
    sync = RankSync(HashStore(), 0, 1, timeout_s=60)
    sink = OneRank(config, fleet, served.loop.loop)
    publisher = WeightPublisher(
        backend, sync, sink.ranks, journal=VersionJournal(tmp_path / "versions.jsonl"), timeout_s=60
    )
    backend.offload()
    served.call(fleet.start())
    sharing = GpuSharing(
        sync, backend, FleetMemory(fleet, engine_config, served.loop), timeout_s=60
    )
    yield Shared(served, engine, fleet, backend, publisher, sharing)
    sharing.switch_to(GpuPhase.HANDOVER)
    publisher.publish(1)
    sharing.switch_to(GpuPhase.GENERATING)
    sink.close()
    backend.close()
    served.call(fleet.close())
    served.call(engine.close())


def offloaded_bytes(backend: MegatronBackend) -> int:
    """Bytes of the backend's models that are off the device."""
    return sum(tensors.num_bytes for tensors in backend._offloadable)


def test_turns_with_a_real_server(shared: Shared) -> None:
    """In two steps: the server cannot generate in between, and then has the new weights."""
    sharing = shared.sharing
    sharing.switch_to(GpuPhase.TRAINING)
    seen = []
    for step in range(2):
        assert shared.served.call(shared.engine.health())["version"] is None
        with pytest.raises(EngineFailed, match="its weights"):
            shared.served.call(shared.engine.resume())
        shared.move_the_policy()
        sharing.switch_to(GpuPhase.HANDOVER)
        assert shared.publisher.publish(step) == ""
        sharing.switch_to(GpuPhase.GENERATING)
        assert offloaded_bytes(shared.backend) > 0
        completion = shared.generate(step)
        assert [span.version for span in completion.versions] == [step + 1]
        np.testing.assert_allclose(
            completion.logprobs, shared.expected_logprobs(completion).numpy(), atol=1e-4
        )
        seen.append(completion.logprobs[0])
        sharing.switch_to(GpuPhase.TRAINING)
        assert offloaded_bytes(shared.backend) == 0
    assert seen[0] != seen[1]
    assert [str(member.health.state) for member in shared.fleet.members] == ["serving"]
    sharing.switch_to(GpuPhase.HANDOVER)


def test_a_checkpoint_in_between_costs_no_publication(shared: Shared) -> None:
    """The server keeps its weights while its cache is released, and generates as before."""
    sharing = shared.sharing
    sharing.switch_to(GpuPhase.HANDOVER)
    assert shared.publisher.publish(0) == ""
    sharing.switch_to(GpuPhase.GENERATING)
    before = shared.generate(0)
    sharing.switch_to(GpuPhase.HANDOVER)
    sharing.switch_to(GpuPhase.GENERATING)
    after = shared.generate(1)
    assert (
        [span.version for span in after.versions]
        == [span.version for span in before.versions]
        == [1]
    )
    np.testing.assert_allclose(after.logprobs, shared.expected_logprobs(after).numpy(), atol=1e-4)


@pytest.mark.full
def test_a_whole_run(tiny_model: Path, tmp_path: Path) -> None:
    """Two ranks and a server of the run's own, with an evaluation and a checkpoint in each step."""
    workspace = Workspace(tmp_path, tiny_model)
    run = workspace.train(
        "colocated",
        *LEARNING,
        "training.steps=2",
        "policy.parallel.tensor=2",
        "cluster.processes_per_node=2",
        f"evaluation.paths=[{tmp_path / 'data' / 'heldout.jsonl'}]",
        "evaluation.max_prompts=8",
        "evaluation.every=1",
        "checkpoint.every=1",
        "rollout.engine.logprobs_every=1",
        f"cluster.start_timeout_s={START_S}",
        "rollout.engine={kind: sglang, threads: 1, device: cpu, colocated: true,"
        f" start_timeout_s: {START_S}}}",
    )
    assert run.code == 0, run.err
    assert [row["step"] for row in run.metrics] == [0, 1, 2]
    assert all(row["time/handover"] > 0 and "eval/score" in row for row in run.metrics)
    assert all(row["rollout/train_rollout_logprob_diff"] < 1e-5 for row in run.metrics[1:])
