"""Checks of speculative decoding: SGLang servers whose draft model proposes tokens.

A draft may change how fast tokens are made. Where it would change which tokens, or what is reported
of them, the configuration is refused.
"""

from __future__ import annotations

import os

from rlcore.config.checks.engine import ENGINE, SERVER, server_argument
from rlcore.config.derived import generates, truncates
from rlcore.config.sections.base import Found
from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.root import Config

ALGORITHM = "speculative_algorithm"
DRAFT_PATH = "speculative_draft_model_path"
TOPK = "speculative_eagle_topk"
_THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def drafts(config: Config) -> Found:
    """A server that drafts samples from the policy, and reports of it what the trainer needs."""
    engine = config.rollout.engine
    if engine.kind != "sglang" or not generates(config) or not has_draft(engine):
        return
    for name in _THRESHOLDS:
        if (got := server_argument(engine, name)) not in (None, 1):
            yield (
                f"{SERVER}.{name}",
                f"got {got!r}, expected 1, with which SGLang samples from the policy and not from"
                " something nearer to the draft: leave it out",
            )
    if server_argument(engine, "speculative_adaptive"):
        yield (
            f"{SERVER}.speculative_adaptive",
            "got true, with which SGLang 0.5.23 counts the proposed tokens of a step by another"
            " number than it proposes: leave it out, and set speculative_num_steps",
        )
    if config.policy.logprobs.keep_sets and truncates(config):
        yield (
            f"{SERVER}.{ALGORITHM}",
            "SGLang reports no keep-sets (policy.logprobs.keep_sets) of drafted tokens: leave it"
            " out, or rollout.sampling.top_p and top_k",
        )
    if config.policy.routing_replay == "engine":
        topk = server_argument(engine, TOPK)
        if topk != 1:
            yield (
                f"{SERVER}.{TOPK}",
                f"got {topk!r}, but SGLang records the experts (policy.routing_replay: engine) of"
                " chains of drafted tokens alone, not of trees: set it to 1",
            )
    if has_own_draft(config) and engine.transport in ("disk", "delta"):
        yield (
            f"{ENGINE}.transport",
            f"got {engine.transport!r}, by which SGLang would load the policy's folder into the"
            f" draft model, too ({SERVER}.{DRAFT_PATH}): leave it at auto",
        )


def has_draft(engine: EngineConfig) -> bool:
    """Whether the servers that the run starts decode speculatively."""
    return any(server_argument(engine, name) is not None for name in (ALGORITHM, DRAFT_PATH))


def has_own_draft(config: Config) -> bool:
    """Whether the draft is another model, not layers of the policy's."""
    path = server_argument(config.rollout.engine, DRAFT_PATH)
    return path is not None and os.path.abspath(str(path)) != os.path.abspath(config.model.path)
