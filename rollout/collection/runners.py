"""Builds the runners of a service: for training groups, and for held-out prompts."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

from rlcore.algorithms import estimator_plugin
from rlcore.config import Config
from rlcore.config.derived import recorded_fields
from rlcore.config.evaluation_sets import EvaluationSet
from rlcore.data.generation import SamplingParams
from rlcore.data.loading import context_of
from rlcore.data.tokenizer import stop_token_ids
from rollout.collection.group_runner import GroupRunner
from rollout.engines.factories import kind_of
from rollout.fleet.dispatcher import Dispatcher
from rollout.fleet.fleet import Fleet
from rollout.rewards.scorer import Scorer
from rollout.workflows.context import NO_LIMIT, WorkflowContext

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EVALUATION_SEED = 0x6576616C  # keeps evaluation's random numbers apart from training's
# keeps the addresses of greedy requests apart from those of the same draw's samples
BASELINE_SEED = 0x67726565


def training_runner(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    dispatcher: Dispatcher,
    scorer: Scorer,
    *,
    greedy_baseline: bool,
) -> GroupRunner:
    """The runner of training groups."""
    rollout = config.rollout
    seed = config.run.seed
    greedy = _greedy(config, tokenizer)
    sampling = replace(
        greedy,
        temperature=rollout.sampling.temperature,
        top_p=rollout.sampling.top_p,
        top_k=rollout.sampling.top_k,
        sampling_mask=config.policy.logprobs.keep_sets,
        routed_experts=config.policy.routing_replay == "engine",
    )
    fleet = dispatcher.fleet
    context = _context(config, sampling, rollout.samples_per_prompt, seed, tokenizer, fleet)
    baseline = _context(config, greedy, 1, seed + BASELINE_SEED, tokenizer, fleet)
    name = config.algorithm.estimator.name
    # an estimator at an import path may compare groups: only registered ones declare it
    compares = ":" in name or estimator_plugin(name).compares_group
    return GroupRunner(
        config,
        dispatcher,
        scorer,
        context,
        greedy=baseline if greedy_baseline else None,
        recorded=recorded_fields(config),
        min_scored=2 if compares and rollout.samples_per_prompt > 1 else 1,
    )


def evaluation_runner(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    dispatcher: Dispatcher,
    scorer: Scorer,
    given: EvaluationSet,
) -> GroupRunner:
    """The runner of a set of held-out prompts."""
    config = given.config(config)
    sampling = replace(
        _greedy(config, tokenizer, given.max_new_tokens),
        temperature=given.temperature,
        top_p=given.top_p,
    )
    # derived from the name, so that the samples of a set are independent of other sets
    seed = config.run.seed + EVALUATION_SEED + zlib.crc32(given.name.encode())
    samples = given.samples_per_prompt
    context = _context(config, sampling, samples, seed, tokenizer, dispatcher.fleet)
    return GroupRunner(config, dispatcher, scorer, context, part_of_a_group=True)


def _context(
    config: Config,
    sampling: SamplingParams,
    samples_per_prompt: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    fleet: Fleet,
) -> WorkflowContext:
    limit = context_of(config)
    reserve = kind_of(config.rollout.engine.kind).answer_reserve

    def served() -> int | None:
        tokens = fleet.max_total_tokens
        return None if tokens is None else tokens - reserve

    return WorkflowContext(
        sampling,
        samples_per_prompt,
        seed,
        tokenizer,
        settings=config.rollout.workflow,
        context=NO_LIMIT if limit is None else limit[0] - reserve,
        served=served,
        chat_kwargs=config.data.chat_template_kwargs,
        tool_parser=config.rollout.tool_parser,
    )


def _greedy(
    config: Config, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int | None = None
) -> SamplingParams:
    """Sampling at temperature 0, with the stops and, by default, the length of training."""
    given = config.rollout.sampling
    return SamplingParams(
        max_new_tokens=max_new_tokens or given.max_new_tokens,
        temperature=0.0,
        stop_token_ids=stop_token_ids(tokenizer, given.stop_token_ids),
        stop=tuple(given.stop),
    )
