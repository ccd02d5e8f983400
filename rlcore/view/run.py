"""One run as the page sees it: its files, and nothing outside its folder."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from rlcore.errors import DataError, UserError
from rlcore.runs.directory import STEP_FILE, RunDirectory
from rlcore.runs.rollouts import Record, read_table
from rlcore.view.metrics import MetricsTable
from rlcore.view.samples import Samples


class LedgerReader(Protocol):
    """Reads what became of a run's draws. The package `rollout` knows the ledger's file."""

    def untrained(self) -> dict[str, Any]:
        """Return `counts`, `events` and `restarts`. Raises DataError where there is no ledger."""

    def life(self, draw: int) -> list[dict[str, Any]]:
        """Return what happened to a draw, in order. Raises DataError as above."""


class RunView:
    """Reads one run."""

    def __init__(self, name: str, path: Path, ledger: LedgerReader) -> None:
        if not (path / "config.yaml").is_file() and not (path / "metrics.jsonl").is_file():
            raise UserError(
                f"{path} is no run: it has neither config.yaml nor metrics.jsonl; give folders as"
                " runs/NAME"
            )
        self.name = name
        self.ledger = ledger
        self.path = path.resolve()
        self.directory = RunDirectory(self.path)
        self.metrics = MetricsTable(lambda: self.inside(self.directory.metrics_path))
        self.texts = TokenTexts(self.config, self.path)
        self.samples = Samples(
            lambda: self._by_step(self.directory.index),
            lambda: self._by_step(self.directory.merged_index),
        )

    def inside(self, path: Path) -> Path:
        """Return `path`, which must lie in the run's folder, links followed.

        Raises:
            DataError: it does not.
        """
        return inside(self.path, path)

    # --- what there is ----------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Return the run's configuration; {} where there is none or it cannot be read."""
        return self._map_in(self.directory.config_path, yaml.safe_load)

    def result(self) -> dict[str, Any]:
        """Return how the run ended; {} while it goes on or after a kill."""
        return self._map_in(self.directory.result_path, json.loads)

    def _map_in(self, path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
        try:
            found = parse(self.inside(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError, DataError):
            return {}
        return found if isinstance(found, dict) else {}

    def recorded(self) -> dict[int, Path]:
        """Return the recordings of steps that are on the disk."""
        return self._by_step(self.directory.rollouts)

    def evaluated(self) -> dict[int, Path]:
        """Return the recordings of evaluations, by the step that they came after."""
        return self._by_step(self.directory.evaluations)

    def _by_step(self, folder: Path) -> dict[int, Path]:
        if not self.inside(folder).is_dir():
            return {}
        with os.scandir(folder) as entries:
            found = [(STEP_FILE.fullmatch(entry.name), entry) for entry in entries]
        files = {int(match[1]): entry for match, entry in found if match}
        return {
            step: self.inside(Path(entry)) if entry.is_symlink() else Path(entry)
            for step, entry in sorted(files.items())
        }

    def recording(self, step: int) -> Path:
        """Return the file of a step. Raises DataError where it is gone."""
        path = self.inside(self.directory.rollouts_path(step))
        if not path.is_file():
            raise DataError(
                f"the samples of step {step} are not on the disk (any more):"
                " tracking.save_rollouts, tracking.keep_rollouts"
            )
        return path

    def records(self, step: int, rows: Iterable[int]) -> dict[int, Record]:
        """Return recorded samples by their rows. Raises DataError where one is missing."""
        wanted = set(rows)
        found = dict(read_table(self.recording(step), rows=wanted))
        if lacking := wanted - found.keys():
            raise DataError(f"step {step} has no sample {min(lacking)}")
        return found


def inside(folder: Path, path: Path) -> Path:
    """Return `path`, which must lie in a run's resolved folder. Raises as `RunView.inside` does."""
    found = path.resolve()
    if not found.is_relative_to(folder):
        raise DataError(f"{path.name} is a link out of the run's folder, which is not followed")
    return found


# --- texts of tokens ------------------------------------------------------------------------------

BROKEN = "\ufffd"  # stands for bytes that are no whole character yet
SPACE = "\u2581"  # in the names of SentencePiece's tokens
MAX_CHARACTER_TOKENS = 8  # tokens that make one character, at most


class TokenTexts:
    """Splits a text into its tokens. The tokenizer is read when it is first asked for.

    Only `tokenizer.json` of the folder that the configuration names is read: it is data, no code
    comes with it.

    Args:
        config: reads the run's configuration.
        run: the run's folder. Relative paths of its configuration start where it was trained.
    """

    def __init__(self, config: Callable[[], Mapping[str, Any]], run: Path) -> None:
        self._config = config
        self._run = run
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        # why texts of tokens are missing
        self.trouble = ""

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; "" for one that goes on with the character before it.

        Without a tokenizer each is its number.
        """
        tokenizer = self._load()
        if tokenizer is None:
            return [f"[{token}]" for token in tokens]
        pieces = tokenizer.decode_batch([[token] for token in tokens], skip_special_tokens=False)
        # of a word alone, some decoders lose its space
        for place, token in enumerate(tokens):
            name = tokenizer.id_to_token(token) or ""
            if name.startswith(SPACE) and not pieces[place].startswith(" "):
                pieces[place] = f" {pieces[place]}"
        return self._joined(tokenizer, tokens, pieces)

    def _joined(self, tokenizer: Any, tokens: Sequence[int], pieces: list[str]) -> list[str]:
        """Join tokens that are parts of one character: its text stands at the first of them."""
        place = 0
        while place < len(tokens):
            size = 1
            if BROKEN in pieces[place]:
                for longer in range(2, MAX_CHARACTER_TOKENS + 1):
                    text = tokenizer.decode(
                        list(tokens[place : place + longer]), skip_special_tokens=False
                    )
                    if BROKEN not in text:
                        pieces[place : place + longer] = [text, *[""] * (longer - 1)]
                        size = longer
                        break
            place += size
        return pieces

    def _load(self) -> Any:
        with self._lock:
            if self._tokenizer is not None or self.trouble:
                return self._tokenizer
            candidates = self._candidates()
            path = next((path for path in candidates if path.is_file()), None)
            if path is None:
                looked = ", ".join(map(str, candidates)) or "no model in config.yaml"
                self.trouble = f"no tokenizer here ({looked}), so tokens are shown by number"
                return None
            from tokenizers import Tokenizer

            try:
                self._tokenizer = Tokenizer.from_file(str(path))
            # tokenizers raises no narrower error
            except Exception as error:  # noqa: BLE001
                self.trouble = f"{path} cannot be read ({error}), so tokens are shown by number"
            return self._tokenizer

    def _candidates(self) -> list[Path]:
        """Return where the tokenizer may be."""
        config = self._config()
        model, run = (config.get(name) for name in ("model", "run"))
        given = model if isinstance(model, dict) else {}
        folder = Path(str(given.get("tokenizer") or given.get("path") or ""))
        found = [folder]
        if isinstance(run, dict) and not folder.is_absolute():
            # `run.dir` is relative to the same folder, and the run lies one below it
            above = len(Path(str(run.get("dir", "runs"))).parts)
            found += [self._run.parents[above] / folder] if above < len(self._run.parents) else []
        return [path / "tokenizer.json" for path in found if folder.parts]
