"""Hashes of the tensors that SGLang keeps, from those that are published. tests/sglang compares
them with a real server's.
"""

from __future__ import annotations

import hashlib

import pytest
import torch

from rlcore.errors import ConfigError
from rollout.engines.sglang.checksums import FusedChecksums

DENSE = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2}


def hash_of(*parts):
    return hashlib.sha256(
        b"".join(part.contiguous().numpy().tobytes() for part in parts)
    ).hexdigest()[:16]


def said(*ranks):
    return [
        {"checksums": sums, "parallelism_info": [{"tp_rank": rank}]}
        for rank, sums in enumerate(ranks)
    ]


def told(checksums, tensors):
    for name, tensor in tensors.items():
        checksums.add(name, tensor)
    return checksums


@pytest.fixture
def attention():
    torch.manual_seed(0)
    rows = {"q": 8, "k": 4, "v": 4}  # heads of 2
    return {f"a.self_attn.{name}_proj.weight": torch.randn(size, 6) for name, size in rows.items()}


def test_queries_keys_and_values_are_one_tensor_in_parts_for_each_rank(attention):
    q, k, v = attention.values()
    checksums = told(FusedChecksums(DENSE, ranks=2, dtype=None), attention)
    whole = [
        {
            "a.self_attn.qkv_proj.weight": hash_of(
                q[r * 4 : r * 4 + 4], k[r * 2 : r * 2 + 2], v[r * 2 : r * 2 + 2]
            )
        }
        for r in range(2)
    ]
    assert checksums.mismatch(said(*whole)) is None
    assert (
        checksums.mismatch(said(*reversed(whole)))
        == "1 tensors differ: a.self_attn.qkv_proj.weight"
    )


