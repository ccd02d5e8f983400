"""`rlcore init-model`: a small model with random weights and a tokenizer of single characters.

Tests, examples and first runs thus need no download.
"""

from __future__ import annotations

import json
import string
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from backends.megatron.convert.families import FAMILIES
from backends.megatron.convert.table import Family
from rlcore.errors import ModelError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD = "<pad>"
EOS = "<eos>"
ALPHABETS = {
    # 29 characters; 31 symbols with <pad> and <eos>
    "addition": string.digits + "+-*/=()<>.,:;?! \nxy",
    "ascii": string.digits + string.ascii_letters + string.punctuation + " \n\t",
}
# Without symbols for roles, a conversation is the concatenation of its contents.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# ChatML with tool calls, as Qwen's models use it, with four more symbols. The symbol that ends a
# turn ends a response. Tools are listed by name and arguments alone, which keeps prompts short.
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CALL_START = "<tool_call>"
CALL_END = "</tool_call>"
CHATML_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}("
    "{{ tool.function.parameters.properties.keys() | join(', ') }})\n{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROLES = "systemuserassistant\n"
COUNTS = (
    *("hidden", "layers", "heads", "kv_heads", "intermediate"),
    *("experts", "experts_per_token", "max_positions"),
)


@dataclass(frozen=True)
class ModelSpec:
    """Family, sizes and alphabet; the default has 595,200 parameters and learns to add."""

    # A key of `FAMILIES`: the `model_type`, and that of its language model if it has several.
    family: str = "qwen3"
    alphabet: str = ALPHABETS["addition"]
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 256
    # Per layer of a family with experts, each half as wide as a dense network.
    experts: int = 8
    experts_per_token: int = 2
    tied: bool = True
    seed: int = 1
    max_positions: int = 512
    chat: bool = False  # a chat template with roles

    def __post_init__(self) -> None:
        """Raise UserError for sizes that contradict each other."""
        if self.family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise UserError(f"family: {self.family!r} is unknown (known: {known})")
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise UserError(f"{name}: got {getattr(self, name)}, expected 1 or more")
        experts = FAMILIES[self.family].experts
        grouped = experts is not None and experts.scoring == "sigmoid"
        twice = "".join(c for c, n in Counter(self.alphabet).items() if n > 1)
        which = f"; {twice!r} come twice" if twice else ""
        missing = "".join(sorted(set(ROLES) - set(self.alphabet))) if self.chat else ""
        wrong = {
            f"hidden: got {self.hidden}, expected a multiple of 2 x heads ({self.heads})": (
                self.hidden % (2 * self.heads)
            ),
            f"kv_heads: got {self.kv_heads}, expected a divisor of heads ({self.heads})": (
                self.heads % self.kv_heads
            ),
            f"experts_per_token: got {self.experts_per_token}, more than the {self.experts}"
            " experts": self.experts_per_token > self.experts,
            f"experts: got {self.experts}, expected 2 or more: a group of experts counts by its two"
            " best": grouped and self.experts < 2,
            f"alphabet: got {self.alphabet!r}, expected one character or more, each once{which}": (
                not self.alphabet or twice
            ),
            f"alphabet: it lacks {missing!r}, with which the chat template of `chat` writes its"
            " roles; take the preset ascii, or add them": missing,
        }
        for message, holds in wrong.items():
            if holds:
                raise UserError(message)

    @classmethod
    def preset(cls, name: str, **given: Any) -> ModelSpec:
        """The defaults with the alphabet called `name`, overridden by `given`."""
        return cls(**{"alphabet": ALPHABETS[name], **given})

    @property
    def vocab_size(self) -> int:
        """The alphabet and two special tokens, or three if turns begin with a token."""
        return len(self.alphabet) + (5 if self.chat else 2)


def init_model(folder: Path, spec: ModelSpec | None = None, *, overwrite: bool = False) -> int:
    """Write configuration, fp32 weights and tokenizer; the same `spec` makes the same weights.

    Returns:
        The number of parameters.

    Raises:
        ModelError: `folder` holds a model and `overwrite` is off.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

    from rlcore.launch.commands.model_fields import model_config, shared_fields

    spec = spec or ModelSpec()
    if (folder / "config.json").exists() and not overwrite:
        raise ModelError(f"{folder}: holds a model already; pass --overwrite to replace it")
    tokenizer = char_tokenizer(spec.alphabet, spec.max_positions, chat=spec.chat)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    family = FAMILIES[spec.family]
    config = model_config(family, {**shared_fields(spec), **ends})
    kind = AutoModelForImageTextToText if family.within else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = kind.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    _name(folder, family)
    tokenizer.save_pretrained(folder)
    return int(sum(parameter.numel() for parameter in model.parameters()))


def char_tokenizer(
    alphabet: str, max_length: int = 512, *, chat: bool = False
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character: `decode(encode(text)) == text`.

    It adds no tokens and raises for unknown characters. With `chat` its template is ChatML.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = (PAD, TURN_END, TURN_START, CALL_START, CALL_END) if chat else (PAD, EOS)
    vocabulary = {symbol: index for index, symbol in enumerate((*special, *alphabet))}
    # The unknown token is not in the vocabulary, so an unknown character raises.
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<none>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=special[1],
        pad_token=PAD,
        additional_special_tokens=list(special[2:]),
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        chat_template=CHATML_TEMPLATE if chat else CHAT_TEMPLATE,
    )


def _name(folder: Path, family: Family) -> None:
    """Give the files the family's names, where transformers writes others."""
    path = folder / "config.json"
    names = {"model_type": family.model_type, "architectures": [family.classes[0]]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **names}, indent=2) + "\n")
    if family.model_type == "kimi_k25":
        file = folder / "model.safetensors"
        save_file(
            {_of_kimi(k): tensor for k, tensor in load_file(file).items()}, file, {"format": "pt"}
        )


def _of_kimi(name: str) -> str:
    """The name in folders of Kimi-K2.5, of which transformers 5 writes two beginnings otherwise."""
    name = name.replace("language_model.model.blocks.", "language_model.model.layers.")
    return name.removeprefix("model.") if name.startswith("model.mm_projector.") else name
