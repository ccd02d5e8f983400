"""The cases of the covering array, run by parity_ranks.py and compared to one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from cases import ENTROPY_COEF, KL_COEF, LENGTHS
from covering import Case
from spawn import run_ranks
from torch import Tensor

from rlcore.data.packing.plan import fill
from tests import nccl_rules

RANKS = Path(__file__).with_name("parity_ranks.py")
DEADLINE_S = 600
BESIDE_GPUS = {"RANKS_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}

# minibatches -> [optimizer step][data-parallel rank of two] = sequences. Somewhere the second rank
# has no trainable token (2 and 3) or no sequence at all; one process holds both parts.
SPLITS: dict[int, list[list[list[int]]]] = {
    1: [[[0, 1, 4, 5, 7, 8], [2, 3, 6]]],
    4: [[[0, 4], [2]], [[1], [3]], [[5, 7], []], [[8], [6]]],
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"estimator": {"name": "grpo"}, "kl": {"loss_coef": KL_COEF, "loss_kind": "k3"},
        "entropy_coef": ENTROPY_COEF,
             "old_logprobs": "rollout"},
    "ppo": {"estimator": {"name": "ppo"}, "kl": {"reward_coef": 0.05}, "entropy_coef": ENTROPY_COEF,
        "old_logprobs": "rollout"},
}  # fmt: skip
MODEL_OF = {"dense": "qwen3", "moe": "qwen3_moe"}


def plans(case: Case) -> list[list[list[list[int]]]]:
    """[optimizer step][data-parallel rank][micro-batch] = sequences, by the token budget."""
    found = []
    for ranks in SPLITS[case.minibatches]:
        shares = ranks if case.dp == 2 else [[i for share in ranks for i in share]]
        bins = case.pp if case.vpp > 1 else 1
        while True:
            packed = [fill(LENGTHS, share, case.budget, bins) for share in shares]
            needed = max(map(len, packed))
            needed += -needed % (case.pp if case.vpp > 1 else 1)
            if all(len(share) == needed for share in packed):
                break
            bins = max(needed, bins + 1) if needed == bins else needed
        found.append(packed)
    return found


def updated(case: Case) -> int:
    """The optimizer step that is compared; it varies over the layouts."""
    return (case.ranks + case.pp + case.sp + case.ep) % case.minibatches


def model_of(case: Case) -> str:
    """The model of a case."""
    return MODEL_OF[case.family] + "_mqa" * (case.kv_heads == 1) + "_tied" * case.tied


def payload(case: Case, *, dtype: str = "fp32") -> dict[str, Any]:
    parallel = {
        "tensor": case.tp, "sequence": case.sp, "pipeline": case.pp, "virtual_pipeline": case.vpp,
        "context": case.cp,
    }  # fmt: skip
    if case.family == "moe":
        parallel |= {"expert": case.ep, "expert_tensor": case.etp}
    return {
        "name": case.name, "model": model_of(case),
        "parallel": parallel, "plans": plans(case),
        "update": updated(case), "algorithm": ALGORITHMS[case.algorithm],
        "critic": case.algorithm == "ppo",
        "reference": f"{MODEL_OF[case.family]}_other", "distributed": case.distributed,
        "dtype": dtype,
    }  # fmt: skip


def reference_of(case: Case) -> dict[str, Any]:
    """The same optimizer step in one process, in one micro-batch, with nothing computed once."""
    alone = Case(
        case.family,
        case.kv_heads,
        tied=case.tied,
        minibatches=case.minibatches,
        budget=1000,
        algorithm=case.algorithm,
    )
    name = f"{alone.name}-{updated(case)}"
    return {**payload(alone), "update": updated(case), "share": "off", "name": name}


@dataclass(frozen=True)
class Row:
    """The result of a case: distances from one process."""

    case: Case
    gradient: float  # the worst weight's |g - g1| / |g1|; the critic's too
    weight: str  # its name
    logprob: float  # the worst token's |logp - logp1|; entropies and values too
    seconds: float
    micro_batches: int


def run(
    chosen: Sequence[Case],
    folder: Path,
    *,
    dtype: str = "fp32",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Row]:
    """Run the cases, one launch per world size, and one for all references.

    `environment` is of the cases' ranks. The references run on the CPU.
    """
    references = {(one := reference_of(case))["name"]: one for case in chosen}
    run_ranks(
        RANKS,
        1,
        folder / "references",
        list(references.values()),
        deadline_s=DEADLINE_S,
        environment=BESIDE_GPUS if environment.get("RANKS_DEVICE") == "cuda" else {},
    )
    for size in sorted({case.ranks for case in chosen}):
        of_size = [case for case in chosen if case.ranks == size]
        payloads = [payload(case, dtype=dtype) for case in of_size]
        run_ranks(
            RANKS,
            size,
            folder / f"world{size}",
            payloads,
            deadline_s=DEADLINE_S,
            environment=environment,
        )
        for case in of_size:
            got = torch.load(folder / f"world{size}" / f"{case.name}.pt", weights_only=False)
            expected = torch.load(
                folder / "references" / f"{reference_of(case)['name']}.pt", weights_only=False
            )
            yield compare(case, got, expected)


def differences_under_nccl_rules(chosen: Sequence[Case], folder: Path) -> list[str]:
    """After `run` in this folder: run them again by NCCL's rules; what is not equal to the bit."""
    found = []
    for size in sorted({case.ranks for case in chosen} - {1}):
        of_size = [case for case in chosen if case.ranks == size]
        again = folder / f"nccl_rules{size}"
        payloads = [payload(case) for case in of_size]
        run_ranks(RANKS, size, again, payloads, deadline_s=DEADLINE_S, environment=nccl_rules.ON)
        assert nccl_rules.INSTALLED in (again / "rank0.log").read_text()
        for case in of_size:
            gloo, ours = (
                torch.load(of / f"{case.name}.pt", weights_only=False)
                for of in (folder / f"world{size}", again)
            )
            found += [f"{case.name}: {name}" for name in unequal(gloo, ours)]
    return found


