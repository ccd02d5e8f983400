"""Weights by transaction."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from engine_kit import flatten, layout, tiny_qwen3, with_engine
from safetensors.torch import load_file

from rlcore.errors import ModelError, RunFailed
from rlcore.weights import Bucket, TensorSpec, cut_buckets, fingerprint
from rollout.engines.embedded.model_weights import ModelWeights


def prints(named):
    return {name: fingerprint(tensor) for name, tensor in named}


def holds(weights, model):
    return prints(weights.tensors.items()) == prints(model.named_parameters())


def filled(weights, model, order=None):
    buckets = layout(model)
    weights.begin(buckets)
    for index in order or range(len(buckets)):
        weights.copy(index, flatten(buckets[index], model))
    weights.end()


def test_a_whole_update_makes_the_models_equal(model):
    weights = ModelWeights("engine-3", tiny_qwen3(seed=9))
    assert len(layout(model)) > 3
    # buckets may come in any order
    filled(weights, model, order=[*range(len(layout(model)))][::-1])
    assert holds(weights, model)
    weights.set_version(4)
    assert weights.require_ready() == 4


def test_a_layer_that_predicts_further_tokens_is_left_out(model):
    weights = ModelWeights("engine-3", tiny_qwen3(seed=9))
    layers = model.config.num_hidden_layers
    behind = TensorSpec(f"model.layers.{layers}.enorm.weight", (3,), "float32")
    buckets = layout(model)
    weights.begin([*buckets, Bucket(len(buckets), (behind,))])
    for bucket in buckets:
        weights.copy(bucket.index, flatten(bucket, model))
    weights.copy(len(buckets), torch.ones(3).view(torch.uint8))
    weights.end()
    assert holds(weights, model)


def test_memory_is_released_and_taken_again(model):
    module = tiny_qwen3(seed=9)
    weights = ModelWeights("engine-3", module)
    filled(weights, model)
    weights.release()
    assert {tensor.untyped_storage().nbytes() for tensor in weights.tensors.values()} == {0}
    weights.restore()
    filled(weights, model)
    assert holds(weights, model)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(module(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_tied_weights_appear_once(model):
    weights = ModelWeights("engine-3", tiny_qwen3())
    assert "lm_head.weight" not in weights.tensors
    assert weights.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    embedding = dict(model.named_parameters())["model.embed_tokens.weight"]
    extra = Bucket(99, (TensorSpec("lm_head.weight", tuple(embedding.shape), "float32"),))
    with pytest.raises(
        ModelError, match=r"lm_head\.weight is tied to model\.embed_tokens\.weight: leave it out"
    ):
        weights.begin([*layout(model), extra])


def test_untied_head_is_expected():
    untied = tiny_qwen3(tie_word_embeddings=False)
    weights = ModelWeights("engine-3", tiny_qwen3(seed=2, tie_word_embeddings=False))
    filled(weights, untied)
    assert torch.equal(weights.tensors["lm_head.weight"], untied.lm_head.weight)
    with pytest.raises(ModelError, match=r"missing lm_head\.weight"):
        weights.begin(layout(tiny_qwen3()))


def test_layouts_that_do_not_fit_are_refused_by_name(model):
    weights = ModelWeights("engine-3", tiny_qwen3())
    buckets = layout(model)
    spec = buckets[0].tensors[0]
    for changed, words in [
        (
            replace(spec, name="model.nonsense"),
            "missing model.embed_tokens.weight; unexpected model.nonsense",
        ),
        (
            replace(spec, shape=(32, 64)),
            r"embed_tokens.weight has shape \(32, 64\), the engine's \(31, 64\)",
        ),
    ]:
        with pytest.raises(ModelError, match=words):
            weights.begin(
                [replace(buckets[0], tensors=(changed, *buckets[0].tensors[1:])), *buckets[1:]]
            )
        with pytest.raises(RunFailed, match="stale"):
            weights.require_ready()
        with pytest.raises(RunFailed, match="outside an update"):
            weights.bucket(0)
    with pytest.raises(ModelError, match="a name appears twice"):
        weights.begin([*buckets, buckets[0]])


def test_steps_out_of_order_are_errors(model):
    weights = ModelWeights("engine-3", tiny_qwen3())
    buckets = layout(model)
    flat = flatten(buckets[0], model)
    with pytest.raises(RunFailed, match="no weights were published"):
        weights.require_ready()
    with pytest.raises(RunFailed, match="outside an update"):
        weights.copy(0, flat)
    with pytest.raises(RunFailed, match="without begin_update"):
        weights.end()
    with pytest.raises(RunFailed, match="version 1 cannot be set"):
        weights.set_version(1)
    weights.begin(buckets)
    with pytest.raises(RunFailed, match="bucket 77"):
        weights.copy(77, flat)
    with pytest.raises(ValueError, match="bucket 0: got"):
        weights.copy(0, flat[:-4])
    weights.copy(0, flat)
    with pytest.raises(RunFailed, match="without buckets 1, 2"):
        weights.end()
    filled(weights, model)
    with pytest.raises(RunFailed, match=r"stale \(unversioned\)"):
        weights.require_ready()
    weights.set_version(5)
    with pytest.raises(RunFailed, match="version 4 after 5"):
        weights.set_version(4)


def test_weights_are_cast_to_the_engines_dtype(model, folder):
    sent = [(name, p.to(torch.bfloat16)) for name, p in model.named_parameters()]

    async def held(engine):
        return prints(engine._started()[1].tensors.items())

    assert with_engine(folder, model, held, dtype="bf16") == prints(sent)


def test_updates_need_a_pause(model, folder):
    with pytest.raises(RunFailed, match="call pause first"):
        with_engine(folder, None, lambda engine: engine.begin_update(layout(model)))


def test_a_fingerprint_sees_type_shape_and_every_byte():
    a = torch.arange(6.0)
    changed = a.clone()
    changed[3] = torch.nextafter(changed[3], torch.tensor(9.0))
    others = [changed, a.view(2, 3), a.view(torch.int32), a.bfloat16()]
    assert len({fingerprint(a), *map(fingerprint, others)}) == 5
    # layout in memory does not count
    assert fingerprint(torch.ones(3, 2).t()) == fingerprint(torch.ones(2, 3))


@pytest.mark.parametrize("config", ["Qwen3MoeConfig", "MixtralConfig", "DeepseekV3Config"])
def test_experts_are_known_one_by_one_as_a_folder_names_them(config, tmp_path):
    """transformers stacks them when it reads a folder; an update must reach the stack."""
    sizes = {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    }
    if config == "DeepseekV3Config":  # whose routers have a buffer, too
        sizes |= {
            "first_k_dense_replace": 0,
            "kv_lora_rank": 8,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
        }
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes))
    model.save_pretrained(tmp_path)
    weights = ModelWeights("engine-3", model)
    folder = load_file(tmp_path / "model.safetensors")
    assert weights.tensors.keys() == folder.keys()
    assert all(torch.equal(weights.tensors[name], tensor) for name, tensor in folder.items())
    name = next(name for name in folder if ".experts.2." in name)
    buckets = cut_buckets(
        [TensorSpec(n, tuple(t.shape), "float32") for n, t in folder.items()], 1 << 20
    )
    weights.begin(buckets)
    for bucket in buckets:
        weights.copy(
            bucket.index,
            torch.cat(
                [folder[spec.name].mul(2).view(-1).view(torch.uint8) for spec in bucket.tensors]
            ),
        )
    weights.end()
    stacked = dict(model.named_parameters())["model.layers.0.mlp.experts.gate_up_proj"]
    ends = ("w1.weight", "w3.weight", "gate_proj.weight", "up_proj.weight")
    parts = [
        tensor
        for n, tensor in folder.items()
        if ".layers.0." in n and ".experts." in n and n.endswith(ends)
    ]
    assert float(stacked.detach().abs().sum()) == pytest.approx(
        2 * sum(float(part.detach().abs().sum()) for part in parts), rel=1e-5
    )
    assert torch.equal(weights.tensors[name], folder[name] * 2)
