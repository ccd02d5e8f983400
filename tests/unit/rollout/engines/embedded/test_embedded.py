"""What the embedded engine generates, against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_kit import VOCAB, logprobs_under, request, tiny_qwen3, with_engine
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlcore.data.generation import StopStrings
from rlcore.errors import ModelError, RunFailed, UserError
from rlcore.launch.commands.init_model import ModelSpec, init_model
from rollout.engines.embedded.cache import Cache
from rollout.engines.embedded.causal_lm import CausalLM, build_module
from rollout.engines.embedded.engine import plan_slots
from rollout.engines.embedded.model_weights import as_published

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12, 13], [1, 2, 3, 4], [9, 9, 9]]


def check_logprobs(model, requests, results, tolerance=1e-5):
    for asked, completions in zip(requests, results):
        assert len(completions) == asked.n
        for completion in completions:
            expected = logprobs_under(
                model, asked.prompt, completion, asked.sampling.temperature or 1.0
            )
            np.testing.assert_allclose(completion.logprobs, expected, atol=tolerance)


def test_logprobs_equal_a_full_forward_pass(model, folder):
    requests = [
        request(p, draw=i, n=3, temperature=t)
        for i, (p, t) in enumerate(zip(PROMPTS, [1, 0.7, 1.3, 1, 0.5]))
    ]
    results = with_engine(folder, model, lambda engine: engine.generate(requests))
    check_logprobs(model, requests, results)
    assert all(len(c.tokens) == 8 and c.finish_reason == "length" for row in results for c in row)
    assert {c.tokens.dtype for row in results for c in row} == {np.dtype(np.int32)}


@pytest.mark.parametrize("make", ["llama_untied", "qwen2_bias", "deepseek_v3"])
def test_other_families(make, tmp_path):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    if make == "llama_untied":
        other = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).eval()
    # keys of 12, values of 10; a choice that the bias of the router changes
    elif make == "deepseek_v3":
        config = DeepseekV3Config(
            **{**sizes, "num_key_value_heads": 4},
            kv_lora_rank=12,
            q_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=10,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
        )
        other = DeepseekV3ForCausalLM(config).eval()
        other.model.layers[1].mlp.gate.e_score_correction_bias.normal_(0.0, 0.3)
    else:
        other = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)).eval()
    other.config.save_pretrained(tmp_path)
    requests = [request(p, draw=i, n=2) for i, p in enumerate(PROMPTS)]
    check_logprobs(
        other, requests, with_engine(tmp_path, other, lambda engine: engine.generate(requests))
    )


ROPES = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"mscale": 1.0, "attention_factor": 1.2},
    "longrope": {"short_factor": [1.0, 1.2, 1.4, 1.6], "long_factor": [1.0, 3.0, 5.0, 7.0]},
}


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_positions(kind, tmp_path):
    """Beyond the original length, except where a longer sequence would change its own cache."""
    rope = {"rope_type": kind, "factor": 8.0, "original_max_position_embeddings": 8, **ROPES[kind]}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
             "intermediate_size": 48, "vocab_size": VOCAB, "max_position_embeddings": 64,
             "initializer_range": 0.3}  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope)).eval()
    model.config.save_pretrained(tmp_path)
    beyond = [request(p, draw=i, n=2, max_new_tokens=40) for i, p in enumerate(PROMPTS)]
    if kind == "longrope":
        with pytest.raises(UserError, match=r"max_new_tokens 40 exceed the model's context of 8"):
            with_engine(tmp_path, model, lambda engine: engine.generate(beyond))
        beyond = [request([3, 4, 5], n=3, max_new_tokens=5)]
    results = with_engine(tmp_path, model, lambda engine: engine.generate(beyond))
    check_logprobs(model, beyond, results)


def test_the_bias_of_a_router_stays_fp32(tmp_path):
    """In bf16 it would choose other experts than the trainer's."""
    init_model(tmp_path, ModelSpec(family="deepseek_v3", hidden=32, layers=2, intermediate=32))
    module = build_module(str(tmp_path), device=torch.device("cpu"), dtype=torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in as_published(module)}
    assert {name for name, dtype in dtypes.items() if dtype != torch.bfloat16} == {
        "model.layers.1.mlp.gate.e_score_correction_bias"
    }
    assert dtypes["model.layers.1.mlp.gate.e_score_correction_bias"] == torch.float32
    assert module.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_logits_of_an_fp32_head_are_not_rounded(tmp_path, tied, dtype):
    """Against float64, from the hidden states that the head got."""
    init_model(tmp_path, ModelSpec(hidden=64, layers=2, intermediate=48, tied=tied))
    logits = {}
    for fp32_head in (False, True):
        torch.manual_seed(0)
        model = CausalLM(
            str(tmp_path), device=torch.device("cpu"), dtype=dtype, fp32_head=fp32_head
        )
        for parameter in model.module.parameters():
            parameter.normal_(0.0, 1.0)
        head = model.module.get_output_embeddings()
        hidden = []
        head.register_forward_pre_hook(lambda layer, given, hidden=hidden: hidden.extend(given))
        tokens = torch.tensor([[3, 7, 1, 9], [2, 2, 8, 5]])
        logits[fp32_head] = model.forward(tokens, Cache(4))
        want = hidden[0][:, -1].double() @ head.weight.double().t()
        error = float((logits[fp32_head] - want).abs().max() / want.abs().max())
        assert (error < 1e-6) is (fp32_head or dtype == "fp32"), error
    assert logits[True].dtype == torch.float32
    if dtype == "fp32":
        assert logits[True].equal(logits[False])


