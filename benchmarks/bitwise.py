"""Counts the log-probs of trainer and embedded engine that are equal to the bit, and says why.

    .venv/bin/python benchmarks/bitwise.py                  # SmolLM2-135M and a toy, on the CPU

Both score the same tokens, those that the engine has sampled. What makes them differ is taken away
step by step, and the first operation that differs is found by comparing the outputs of layers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

sys.path.insert(0, str(Path(__file__).parents[1]))
from backends.megatron import MegatronBackend
from backends.megatron.model.attention import core
from backends.megatron.model.head import fused_logprobs
from rlcore.config import Config
from rlcore.data.batch import RolloutBatch
from rlcore.data.generation import GenerateRequest, SamplingParams, StopStrings
from rlcore.data.packing.plan import MinibatchPlan
from rlcore.data.tokenizer import load_tokenizer
from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.trainer.objective import Objective
from rlcore.weights import DTYPES
from rollout.engines.embedded import causal_lm
from rollout.engines.embedded.cache import Cache
from rollout.engines.embedded.causal_lm import CausalLM
from rollout.engines.embedded.decoding import Decoding, Slot
from rollout.engines.embedded.sampling import draw

SMOLLM2 = Path(__file__).parents[1] / "build" / "smollm2" / "model"
PROMPTS = 4
SAMPLES = 4
NEW = 64
CPU = torch.device("cpu")
ALONE: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)  # a tensor-parallel group
Sequences = list[tuple[Tensor, int]]  # (tokens, length of the prompt)


class Engine:
    """The embedded engine's model with the weights of its folder."""

    def __init__(self, folder: Path, dtype: str, *, fp32_head: bool) -> None:
        self.folder = folder
        self.fp32_head = fp32_head
        self.model = CausalLM(str(folder), device=CPU, dtype=dtype, fp32_head=fp32_head)
        weights = load_file(folder / "model.safetensors")
        cast = {name: tensor.to(DTYPES[dtype]) for name, tensor in weights.items()}
        self.model.module.load_state_dict(cast, strict=False)
        self.model.module.tie_weights()

    def generate(self) -> tuple[Sequences, Tensor]:
        """Sample all responses in one batch. Returns them, and log-probs [M]."""
        tokenizer = load_tokenizer(str(self.folder))
        sums = [f"{11 * k + 3}+{7 * k + 5}={18 * k + 8}" for k in range(2 * PROMPTS)]
        prompts = [" ".join(sums[: 2 * draw + 1]) + " 26+12=" for draw in range(PROMPTS)]
        sampling = SamplingParams(max_new_tokens=NEW, stop_token_ids=())
        requests = [
            GenerateRequest(
                np.array(tokenizer.encode(prompt), dtype=np.int32), sampling, draw, n=SAMPLES
            )
            for draw, prompt in enumerate(prompts)
        ]
        slots = [Slot(request, place) for request in range(PROMPTS) for place in range(SAMPLES)]
        decoding = Decoding(self.model, requests, slots, lambda _: StopStrings(()))
        with torch.inference_mode():
            while not decoding.finished:
                decoding.step(1)
        made = decoding.completions()
        sequences = []
        for slot, one in zip(slots, made):
            prompt = requests[slot.request].prompt
            sequences.append((torch.from_numpy(np.concatenate([prompt, one.tokens])), len(prompt)))
        return sequences, torch.from_numpy(np.concatenate([one.logprobs for one in made]))

    def one_by_one(self, sequences: Sequences) -> Tensor:
        """Log-probs [M] of each sequence alone: the prompt, then token by token."""
        return torch.cat([self._decoded(*sequence) for sequence in sequences])

    @torch.inference_mode()
    def _decoded(self, tokens: Tensor, prompt: int) -> Tensor:
        cache = Cache(len(tokens))
        found = []
        start = 0
        for end in range(prompt, len(tokens)):
            logits = self.model.forward(tokens[None, start:end].long(), cache)
            found.append(sampled(logits, tokens[end : end + 1]))
            start = end
        return torch.cat(found)

    @torch.inference_mode()
    def whole(self, sequences: Sequences) -> Tensor:
        """Log-probs [M] of each sequence alone, in one forward pass."""
        found = []
        for tokens, prompt in sequences:
            logits = self.model.module(input_ids=tokens[None].long(), use_cache=False).logits
            found.append(sampled(logits[0, prompt - 1 : -1], tokens[prompt:]))
        return torch.cat(found)


