"""A rank of the parity tests: run every case of the payload; rank 0 writes the results."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from cases import gradient, make_batch, make_config, make_plan, make_vectors, plan_of
from rank_main import build_backend, main
from torch import Tensor, nn

from backends.megatron import MegatronBackend
from backends.megatron.cpu.shim import importing_megatron
from backends.megatron.weights.export import WeightExporter
from rlcore.config.sections.policy import LoraConfig
from rlcore.data.batch import RolloutBatch
from rlcore.data.packing.plan import MinibatchPlan, plan_minibatches
from rlcore.data.sample import Sample
from rlcore.runs.rollouts import read_rollouts
from rlcore.trainer.credit import CreditAssignment
from rlcore.trainer.loop import put
from rlcore.trainer.objective import Objective

with importing_megatron():
    from backends.megatron.model import grouped_experts
    from backends.megatron.model.attention import core
    from backends.megatron.model.mtp import MultiTokenPrediction


def weights(backend: MegatronBackend, model: Any, head: str) -> dict[str, Tensor]:
    """Every weight that is trained under its Hugging Face name, on rank 0."""
    lora = backend.config.policy.lora
    named = exported(backend, model, head)
    if lora is None:
        return named
    trained = {name: named[name] for name in named.keys() & {"score.weight"}}
    return trained | exported(backend, model, head, adapters=lora)


def exported(
    backend: MegatronBackend, model: Any, head: str, adapters: LoraConfig | None = None
) -> dict[str, Tensor]:
    """Every weight, or the factors of every adapter, on rank 0."""
    exporter = WeightExporter(
        model.chunks,
        model.arch,
        backend.parallel,
        dtype=torch.float32,
        head=head,
        adapters=adapters,
    )  # type: ignore[arg-type]
    named: dict[str, Tensor] = {}
    for bucket, flat in exporter.export_buckets():
        if flat is not None:
            named.update((name, tensor.to("cpu", copy=True)) for name, tensor in bucket.views(flat))
    return named


def padding_is_zero(chunks: list[nn.Module], backend: MegatronBackend) -> bool:
    """No step may touch the rows that pad the vocabulary."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                first = backend.parallel.tp_rank * parameter.size(0)
                if parameter[max(backend.vocab_size - first, 0) :].count_nonzero():
                    return False
    return True


def read_plans(case: dict[str, Any]) -> list[MinibatchPlan] | None:
    """Run one case.

    `plan`: one name or several; `plans`: written out; None: the backend plans by the token budget.
    """
    if "plans" in case:
        return [plan_of(plan) for plan in case["plans"]]
    names = case.get("plan")
    return (
        [make_plan(name) for name in ([names] if isinstance(names, str) else names)]
        if names
        else None
    )


def read_batch(case: dict[str, Any], folder: Path) -> RolloutBatch:
    """`samples`: a file of recorded ones; None: the batch that all cases work on."""
    if "samples" not in case:
        return make_batch()
    return RolloutBatch.from_samples(
        [Sample.from_record(record) for record in read_rollouts(folder / case["samples"])]
    )


def run(case: dict[str, Any], folder: Path) -> None:
    # what a GPU has: torch's grouped matmul, which has a kernel for the CPU too
    grouped = patch.object(grouped_experts, "groups_matmuls", lambda experts, hidden: True)
    # what long prefixes have
    merged = patch.object(core, "merges", lambda layout, *_, **__: layout.prefixes is not None)
    with (
        grouped if case.get("grouped") else nullcontext(),
        merged if case.get("merged") else nullcontext(),
    ):
        run_case(case, folder)


def vectors_of(
    case: dict[str, Any],
    credit: CreditAssignment,
    batch: RolloutBatch,
    result: dict[str, Any],
    plans: list[MinibatchPlan] | None,
) -> dict[str, Tensor]:
    """The vectors that rank 0 assigns: made up, or what a training step would assign."""
    vectors = make_vectors(batch.num_trainable)
    if "algorithm" in case:
        put(batch, result["scores"])
        put(batch, result["reference"], prefix="ref_")
        put(batch, result.get("values"))
        minibatches = [
            sorted(i for d in range(len(plan.microbatches)) for i in plan.sequences(d))
            for plan in plans or ()
        ]
        vectors = credit.assign(batch, minibatches)
    for name in case.get("leave_out", []):
        del vectors[name]
    if case.get("own_old"):
        vectors["old_logprobs"] = result["scores"]["logprobs"]
    if case.get("poison"):
        vectors["advantages"][0] = float("inf")
    return vectors