def test_greedy_equals_transformers_generate(model, folder):
    requests = [
        request(p, draw=i, temperature=0, max_new_tokens=12, stop_token_ids=(2,))
        for i, p in enumerate(PROMPTS)
    ]
    results = with_engine(folder, model, lambda engine: engine.generate(requests))
    for prompt, [completion] in zip(PROMPTS, results):
        expected = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=2,
            pad_token_id=0,
        )
        assert completion.tokens.tolist() == expected[0, len(prompt) :].tolist()
    check_logprobs(model, requests, results)


def test_the_same_tokens_in_any_chunks_order_and_company(model, folder):
    requests = [
        request(p, draw=i, n=4, max_new_tokens=10, stop_token_ids=(5, 6, 7))
        for i, p in enumerate(PROMPTS)
    ]

    async def all_at_once(engine):
        return await engine.generate(requests)

    async def backwards(engine):
        return (await engine.generate(requests[::-1]))[::-1]

    async def one_sample_each(engine):
        singles = [
            [
                request(
                    r.prompt,
                    draw=r.draw,
                    first_sample=k,
                    max_new_tokens=10,
                    stop_token_ids=(5, 6, 7),
                )
                for k in range(4)
            ]
            for r in requests
        ]
        return [[(await engine.generate([single]))[0][0] for single in row] for row in singles]

    whole = with_engine(folder, model, all_at_once)
    # rows do leave at different times
    assert len({len(c.tokens) for row in whole for c in row}) > 3
    ways = [
        (all_at_once, {"max_batch": 3}),
        (all_at_once, {"max_batch": 1}),
        (backwards, {}),
        (one_sample_each, {}),
    ]
    for use, config in ways:
        for row, other_row in zip(whole, with_engine(folder, model, use, **config)):
            for completion, other in zip(row, other_row):
                assert completion.tokens.tolist() == other.tokens.tolist()
                assert completion.finish_reason == other.finish_reason
                np.testing.assert_allclose(completion.logprobs, other.logprobs, atol=1e-5)
    again = with_engine(folder, model, backwards)
    # to the bit
    assert all((a.logprobs == b.logprobs).all() for x, y in zip(whole, again) for a, b in zip(x, y))


def test_chunks_are_cut_by_address_and_not_by_the_order_of_the_requests():
    asked = [
        request([1], draw=draw, n=2, first_sample=first)
        for draw, first in [(3, 0), (1, 2), (2, 0), (1, 0)]
    ]
    order = [
        (asked[slot.request].draw, asked[slot.request].samples[slot.place])
        for slot in plan_slots(asked)
    ]
    assert order == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (3, 0), (3, 1)]


def test_another_seed_draw_sample_or_turn_is_another_response(model, folder):
    base = request([3, 4], max_new_tokens=16)
    changed = [base] + [
        type(base)(**{**{f: getattr(base, f) for f in base.__dataclass_fields__}, field: 7})
        for field in ("seed", "draw", "first_sample", "turn")
    ]
    results = with_engine(folder, model, lambda engine: engine.generate(changed))
    assert len({tuple(row[0].tokens.tolist()) for row in results}) == 5


def test_long_responses_grow_their_buffers(model, folder):
    requests = [
        request([1, 2], draw=0, max_new_tokens=300),
        request([3], draw=1, max_new_tokens=140, top_k=3),
    ]
    results = with_engine(folder, model, lambda engine: engine.generate(requests))
    assert [len(row[0].tokens) for row in results] == [300, 140]
    check_logprobs(model, requests, results, tolerance=1e-4)


