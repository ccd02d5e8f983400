"""Layers with states, windows, caps and sinks: the embedded engine against transformers alone.

transformers gets each sequence whole, without padding and without a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_kit import VOCAB, flatten, layout, logprobs_under, request, with_engine
from safetensors.torch import load_file

from rlcore.data.generation import Prefix
from rlcore.errors import UserError
from rollout.engines.checks import ExpertLayers, language_config
from rollout.engines.embedded import attention as attention_module
from rollout.engines.embedded.attention import Masks, attention
from rollout.engines.embedded.cache import Cache
from rollout.engines.embedded.causal_lm import CausalLM
from rollout.engines.embedded.model_weights import ModelWeights, as_published

WINDOW = 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MAMBA = {
    "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 8,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
SINKS = {
    **WINDOWED,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}

STATES: dict[str, Callable[[], Any]] = {
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**SIZES, **DELTA, **EXPERTS),
    "qwen3_5_text": lambda: transformers.Qwen3_5TextConfig(**SIZES, **DELTA),
    "qwen3_5": lambda: transformers.Qwen3_5Config(
        text_config={**SIZES, **DELTA}, vision_config=VISION
    ),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeConfig(
        text_config={**SIZES, **DELTA, **EXPERTS}, vision_config=VISION
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **{**SIZES, "num_hidden_layers": None}, **MAMBA
    ),
}
WINDOWS: dict[str, Callable[[], Any]] = {
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, **WINDOWED, attn_logit_softcapping=1.5, query_pre_attn_scalar=16
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **WINDOWED),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, **SINKS),
}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 128,
}  # fmt: skip
SPARSE: dict[str, Callable[[], Any]] = {
    "deepseek_v32": lambda: transformers.DeepseekV32Config(**SIZES | LATENT),
    "glm_moe_dsa": lambda: transformers.GlmMoeDsaConfig(
        **SIZES | LATENT, indexer_types=["full", "shared", "shared", "full"]
    ),
}
FAMILIES = STATES | WINDOWS | SPARSE

PROMPTS = [[3, 4, 5], [6], [*range(7, 30)], [1, 2, 3, 4], [9, 8, 7, 6, 5, 4, 3]]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(the folder's config.json, transformers' model, with sinks and biases that are not zero)."""
    config = FAMILIES[request.param]()
    folder = tmp_path_factory.mktemp(request.param)
    config.save_pretrained(folder)
    return folder, random_model(config)