def test_more_ranks_than_key_heads_share_them(attention):
    q, k, v = attention.values()
    checksums = told(FusedChecksums(DENSE, ranks=4, dtype=None), attention)
    held = [
        (q[r * 2 : r * 2 + 2], k[r // 2 * 2 : r // 2 * 2 + 2], v[r // 2 * 2 : r // 2 * 2 + 2])
        for r in range(4)
    ]
    assert (
        checksums.mismatch(
            said(*({"a.self_attn.qkv_proj.weight": hash_of(*parts)} for parts in held))
        )
        is None
    )


def test_what_is_cut_along_its_columns_and_what_every_rank_has():
    down = torch.randn(6, 8)
    norm = torch.randn(6)
    checksums = told(
        FusedChecksums(DENSE, ranks=2, dtype=None),
        {"a.mlp.down_proj.weight": down, "a.norm.weight": norm},
    )
    ranks = [
        {
            "a.mlp.down_proj.weight": hash_of(down[:, r * 4 : r * 4 + 4]),
            "a.norm.weight": hash_of(norm),
        }
        for r in range(2)
    ]
    assert checksums.mismatch(said(*ranks)) is None


@pytest.mark.parametrize(
    ("rows", "ranks", "held"),
    [
        (31, 1, [(0, 31, 64)]),
        (31, 2, [(0, 31, 32), (31, 31, 32)]),
        (100, 2, [(0, 64, 64), (64, 100, 64)]),
        (100, 3, [(0, 64, 64), (64, 100, 64), (100, 100, 64)]),
    ],
)
def test_the_vocabulary_is_padded_with_zeros(rows, ranks, held):
    table = torch.randn(rows, 4)
    checksums = told(
        FusedChecksums(DENSE, ranks=ranks, dtype=None), {"model.embed_tokens.weight": table}
    )
    padded = [
        torch.cat([table[start:end], torch.zeros(size - (end - start), 4)])
        for start, end, size in held
    ]
    assert (
        checksums.mismatch(said(*({"model.embed_tokens.weight": hash_of(part)} for part in padded)))
        is None
    )


# transformers before 5, and since
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_experts_lie_on_one_another_whatever_the_order_in_which_they_come(key):
    torch.manual_seed(0)
    experts = {
        f"m.mlp.experts.{e}.{kind}_proj.weight": torch.randn(
            *((4, 6) if kind != "down" else (6, 4))
        )
        for e in (1, 0, 2)
        for kind in ("down", "up", "gate")
    }
    checksums = told(
        FusedChecksums(DENSE | {"model_type": "qwen3_moe", key: 3}, ranks=2, dtype=None), experts
    )

    def part(e, kind, r):
        tensor = experts[f"m.mlp.experts.{e}.{kind}_proj.weight"]
        return tensor.chunk(2, dim=int(kind == "down"))[r]

    ranks = [
        {
            "m.mlp.experts.w13_weight": hash_of(
                *(part(e, kind, r) for e in range(3) for kind in ("gate", "up"))
            ),
            "m.mlp.experts.w2_weight": hash_of(*(part(e, "down", r) for e in range(3))),
        }
        for r in range(2)
    ]
    assert checksums.mismatch(said(*ranks)) is None


def test_the_servers_dtype_counts():
    norm = torch.randn(6)
    checksums = told(FusedChecksums(DENSE, ranks=1, dtype=torch.float16), {"a.norm.weight": norm})
    assert checksums.mismatch(said({"a.norm.weight": hash_of(norm.half())})) is None


def test_a_buffer_that_is_used_again_does_not_matter(attention):
    expected = {"a.self_attn.qkv_proj.weight": hash_of(*attention.values())}
    checksums = FusedChecksums(DENSE, ranks=1, dtype=None)
    buffer = torch.empty(8, 6)
    for name, tensor in attention.items():
        buffer[: len(tensor)] = tensor
        checksums.add(name, buffer[: len(tensor)])
    assert checksums.mismatch(said(expected)) is None


def test_what_was_not_sent_and_what_the_server_has_besides(attention):
    attention.pop("a.self_attn.v_proj.weight")
    checksums = told(
        FusedChecksums(DENSE, ranks=1, dtype=None), attention | {"a.norm.weight": torch.ones(3)}
    )
    assert checksums.mismatch(said({})) == "parts were never sent of a.self_attn.qkv_proj.weight"
    checksums = told(FusedChecksums(DENSE, ranks=1, dtype=None), {"a.norm.weight": torch.ones(3)})
    other = {"a.norm.weight": hash_of(torch.ones(3)), "b.norm.weight": "0"}
    assert checksums.mismatch(said(other)) == "1 tensors differ: b.norm.weight"
    assert checksums.mismatch(said(other, other)) == "checksums of 2 ranks, expected 1"


@pytest.mark.parametrize("ranks", [[0, 0], [0, -1], [0, 2]])
def test_each_rank_tells_its_own(ranks):
    norm = torch.ones(3)
    checksums = told(FusedChecksums(DENSE, ranks=2, dtype=None), {"a.norm.weight": norm})
    answers = [
        {"checksums": {"a.norm.weight": hash_of(norm)}, "parallelism_info": [{"tp_rank": rank}]}
        for rank in ranks
    ]
    assert checksums.mismatch(answers) == f"checksums of ranks {ranks}, expected each of 2 once"


def test_a_family_whose_layout_is_not_known_is_refused():
    with pytest.raises(
        ConfigError, match=r"verify_every: .* of type deepseek_v3 \(known: llama, .*\): set it to 0"
    ):
        FusedChecksums({"model_type": "deepseek_v3"}, ranks=1, dtype=None)


@pytest.mark.parametrize(
    "nonsense",
    [{}, {"checksums": {}}, {"checksums": None, "parallelism_info": [{"tp_rank": 0}]}, "ok", None],
)
def test_an_answer_that_is_none_is_told_of_the_engine_and_raises_nothing(nonsense):
    checksums = told(FusedChecksums(DENSE, ranks=1, dtype=None), {"b.norm.weight": torch.zeros(2)})
    assert "not told as SGLang tells them" in checksums.mismatch([nonsense])