def sampled(logits: Tensor, tokens: Tensor) -> Tensor:
    """Compute the log-probs [M] of given tokens by the sampler's own sums."""
    logits = logits.float()
    highest = logits.amax(-1, keepdim=True)
    _, mass = draw((logits - highest).exp_(), torch.zeros(len(tokens), dtype=torch.float64))
    chosen = (logits.gather(-1, tokens.long()[:, None]) - highest)[:, 0]
    return (chosen.double() - mass.log()).float()


class Trainer:
    """The Megatron model of a folder, in one process."""

    def __init__(self, folder: Path, dtype: str, *, fp32_head: bool) -> None:
        config = Config.model_validate(
            {
                "run": {"name": "bitwise"},
                "model": {"path": str(folder), "dtype": dtype},
                "data": {"paths": ["unused"]},
                "policy": {
                    "share_prefixes": "off",
                    "max_tokens_per_microbatch": 4096,
                    "logprobs": {"fp32_head": fp32_head},
                },
                "training": {"steps": 1},
            }
        )
        self.backend = MegatronBackend(
            config,
            Objective(config.algorithm),
            with_reference=False,
            with_critic=False,
            total_steps=0,
            device="cpu",
        )

    def score(self, sequences: Sequences, *, alone: bool) -> Tensor:
        """Log-probs [M], with all sequences in one pack or each in a pack of its own."""
        tokens = torch.cat([tokens for tokens, _ in sequences])
        lengths = [len(tokens) for tokens, _ in sequences]
        mask = torch.cat([torch.arange(len(t)) >= prompt for t, prompt in sequences])
        count = len(sequences)
        numbers = torch.arange(count)
        batch = RolloutBatch(
            tokens,
            torch.tensor([0, *lengths]).cumsum(0),
            mask,
            {"rewards": torch.zeros(count), "group_ids": numbers, "rollout_ids": numbers},
        )
        packs = tuple((i,) for i in range(count)) if alone else (tuple(range(count)),)
        self.backend.load_batch(batch, [MinibatchPlan((packs,))])
        scores = self.backend.score("policy")
        assert scores is not None
        return scores["logprobs"]


