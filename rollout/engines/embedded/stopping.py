"""The end of a response: stop token ids for whole batches at once, stop strings row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# a window cut inside a character or a word decodes wrongly at its left edge only
EXTRA_TOKENS = 4


def stop_id_table(stop_ids: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """Return each row's stop ids, int64 [R, S], filled up with -1, which is no token."""
    width = max(1, max(map(len, stop_ids)))
    return torch.tensor(
        [[*ids, *[-1] * (width - len(ids))] for ids in stop_ids], dtype=torch.int64, device=device
    )


class StopStrings:
    """Tells when the text of a response comes to hold one of its stop strings.

    A token stands for at least one byte, so a string of b bytes that the newest token completes
    lies in the last b tokens: only that window is decoded, however long the response is.
    """

    def __init__(self, strings: tuple[str, ...], tokenizer: Any) -> None:
        self.strings = strings
        self.tokenizer = tokenizer
        self.window = max(len(text.encode()) for text in strings) + EXTRA_TOKENS

    def hit(self, tail: list[int]) -> bool:
        """Whether a response whose last `window` tokens are `tail` holds a stop string."""
        text = self.tokenizer.decode(
            tail, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(string in text for string in self.strings)
