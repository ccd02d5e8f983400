"""The arguments of each command of `rlcore`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from rlcore import __version__

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_SETTINGS = (
    "FILE.yaml ... and overrides KEY=VALUE (policy.optimizer.lr=2e-6), later ones over earlier ones"
)
_ADDRESS = "of the cluster; default: your own on this machine"

_MODEL_SIZES = (
    *("hidden", "layers", "heads", "kv_heads", "intermediate"),
    *("experts", "experts_per_token", "max_positions", "seed"),
)
MODEL_OPTIONS = ("family", "alphabet", "tied", "chat", *_MODEL_SIZES)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line.

    argparse collects files and overrides only up to the next flag, so the rest are added here.
    """
    parser = argparse.ArgumentParser(
        prog="rlcore", description="Reinforcement learning for language models."
    )
    parser.add_argument("--version", action="version", version=f"rlcore {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_configured(commands)
    _add_others(commands)
    arguments, rest = parser.parse_known_args(argv)
    flags = [argument for argument in rest if argument.startswith("-")]
    hint = ""
    if flags and "settings" in arguments:
        # In other trainers a configuration key is a flag.
        from rlcore.config.messages import suggest

        key = suggest(tuple(flags[0].partition("=")[0].lstrip("-").split("."))) or "KEY"
        hint = f" (a key of the configuration is given as {key}=VALUE, without dashes)"
    if flags or (rest and "settings" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if rest:
        arguments.settings += rest
    return arguments


def _command(
    commands: Commands, name: str, text: str, settings: str = ""
) -> argparse.ArgumentParser:
    """Add a command; `settings` is the nargs of its files and overrides."""
    sub = commands.add_parser(name, help=text, description=text)
    sub.set_defaults(command=name)
    if settings:
        sub.add_argument("settings", nargs=settings, metavar="FILE.yaml|KEY=VALUE", help=_SETTINGS)
    return sub


def _flag(sub: argparse._ActionsContainer, name: str, text: str) -> None:
    sub.add_argument(name, action="store_true", help=text)


def _add_configured(commands: Commands) -> None:
    """Add the commands that take a configuration."""
    text = "train a model by reinforcement learning or supervised fine-tuning"
    sub = _command(commands, "train", text, "+")
    how = sub.add_mutually_exclusive_group()
    _flag(how, "--resume", "continue from the run's last checkpoint")
    _flag(how, "--overwrite", "delete what an earlier run of this name left")
    text = "check a configuration and print it with the origin of each value"
    sub = _command(commands, "validate", text, "+")
    text = "the run will be on other machines: leave the model's folder and the files unchecked"
    _flag(sub, "--elsewhere", text)
    text = "print rows as the model will see them, what the reward says, and how long they are"
    sub = _command(commands, "data", text, "+")
    sub.add_argument("--rows", type=_positive, default=3, metavar="N", help="how many rows (3)")
    _flag(sub, "--ask-services", "ask reward services and judges too: about 30 answers to each row")
    text = "look at this machine and its environments; exit code 1 if a run would fail"
    _command(commands, "doctor", text, "*")
    sub = _command(commands, "eval", "score a model on the evaluation prompts", "+")
    text = (
        "a Hugging Face folder, a checkpoint or a RUN[@STEP|@best], instead of the configured one;"
        " load only checkpoints that you trust"
    )
    sub.add_argument("--checkpoint", "--model", dest="model", type=Path, help=text)
    text = "score this one of evaluation.sets alone; may be repeated"
    sub.add_argument("--set", action="append", default=[], metavar="NAME", help=text)
    sub.add_argument("--output", type=Path, help="also write the scores to this JSON file")
    text = "hold the model in the configured layout, on the ranks that would train"
    _flag(sub, "--all-ranks", text)
    text = "which layouts fit on so many GPUs, and about how fast; prints their keys"
    sub = _command(commands, "plan", text, "+")
    text = "GPUs of the trainer alone, one a rank; default: as configured (cluster)"
    sub.add_argument("--trainer-gpus", type=_positive, metavar="N", help=text)
    text = "GPUs of the engines, next to the trainer's; default: as configured (rollout.engine)"
    sub.add_argument("--engine-gpus", type=_positive, metavar="N", help=text)
    _add_gpu_memory(sub)
    gpus = ("A100", "H100", "H200", "B200")
    sub.add_argument("--gpu", choices=gpus, default="H100", help="whose speed to assume")
    text = "run single ranks at the real sizes, on a CPU, without memory, weights or peers"
    sub = _command(commands, "dryrun", text, "+")
    _add_gpu_memory(sub)
    text = "of the trainer, may be repeated; default: one of the first, a middle, the last stage"
    sub.add_argument("--rank", type=int, action="append", metavar="N", help=text)
    text = "trainer ranks; default: as configured"
    sub.add_argument("--world", type=_positive, metavar="W", help=text)
    text = "the tokens of the rank's experts over an even share (1)"
    sub.add_argument("--skew", type=float, default=1.0, metavar="FACTOR", help=text)
    text = "run the SGLang engines of a configuration alone, for a trainer that is given their URLs"
    sub = _command(commands, "engine", text, "*")
    text = "a JSON file for their URLs; it exists while they are ready"
    sub.add_argument("--urls-file", type=Path, help=text)
    text = "machines of one engine, each with equally many ranks; run the command on all of them"
    sub.add_argument("--nodes", type=_positive, default=1, metavar="N", help=text)
    text = "rank of this machine; 0: the machine that answers requests"
    sub.add_argument("--node-rank", type=int, default=0, metavar="K", help=text)
    text = "an address of machine 0, and a free port there for the rendezvous of the ranks"
    sub.add_argument("--head", metavar="HOST:PORT", help=text)


def _add_others(commands: Commands) -> None:
    """Add the commands that take no configuration."""
    sub = _command(commands, "export", "write a training checkpoint as a Hugging Face folder")
    text = (
        "a run (its last checkpoint), RUN@STEP, RUN@best or a checkpoint folder; load only"
        " checkpoints that you trust"
    )
    sub.add_argument("source", type=Path, help=text)
    sub.add_argument("folder", type=Path, help="the Hugging Face folder to write")
    _flag(sub, "--best", "the run's best checkpoint: RUN@best")
    _flag(sub, "--merged", "a whole model, not a PEFT folder, of a run that trained adapters")
    text = "what became of every prompt that a run drew; exit code 1 unless the ledger balances"
    sub = _command(commands, "ledger", text)
    sub.add_argument("run", type=Path, help="the folder of a run, even one in progress")
    how = sub.add_mutually_exclusive_group()
    how.add_argument("--draw", type=int, metavar="N", help="everything that happened to this draw")
    _flag(how, "--json", "as one JSON object")
    _flag(sub, "--quick", "do not read the recorded samples")
    text = "what differs between two runs, and where their metrics diverge; exit code 1 if anything"
    sub = _command(commands, "compare", text)
    sub.add_argument("a", type=Path, metavar="A", help="the folder of a run")
    sub.add_argument("b", type=Path, metavar="B", help="the folder of another run")
    text = "the relative difference that a metric may have (0.001)"
    sub.add_argument("--tolerance", type=float, default=1e-3, metavar="SHARE", help=text)
    text = "look at runs in a browser: curves, samples, tokens, what was not trained and why"
    sub = _command(commands, "view", text)
    sub.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    _flag(sub, "--follow", "show new steps as they come")
    sub.add_argument("--port", type=int, default=0, help="on 127.0.0.1; default: a free one")
    text = "write one file that needs no server, with one step of each run, instead of serving"
    sub.add_argument("--export", type=Path, metavar="PAGE.html", help=text)
    text = "the step that --export holds; default: the newest"
    sub.add_argument("--step", type=int, metavar="N", help=text)
    text = "a run, or the runs on a Ray cluster: their step, processes and engines"
    sub = _command(commands, "status", text)
    text = "the folder of a run, under any launcher (default: the runs on a Ray cluster)"
    sub.add_argument("run", type=Path, metavar="RUN", nargs="?", help=text)
    sub.add_argument("--address", metavar="HOST:PORT", help=_ADDRESS)
    sub = _command(commands, "stop", "end a run on a Ray cluster cleanly, after its current step")
    sub.add_argument("run", metavar="RUN", help="its run.name")
    sub.add_argument("--address", metavar="HOST:PORT", help=_ADDRESS)
    text = "how long to wait for its end (600)"
    sub.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help=text)
    text = "write a small, randomly initialised Hugging Face folder"
    _add_model_options(_command(commands, "init-model", text))
    text = "compare the model of a folder with transformers', layer by layer, before you trust it"
    sub = _command(commands, "check-model", text)
    sub.add_argument("folder", type=Path, metavar="FOLDER", help="a Hugging Face folder")
    text = "check the first N layers (all)"
    sub.add_argument("--layers", type=_positive, metavar="N", help=text)
    sub = _command(commands, "metrics", "define every metric that a run writes")
    _flag(sub, "--markdown", "as the page docs/metrics.md")
    sub = _command(commands, "config", "list every key of a configuration with its default")
    how = sub.add_mutually_exclusive_group()
    _flag(how, "--markdown", "as the page docs/configuration-reference.md")
    _flag(how, "--algorithms", "list estimators and losses with their keywords instead")


def _add_gpu_memory(sub: argparse.ArgumentParser) -> None:
    """Add the GPU memory that `rlcore plan` and `rlcore dryrun` compare with the need."""
    text = "of one GPU, as 80G (the default)"
    sub.add_argument("--gpu-memory", type=_gibibytes, default=80 << 30, metavar="SIZE", help=text)


def _add_model_options(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of `rlcore init-model`."""
    sub.add_argument("folder", type=Path)
    presets = ("addition", "ascii")
    text = "where the defaults come from"
    sub.add_argument("--preset", choices=presets, default="addition", help=text)
    text = "a `model_type` that the trainer knows; default: qwen3. Another one lists them"
    sub.add_argument("--family", metavar="NAME", help=text)
    text = "what the tokenizer knows, one token a character"
    sub.add_argument("--alphabet", metavar="CHARACTERS", help=text)
    for name in _MODEL_SIZES:
        sub.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    switch = argparse.BooleanOptionalAction
    sub.add_argument("--tied", action=switch, help="the LM head is the embedding")
    text = "a chat template with roles (ChatML); the alphabet needs letters and a line end"
    sub.add_argument("--chat", action=switch, help=text)
    _flag(sub, "--overwrite", "replace a model that is there")


def _positive(text: str) -> int:
    """Read a positive integer."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive integer")
    return int(text)


def _gibibytes(text: str) -> int:
    """Read the bytes of "80G", "80GB" or "80"."""
    number = text.upper().removesuffix("IB").removesuffix("B").removesuffix("G")
    if not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected gibibytes, as 80G")
    return int(number) << 30
