"""Advantages and returns of a batch, for callers outside of a run; training does not use this.

Training computes them in `rlcore.trainer.credit`. This module calls the same code once, on rank 0,
and sends the result to every rank. It needs no Megatron, GPU or torch.distributed: a CPU unit test
can call it with a stub of `megatron.core.mpu` (see `backends.megatron.testing`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from backends.megatron.parallel.agreement import broadcast_json, raise_on_all_ranks
from backends.megatron.parallel.state import ParallelState
from rlcore.algorithms import Advantages, GuardedEstimator, MissingInputError, estimator_keywords
from rlcore.algorithms.plugin_guard import SOURCES
from rlcore.algorithms.types import symbol_of
from rlcore.config import Config
from rlcore.config.checks.algorithm import coefficient_ignored, reward_terms
from rlcore.config.derived import coefficients
from rlcore.data.batch import RolloutBatch
from rlcore.errors import ConfigError
from rlcore.trainer.credit import CreditAssignment
from rlcore.trainer.objective import Objective

_KL_FROM = ("logprobs", "ref_logprobs")


def compute_advantages_and_returns(
    batch: RolloutBatch | None, config: Config, parallel: ParallelState
) -> Advantages:
    """Compute advantages by `config.algorithm.estimator`, normalised as configured.

    Collective where `parallel` has groups: rank 0 passes the batch and computes, the other ranks
    pass None and receive the result. Without groups this process computes, whatever its rank.

    If the batch has log-probs of policy and reference, their KL by `algorithm.kl.reward_kind` is
    stored raw as `batch.vectors["kl"]`; no estimator can change it.

    Args:
        batch: `vectors` holds `rewards` and `group_ids`, [B], and the estimator's further inputs:
            `logprobs`, `ref_logprobs`, `values`, ..., [M] trainable tokens.

    Returns:
        Advantages [M], and the critic's targets `returns` [M] where the estimator has any.

    Raises:
        MissingInputError: the batch lacks a vector that the estimator needs.
        ConfigError: the configuration names no estimator, or a coefficient that the estimator
            would ignore.
        RunFailed: the estimator broke a rule: see `CreditAssignment.assign`. On the other ranks,
            any error on rank 0.
    """
    if not parallel.is_distributed:
        return _compute(batch, config)
    result = None
    with raise_on_all_ranks(parallel, "computing the advantages"):
        if parallel.rank == 0:
            result = _compute(batch, config)
    return _from_rank_0(result, parallel)


def _compute(batch: RolloutBatch | None, config: Config) -> Advantages:
    if batch is None:
        raise ValueError(
            "batch: got None on the rank that computes (rank 0, or a process without"
            " torch.distributed)"
        )
    _check_config(config)
    credit = CreditAssignment(config, Objective(config.algorithm))
    _check_vectors(batch, credit.estimator)
    return credit.advantages(batch)


def _check_config(config: Config) -> None:
    """Refuse keys that would be ignored, in a configuration that was not loaded from a file."""
    if config.is_sft:
        raise ConfigError(
            "algorithm.loss.name: 'sft' learns from labels and has no advantages; choose a policy"
            " loss"
        )
    problems = [str(problem) for problem in reward_terms(config)]
    keywords = estimator_keywords(config.algorithm.estimator.name)
    unread = [
        name for name, value in coefficients(config).items() if value and name not in keywords
    ]
    problems += [str(coefficient_ignored(config, name)) for name in unread]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _check_vectors(batch: RolloutBatch, estimator: GuardedEstimator) -> None:
    lacking = {"rewards", "group_ids", *estimator.needs} - batch.names
    sources = {name: SOURCES.get(name, "RolloutBatch.from_samples makes it") for name in lacking}
    if "kl" in lacking:
        del sources["kl"]
        sources |= {
            name: f"'kl' is computed from it; {SOURCES[name]}"
            for name in _KL_FROM
            if name not in batch.vectors
        }
    if sources:
        wanted = (
            f"{name!r} (float {symbol_of(name)}; {source})"
            for name, source in sorted(sources.items())
        )
        raise MissingInputError(
            f"estimator {estimator.name!r}: batch.vectors lacks {', '.join(wanted)}. "
            f"Set it with batch.set(name, tensor); the batch has {sorted(batch.names)}"
        )


def _from_rank_0(result: Advantages | None, parallel: ParallelState) -> Advantages:
    vectors: dict[str, Tensor] = {}
    if result is not None:
        vectors = {"advantages": result.advantages}
        if result.returns is not None:
            vectors["returns"] = result.returns
    layout = [(name, str(v.dtype).removeprefix("torch."), v.numel()) for name, v in vectors.items()]
    received: dict[str, Tensor] = {}
    for name, dtype, size in broadcast_json(layout, 0, parallel.control_group):
        vector = (
            vectors[name].contiguous()
            if vectors
            else torch.empty(size, dtype=getattr(torch, dtype))
        )
        dist.broadcast(vector, 0, group=parallel.control_group)
        received[name] = vector
    return Advantages(received["advantages"], received.get("returns"))