def test_stop_ids_end_a_response_and_are_kept(model, folder):
    requests = [
        request(p, draw=i, n=8, max_new_tokens=20, stop_token_ids=(4, 8))
        for i, p in enumerate(PROMPTS)
    ]
    results = with_engine(folder, model, lambda engine: engine.generate(requests))
    stopped = 0
    for completion in (c for row in results for c in row):
        hits = np.isin(completion.tokens, (4, 8)).nonzero()[0].tolist()
        if completion.finish_reason == "stop":
            assert hits == [len(completion.tokens) - 1]
            stopped += 1
        else:
            assert not hits
            assert len(completion.tokens) == 20
    assert 10 < stopped < 40


class LetterTokenizer:
    """Token i is the i-th letter; token 0 is the two letters `xy`."""

    def decode(self, tokens, **_):
        return "".join("xy" if t == 0 else chr(96 + t) for t in tokens)


@pytest.mark.parametrize("stop", [("c",), ("ca", "b"), ("ya",), ("xyx",)])
def test_stop_strings_cut_at_the_token_that_completes_them(model, folder, stop):
    prompt = [3, 4, 5]
    tokenizer = LetterTokenizer()

    async def both(engine):
        engine._tokenizer = tokenizer
        free = request(prompt, n=64, max_new_tokens=40, top_k=4)
        cut = request(prompt, n=64, max_new_tokens=40, top_k=4, stop=stop)
        return await engine.generate([free]), await engine.generate([cut])

    [free], [cut] = with_engine(folder, model, both)
    for whole, short in zip(free, cut):
        ends = [
            m
            for m in range(1, 41)
            if any(s in tokenizer.decode(whole.tokens[:m].tolist()) for s in stop)
        ]
        expected = ends[0] if ends else 40
        assert short.tokens.tolist() == whole.tokens[:expected].tolist()
        assert short.finish_reason == ("stop" if ends else "length")


class SpaceTokenizer:
    """Drops the space before the first word that it decodes, as SentencePiece does."""

    def decode(self, tokens, **_):
        return "".join("a b"[t] for t in tokens).removeprefix(" ")


def test_a_stop_string_may_begin_with_a_token_that_reads_otherwise_alone():
    stop = StopStrings((" b",), SpaceTokenizer())
    response = [0, 1, 2]
    assert stop.hit(response[-stop.window :])
    assert not stop.hit([0, 2])


def test_mixed_sampling_in_one_call(model, folder):
    requests = [
        request([3, 4], draw=0, n=2, temperature=0, max_new_tokens=3),
        request([5], draw=1, n=2, top_p=0.3, max_new_tokens=9),
        request([6, 7, 8], draw=2, n=2, top_k=1, max_new_tokens=5),
    ]
    results = with_engine(folder, model, lambda engine: engine.generate(requests))
    check_logprobs(model, requests, results)
    assert [len(c.tokens) for row in results for c in row] == [3, 3, 9, 9, 5, 5]
    assert results[2][0].tokens.tolist() == results[2][1].tokens.tolist()  # top-k 1 is greedy


def test_bad_requests_are_named(model, folder):
    for bad, words in [
        (request([], draw=4), "draw 4.*at least one token"),
        (request([VOCAB], draw=5), "draw 5.*vocabulary of 31"),
        (request([1] * 510, draw=6), "draw 6.*context of 512"),
        (request([1], top_p=0.0), r"top_p must lie in \(0, 1\]"),
    ]:
        with pytest.raises(UserError, match=words):
            with_engine(folder, model, lambda engine, bad=bad: engine.generate([bad]))


def test_broken_weights_are_an_error(model, folder):
    broken = tiny_qwen3()
    with torch.no_grad():
        broken.model.norm.weight[3] = torch.nan
    with pytest.raises(RunFailed, match="not finite"):
        with_engine(folder, broken, lambda engine: engine.generate([request([1])]))


def test_a_model_it_cannot_run_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        with_engine(tmp_path, None, lambda engine: engine.health())
    Llama4TextConfig(num_hidden_layers=4).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="does not do layers of type chunked_attention"):
        with_engine(tmp_path, None, lambda engine: engine.health())


def test_starting_leaves_global_torch_state_alone(folder):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    dtype = torch.get_default_dtype()
    with_engine(folder, None, lambda engine: engine.health())
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_default_dtype() == dtype
