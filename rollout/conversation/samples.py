"""Makes the samples of a rollout: one response, or one sample for each leaf of its tree."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from rlcore.algorithms.rollout_metrics import DROPPED
from rlcore.data.generation import Completion
from rlcore.data.prompts import Prompt
from rlcore.data.sample import (
    FinishReason,
    Sample,
    SamplingMasks,
    TurnSpan,
    VersionSpan,
    join_experts,
)
from rollout.conversation.tree import Node, Tree


def of_prompt(prompt: Prompt, draw: int, index: int) -> dict[str, Any]:
    """The fields that identify a sample's rollout, and the fields of its prompt."""
    return {
        "draw": draw,
        "index": index,
        "prompt_id": prompt.prompt_id,
        "group_id": draw,
        # unique within a run, for any number of samples per draw
        "rollout_id": (draw << 20) + index,
        "prompt_text": prompt.text,
        "label": prompt.label,
        "metadata": dict(prompt.row),
    }


def make_sample(prompt: Prompt, draw: int, index: int, completion: Completion) -> Sample:
    """A sample of one prompt and one completion; text and reward are filled in later."""
    size = len(prompt.tokens)
    made = len(completion.tokens)
    mask = np.zeros(size + made, dtype=np.uint8)
    mask[size:] = 1
    return Sample(
        **of_prompt(prompt, draw, index),
        tokens=np.concatenate([prompt.tokens, completion.tokens]),
        loss_mask=mask,
        rollout_logprobs=completion.logprobs,
        versions=completion.versions,
        sampling_mask=completion.sampling_mask,
        routed_experts=completion.routed_experts,
        finish_reason=completion.finish_reason,
        messages=prompt.messages,
    )


def samples_of(
    tree: Tree,
    prompt: Prompt,
    draw: int,
    index: int,
    *,
    outcome: Mapping[str, float],
    finish_reasons: Mapping[Node, FinishReason],
    measured: Mapping[str, float] = MappingProxyType({}),
) -> list[Sample]:
    """One sample for each leaf, in the order in which their last turns were made.

    A turn is trainable in the first sample that contains it, and context in the others.

    Args:
        outcome: the workflow's own rewards of the rollout, by name.
        finish_reasons: by leaf, if they differ from those of the completions.
        measured: measurements by name; the first sample holds them, with the counts of tokens.
    """
    trained: set[Node] = set()
    found = []
    for leaf in tree.leaves():
        path = leaf.path()
        own = {node for node in path if node.turn is not None and not node.dropped} - trained
        trained |= own
        sample = _sample(path, own, prompt, draw, index)
        sample.finish_reason = finish_reasons.get(leaf, sample.finish_reason)
        sample.outcome = dict(outcome)
        found.append(sample)
    if found:
        found[0].measured = {**measured, **_counts(tree, trained)}
    return found


def _counts(tree: Tree, trained: set[Node]) -> dict[str, float]:
    """Token counts of the rollout: made, trained, dropped by reason, and context."""
    turns = [node for node in tree.nodes if node.turn is not None]
    sent = {node for turn in turns for node in turn.path() if node.turn is None}
    found = {
        "generated_tokens": float(sum(len(node.tokens) for node in turns)),
        "trained_tokens": float(sum(len(node.tokens) for node in trained)),
        "context_tokens": float(sum(len(node.tokens) for node in sent)),
    }
    for node in turns:
        if node.dropped:
            name = DROPPED + node.dropped
            found[name] = found.get(name, 0.0) + len(node.tokens)
    return found


def _sample(path: list[Node], own: set[Node], prompt: Prompt, draw: int, index: int) -> Sample:
    turns = [node for node in path if node in own]
    completions = [node.completion for node in turns if node.completion is not None]
    versions: list[VersionSpan] = []
    spans: list[TurnSpan] = []
    messages: list[dict[str, Any]] = []
    made = 0
    for node in path:
        messages += node.messages
        if node in own and node.completion is not None and node.turn is not None:
            versions += [
                VersionSpan(span.version, made + span.start, made + span.end)
                for span in node.completion.versions
            ]
            spans.append(TurnSpan(node.turn, len(messages) - 1, made, made + len(node.tokens)))
            made += len(node.tokens)
    masks = [c.sampling_mask for c in completions if c.sampling_mask is not None]
    # A dropped turn may be another policy's, whose routers saw other states. The record of the next
    # turn covers its tokens too.
    routed = [
        node.completion.routed_experts
        for node in path
        if not node.dropped
        and node.completion is not None
        and node.completion.routed_experts is not None
    ]
    last = path[-1].completion
    assert last is not None
    return Sample(
        **of_prompt(prompt, draw, index),
        tokens=np.concatenate([node.tokens for node in path], dtype=np.int32),
        loss_mask=np.repeat(
            np.array([node in own for node in path], dtype=np.uint8),
            [len(node.tokens) for node in path],
        ),
        rollout_logprobs=np.concatenate(
            [np.zeros(0, dtype=np.float32), *(made.logprobs for made in completions)],
            dtype=np.float32,
        ),
        versions=tuple(versions),
        finish_reason=last.finish_reason,
        turns=sum(node.turn is not None for node in path),
        response_text=str(path[-1].messages[0].get("content") or ""),
        token_rewards=_token_rewards(turns, made),
        sampling_mask=SamplingMasks.joined(masks) if masks else None,
        routed_experts=join_experts(routed) if routed else None,
        messages=messages,
        turn_spans=tuple(spans),
    )


def _token_rewards(turns: list[Node], size: int) -> Any:
    """Put the reward of each turn onto its last token; None if no turn has a reward."""
    if all(node.reward is None for node in turns):
        return None
    rewards = np.zeros(size, dtype=np.float32)
    end = 0
    for node in turns:
        end += len(node.tokens)
        if node.reward is not None and len(node.tokens):
            rewards[end - 1] = node.reward
    return rewards
