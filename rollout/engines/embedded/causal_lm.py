"""The Hugging Face model of the embedded engine: transformers' layers, our cache and attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.errors import ModelError
from rlcore.hf_config.language import as_trained
from rlcore.weights import DTYPES, add_product
from rollout.engines.checks import language_config
from rollout.engines.embedded.attention import ATTENTION, Masks, attention
from rollout.engines.embedded.cache import Cache
from rollout.engines.embedded.routed_experts import ExpertTap

# Layers that are computed here as transformers computes them.
LAYER_TYPES = {
    *("full_attention", "sliding_attention", "linear_attention", "moe", "mlp"),
    # DeepSeek-V3.2's and GLM-5's sparse attention, up to the length where it is dense.
    "indexed_attention",
}


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

    def forward(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits `[R, V]` of the last column.

        Args:
            tokens: int64 [R, Q], the new columns, which are added to the cache.
        """
        queries = tokens.shape[1]
        given = None
        if cache.pads is not None and queries == 1:
            positions = (cache.length - cache.pads)[:, None]
        else:
            columns = torch.arange(cache.length, cache.length + queries, device=tokens.device)
            positions = columns[None]
            if cache.pads is not None:
                pads = cache.pads[:, None]
                positions = (columns - pads).clamp_(min=0)
                # Layers with a state skip the padding.
                given = columns >= pads
        output = self.module(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=given,
            past_key_values=cache,
            use_cache=False,
            logits_to_keep=1,
            masks=Masks(cache.length, cache.pads),
        )
        cache.length += queries
        logits: Tensor = output.logits[:, -1]
        return logits


def _max_positions(config: Any) -> int:
    """The longest sequence that the model computes right next to others, over a cache."""
    longest: int = getattr(config, "max_position_embeddings", None) or 1 << 62
    longest = min(longest, getattr(config, "index_topk", None) or longest)
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
    others = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if others:
        raise ModelError(
            f"{path}: the embedded engine does not do layers of type {', '.join(sorted(others))};"
            " use rollout.engine.kind: sglang"
        )
    with torch.device("meta"):
        # In fp32, then cast: from_config would set the process's default dtype, under the feet of
        # other threads.
        module = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=ATTENTION, trust_remote_code=False
        )
    as_trained(module)
    for layer in module.modules():
        if hasattr(layer, "indexer"):
            _attend_to_all(layer)
    # The buffers are not cast: the bias of a router is fp32 in any model.
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    module = module.to_empty(device=device).eval().requires_grad_(False)
    # `to_empty` has given tied weights separate storages.
    module.tie_weights()
    restore_buffers(module)
    result: nn.Module = module
    return result


def _attend_to_all(attention: Any) -> None:
    """Leave the indexer of sparse attention out: up to `index_topk` tokens it chooses every key."""
    attention.indexer = _AllKeys()
    attention.register_forward_pre_hook(_with_a_mask, with_kwargs=True)


class _AllKeys(nn.Module):
    def forward(self, hidden_states: Tensor, *unused: Any, **options: Any) -> Tensor:
        """The choice of keys, which our attention does not read."""
        return hidden_states[..., :0]


def _with_a_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """transformers cuts a mask for the indexer, also where there is none."""
    hidden: Tensor = kwargs["hidden_states"]
    return args, {**kwargs, "attention_mask": hidden.new_zeros(1, 1, 1, 1)}


def restore_buffers(module: Any) -> None:
    """Compute the buffers that no file holds, such as rotary frequencies, as transformers does."""
    for parameter in module.parameters():
        # transformers then leaves it alone.
        parameter._is_hf_initialized = True
    for name, owner in module.named_modules():
        lost = [owner.get_buffer(buffer) for buffer in owner._non_persistent_buffers_set]
        for buffer in lost:
            buffer.fill_(torch.nan)
        if lost:
            module._init_weights(owner)
        if any(buffer.isnan().any() for buffer in lost):
            raise ModelError(
                f"the embedded engine cannot restore the buffers of {name}"
                f" ({type(owner).__name__}) of {type(module).__name__}"
            )
