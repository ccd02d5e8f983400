"""`rlcore init-model`: a small model with random weights and a tokenizer of single characters.

Tests, examples and first runs thus need no download.
"""

from __future__ import annotations

import json
import string
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from rlcore.errors import ModelError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Family = Literal[
    "qwen3", "qwen2", "llama", "mistral", "ministral3", "seed_oss", "smollm3", "qwen3_moe",
    "mixtral", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "qwen3_5", "qwen3_5_moe",
]  # fmt: skip
LATENT = ("deepseek_v3", "glm4_moe_lite", "kimi_k2")
# Of families that need no further fields.
DENSE_CONFIGS = {
    "qwen3": "Qwen3Config",
    "qwen2": "Qwen2Config",
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "ministral3": "Ministral3Config",
    "seed_oss": "SeedOssConfig",
    "smollm3": "SmolLM3Config",
}

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

    family: Family = "qwen3"
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
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise UserError(f"{name}: got {getattr(self, name)}, expected 1 or more")
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
            " best": self.family in LATENT and self.experts < 2,
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
    from transformers import AutoModelForCausalLM, GenerationConfig

    spec = spec or ModelSpec()
    if (folder / "config.json").exists() and not overwrite:
        raise ModelError(f"{folder}: holds a model already; pass --overwrite to replace it")
    tokenizer = char_tokenizer(spec.alphabet, spec.max_positions, chat=spec.chat)
    config = _architecture(spec, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    if spec.family == "kimi_k2":
        _rename(folder, "kimi_k2")
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


def _architecture(spec: ModelSpec, *, eos: int, pad: int) -> Any:
    """The family's own configuration class with our sizes."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "bos_token_id": None,
    }
    head = spec.hidden // spec.heads
    width = max(spec.intermediate // 2, 1)
    dense = min(1, spec.layers - 1)
    if spec.family in LATENT:
        # A dense first layer and one group of experts.
        latent = {
            "num_key_value_heads": spec.heads,
            "q_lora_rank": spec.hidden // 2,
            "kv_lora_rank": spec.hidden // 4,
            "qk_nope_head_dim": head,
            "qk_rope_head_dim": max(head // 4 * 2, 2),
            "v_head_dim": head,
            "n_routed_experts": spec.experts,
            "num_experts_per_tok": spec.experts_per_token,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": dense,
            "num_nextn_predict_layers": 0,
            "moe_intermediate_size": width,
        }
        if spec.family == "glm4_moe_lite":
            del latent["first_k_dense_replace"]
            kinds = ["dense"] * dense + ["sparse"] * (spec.layers - dense)
            return transformers.Glm4MoeLiteConfig(**sizes | latent, mlp_layer_types=kinds)
        return transformers.DeepseekV3Config(**sizes | latent)
    # Two classes derive the head size from hidden / heads.
    if spec.family not in ("qwen2", "smollm3"):
        sizes["head_dim"] = head
    if spec.family in ("qwen3_5", "qwen3_5_moe"):
        return _gated_delta(spec, sizes)
    experts = {"num_experts_per_tok": spec.experts_per_token, "num_local_experts": spec.experts}
    if spec.family == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **sizes, **experts, moe_intermediate_size=width, norm_topk_prob=True
        )
    if spec.family == "mixtral":
        return transformers.MixtralConfig(**{**sizes, **experts, "intermediate_size": width})
    if spec.family == "mistral":
        sizes["sliding_window"] = None
    return getattr(transformers, DENSE_CONFIGS[spec.family])(**sizes)


def _gated_delta(spec: ModelSpec, sizes: dict[str, Any]) -> Any:
    """The text model of Qwen3.5: every fourth layer has attention, or the last of fewer."""
    import transformers

    head: int = sizes["head_dim"]
    every = min(4, spec.layers)
    delta = {
        "layer_types": [
            "linear_attention" if (layer + 1) % every else "full_attention"
            for layer in range(spec.layers)
        ],
        "linear_num_key_heads": spec.kv_heads,
        "linear_num_value_heads": spec.heads,
        "linear_key_head_dim": head,
        "linear_value_head_dim": head,
        # The published models' quarter of a head, or what is even.
        "partial_rotary_factor": next(part for part in (0.25, 0.5, 1.0) if head * part % 2 == 0),
    }
    if spec.family == "qwen3_5":
        return transformers.Qwen3_5TextConfig(**sizes, **delta)
    width = max(spec.intermediate // 2, 1)
    experts = {
        "num_experts": spec.experts,
        "num_experts_per_tok": spec.experts_per_token,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }
    del sizes["intermediate_size"]
    return transformers.Qwen3_5MoeTextConfig(**sizes, **delta, **experts)


def _rename(folder: Path, model_type: str) -> None:
    """Give a folder the `model_type` of a family that transformers has by another name."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "model_type": model_type}
    path.write_text(json.dumps(config, indent=2) + "\n")
