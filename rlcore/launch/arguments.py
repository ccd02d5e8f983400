"""Arguments of the `rlcore` command that have a form of their own."""

from __future__ import annotations

import argparse
from pathlib import Path

_MODEL_SIZES = (
    *("hidden", "layers", "heads", "kv_heads", "intermediate"),
    *("experts", "experts_per_token", "seed"),
)
MODEL_OPTIONS = ("family", "alphabet", "tied", *_MODEL_SIZES)


def positive(text: str) -> int:
    """Read a positive integer."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive integer")
    return int(text)


def gibibytes(text: str) -> int:
    """Read the bytes of "80G", "80GB" or "80"."""
    number = text.upper().removesuffix("IB").removesuffix("B").removesuffix("G")
    if not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected gibibytes, as 80G")
    return int(number) << 30


def add_model_options(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of `rlcore init-model`."""
    sub.add_argument("folder", type=Path)
    sub.add_argument(
        "--preset",
        choices=("addition", "ascii"),
        default="addition",
        help="where the defaults come from",
    )
    sub.add_argument(
        "--family", choices=("qwen3", "qwen2", "llama", "qwen3_moe", "mixtral", "deepseek_v3")
    )
    sub.add_argument(
        "--alphabet", metavar="CHARACTERS", help="what the tokenizer knows, one token a character"
    )
    for name in _MODEL_SIZES:
        sub.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    sub.add_argument(
        "--tied", action=argparse.BooleanOptionalAction, help="the LM head is the embedding"
    )
    sub.add_argument("--overwrite", action="store_true", help="replace a model that is there")
