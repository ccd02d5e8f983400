"""The text of single tokens, by the tokenizer of the run's model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

BROKEN = "\ufffd"  # stands for bytes that are no whole character yet
SPACE = "\u2581"  # in the names of SentencePiece's tokens
LONGEST_CHARACTER = 8  # tokens that make one character, at most


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
        self.trouble = ""  # why texts of tokens are missing

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; "" for one that goes on with the character before it.

        Without a tokenizer each is its number.
        """
        tokenizer = self._load()
        if tokenizer is None:
            return [f"[{token}]" for token in tokens]
        pieces = tokenizer.decode_batch([[token] for token in tokens], skip_special_tokens=False)
        for place, token in enumerate(tokens):  # of a word alone, some decoders lose its space
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
                for longer in range(2, LONGEST_CHARACTER + 1):
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
