"""`rlcore dryrun`: single ranks of a configuration at the real sizes, beside the plan's numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

from backends.megatron.checks.layout import check_layout, check_others, check_vocabularies
from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.read import read_architecture
from rlcore.config import Config
from rlcore.config.derived import other_folders, world_size
from rlcore.errors import ConfigError, UserError
from rlcore.launch.commands.plan import configured_layout, job_passes, make_job
from rlcore.planning.fit import Needs, stage_needs
from rlcore.planning.memory import Layout, Load, rank_weights
from rlcore.planning.report import describe
from rlcore.planning.search import Job
from rlcore.planning.speed import rank_flops

GIB = 1 << 30


def dry_run(
    config: Config,
    *,
    world: int | None = None,
    ranks: Sequence[int] | None = None,
    skew: float = 1.0,
    holders: bool = False,
) -> Iterator[str]:
    """Yield lines on each rank: what it needs and does, and what `rlcore plan` says of it.

    Args:
        world: trainer ranks, by default as configured.
        ranks: those to run, by default one of the first, of a middle and of the last stage.
        skew: how many times an even share of tokens the rank's experts get.
        holders: also list what holds memory at the peaks.

    Raises UserError naming the option, or ConfigError or ModelError naming the key.
    """
    world = world or world_size(config)
    arch, job = _checked(config, world)
    layout = configured_layout(config, arch, world)
    chosen = _ranks(layout, world, ranks)
    _check_skew(layout, job, skew)

    from backends.megatron.dryrun.rank import rehearse
    from backends.megatron.dryrun.stand_ins import LEFT_OUT

    yield f"{describe(layout)}: {world} ranks of {_count(job.trained[0].shape.parameters)}"
    load = replace(job.load(layout), routing_skew=skew)
    for rank in chosen:
        stage = rank // (world // layout.pipeline)
        in_flight = replace(load, micro_batches=micro_batches_in_flight(layout, load, stage))
        work = job_work(job, in_flight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Megatron and torch, on advice for real ranks
            report = rehearse(
                config,
                job_passes(config),
                work,
                rank=rank,
                world=world,
                skew=skew,
                origins=holders,
            )
        planned = stage_needs(layout, in_flight, job.trained, job.frozen, stage)
        yield ""
        yield from _rank_lines(report, planned, layout, in_flight, job)
    yield ""
    yield "Left out: " + "; ".join(LEFT_OUT) + "."


# --- what is run ----------------------------------------------------------------------------------


def _checked(config: Config, world: int) -> tuple[Architecture, Job]:
    if config.policy.fp8 is not None:
        raise ConfigError(
            "policy.fp8: a dry run has Megatron's own layers, which have no FP8; pass"
            " policy.fp8=null to see the needs in bf16"
        )
    bridge = config.model.bridge
    arch = read_architecture(config.model.path, weights=False, bridge=bridge)
    others = {
        key: read_architecture(path, weights=False, bridge=bridge)
        for key, path in other_folders(config).items()
    }
    check_layout(arch, config.policy.parallel, world)
    check_others(others, config.policy.parallel, world)
    check_vocabularies(others, arch)
    return arch, make_job(config, arch, others)
