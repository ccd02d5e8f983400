"""The `rlcore` command. Each command imports torch and other heavy modules only if needed."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from rlcore.arguments import MODEL_OPTIONS, parse
from rlcore.config.load import Loaded, load_config, refuse_masked, split_arguments
from rlcore.config.secrets import mask_text, masked
from rlcore.errors import BAD_INPUT, FAILED, INTERRUPTED, EmptyBatch, RunFailed, UserError
from rlcore.launch.environment import (
    first_on_node,
    is_rank,
    resolved_by_launcher,
    started_by_torchrun,
    wait_for_reporter,
)
from rlcore.launch.signals import handling_stop_signals, leave_in_time
from rlcore.terminal import printable
from rlcore.timeline.start import START, process_start


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0 if done, 1 if failed, 2 on bad input, 130 if interrupted."""
    if argv is None:
        START.origin = process_start()
        sys.excepthook = _print_traceback
    given = sys.argv[1:] if argv is None else list(argv)
    args = parse(given)
    args.given = given
    code = _run(args)
    if argv is None:
        # The process ends here, even if a plugin left threads behind.
        leave_in_time(code)
    return code


def _print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    print(printable(mask_text(text)), end="", file=sys.stderr, flush=True)


def _run(args: argparse.Namespace) -> int:
    try:
        result = COMMANDS[args.command](args)
        if isinstance(result, int):
            return result
        for line in result:
            print(printable(line))
        return 0
    except (UserError, RunFailed) as error:
        # Several ranks may raise the same error: one of each node prints it.
        if first_on_node():
            print(f"rlcore: {printable(mask_text(str(error)))}", file=sys.stderr)
        else:
            wait_for_reporter()
        return BAD_INPUT if isinstance(error, UserError | EmptyBatch) else FAILED
    except SystemExit as error:
        # A plugin called sys.exit. Its exit code is not the result of a run.
        where = traceback.extract_tb(error.__traceback__)[-1]
        location = f"{where.filename}:{where.lineno} in {where.name}"
        print(f"rlcore: sys.exit({error.code!r}) was called ({location})", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("rlcore: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if args.command in _LONG:
            print("rlcore: standard output or another pipe was closed", file=sys.stderr)
            return FAILED
        # The reader has read enough, as in `rlcore metrics | head`.
        sys.stderr.close()
        return 0


# --- commands -------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> int:
    """Check the plugins and train with the configured launcher."""
    # SIGTERM acts like Ctrl-C until the run handles both. Ranks keep the default, since they may be
    # in native code, which runs no Python handler.
    with nullcontext() if is_rank() else handling_stop_signals(signal.default_int_handler):
        launcher = ["cluster.launcher=torchrun"] if started_by_torchrun() else []
        loaded = _load([*launcher, *args.settings])
        if resolved_by_launcher() is None:
            from rlcore.launch.doctor.machine import at_start
            from rlcore.launch.input_checks import check_plugins

            found = check_plugins(loaded)
            if first_on_node():
                found += at_start(loaded.config)
            loaded = replace(loaded, warnings=(*loaded.warnings, *found))
        from rlcore.launch import launchers

        return launchers.train(
            loaded, resume=args.resume, overwrite=args.overwrite, arguments=args.given
        )


def validate(args: argparse.Namespace) -> int:
    """Print the configuration, the checks that ran and those left out, and the warnings."""
    loaded = _load(args.settings)
    from rlcore.config.checks.all_checks import describe_checks
    from rlcore.config.yaml_settings import render_config
    from rlcore.import_paths import import_torch_lazily
    from rlcore.runs.directory import check_plain_name

    check_plain_name(loaded.config.run.name)
    warnings = list(loaded.warnings)
    made = describe_checks()
    left_out = []
    if import_torch_lazily():
        from rlcore.config.derived import world_size
        from rlcore.launch import input_checks

        warnings += input_checks.check_plugins(loaded)
        made += input_checks.MADE
        if args.elsewhere:
            left_out += [f"{line}: --elsewhere" for line in input_checks.MADE_HERE]
        else:
            input_checks.check_folders(loaded.config, world_size(loaded.config), here=False)
            made += input_checks.MADE_HERE
    else:
        left_out.append("Algorithms, functions, model and files: torch is not installed here")
    print(render_config(masked(loaded.config.model_dump()), loaded.origins), end="")
    for title, lines in (("checks made", made), ("checks left out", left_out), ("notes", warnings)):
        if lines:
            print(f"\n# {title} ({len(lines)}):", *(f"#   {line}" for line in lines), sep="\n")
    return 0


def data(args: argparse.Namespace) -> Iterable[str]:
    """Print rows as the model will see them, and count their tokens."""
    loaded = _load(args.settings)
    from rlcore.launch.commands.data import show_data

    return show_data(loaded.config, rows=args.rows, ask_services=args.ask_services)


def doctor(args: argparse.Namespace) -> int:
    """Print what this machine and its environments lack; exit code 1 if a run would fail."""
    loaded = _load(args.settings) if args.settings else None
    from rlcore.launch.doctor.checks import check_machine

    failed = 0
    for found in check_machine(None if loaded is None else loaded.config):
        print(found, flush=True)
        failed += found.level == "FAIL"
    if failed:
        print(f"rlcore: {failed} of these would end a run", file=sys.stderr)
    return FAILED if failed else 0


def evaluate(args: argparse.Namespace) -> int:
    """Score a Hugging Face folder, a checkpoint, or the configured model."""
    chosen: list[str] = []
    if args.model is not None:
        path = json.dumps(str(args.model))
        chosen = [f"policy.checkpoint={path}"]
        if (args.model / "config.json").is_file():
            chosen = [f"model.path={path}", "policy.checkpoint=null"]
    launcher = ["cluster.launcher=torchrun"] if started_by_torchrun() else []
    loaded = _load([*launcher, *args.settings, *chosen])
    if not (loaded.config.evaluation.paths or loaded.config.evaluation.sets):
        raise loaded.error("evaluation.paths", "empty: name the files with the prompts to score")
    from rlcore.launch.commands.evaluate import evaluate_model

    return evaluate_model(
        loaded, output=args.output, sets=args.set, all_ranks=args.all_ranks, arguments=args.given
    )


def engine(args: argparse.Namespace) -> int:
    """Run SGLang engines without a trainer."""
    from rlcore.launch.commands.engine import node_of, serve_engines

    node = node_of(args.nodes, args.node_rank, args.head)
    loaded = _load(args.settings)
    return serve_engines(loaded.config, urls_file=args.urls_file, node=node)


def export(args: argparse.Namespace) -> int:
    """Write a checkpoint as a Hugging Face folder."""
    from rlcore.launch.commands.export import export_checkpoint

    source = f"{args.source}@best" if args.best else args.source
    return export_checkpoint(Path(source), args.folder, merged=args.merged)


def ledger(args: argparse.Namespace) -> int:
    """Show the ledger of a run; exit code 1 if it does not balance."""
    from rlcore.launch.commands.ledger import show_ledger

    return show_ledger(args.run, draw=args.draw, as_json=args.json, recordings=not args.quick)


def compare(args: argparse.Namespace) -> int:
    """Print what differs between two runs; exit code 1 if anything does."""
    from rlcore.launch.commands.compare import compare_runs

    return compare_runs(args.a, args.b, tolerance=args.tolerance)


def plan_layouts(args: argparse.Namespace) -> Iterable[str]:
    """Print the layouts that fit."""
    loaded = _load(args.settings)
    from rlcore.launch.commands.plan import plan

    return plan(
        loaded.config,
        trainer_gpus=args.trainer_gpus,
        engine_gpus=args.engine_gpus,
        gpu_memory=args.gpu_memory,
        gpu=args.gpu,
    )


def dry_run(args: argparse.Namespace) -> Iterable[str]:
    """Print the memory and the work of single ranks of a configuration."""
    loaded = _load(args.settings)
    from rlcore.launch.commands.dryrun import dry_run as rehearse

    return rehearse(
        loaded.config, world=args.world, ranks=args.rank, skew=args.skew, gpu_memory=args.gpu_memory
    )


def view(args: argparse.Namespace) -> int:
    """Serve a web page about runs, or write it to a file."""
    from rlcore.launch.commands.view import view_runs

    return view_runs(
        args.runs, port=args.port, follow=args.follow, export=args.export, step=args.step
    )


def status(args: argparse.Namespace) -> Iterable[str]:
    """Print the progress and the engines of a run, or the runs on a Ray cluster."""
    if args.run is not None:
        from rlcore.launch.run_folder import describe_run

        return describe_run(args.run)
    from rlcore.launch.launchers import need_ray

    need_ray()
    from rlcore.launch.ray import status as runs

    return runs.status(args.address)


def stop(args: argparse.Namespace) -> Iterable[str]:
    """Ask a run on a Ray cluster to end cleanly, and wait for its end."""
    from rlcore.launch.launchers import need_ray

    need_ray()
    from rlcore.launch.ray import status as runs

    return [runs.stop(args.run, args.address, timeout_s=args.timeout)]


def init_model(args: argparse.Namespace) -> Iterable[str]:
    """Write a small model with random weights."""
    from transformers.utils import logging

    from rlcore.launch.commands.init_model import ModelSpec
    from rlcore.launch.commands.init_model import init_model as write

    options = vars(args)
    given = {name: options[name] for name in MODEL_OPTIONS if options[name] is not None}
    spec = ModelSpec.preset(args.preset, **given)
    logging.disable_progress_bar()
    count = write(args.folder, spec, overwrite=args.overwrite)
    described = f"{spec.family}, {count:,} parameters, {spec.vocab_size} symbols"
    return [f"{args.folder}: {described}"]


def check_model(args: argparse.Namespace) -> int:
    """Compare a folder's model with transformers'; exit code 1 where they part."""
    from rlcore.launch.commands.check_model import check_folder

    return check_folder(args.folder, args.layers)


def metrics(args: argparse.Namespace) -> Iterable[str]:
    """Print the definition of every metric."""
    from rlcore.launch.commands.catalogue import list_metrics, metrics_page

    return metrics_page().splitlines() if args.markdown else list_metrics()


def config(args: argparse.Namespace) -> Iterable[str]:
    """Print every key of a configuration, or the algorithms with their keywords."""
    if args.algorithms:
        from rlcore.launch.commands.catalogue import list_algorithms

        return list_algorithms()
    from rlcore.config.reference import list_keys, reference_page

    return reference_page().splitlines() if args.markdown else list_keys()


def _load(settings: Sequence[str]) -> Loaded:
    if (path := resolved_by_launcher()) is not None:
        return Loaded.from_json(path.read_text())
    loaded = load_config(*split_arguments(settings))
    refuse_masked(loaded)
    return loaded


# Commands whose output is not their purpose: for them a closed pipe is a failure.
_LONG = frozenset({"train", "eval", "engine"})
COMMANDS: dict[str, Callable[[argparse.Namespace], int | Iterable[str]]] = {
    "train": train, "validate": validate, "data": data, "doctor": doctor, "eval": evaluate,
    "plan": plan_layouts, "dryrun": dry_run, "engine": engine, "export": export, "ledger": ledger,
    "compare": compare, "view": view, "status": status, "stop": stop, "init-model": init_model,
    "check-model": check_model, "metrics": metrics, "config": config,
}  # fmt: skip
