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
    """

    def __init__(self, config: Callable[[], Mapping[str, Any]]) -> None:
        self._config = config
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
            model = self._config().get("model")
            given = model if isinstance(model, dict) else {}
            folder = given.get("tokenizer") or given.get("path") or ""
            path = Path(str(folder)) / "tokenizer.json"
            if not folder or not path.is_file():
                self.trouble = f"no {path} here, so tokens are shown by number"
                return None
            from tokenizers import Tokenizer

            try:
                self._tokenizer = Tokenizer.from_file(str(path))
            # tokenizers raises no narrower error
            except Exception as error:  # noqa: BLE001
                self.trouble = f"{path} cannot be read ({error}), so tokens are shown by number"
            return self._tokenizer
