"""`rlcore dryrun`: runs single ranks at the real sizes, and compares them with the plan."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from backends.megatron.checks.layout import check_layout, check_others, check_vocabularies
from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.read import read_models
from backends.megatron.policy_checks import check_policy
from rlcore.config import Config
from rlcore.config.derived import world_size
from rlcore.errors import ConfigError, RunFailed, UserError
from rlcore.launch.commands.plan import configured_layout, job_passes, make_job
from rlcore.planning.activations import micro_batches_in_flight
from rlcore.planning.fit import GIB, Needs, gib, model_weights, outside_bytes, stage_needs, usable
from rlcore.planning.job import Job
from rlcore.planning.memory import Layout, Load
from rlcore.planning.report import describe

if TYPE_CHECKING:
    from backends.megatron.dryrun.rank import RankReport


def dry_run(
    config: Config,
    *,
    world: int | None = None,
    ranks: Sequence[int] | None = None,
    skew: float = 1.0,
    gpu_memory: int,
) -> Iterator[str]:
    """Yield each rank's memory and operations next to the plan's numbers, then a verdict.

    Args:
        world: number of trainer ranks; default: as configured.
        ranks: ranks to run; default: one of the first, of a middle and of the last stage.
        skew: tokens of the rank's experts, as a multiple of an even share.
        gpu_memory: bytes of each GPU.

    Raises:
        UserError: an option is wrong.
        ConfigError, ModelError: a configuration key is wrong.
        RunFailed: at the end, if a rank does not fit its GPU.
    """
    world = world or world_size(config)
    arch, job = _checked(config, world, skew)
    layout = configured_layout(config, arch, world)
    chosen = _ranks(layout, world, ranks)

    from backends.megatron.dryrun.rank import Work, rehearse
    from backends.megatron.dryrun.stubs import LEFT_OUT

    yield f"{describe(layout)}: {world} ranks, {arch.shape.parameters / 1e9:.2f} B parameters"
    load = replace(job.load(layout), routing_skew=skew)
    published = job.publication
    peaks = []
    for rank in chosen:
        stage = rank // (world // layout.pipeline)
        packs = micro_batches_in_flight(layout, load.micro_batches, stage)
        in_flight = replace(load, micro_batches=packs)
        work = Work(packs, load.tokens, job.length, job.trainable, job.siblings)
        with warnings.catch_warnings():
            # Megatron and torch give advice that concerns real ranks only.
            warnings.simplefilter("ignore")
            report = rehearse(
                config,
                job_passes(config),
                work,
                rank=rank,
                world=world,
                skew=skew,
                everywhere=published is not None and published.is_everywhere(layout),
            )
        planned = stage_needs(layout, in_flight, job, stage)
        yield ""
        yield from _rank_lines(report, planned, layout, in_flight, job)
        # Engines that share the GPU hold their weights while they take new ones.
        engine = 0 if published is None or not published.colocated else published.engine_bytes
        peaks += [
            (phase.peak.bytes + (engine if name == "publication" else 0), rank, name)
            for name, phase in report.phases.items()
        ]
    yield ""
    yield "Left out: " + "; ".join(LEFT_OUT) + "."
    yield ""
    yield _verdict(max(peaks), outside_bytes(layout, job), gpu_memory, chosen, world)


# --- ranks ----------------------------------------------------------------------------------------


def _checked(config: Config, world: int, skew: float) -> tuple[Architecture, Job]:
    if config.policy.fp8 is not None:
        raise ConfigError(
            "policy.fp8: a dry run has Megatron's own layers, which have no FP8; pass"
            " policy.fp8=null to see the needs in bf16"
        )
    arch, others = read_models(config, weights=False)
    parallel = config.policy.parallel
    check_policy(config, arch, None)
    check_layout(arch, parallel, world)
    check_others(others, parallel, world)
    check_vocabularies(others, arch)
    shape = arch.shape
    # One expert-parallel rank can get no more tokens.
    most = min(parallel.expert, shape.experts / shape.topk) if shape.experts else 1
    if not 1 <= skew <= most:
        raise UserError(
            f"--skew: got {skew:g}, expected 1 (even) to {most:g}: the model has {shape.experts}"
            f" experts, of which a token takes {shape.topk}, over {parallel.expert} ranks"
            " (policy.parallel.expert)"
        )
    return arch, make_job(config, arch, others)


def _ranks(layout: Layout, world: int, given: Sequence[int] | None) -> list[int]:
    of_a_stage = world // layout.pipeline
    if not given:
        # The last rank of the last stage has the most targets of the ranks that share a pack.
        middle = layout.pipeline // 2 * of_a_stage if layout.pipeline > 2 else 0
        several = layout.pipeline > 1 or layout.context > 1
        return sorted({0, middle, world - 1 if several else 0})
    for rank in given:
        if not 0 <= rank < world:
            raise UserError(
                f"--rank: got {rank}, expected 0 to {world - 1}: the trainer has {world} ranks"
                " (cluster.nodes x cluster.processes_per_node, or --world)"
            )
    return list(given)


# --- report ---------------------------------------------------------------------------------------


def _verdict(
    peak: tuple[int, int, str],
    outside: Mapping[str, int],
    capacity: int,
    ranks: Sequence[int],
    world: int,
) -> str:
    """Return the verdict of a run that fits. Raises RunFailed if a rank does not fit."""
    size, rank, phase = peak
    limit = usable(capacity)
    which = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {world}"
    parts = [f"{gib(size)} in {phase} of rank {rank}"]
    parts += [f"{gib(num_bytes)} for {what}" for what, num_bytes in outside.items()]
    needed = " and ".join(parts)
    if size + sum(outside.values()) > limit:
        raise RunFailed(
            f"verdict: {which} ran all phases, but the largest peak does NOT fit: {needed}, where"
            f" {gib(limit)} of {gib(capacity)} can be used; `rlcore plan CONFIG --trainer-gpus"
            f" {world}` lists layouts that fit, and their keys"
        )
    return (
        f"Verdict: it works: {which} ran all phases, and the largest peak fits: {needed}, of"
        f" {gib(limit)} that can be used of {gib(capacity)}"
    )


def _rank_lines(
    report: RankReport, planned: Needs, layout: Layout, load: Load, job: Job
) -> Iterator[str]:
    yield (
        f"Rank {report.rank}, stage {report.stage + 1} of {layout.pipeline}:"
        f" {load.micro_batches} micro-batches of {load.tokens} tokens, as many as are in flight"
    )
    yield f"{'':44}{'dry run':>16}{'plan':>16}"
    for model in job.trained:
        weights = model_weights(model, layout, load, report.stage)
        own = report.parameters[model.name]
        yield f"  {model.name + ' parameters':42}{own:>16,}{weights.total:>16,}"
    for name, size in report.bytes.items():
        yield _compared(name, size, planned.resident.get(name))
    for name, phase in report.phases.items():
        # The plan's checkpoint follows a publication, whose buffers stay allocated.
        added = None if name == "checkpoint" else planned.phases.get(name)
        whole = None if added is None else sum(planned.resident.values()) + added
        yield _compared(f"peak, {name}", phase.peak.bytes, whole)
        yield f"      {phase.peak.operation} at {phase.peak.place}"
    yield from _collectives(report)
    buckets, size = report.buckets
    yield f"  a publication: {buckets} buckets, {_gib(size)} in all"
    tensors, size = report.checkpoint
    yield f"  this rank writes {tensors} tensors of a checkpoint, {_gib(size)}"
    yield f"  took {report.seconds:.0f} s for {report.operations:,} operations"


def _collectives(report: RankReport) -> Iterator[str]:
    """Yield a step's collective calls by group, and the numbers that the host reads."""
    calls: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for name, phase in report.phases.items():
        if name.endswith((" pass", "backward", "step")):
            for key, (count, size) in phase.collectives.items():
                calls[key] += count
                sizes[key] += size
    for group, operation in sorted(calls):
        of = f"{operation} in {group}: {calls[group, operation]} calls"
        yield f"  {of}, {_gib(sizes[group, operation])}"
    for name, phase in report.phases.items():
        for location, count in phase.reads.items():
            yield f"  {name}: the host waits for {count} numbers at {location}"


def _compared(name: str, size: int, planned: int | None) -> str:
    line = f"  {name:42}{_gib(size):>16}"
    if planned is None:
        return f"{line}{'-':>16}"
    return f"{line}{_gib(planned):>16}{f'{planned / size - 1:+.1%}' if size else '':>8}"


def _gib(size: float) -> str:
    return f"{size / GIB:.3f} GiB"
