"""A run as the page reads it: its files, and nothing outside its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rlcore.errors import DataError, UserError
from rlcore.runs.directory import STEP_FILE, RunDirectory
from rlcore.runs.rollouts import Record, read_table
from rlcore.view.metrics import MetricsTable
from rlcore.view.samples import Samples


class RunView:
    """Reads one run."""

    def __init__(self, name: str, path: Path) -> None:
        if not (path / "config.yaml").is_file() and not (path / "metrics.jsonl").is_file():
            raise UserError(
                f"{path} is not a run: it has neither config.yaml nor metrics.jsonl; give folders"
                " as runs/NAME"
            )
        self.name = name
        self.path = path.resolve()
        self.directory = RunDirectory(self.path)
        self.metrics = MetricsTable(lambda: self.inside(self.directory.metrics_path))
        self.texts = TokenTexts(self.config, self.path)
        self.samples = Samples(
            lambda: self._by_step(self.directory.index),
            lambda: self._by_step(self.directory.merged_index),
        )

    def inside(self, path: Path) -> Path:
        """Return `path`, links followed. Raises DataError if it lies outside the run's folder."""
        found = path.resolve()
        if not found.is_relative_to(self.path):
            raise DataError(f"{path.name} is a link out of the run's folder, which is not followed")
        return found

    # --- files ------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Return the run's configuration; {} if it is missing or unreadable."""
        return self._map_in(self.directory.config_path, yaml.safe_load)

    def result(self) -> dict[str, Any]:
        """Return the result of the run; {} while it is running or after a kill."""
        return self._map_in(self.directory.result_path, json.loads)

    def _map_in(self, path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
        try:
            found = parse(self.inside(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError, DataError):
            return {}
        return found if isinstance(found, dict) else {}

    def recorded(self) -> dict[int, Path]:
        """Return the recordings of steps on the disk."""
        return self._by_step(self.directory.rollouts)

    def evaluated(self) -> dict[int, Path]:
        """Return the recordings of evaluations, by the step that they follow."""
        return self._by_step(self.directory.evaluations)

    def _by_step(self, folder: Path) -> dict[int, Path]:
        if not self.inside(folder).is_dir():
            return {}
        files = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                if match := STEP_FILE.fullmatch(entry.name):
                    path = Path(entry)
                    files[int(match[1])] = self.inside(path) if entry.is_symlink() else path
        return dict(sorted(files.items()))

    def recording(self, step: int) -> Path:
        """Return the file of a step. Raises DataError if it is gone."""
        path = self.inside(self.directory.rollouts_path(step))
        if not path.is_file():
            raise DataError(
                f"the samples of step {step} are not on the disk (any more):"
                " tracking.save_rollouts, tracking.keep_rollouts"
            )
        return path

    def records(self, step: int, rows: Iterable[int]) -> dict[int, Record]:
        """Return recorded samples by their rows. Raises DataError if one is missing."""
        wanted = set(rows)
        found = dict(read_table(self.recording(step), rows=wanted))
        if lacking := wanted - found.keys():
            raise DataError(f"step {step} has no sample {min(lacking)}")
        return found


# --- texts of tokens ------------------------------------------------------------------------------

BROKEN = "\ufffd"  # stands for bytes of an incomplete character
SPACE = "\u2581"  # a space in the names of SentencePiece's tokens
MAX_CHARACTER_TOKENS = 8  # tokens that make one character, at most


class TokenTexts:
    """Splits a text into its tokens; reads the tokenizer at the first use.

    It reads only `tokenizer.json` in the configured folder, which is data without code.

    Args:
        config: reads the run's configuration.
        run: the run's folder. Relative paths of its configuration start at the folder where it
            was trained.
    """

    def __init__(self, config: Callable[[], Mapping[str, Any]], run: Path) -> None:
        self._config = config
        self._run = run

    @property
    def trouble(self) -> str:
        """The reason why texts of tokens are missing."""
        return self._loaded[1]

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; "" for a token that continues the character before it.

        Without a tokenizer the text is the token's number.
        """
        tokenizer = self._loaded[0]
        if tokenizer is None:
            return [f"[{token}]" for token in tokens]
        pieces = tokenizer.decode_batch([[token] for token in tokens], skip_special_tokens=False)
        # Some decoders drop the space before a single word.
        for index, token in enumerate(tokens):
            name = tokenizer.id_to_token(token) or ""
            if name.startswith(SPACE) and not pieces[index].startswith(" "):
                pieces[index] = f" {pieces[index]}"
        # Of tokens that are parts of a character, the first gets its text.
        for index in range(len(tokens)):
            for end in range(index + 2, index + MAX_CHARACTER_TOKENS + 1):
                if BROKEN not in pieces[index]:
                    break
                text = tokenizer.decode(list(tokens[index:end]), skip_special_tokens=False)
                if BROKEN not in text:
                    pieces[index:end] = [text, *[""] * (end - index - 1)]
        return pieces

    @cached_property
    def _loaded(self) -> tuple[Any, str]:
        """The tokenizer, or None and the reason."""
        config = self._config()
        model, run = (config.get(name) for name in ("model", "run"))
        given = model if isinstance(model, dict) else {}
        folder = Path(str(given.get("tokenizer") or given.get("path") or ""))
        folders = [folder]
        if isinstance(run, dict) and not folder.is_absolute():
            # `run.dir` is relative to the same folder, and the run lies one level below `run.dir`.
            above = len(Path(str(run.get("dir", "runs"))).parts)
            folders += [self._run.parents[above] / folder] if above < len(self._run.parents) else []
        candidates = [path / "tokenizer.json" for path in folders if folder.parts]
        path = next((path for path in candidates if path.is_file()), None)
        if path is None:
            looked = ", ".join(map(str, candidates)) or "no model in config.yaml"
            return None, f"no tokenizer here ({looked}), so tokens are shown by number"
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(path)), ""
        # tokenizers raises no narrower error.
        except Exception as error:  # noqa: BLE001
            return None, f"{path} cannot be read ({error}), so tokens are shown by number"
