"""What the pages of the documentation show: files, fragments of configurations, commands."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from rlcore.config.sections.root import Config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)*^ {4}.*\n", re.MULTILINE)
_NAMED = re.compile(r"# ([\w./-]+\.(?:py|yaml|toml|jsonl))\n")


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str | None:
        """The file that the block is, by its first line: `# grpo.yaml`."""
        found = _NAMED.match(self.text)
        return None if found is None else found[1]

    @property
    def where(self) -> str:
        """The page and line, for messages."""
        return f"{self.page.name}:{self.line}"


@cache
def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order, fenced and indented; an indented one is told apart."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(page, _line(text, match.start()), match[1], match[2])
        for match in _FENCED.finditer(text)
    ]
    # lines keep their numbers, and a fence stays between two indented blocks
    rest = _FENCED.sub(lambda match: re.sub(r"[^\n]+", "`", match[0]), text)
    for match in _INDENTED.finditer(rest):
        code = textwrap.dedent(match[0]).strip("\n") + "\n"
        line = _line(rest, match.start()) + len(match[0]) - len(match[0].lstrip("\n"))
        found.append(Block(page, line, _language(code), code))
    return sorted(found, key=lambda block: block.line)


def block(page: Path, name: str) -> Block:
    """Return the file of that name that a page shows."""
    [found] = [one for one in blocks(page) if one.name == name]
    return found


def commands(page: Path, start: str = "rlcore ") -> Iterator[tuple[Block, list[str]]]:
    """Yield the words of each shell command of a page that begins with `start`, and its block.

    Where the output goes through a pipe, the first command alone.
    """
    for shown in blocks(page):
        if shown.language != "shell":
            continue
        for line in re.sub(r"\\\n\s*", "", shown.text).splitlines():
            if line.startswith(start):
                words = shlex.split(line, comments=True)
                yield shown, words[: words.index("|")] if "|" in words else words


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _language(code: str) -> str:
    """Tell YAML of a configuration from shell in an indented block."""
    try:
        value = yaml.safe_load(code)
    except yaml.YAMLError:
        return "shell"
    is_configuration = isinstance(value, dict) and set(value) <= set(Config.model_fields)
    return "yaml" if is_configuration else "shell"
