"""The listings that `rlcore metrics` and `rlcore config --algorithms` print."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlcore.algorithms import (
    CORRECTIONS,
    METRICS,
    AlgorithmError,
    GuardedEstimator,
    GuardedPolicyLoss,
    build_estimator,
    build_policy_loss,
    estimator_names,
    estimator_plugin,
    policy_loss_names,
    policy_loss_plugin,
)
from rlcore.algorithms.plugins import Keyword, constructor_keywords
from rlcore.algorithms.registry import Plugin
from rlcore.config.derived import COEFFICIENTS

WIDTH = 120  # columns of the output of `rlcore config --algorithms`
_LABELS = 10  # columns of the labels


def list_metrics() -> Iterator[str]:
    """Yield one line a metric: name, unit, what it is averaged over, definition."""
    rows = [(spec.name, spec.unit, spec.denominator, spec.definition) for spec in METRICS.values()]
    widths = [max(map(len, column)) for column in zip(*rows)][:3]
    for *cells, definition in rows:
        aligned = (cell.ljust(width) for cell, width in zip(cells, widths))
        yield "  ".join([*aligned, definition])


def metrics_page() -> str:
    """Return docs/metrics.md, for `rlcore metrics --markdown`."""
    rows = "\n".join(
        f"| `{spec.name}` | {spec.definition} | {spec.unit}"
        + ("" if spec.denominator == "-" else f", {spec.denominator}")
        + " |"
        for spec in METRICS.values()
    )
    return f"""# Metrics

Written by `rlcore metrics --markdown`; do not edit. One JSON object a step in
`runs/<name>/metrics.jsonl`, the same names in TensorBoard and wandb.

A *token* is a trainable token. A *sequence* is one with at least one trainable token, unless a line
says "all sequences". A metric whose inputs were not computed is absent, never 0: without a
reference model there is no KL, without a critic no value loss. Steps that train only the critic
(`critic.warmup_steps`) have no policy loss. With one optimizer step a batch `approxkl`, the
`clipfrac`s, `sequence_ratio` and `val/ratio` could only be 0 or 1, and are absent;
`policy/step_kl` (k2 of J. Schulman, "Approximating KL divergence", 2020) is there for any number of
optimizer steps, from a forward pass over a few sequences after the last of them.

| name | what it is | unit, averaged over |
|---|---|---|
{rows}
"""


def list_algorithms() -> Iterator[str]:
    """Yield estimators, losses and corrections by their keys, in lines of at most WIDTH."""
    yield (
        "estimators (algorithm.estimator.name): one advantage A_t a token, from the reward R of a"
        " sequence"
    )
    for name in estimator_names():
        yield from _plugin_entry(name, estimator_plugin, build_estimator)
    yield ""
    yield (
        "policy losses (algorithm.loss.name): one loss a token, of the ratio r_t = exp(logprobs_t -"
        " old_logprobs_t)"
    )
    for name in policy_loss_names():
        yield from _plugin_entry(name, policy_loss_plugin, build_policy_loss)
    yield ""
    yield (
        "corrections (algorithm.correction.name): weights from w = exp(old_logprobs -"
        " rollout_logprobs), trainer to engine"
    )
    yield from _entry("none", "No correction.", [])
    for name, spec in CORRECTIONS.items():
        lower = "1 / upper" if spec.lower is None else f"{spec.lower:g}"
        rows = [
            ("formula", spec.formula),
            ("keywords", f"lower = {lower}, upper = {spec.upper:g}"),
            ("source", spec.source),
        ]
        yield from _entry(name, "", rows)


def _plugin_entry(
    name: str,
    find: Callable[[str], Plugin],
    build: Callable[..., GuardedEstimator | GuardedPolicyLoss],
) -> Iterator[str]:
    try:
        plugin = find(name)
        keywords = constructor_keywords(plugin.factory, repr(name))
    # Only this plugin of an installed package is broken: list the others.
    except (AlgorithmError, ImportError) as error:
        yield from _entry(name, f"cannot be used: {error}", [])
        return
    module, qualname = (getattr(plugin.factory, key, "?") for key in ("__module__", "__qualname__"))
    rows = [("formula", plugin.formula), *_fields(plugin, keywords, build)]
    for i, (key, keyword) in enumerate(keywords.items()):
        elsewhere = f"    (set {COEFFICIENTS[key]})" if key in COEFFICIENTS else ""
        rows.append(("keywords" * (i == 0), f"{keyword}{elsewhere}"))
    rows += [
        ("source", plugin.source),
        ("plugin", "" if module.startswith("rlcore.") else f"{module}:{qualname}"),
    ]
    # The first paragraph may span several lines.
    summary = (plugin.factory.__doc__ or "").strip().partition("\n\n")[0]
    yield from _entry(name, " ".join(summary.split()), rows)


def _fields(
    plugin: Plugin, keywords: Mapping[str, Keyword], build: Callable[..., Any]
) -> list[tuple[str, str]]:
    """Return the batch fields that the plugin needs, and those that it uses if present."""
    try:
        built = build(plugin.name)
        needs = [", ".join(sorted(built.needs))]
        for name in filter(keywords.__contains__, COEFFICIENTS):
            if more := build(plugin.name, **{name: 1.0}).needs - built.needs:
                needs.append(f"{', '.join(sorted(more))} where {name} is not 0")
    # A keyword has no default, or the constructor rejects these values.
    except (ValueError, TypeError):
        return [("needs", "depends on its keywords")]
    if getattr(built, "has_batch_stats", False):
        needs.append("a look at the whole optimizer step")
    return [("needs", "; ".join(filter(None, needs))), ("takes", ", ".join(sorted(built.optional)))]


def _entry(name: str, sentence: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    title = f"  {name}: " if sentence else f"  {name}"
    for label, text in [(title, sentence), *rows]:
        start = label if label == title else f"    {label:<{_LABELS}}"
        if text or label == title:
            yield from textwrap.wrap(
                text,
                WIDTH,
                initial_indent=start,
                subsequent_indent=" " * (4 if label == title else len(start)),
                break_long_words=False,
                break_on_hyphens=False,
            ) or [start]