@contextmanager
def outputs(modules: dict[str, torch.nn.Module]) -> Iterator[dict[str, Tensor]]:
    """The first tensor that each module returns, and under "NAME in" the first that it gets."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, given: Any, kwargs: Any, output: Any) -> None:
            first = given[0] if given else kwargs["hidden_states"]
            found[f"{name} in"] = first
            found[name] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [m.register_forward_hook(keep(n), with_kwargs=True) for n, m in modules.items()]
    yield found
    for hook in hooks:
        hook.remove()


@contextmanager
def rotated() -> Iterator[tuple[list[Any], list[Any]]]:
    """(q, k, v, output) of each attention, in the engine and in the trainer."""
    theirs: list[Any] = []
    ours: list[Any] = []
    bucketed = core.bucketed_attention

    def engines(module: Any, q: Tensor, k: Tensor, v: Tensor, *given: Any, **more: Any) -> Any:
        output = causal_lm.attention(module, q, k, v, *given, **more)
        theirs.append([x[0].transpose(0, 1) for x in (q, k, v)] + [output[0][0]])
        return output

    def trainers(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
        output = bucketed(q, k, v, *given)
        ours.append((q, k, v, output, *given))
        return output

    AttentionInterface.register(causal_lm.ATTENTION, engines)
    core.bucketed_attention = trainers
    yield theirs, ours
    core.bucketed_attention = bucketed
    AttentionInterface.register(causal_lm.ATTENTION, causal_lm.attention)


def first_difference(engine: Engine, trainer: Trainer, sequence: tuple[Tensor, int]) -> list[str]:
    """Compare the operations of the first layer, in one forward pass over one sequence each."""
    theirs: Any = engine.model.module.model
    ours: Any = trainer.backend.policy.chunks[0]
    layer = theirs.layers[0]
    attended = layer.self_attn
    mega = ours.decoder.layers[0]
    heads = attended.config.num_attention_heads // attended.config.num_key_value_heads
    named = {
        "norm": layer.input_layernorm, "q": attended.q_proj, "k": attended.k_proj,
        "v": attended.v_proj, "o": attended.o_proj, "norm 2": layer.post_attention_layernorm,
        "gate": layer.mlp.gate_proj, "up": layer.mlp.up_proj, "down": layer.mlp.down_proj,
        "final norm": theirs.norm,
    }  # fmt: skip
    own = {
        "norm": mega.input_layernorm, "qkv": mega.self_attention.linear_qkv,
        "o": mega.self_attention.linear_proj, "norm 2": mega.pre_mlp_layernorm,
        "fc1": mega.mlp.linear_fc1, "down": mega.mlp.linear_fc2,
        "final norm": ours.decoder.final_layernorm,
    }  # fmt: skip
    with outputs(named) as a, outputs(own) as b, rotated() as (engines, trainers):
        engine.whole([sequence])
        trainer.score([sequence], alone=True)
    length = len(sequence[0])
    flat = {name: tensor.reshape(-1, tensor.size(-1))[:length] for name, tensor in b.items()}
    size = attended.head_dim
    q, k, v, mixed = engines[0]
    again = core.bucketed_attention(q, k, v, *trainers[0][4:])
    tokens, prompt = sequence
    hidden = a["final norm"][0, prompt - 1 : -1]
    weight = engine.model.module.get_output_embeddings().weight
    fp32 = engine.fp32_head
    logprobs, _ = fused_logprobs(
        hidden, weight, tokens[prompt:].long(), vocab_size=len(weight), tp=ALONE, fp32=fp32
    )
    groups = flat["qkv"].view(length, -1, heads + 2, size)
    gate, up = flat["fc1"].chunk(2, -1)
    pairs = {
        "embedding": (a["norm in"], flat["norm in"]),
        "norm": (a["norm"], flat["norm"]),
        "q": (a["q"], groups[:, :, :heads]),
        "k": (a["k"], groups[:, :, heads]),
        "v": (a["v"], groups[:, :, heads + 1]),
        "rotated q": (q, trainers[0][0][:length]),
        "attention": (a["o in"], flat["o in"]),
        "attention of the same q, k, v": (mixed, again[:length]),
        "attention's projection": (a["o"], flat["o"]),
        "residual": (a["norm 2 in"], flat["norm 2 in"]),
        "second norm": (a["norm 2"], flat["norm 2"]),
        "gate": (a["gate"], gate),
        "up": (a["up"], up),
        "SwiGLU": (a["down in"], flat["down in"]),
        "MLP": (a["down"], flat["down"]),
        "final norm of all layers": (a["final norm"], flat["final norm"]),
        "log-probs of the same hidden states": (engine.whole([sequence]), logprobs),
    }
    return [f"{name} {share(*pair):.1%}" for name, pair in pairs.items()]


def share(one: Tensor, other: Tensor) -> float:
    """The share of numbers that are equal to the bit."""
    return float((one.reshape(-1) == other.reshape(-1)).double().mean())


def compare(folder: Path, dtype: str, *, fp32_head: bool) -> None:
    """Print the shares of equal log-probs, and the operations of the first layer."""
    engine = Engine(folder, dtype, fp32_head=fp32_head)
    trainer = Trainer(folder, dtype, fp32_head=fp32_head)
    sequences, made = engine.generate()
    one_by_one = engine.one_by_one(sequences)
    whole = engine.whole(sequences)
    alone = trainer.score(sequences, alone=True)
    packed = trainer.score(sequences, alone=False)
    print(f"{dtype}{', fp32 head' * fp32_head}: {len(made)} tokens")
    rows: Sequence[tuple[str, Tensor, Tensor]] = (
        ("engine in a batch, trainer in a pack", made, packed),
        ("engine in a batch, engine one by one", made, one_by_one),
        ("engine token by token, engine in one pass", one_by_one, whole),
        ("trainer in a pack, trainer one by one", packed, alone),
        ("both in one pass over one sequence", whole, alone),
    )
    for name, one, other in rows:
        gap = (one.double() - other.double()).abs()
        print(f"  {name}: {share(one, other):.1%}, mean {gap.mean():.1e}, worst {gap.max():.1e}")
    print("  first layer:", ", ".join(first_difference(engine, trainer, sequences[-1])))
    trainer.backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="a Hugging Face folder")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        toy = Path(scratch) / "toy"
        init_model(toy, ModelSpec())
        for folder in (toy, arguments.model):
            print(folder.name if folder == toy else folder)
            for dtype, fp32_head in (("fp32", False), ("bf16", False), ("bf16", True)):
                compare(folder, dtype, fp32_head=fp32_head)


if __name__ == "__main__":
    main()
