"""What a model keeps of the tokens that it was given, so that the next one costs one column.

transformers' layers get this cache in the place of their own, whose classes concatenate on every
token and change between versions. Attention layers keep keys and values, in buffers that grow by
blocks. Linear-attention and Mamba layers keep a state of fixed size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # positions: buffers grow by at least this much


class Cache:
    """Keys, values and states of R rows, of which `length` columns were computed.

    Columns are aligned: column c of every row was computed in the same forward pass. Keys and
    values are [R, KV heads, columns, head size] a layer. With latent attention they have different
    head sizes.

    Args:
        capacity: columns that the buffers have room for.
        pads: int64 [R], the columns left of each row's first token; None: none.
    """

    def __init__(self, capacity: int, pads: Tensor | None = None) -> None:
        self.capacity = capacity
        self.pads = pads
        self.length = 0
        # by layer
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        # The inputs of the convolution that the next token needs, [R, channels, kernel size].
        self._inputs: dict[int, Tensor] = {}
        self._states: dict[int, Tensor] = {}

    # --- rows and columns -------------------------------------------------------------------------

    def reserve(self, length: int, most: int) -> None:
        """Make room for `length` columns; grow by half, never beyond `most`."""
        if length <= self.capacity:
            return
        self.capacity = min(most, max(length, self.capacity + BLOCK, self.capacity * 3 // 2))
        for layer, pair in self._layers.items():
            grown = tuple(
                old.new_empty(*old.shape[:2], self.capacity, old.shape[3]) for old in pair
            )
            for new, old in zip(grown, pair):
                new[:, :, : self.length] = old[:, :, : self.length]
            self._layers[layer] = grown[0], grown[1]

    def select(self, rows: Tensor) -> None:
        """Keep these rows, int64 [r], in this order; a row may be taken more than once."""
        if self.pads is not None:
            self.pads = self.pads[rows]
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = keys.index_select(0, rows), values.index_select(0, rows)
        for kept in (self._inputs, self._states):
            for layer, tensor in kept.items():
                kept[layer] = tensor.index_select(0, rows)

    def fill(self, pieces: list[Cache]) -> None:
        """Take the rows of all pieces, which have one length, in order; the pieces are emptied."""
        self.length = pieces[0].length
        for layer in list(pieces[0]._layers):
            keys, values = zip(*(piece._layers.pop(layer) for piece in pieces))
            self._layers[layer] = joined(keys), joined(values)
        for kind in ("_inputs", "_states"):
            for layer in list(getattr(pieces[0], kind)):
                parts = tuple(getattr(piece, kind).pop(layer) for piece in pieces)
                getattr(self, kind)[layer] = joined(parts)

    # --- what transformers' layers call -----------------------------------------------------------

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new columns [R, KV heads, Q, head size] of a layer; return views of all columns."""
        end = self.length + keys.shape[2]
        if layer_idx not in self._layers:
            empty = [
                new.new_empty(*new.shape[:2], self.capacity, new.shape[3]) for new in (keys, values)
            ]
            self._layers[layer_idx] = empty[0], empty[1]
        all_keys, all_values = self._layers[layer_idx]
        all_keys[:, :, self.length : end] = keys
        all_values[:, :, self.length : end] = values
        return all_keys[:, :, :end], all_values[:, :, :end]

    def get_conv_state(self, layer_idx: int, **_: Any) -> Tensor | None:
        """The last inputs of a layer's convolution, which the layer moves on in place."""
        return self._inputs.get(layer_idx)

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, *, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        """Take the inputs of new columns [R, channels, Q]; return them behind the last ones."""
        before = self._inputs.get(layer_idx)
        if before is None:
            before = inputs.new_zeros(*inputs.shape[:2], conv_kernel_size)
        whole = torch.cat([before, inputs], dim=-1)
        # A copy, which does not keep the whole prompt alive.
        self._inputs[layer_idx] = whole[..., -conv_kernel_size:].clone()
        return whole

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a layer must be able to go back: never."""
        return False

    def get_recurrent_state(self, layer_idx: int, **_: Any) -> Tensor | None:
        """The state of a layer behind the last column."""
        return self._states.get(layer_idx)

    def update_recurrent_state(self, state: Tensor, layer_idx: int, **_: Any) -> Tensor:
        """Take the state of a layer behind new columns. It is kept, not copied."""
        self._states[layer_idx] = state
        return state


def joined(parts: tuple[Tensor, ...]) -> Tensor:
    """Concatenate rows; a single part is not copied."""
    return torch.cat(parts) if len(parts) > 1 else parts[0]
