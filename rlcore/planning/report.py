"""The text that `rlcore plan` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from math import ceil

from rlcore.planning.devices import Gpu
from rlcore.planning.fit import RESERVED, Option, gib, needs, usable
from rlcore.planning.job import Job, Trained
from rlcore.planning.memory import Layout
from rlcore.planning.publication import Publication
from rlcore.planning.shape import ModelShape

SHOWN = 8


def describe(layout: Layout) -> str:
    """Name a layout: "TP 2 x DP 4, SP, distributed optimizer"."""
    sizes = {
        "TP": layout.tensor,
        "PP": layout.pipeline,
        "VPP": layout.virtual_pipeline,
        "CP": layout.context,
        "EP": layout.expert,
        "ETP": layout.expert_tensor,
        "DP": layout.data,
    }
    # Only a layout with its own ETP has to name it.
    own = layout.expert_tensor != layout.tensor
    named = [f"{k} {size}" for k, size in sizes.items() if (own if k == "ETP" else size > 1)]
    extras = ["SP"] * layout.sequence + ["distributed optimizer"] * layout.distributed
    if layout.recompute != "none":
        method = f"{layout.recompute_method} {layout.recompute_layers}"
        suffix = f" ({method})" if method != "uniform 1" else ""
        extras.append(f"recompute {layout.recompute}{suffix}")
    return ", ".join([" x ".join(named) or "1 GPU", *extras])


def report(
    job: Job,
    gpus: int,
    engines: str,
    capacity: int,
    gpu: Gpu,
    own: Option | str,
    found: Sequence[Option],
) -> Iterator[str]:
    """Yield the lines of the report.

    Args:
        gpus: number of the trainer's GPUs.
        engines: the number of engines, and the GPUs that they use.
        own: the configuration's layout, or why it is refused.
        found: all admissible layouts, the fastest first.
    """
    shape = job.shape
    active = f", {shape.active_parameters / 1e9:.2f} B active" if shape.experts else ""
    yield (
        f"{shape.parameters / 1e9:.2f} B parameters{active}; {gpus} x {gpu.name} of"
        f" {gib(capacity)} for the trainer, {RESERVED:.0%} reserved"
    )
    yield engines
    yield (
        f"a step: {job.sequences} sequences of {job.length} tokens, packs of {job.pack_tokens},"
        f" {job.scoring_passes} scoring passes"
    )
    if job.siblings > 1:
        yield f"a pack holds the prompt of {job.siblings} sequences once (policy.share_prefixes)"
    yield ""
    yield "The configuration's layout:"
    if isinstance(own, str):
        yield f"  refused: {own}"
    else:
        peak = gib(own.needs.peak)
        limit = gib(usable(capacity))
        verdict = f"does NOT fit, {peak} where {limit} can be used"
        if own.fits(capacity):
            seconds = own.time.total
            verdict = f"fits, {peak} of {limit}; about {seconds:.1f} s an optimizer step"
        yield f"  {describe(own.layout)}: {verdict}"
        yield from (f"    {line}" for line in breakdown(own, job, capacity))
    yield ""
    fitting = [option for option in found if option.fits(capacity)]
    if not fitting:
        yield from nearest(job, found, capacity)
        return
    counts = f"{len(fitting)} of {len(found)}"
    yield f"Layouts that fit, by estimated time of an optimizer step ({counts}):"
    yield "    time   peak of the fullest rank   layout"
    # Of options that differ only in what they recompute, the fastest is shown.
    first: dict[Layout, Option] = {}
    for option in fitting:
        first.setdefault(replace(option.layout, recompute="none"), option)
    for option in [*first.values()][:SHOWN]:
        mark = "*" if not isinstance(own, str) and option.layout == own.layout else " "
        size = f"{gib(option.needs.peak):>10}"
        yield f" {mark} {option.time.total:6.1f} s   {size}   {describe(option.layout)}"
    yield "Times are estimates for ranking: docs/planning.md."


def breakdown(option: Option, job: Job, capacity: int) -> Iterator[str]:
    """Yield the parts of the fullest rank's memory and of the time, then facts beyond a step."""
    needs = option.needs
    published = job.publication
    for name, size in needs.resident.items():
        yield f"{gib(size):>10}  {name}"
    yield f"{gib(needs.phases[needs.largest_phase]):>10}  {needs.largest_phase} (the largest phase)"
    if published is not None:
        yield _engine(option, job.shape, published, capacity)
    times = asdict(option.time).items()
    yield "time: " + ", ".join(f"{part} {s:.1f} s" for part, s in times if s >= 0.05)
    if published is not None:
        yield (
            f"a publication: {gib(published.num_bytes)} in {len(published.buckets)} buckets of at"
            f" most {gib(max(published.buckets))} to {published.engines}"
            f" engine{'s' * (published.engines > 1)}"
        )
        if published.adapters:
            yield f"  once; then the adapters alone, {gib(published.adapters)}"
    yield f"a checkpoint: {gib(job.checkpoint_bytes)} on disk"


