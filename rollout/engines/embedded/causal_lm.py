"""The Hugging Face model of the embedded engine: transformers' layers over a KV cache of ours.

The cache never passes through transformers' cache classes (which concatenate on every token, and
change between versions): the model runs with an attention function of ours, which gets the cache as
a keyword and keeps keys and values in buffers that grow by blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlcore.errors import ModelError
from rlcore.weights import DTYPES, add_product
from rollout.engines.checks import language_config
from rollout.engines.embedded.routed_experts import ExpertTap

ATTENTION = "rlcore_kv_cache"
BLOCK = 128  # positions: buffers grow by at least this much
# Keywords of attention that change the result.
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")


class KVCache:
    """Keys and values of R rows: [R, KV heads, positions, head size] a layer, `length` valid.

    With latent attention keys and values have different head sizes. Columns are aligned: position
    column c of every row was computed in the same forward pass.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new columns [R, KV heads, Q, head size] of a layer; return views of all columns."""
        end = self.length + keys.shape[2]
        if layer not in self._layers:
            empty = [
                new.new_empty(*new.shape[:2], self.capacity, new.shape[3]) for new in (keys, values)
            ]
            self._layers[layer] = empty[0], empty[1]
        all_keys, all_values = self._layers[layer]
        all_keys[:, :, self.length : end] = keys
        all_values[:, :, self.length : end] = values
        return all_keys[:, :, :end], all_values[:, :, :end]

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
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = keys.index_select(0, rows), values.index_select(0, rows)

    def fill(self, pieces: list[KVCache]) -> None:
        """Take the rows of all pieces, which have one length, in order; the pieces are emptied."""
        self.length = pieces[0].length
        for layer in list(pieces[0]._layers):
            parts = [piece._layers.pop(layer) for piece in pieces]
            keys, values = (torch.cat(half) if len(parts) > 1 else half[0] for half in zip(*parts))
            self._layers[layer] = keys, values


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    kv_cache: KVCache | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query `[R, heads, Q, d]` to `[R, Q, heads, d]`.

    Without a mask the rows are causal from column 0. A single query is packed as `[R, KV heads,
    group, d]`, so that grouped heads need no copies of the keys.
    """
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ModelError(
                f"the embedded engine does not do attention with {name}; use rollout.engine.kind:"
                " sglang"
            )
    if kv_cache is not None:
        key, value = kv_cache.append(module.layer_idx, key, value)  # type: ignore[arg-type]
    rows, heads, queries, size = query.shape
    if queries == 1:
        packed = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
        if query.device.type == "cpu":
            mixed = _attend(packed, key, value, attention_mask, scaling)
        else:
            mixed = functional.scaled_dot_product_attention(
                packed, key, value, attn_mask=attention_mask, scale=scaling
            )
        return mixed.reshape(rows, 1, heads, value.shape[3]), None
    mixed = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None,
        scale=scaling,
        enable_gqa=heads != key.shape[1],
    )
    return mixed.transpose(1, 2), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Attention of a few queries `[R, KV heads, group, d]`; torch's kernel for the CPU takes three
    times as long for them.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query * scale, key.transpose(-1, -2)).float()
    if mask is not None:
        scores += mask
    return torch.matmul(scores.softmax(-1).to(value.dtype), value)


class Fp32Head(nn.Linear):
    """An output layer whose logits are in fp32, not rounded to the dtype of its weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute the logits [..., V] of hidden states [..., H]."""
        rows = input.flatten(0, -2)
        logits = rows.new_empty(len(rows), self.out_features, dtype=torch.float32)
        return add_product(logits, rows, self.weight.t(), beta=0).view(*input.shape[:-1], -1)


class CausalLM:
    """The model of a Hugging Face folder, with uninitialised weights, on one device.

    Args:
        fp32_head: keep the logits of a bf16 model in fp32, as `policy.logprobs.fp32_head` says.
    """

    def __init__(
        self, path: str, *, device: torch.device, dtype: str, fp32_head: bool = False
    ) -> None:
        self.device = device
        self.module = build_module(path, device=device, dtype=DTYPES[dtype])
        if fp32_head and DTYPES[dtype] != torch.float32:
            module: Any = self.module
            module.get_output_embeddings().__class__ = Fp32Head
        config: Any = self.module.config
        self.vocab_size: int = config.vocab_size
        self.max_positions = _max_positions(config)
        self.dtype = DTYPES[dtype]
        self.tap = ExpertTap(self.module)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        """Logits `[R, V]` of the last column.

        Args:
            tokens: int64 [R, Q], the new columns; their keys and values are appended to the cache.
            positions: int64 [R, Q], or [1, Q] where all rows agree.
            mask: additive, [R, 1, Q, columns], or None for plain causal rows.
        """
        output = self.module(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            use_cache=False,
            logits_to_keep=1,
            kv_cache=cache,
        )
        cache.length += tokens.shape[1]
        logits: Tensor = output.logits[:, -1]
        return logits


def _max_positions(config: Any) -> int:
    """The longest sequence that the model computes right next to others, over a cache."""
    longest: int = getattr(config, "max_position_embeddings", None) or 1 << 62
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("longrope", "dynamic"):
        return longest
    # In a longer sequence every key would change, also those of the sequences in its batch.
    return min(longest, rope.get("original_max_position_embeddings") or longest)


def build_module(path: str, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The architecture of `path` with uninitialised weights.

    The module is built on the meta device. This makes no random weights and leaves the global
    random state alone, on which a trainer in the same process depends.
    """
    if not (Path(path) / "config.json").is_file():
        raise ModelError(f"model.path: {path} has no config.json; give a Hugging Face model folder")

    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    config = language_config(path)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ModelError(
            f"{path}: the embedded engine does not do sliding-window attention; use"
            " rollout.engine.kind: sglang"
        )
    with torch.device("meta"):
        # In fp32, then cast: from_config would set the process's default dtype, under the feet of
        # other threads.
        module = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=ATTENTION, trust_remote_code=False
        )
    # The buffers are not cast: the bias of a router is fp32 in any model.
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    module = module.to_empty(device=device).eval().requires_grad_(False)
    # `to_empty` has given tied weights separate storages.
    module.tie_weights()
    restore_buffers(module, device)
    result: nn.Module = module
    return result


def restore_buffers(module: nn.Module, device: torch.device) -> None:
    """Restore the buffers that no file holds (rotary frequencies): build their owners again."""
    for name, owner in list(module.named_modules()):
        lost = owner._non_persistent_buffers_set
        if not lost:
            continue
        try:
            fresh = type(owner)(module.config)
        except TypeError as error:
            raise ModelError(
                f"the embedded engine cannot rebuild {name} ({type(owner).__name__}) of"
                f" {type(module).__name__}: {error}"
            ) from None
        for buffer in lost:
            setattr(owner, buffer, getattr(fresh, buffer).to(device))
