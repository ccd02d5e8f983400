"""What `rlcore metrics` and `rlcore algorithms` print."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rlcore.algorithms import (
    METRICS,
    Keyword,
    build_estimator,
    build_policy_loss,
    estimator_keywords,
    estimator_names,
    policy_loss_keywords,
    policy_loss_names,
)
from rlcore.algorithms.keywords import REQUIRED


def list_metrics() -> Iterator[str]:
    """One line a metric: name, unit, what it is averaged over, definition."""
    specs = list(METRICS.values())
    widths = [max(len(getattr(spec, column)) for spec in specs) for column in ("name", "unit", "denominator")]
    for spec in specs:
        cells = (spec.name, spec.unit, spec.denominator)
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths)) + f"  {spec.definition}"


def metrics_page() -> str:
    """docs/metrics.md, made by `rlcore metrics --markdown`."""
    rows = "\n".join(
        f"| `{spec.name}` | {spec.definition} | {spec.denominator} | {spec.unit} |" for spec in METRICS.values()
    )
    return f"""# Metrics

Written by `rlcore metrics --markdown`; do not edit. One JSON object a step in `runs/<name>/metrics.jsonl`, the same names
in TensorBoard and wandb.

A *token* is a trainable token: prompts, tool output, observations and padding are in no metric. A *sequence* is one with
at least one trainable token, unless a line says "all sequences". A metric whose inputs were not computed is absent, never
0: without a reference model there is no KL, without a critic no value loss, without a correction no `correction/*`; with
several optimizer steps a batch and no pass before them nothing compares the policy with the engine (`rollout/ess` and the
`train_rollout_logprob_diff`s). Steps that train the critic alone (`critic.warmup_steps`) have no policy loss.

| name | what it is | averaged over | unit |
|---|---|---|---|
{rows}
"""


def list_algorithms() -> Iterator[str]:
    """Each estimator and policy loss: its sentence, what it needs, its keywords with their defaults."""
    yield "estimators (algorithm.estimator.name)"
    for name in estimator_names():
        keywords = estimator_keywords(name)
        estimator = None if _has_required(keywords) else build_estimator(name)
        if estimator is None:
            yield from _entry(name, keywords, None, None)
        else:
            yield from _entry(name, keywords, estimator.estimator, estimator.needs)
    yield ""
    yield "policy losses (algorithm.loss.name)"
    for name in policy_loss_names():
        keywords = policy_loss_keywords(name)
        loss = None if _has_required(keywords) else build_policy_loss(name)
        if loss is None:
            yield from _entry(name, keywords, None, None)
        else:
            yield from _entry(name, keywords, loss.loss, loss.needs)


def _has_required(keywords: Mapping[str, Keyword]) -> bool:
    return any(keyword.default is REQUIRED for keyword in keywords.values())


def _entry(name: str, keywords: Mapping[str, Keyword], built: Any, needs: Collection[str] | None) -> Iterator[str]:
    sentence = (getattr(built, "__doc__", None) or "").strip().splitlines()
    yield f"  {name}" + (f": {sentence[0]}" if sentence else "")
    if needs is None:
        yield "    needs: depends on its keywords"
    elif needs:
        yield f"    needs: {', '.join(sorted(needs))}"
    for keyword in keywords.values():
        if keyword.name == "kl_coef":
            yield f"    {keyword}    (set algorithm.kl.reward_coef)"
        else:
            yield f"    {keyword}"
