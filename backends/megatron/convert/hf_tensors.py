"""The Hugging Face tensors of a model: which it has, and their shapes. It needs no torch."""

from __future__ import annotations

from collections.abc import Iterator

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.fields import latent_shapes
from backends.megatron.convert.table import OUTPUT_LAYER, VALUE_HEAD, Entry, Split


def model_entries(arch: Architecture, head: str) -> list[Entry]:
    """The entries of a model with an "lm" or "value" head, in the order of a forward pass."""
    absent = {VALUE_HEAD} if head == "lm" else {OUTPUT_LAYER}
    if arch.tie_word_embeddings:
        absent.add(OUTPUT_LAYER)
    return [entry for entry in arch.entries() if entry.megatron not in absent]


def weight_tensors(
    arch: Architecture, dtype: str, head: str
) -> Iterator[tuple[Entry, str, tuple[int, ...], str]]:
    """Yield entry, name, shape and dtype of every tensor, in the order of a publication.

    It is that of a forward pass, but weights that keep a dtype of their own come last, since no
    bucket mixes dtypes. Tied models have no `lm_head.weight`; vocabulary padding is left out.

    Args:
        dtype: of the others, as "bfloat16".
    """
    for entry in sorted(model_entries(arch, head), key=lambda entry: entry.dtype is not None):
        for name, shape in zip(entry.hf, hf_shapes(arch, entry)):
            yield entry, name, shape, entry.dtype or dtype


def hf_shapes(arch: Architecture, entry: Entry) -> list[tuple[int, ...]]:
    """The full shape of each Hugging Face tensor of an entry, without vocabulary padding."""
    t = arch.transformer
    hidden = t["hidden_size"]
    ffn = _ffn_width(arch, entry)
    head_dim = t["kv_channels"]
    query = t["num_attention_heads"] * head_dim
    key = t["num_query_groups"] * head_dim
    if entry.split is Split.VOCAB:
        return [(arch.vocab_size, hidden)]
    if latent := latent_shapes(t).get(entry.megatron.rpartition(".self_attention.")[2]):
        return [latent]
    if entry.split is Split.GATED:
        return [(ffn, hidden), (ffn, hidden)]
    if entry.split is Split.QKV:
        tail = () if entry.megatron.endswith(".bias") else (hidden,)
        return [(query, *tail), (key, *tail), (key, *tail)]
    if entry.split is Split.ROW:
        return [(hidden, ffn if ".mlp." in entry.megatron else query)]
    if entry.megatron == VALUE_HEAD or entry.megatron.endswith(".shared_experts.gate_weight"):
        return [(1, hidden)]
    if entry.megatron.endswith(".router.weight"):
        return [(arch.num_experts, hidden)]
    if entry.megatron.endswith(".router.expert_bias"):
        return [(arch.num_experts,)]
    if entry.split is Split.REPLICATED:
        per_head = entry.megatron.endswith(("q_layernorm.weight", "k_layernorm.weight"))
        return [(head_dim if per_head else hidden,)]
    raise TypeError(f"{entry.megatron}: no shape rule for a {entry.split.value} split")


def _ffn_width(arch: Architecture, entry: Entry) -> int:
    """The width of the feed-forward net that an entry belongs to."""
    if entry.expert is not None:
        return int(arch.transformer["moe_ffn_hidden_size"])
    if ".shared_experts." in entry.megatron:
        return int(arch.transformer["moe_shared_expert_intermediate_size"])
    return int(arch.transformer["ffn_hidden_size"])