def distance(backend: MegatronBackend) -> dict[str, float]:
    """The distance that the updates moved the policy, the same on every rank."""
    randomness = torch.get_rng_state()
    found = backend.step_distance().reduce()
    assert torch.equal(randomness, torch.get_rng_state()), "the pass drew random numbers"
    assert all(chunk.training for chunk in backend.policy.chunks)
    every: list[Any] = [None] * backend.world_size
    dist.all_gather_object(every, found)
    assert all(one == found for one in every), every
    return found


def run_case(case: dict[str, Any], folder: Path) -> None:
    begin = time.perf_counter()
    config = make_config(case, folder.parent / "models")
    objective = Objective(config.algorithm)
    backend = build_backend(config, reference=True, critic=case.get("critic", False))
    root = backend.rank == 0
    batch = read_batch(case, folder.parent) if root else None
    plans = read_plans(case)
    if root and plans is None:
        assert batch is not None
        config.policy.max_tokens_per_microbatch = case["max_tokens"]
        plans = plan_minibatches(backend.plan_rules, batch, [range(batch.num_sequences)])
    backend.load_batch(batch, plans if root else None)
    result: dict[str, Any] = {
        "scores": backend.score("policy", entropy=True),
        "reference": backend.score("reference"),
    }
    models = {"policy": (backend.policy, "lm")}
    if backend.critic is not None:
        result["values"] = backend.score("critic")
        models["critic"] = (backend.critic, "value")
    credit = CreditAssignment(config, objective)
    vectors = None if batch is None else vectors_of(case, credit, batch, result, plans)
    backend.assign(vectors)
    if "load" in case:
        backend.load(folder.parent / case["load"])
    if case.get("silent"):
        backend.update(0)  # which gives the optimizers moments
        if vectors is not None:
            vectors = {**vectors, "advantages": vectors["advantages"].zero_()}
        backend.assign(vectors)
    before = {name: weights(backend, *model) for name, model in models.items()}
    for k in case.get("updates", [case.get("update", 0)] * case.get("steps", 1)):
        update = backend.update(k)
    if case.get("distance"):
        result["distance"] = distance(backend)
    result["updated"] = backend.updated_vectors()
    result["old_logprobs"] = None if vectors is None else vectors.get("old_logprobs")
    after = {name: weights(backend, *model) for name, model in models.items()}
    result["metrics"] = update.metrics
    result["skipped"] = (update.not_finite, update.without_signal)
    result["gradients"] = {
        m: {k: gradient(before[m][k], after[m][k]) for k in before[m]} for m in models
    }
    result["moved"] = {k: after["policy"][k] - v for k, v in before["policy"].items()}
    result["unchanged"] = {
        m: all(torch.equal(before[m][k], after[m][k]) for k in before[m]) for m in models
    }
    if config.policy.mtp_coef:
        result["predicting"] = {
            name: any(isinstance(part, MultiTokenPrediction) for part in model.chunks[-1].modules())
            for name, model in (("policy", backend.policy), *backend.frozen.items())
        }
    if config.policy.lora is not None:
        result["merged"] = exported(backend, *models["policy"])
    result["before"] = before["policy"]
    result["after"] = after["policy"]
    if "save" in case:
        backend.save(folder.parent / case["save"])
    result["padding_is_zero"] = padding_is_zero(list(backend.policy.chunks), backend)
    every: list[Any] = [None] * backend.world_size
    dist.all_gather_object(every, (update.metrics, result["skipped"], result["padding_is_zero"]))
    assert all(one == every[0] or case.get("poison") for one in every), every
    assert all(one[1:] == every[0][1:] for one in every), every
    result["micro_batches"] = len(backend._batch.micro_batches(case.get("update", 0)))
    backend.close()
    result["seconds"] = time.perf_counter() - begin
    if root:
        torch.save(result, folder / f"{case['name']}.pt")


if __name__ == "__main__":
    main(run)
