from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from backends.megatron.convert.architecture import weight_tensors
from backends.megatron.convert.families import FAMILIES
from backends.megatron.convert.read import read_architecture
from rlcore import cli
from rlcore.data.tokenizer import load_tokenizer
from rlcore.errors import ModelError, UserError
from rlcore.launch.commands.init_model import ALPHABETS, ModelSpec, init_model
from rollout.engines.embedded.causal_lm import build_module
from rollout.engines.embedded.model_weights import as_published

SMALL = {"hidden": 32, "layers": 2, "intermediate": 64}


def test_the_default_is_the_addition_model(tmp_path, capsys):
    assert cli.main(["init-model", str(tmp_path / "m")]) == 0
    assert capsys.readouterr().out.endswith("qwen3, 595,200 parameters, 31 symbols\n")
    config = AutoConfig.from_pretrained(tmp_path / "m")
    assert (config.model_type, config.vocab_size, config.tie_word_embeddings) == ("qwen3", 31, True)


@pytest.mark.parametrize("text", ["12+34=", "46", " 1  2 ", "a"[:0], "x\ny"])
def test_text_goes_through_the_tokenizer_character_by_character(tiny_model, text):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer.encode(text)
    assert [tokenizer.decode([i]) for i in ids] == list(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_special_tokens(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert len(tokenizer) == 31
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.encode("1<eos>") == [tokenizer.convert_tokens_to_ids("1"), 1]


def test_an_unknown_character_is_an_error(tiny_model):
    with pytest.raises(Exception, match="WordLevel error"):
        AutoTokenizer.from_pretrained(tiny_model).encode("12+é")


def test_a_character_that_comes_twice_is_named():
    with pytest.raises(UserError, match=r"each once; 'ab' come twice"):
        ModelSpec(alphabet="abcab")


def test_a_chat_is_its_contents(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    assert (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        == "1+2=3"
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_family_of_the_trainer_is_one_of_the_engine(
    tmp_path: Path, family: str, tied: bool
) -> None:
    """The file has the tensors of both, and others only that an export copies."""
    count = init_model(tmp_path, ModelSpec(family=family, tied=tied, **SMALL))
    on_disk = load_file(tmp_path / "model.safetensors")
    buffers = ("correction_bias", "layer_scalar")
    assert sum(t.numel() for name, t in on_disk.items() if not name.endswith(buffers)) == count
    arch = read_architecture(tmp_path)
    # transformers does not tie embeddings of one family.
    assert (arch.family, arch.tie_word_embeddings) == (family, tied and family != "nemotron_h")
    trained = {name: shape for name, shape, _ in weight_tensors(arch, "float32", "lm")}
    module = build_module(str(tmp_path), device=torch.device("cpu"), dtype=torch.float32)
    assert trained == {name: tuple(tensor.shape) for name, tensor in as_published(module)}
    assert trained.items() <= {name: tuple(t.shape) for name, t in on_disk.items()}.items()
    carried = re.compile("|".join(arch.table.carried) or "$")
    assert [name for name in on_disk.keys() - trained if not carried.match(name)] == []
    assert {tensor.dtype for tensor in on_disk.values()} == {torch.float32}
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.get("text_config", config)
    if arch.blocks:
        assert len(text["layers_block_type"]) == arch.num_layers
    elif arch.table.recurrence or arch.table.windows:
        assert len({*text["layer_types"]}) == 2
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer) == 31
    assert tokenizer.decode(tokenizer.encode(" 1  2\nx")) == " 1  2\nx"


def test_an_unknown_family_is_an_error_with_the_known_ones(tmp_path, capsys):
    assert cli.main(["init-model", str(tmp_path / "m"), "--family=qwen9"]) == 2
    error = capsys.readouterr().err
    assert "family: 'qwen9' is unknown" in error
    assert all(family in error for family in FAMILIES)
    assert not (tmp_path / "m").exists()


def test_the_seed_fixes_the_weights_and_leaves_torchs_generator_alone(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        init_model(tmp_path / name, ModelSpec(seed=seed, **SMALL))
    assert torch.equal(torch.rand(2), expected)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_model_is_not_overwritten_by_accident(tmp_path):
    init_model(tmp_path, ModelSpec(**SMALL))
    with pytest.raises(ModelError, match="--overwrite"):
        init_model(tmp_path)
    init_model(tmp_path, ModelSpec(seed=2, **SMALL), overwrite=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hidden": 130}, "hidden: got 130, expected a multiple of 2 x heads"),
        ({"kv_heads": 3}, "kv_heads: got 3, expected a divisor of heads"),
        ({"layers": 0}, "layers: got 0"),
        (
            {"family": "deepseek_v3", "experts": 1, "experts_per_token": 1},
            "experts: got 1, expected 2 or more",
        ),
        ({"alphabet": "aba"}, "alphabet: got 'aba'"),
    ],
)
def test_impossible_sizes(given, message):
    with pytest.raises(UserError, match=message):
        ModelSpec(**given)


def test_presets_differ_in_their_alphabet():
    assert ModelSpec.preset("addition").vocab_size == 31
    assert ModelSpec.preset("ascii", hidden=64).vocab_size == len(ALPHABETS["ascii"]) + 2 == 99


def test_a_chat_with_roles(tmp_path):
    folder = str(tmp_path / "m")
    given = ["--preset", "ascii", "--chat", "--hidden", "32", "--max-positions", "64"]
    assert cli.main(["init-model", folder, *given]) == 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    question = "<|im_start|>user\n1+2=<|im_end|>\n"
    assert text == f"{question}<|im_start|>assistant\n3<|im_end|>\n"
    assert question + "<|im_start|>assistant\n" == tokenizer.apply_chat_template(
        messages[:1], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert [ids.count(i) for i in (0, 1, 2)] == [0, 2, 2]  # padding; ends and starts of turns
    assert tokenizer.eos_token_id == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\n1+2=\nassistant\n3\n"
    config = AutoConfig.from_pretrained(folder)
    assert (config.vocab_size, config.eos_token_id) == (len(tokenizer), 1)
    assert config.max_position_embeddings == 64


def test_a_chat_needs_letters_for_its_roles():
    with pytest.raises(UserError, match=r"lacks 'aemnrstuy'.* preset ascii"):
        ModelSpec(chat=True, alphabet="0123456789\ni")