def unequal(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The results of two runs of a case that are not equal to the bit."""
    kinds = ("scores", "reference", "values", "metrics")
    pairs = {
        f"{kind} {key}": (value, other[kind][key])
        for kind in kinds
        if kind in one
        for key, value in one[kind].items()
    }
    pairs |= {
        f"gradient of {model}: {key}": (value, other["gradients"][model][key])
        for model, gradients in one["gradients"].items()
        for key, value in gradients.items()
    }
    # NaN is a metric of an empty selection
    return [
        name
        for name, (a, b) in pairs.items()
        if not torch.equal(torch.as_tensor(a).nan_to_num(), torch.as_tensor(b).nan_to_num())
    ]


def compare(case: Case, got: dict[str, Any], expected: dict[str, Any]) -> Row:
    distances = {
        f"{model}: {name}": distance(got["gradients"][model][name], gradient, _scale(gradients))
        for model, gradients in expected["gradients"].items()
        for name, gradient in gradients.items()
    }
    assert all(
        got["gradients"][model].keys() == gradients.keys()
        for model, gradients in expected["gradients"].items()
    )
    assert all(_scale(gradients) > 0 for gradients in expected["gradients"].values()), (
        "nothing to compare: no gradient at all"
    )
    worst = max(distances, key=lambda name: distances[name])
    outputs = [(got[kind][key], value) for kind in ("scores", "reference",
        "values") if kind in expected
               for key, value in expected[kind].items()]  # fmt: skip
    return Row(case, distances[worst], worst, max(float((a - b).abs().max()) for a, b in outputs),
        got["seconds"],
               got["micro_batches"])  # fmt: skip


def _scale(gradients: dict[str, Tensor]) -> float:
    return float(torch.stack([g.double().norm() for g in gradients.values()]).norm())


def distance(got: Tensor, expected: Tensor, whole: float) -> float:
    """The error relative to the weight's gradient.

    A gradient of round-off alone (an expert without tokens) is compared to the whole gradient.
    """
    floor = max(float(expected.double().norm()), 1e-4 * whole)
    error = float((got.double() - expected.double()).norm() / floor)
    return error if error == error else float("inf")