def _engine(option: Option, shape: ModelShape, published: Publication, capacity: int) -> str:
    """Describe the free memory on a GPU of one of the run's engines.

    A colocated engine allocates its KV cache while the trainer is offloaded, but holds its weights
    next to the trainer's state.
    """
    tensor = published.engine_tensor
    weights = published.engine_bytes
    left = usable(capacity) - weights
    engine = f"{'a colocated engine' if published.colocated else 'an engine'} of TP {tensor}"
    state = sum(option.needs.resident.values()) if published.colocated else 0
    if state >= left:
        next_to = " next to the trainer's state" * published.colocated
        return (
            f"{'none':>10}  for {engine}: its weights ({gib(weights)}){next_to} are"
            f" {gib(state - left)} too much; raise rollout.engine.tensor_parallel"
        )
    heads = sum(
        count * kind.head_dim * kind.groups / min(tensor, kind.groups)
        for count, kind in shape.attentions()
    )
    per_token = 2 * heads * published.engine_dtype_bytes
    return f"{gib(left):>10}  left for KV of {engine}: {left / per_token:,.0f} tokens"


def nearest(job: Job, found: Sequence[Option], capacity: int) -> Iterator[str]:
    """Yield the layout that is nearest to fitting, and changes that would make it fit."""
    if not found:
        yield "No layout of this number of GPUs suits the model."
        return
    best = min(found, key=lambda option: option.needs.peak)
    over = best.needs.peak - usable(capacity)
    yield (
        f"No layout fits. The nearest is {describe(best.layout)}: {gib(best.needs.peak)} on stage"
        f" {best.needs.stage},"
    )
    yield f"  {gib(over)} more than {gib(usable(capacity))}. What would help:"
    advice = {
        key: best.needs.peak - needs(best.layout, changed).peak for key, changed in _offloads(job)
    }
    for key, size in sorted(advice.items(), key=lambda pair: -pair[1]):
        if size > 0:
            yield f"  {key} lowers the peak by {gib(size)}"
    factor = ceil(100 * best.needs.peak / usable(capacity)) / 100
    yield f"  about {factor:.2f} times the GPUs, or GPUs of {gib(best.needs.peak / (1 - RESERVED))}"
    if best.needs.largest_phase.endswith("backward"):
        yield "  a smaller policy.max_tokens_per_microbatch"


def _offloads(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield the keys that would offload something, each with the job that it makes."""
    for number, model in enumerate(job.trained):
        if model.offload:
            continue
        changes: list[tuple[str, Trained]] = []
        if not model.offload_optimizer:
            changes.append(("optimizer.offload", replace(model, offload_optimizer=True)))
        if number:
            # The policy stays: engines get their weights from it.
            changes.append(("offload", replace(model, offload=True)))
        for key, changed in changes:
            trained = (*job.trained[:number], changed, *job.trained[number + 1 :])
            yield f"{model.name}.{key}=true", replace(job, trained=trained)
    for number, other in enumerate(job.frozen):
        if not other.offload:
            moved = replace(other, offload=True)
            frozen = (*job.frozen[:number], moved, *job.frozen[number + 1 :])
            yield f"{other.name}.offload=true", replace(job, frozen=frozen)