def random_model(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for name, parameter in model.named_parameters():
        if name.endswith((".sinks", "bias", "dt_bias", ".D")):
            torch.nn.init.normal_(parameter)
    return model


def check(model, asked, answers):
    """Log-probs of all tokens; greedy ones are the likeliest."""
    for one, completions in zip(asked, answers, strict=True):
        for place, completion in enumerate(completions):
            before = [*map(int, one.prompt), *map(int, one.made(place))]
            expected = logprobs_under(model, before, completion, one.sampling.temperature or 1.0)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
            if one.sampling.temperature == 0:
                ids = torch.tensor([[*before, *completion.tokens.tolist()]])
                with torch.no_grad():
                    best = model(ids).logits[0, len(before) - 1 : -1].argmax(-1)
                assert completion.tokens.tolist() == best.tolist()


def test_samples_of_unequal_prompts_that_end_at_different_times(family, monkeypatch):
    """They leave the batch, so that rows of the cache are selected; prompts are longer than a
    window, and come in several pieces of blocks of queries.
    """
    folder, model = family
    monkeypatch.setattr(attention_module, "WINDOW_QUERIES", 2)
    monkeypatch.setattr(attention_module, "SCORES", 2000)
    monkeypatch.setattr("rollout.engines.embedded.decoding.PREFILL_TOKENS", 60)
    asked = [
        request(p, draw=i, n=3, max_new_tokens=20, stop_token_ids=(5, 6, 7), temperature=t)
        for i, (p, t) in enumerate(zip(PROMPTS, [1.0, 0.7, 1.3, 0.0, 1.0]))
    ]
    asked.append(request(PROMPTS[2], draw=9, temperature=0, max_new_tokens=30))
    answers = with_engine(folder, model, lambda engine: engine.generate(asked))
    lengths = {len(one.tokens) for completions in answers for one in completions}
    assert len(lengths) > 3
    check(model, asked, answers)


def test_equal_prompts_need_no_padding(family):
    folder, model = family
    asked = [request([4, 5, 6], draw=i, n=2, max_new_tokens=12) for i in range(2)]
    check(model, asked, with_engine(folder, model, lambda engine: engine.generate(asked)))


def test_nothing_longer_than_the_indexer_chooses_is_answered(family):
    """Sparse attention is dense, as it is computed here, up to `index_topk` tokens."""
    folder, model = family
    longest = getattr(model.config, "index_topk", 512)
    fits, beyond = (
        request([1] * (longest - 4), draw=i, max_new_tokens=tokens, stop_token_ids=())
        for i, tokens in enumerate((4, 5))
    )
    answers = with_engine(folder, model, lambda engine: engine.generate([fits]))
    assert len(answers[0][0].tokens) == 4
    with pytest.raises(UserError, match=f"context.*{longest}"):
        with_engine(folder, model, lambda engine: engine.generate([beyond]))


@pytest.mark.parametrize("retracts", [False, True])
def test_responses_go_on_from_prefixes(family, retracts):
    """Also if the cache is computed again before each token."""
    folder, model = family
    settings = {"n": 3, "max_new_tokens": 16, "stop_token_ids": ()}
    asked = [request(p, draw=i, **settings) for i, p in enumerate(PROMPTS[:3])]

    async def use(engine):
        whole = await engine.generate(asked)
        rest = [
            one.continued([Prefix(k, found.tokens[: 4 * k]) for k, found in enumerate(completions)])
            for one, completions in zip(asked, whole)
        ]
        if retracts:
            pass_through = engine._gate.pass_through
            engine._gate.pass_through = lambda ticket, drop: (drop(), pass_through(ticket, drop))
        return whole, rest, await engine.generate(rest)

    whole, rest, answers = with_engine(folder, model, use)
    check(model, rest, answers)
    for completions, tails in zip(whole, answers):
        for k, (one, tail) in enumerate(zip(completions, tails)):
            assert tail.tokens.tolist() == one.tokens[4 * k :].tolist()


def test_padding_reaches_no_state(family, tmp_path):
    """A prompt in a batch with a longer one, against the prompt alone."""
    folder, model = family
    device = torch.device("cpu")
    engine = CausalLM(str(folder), device=device, dtype="fp32")
    engine.module.load_state_dict(model.state_dict(), strict=False)
    short, long = torch.tensor([[3, 4, 5, 6]]), torch.arange(1, 12)[None]
    alone = Cache(16)
    expected = engine.forward(short, alone)
    pads = torch.tensor([0, 7])
    padded = Cache(16, pads)
    # tokens of the padding do not count either
    logits = engine.forward(torch.cat([long, torch.cat([long[:, :7], short], dim=1)]), padded)
    torch.testing.assert_close(logits[1:], expected, atol=1e-6, rtol=1e-6)
    for kind in ("_inputs", "_states"):
        kept = getattr(alone, kind)
        assert kept.keys() == getattr(padded, kind).keys()
        for layer, state in kept.items():
            torch.testing.assert_close(
                getattr(padded, kind)[layer][1:], state, atol=1e-6, rtol=1e-6
            )
    has_states = "linear_attention" in (getattr(engine.module.config, "layer_types", None) or ())
    assert bool(alone._states) is has_states


def test_a_state_is_not_copied_for_a_token():
    cache = Cache(8)
    state = torch.zeros(2, 3, 4, 5)
    assert cache.update_recurrent_state(state, 1) is state
    assert cache.get_recurrent_state(1) is state
    cache.update_conv_state(torch.randn(2, 6, 9), 1, conv_kernel_size=4)
    assert cache.get_conv_state(1) is cache.get_conv_state(1)
    # the inputs of the whole prompt are not kept
    assert cache.get_conv_state(1).untyped_storage().nbytes() == 2 * 6 * 4 * 4


@pytest.mark.parametrize("end", [2, 3])
def test_a_padded_query_sees_itself(end):
    """Alone in its piece of a prefill, and beside the next one."""
    masks = Masks(0, torch.tensor([0, 4]))
    seen, mask = masks.of(1, end, None, torch.zeros(1), causal=False)
    assert (seen.start, seen.stop) == (0, end)
    visible = mask[:, 0] == 0
    assert visible[0].tolist() == [[c <= q for c in range(end)] for q in range(1, end)]
    assert visible[1].tolist() == [[c == q for c in range(end)] for q in range(1, end)]


@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 0.7}, {"s_aux": torch.tensor([-1.0, 0, 2, 9])}]
)
def test_attention_equals_its_definition(queries, padded, window, options, monkeypatch):
    """In float64, with a softmax over a written column of the sink."""
    monkeypatch.setattr(attention_module, "WINDOW_QUERIES", 2)
    monkeypatch.setattr(attention_module, "SCORES", 3 * 4 * 11 * 2)
    torch.manual_seed(0)
    rows, heads, groups, columns, size = 3, 4, 2, 11, 8
    query = torch.randn(rows, heads, queries, size)
    key, value = (torch.randn(rows, groups, columns, size) for _ in range(2))
    pads = torch.tensor([0, 2, 4]) if padded else None
    first = columns - queries
    mixed, _ = attention(
        torch.nn.Module(),
        query,
        key,
        value,
        None,
        scaling=0.4,
        sliding_window=window,
        masks=Masks(first, pads),
        **options,
    )
    keys, values = (x.double().repeat_interleave(2, dim=1) for x in (key, value))
    scores = query.double() @ keys.transpose(-1, -2) * 0.4
    if "softcap" in options:
        scores = 0.7 * torch.tanh(scores / 0.7)
    for row in range(rows):
        for place in range(queries):
            own = first + place
            begin = max(0 if pads is None else int(pads[row]), own - (window or columns) + 1)
            hidden = [c for c in range(columns) if not begin <= c <= own]
            scores[row, :, place, hidden] = -torch.inf
    sinks = options.get("s_aux", torch.full((heads,), -torch.inf)).double()
    column = sinks[None, :, None, None].expand(rows, heads, queries, 1)
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    expected = (weights @ values).transpose(1, 2)
    # a query within the padding sees what it likes
    seen = torch.arange(first, columns) >= (torch.zeros(rows) if pads is None else pads)[:, None]
    torch.testing.assert_close(mixed[seen].double(), expected[seen], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("make", [*STATES, "gpt_oss"])
def test_weights_have_the_names_of_the_folder(make, tmp_path):
    """The folder as transformers writes it, images' part included."""
    config = FAMILIES[make]()
    kind = type(config).__name__.removesuffix("Config")
    whole: Any = getattr(transformers, f"{kind}ForConditionalGeneration", None)
    language_model = random_model(config)
    (language_model if whole is None else whole(config)).save_pretrained(tmp_path)
    if whole is None:
        config.save_pretrained(tmp_path)
    folder = load_file(tmp_path / "model.safetensors")
    prefix = language_config(str(tmp_path)).published_prefix
    language_model.config.published_prefix = prefix
    named = dict(as_published(language_model))
    assert named.keys() == {name for name in folder if ".visual." not in name}
    assert all(tensor.shape == folder[name].shape for name, tensor in named.items())
    if whole is not None:
        assert "model.language_model.layers.0.linear_attn.in_proj_qkv.weight" in named
    # what is published reaches the model
    other = random_model(config)
    other.config.published_prefix = prefix
    weights = ModelWeights("engine-3", other)
    weights.begin(buckets := layout(language_model))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7)
    for bucket in buckets:
        weights.copy(bucket.index, flatten(bucket, language_model))
    weights.end()
    for (name, mine), (_, published) in zip(
        other.state_dict().items(), language_model.state_dict().items(), strict=True
    ):
        assert torch.equal(mine, published), name


@pytest.mark.parametrize(
    ("make", "places"),
    [("qwen3_5_moe", (0, 1, 2, 3)), ("nemotron_h", (1,)), ("gpt_oss", (0, 1, 2, 3))],
)
def test_the_experts_of_such_models_are_recorded(make, places, tmp_path):
    config = FAMILIES[make]()
    config.save_pretrained(tmp_path)
    assert ExpertLayers.of(str(tmp_path)) == ExpertLayers(4, places, 4, 2)
    model = random_model(config)
    asked = [request(p, draw=i, n=2, routed_experts=True) for i, p in enumerate(PROMPTS[:3])]
    answers = with_engine(tmp_path, model, lambda engine: engine.generate(asked))
    heard = []
    for name, part in model.named_modules():
        if name.endswith(".experts"):
            part.register_forward_pre_hook(lambda _, given: heard.append(given[1]))
    for one, completions in zip(asked, answers):
        for completion in completions:
            heard.clear()
            with torch.no_grad():
                model(torch.tensor([[*map(int, one.prompt), *completion.tokens[:-1].tolist()]]))
            expected = torch.stack(heard, dim=1).view(-1, len(places), 2)
            assert np.array_equal(completion.routed_experts, expected)
