"""Multi-token prediction in torch: a decoder layer of transformers, one sequence at a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import oracle
import torch
from cases import TEMPERATURE, make_batch, make_vectors
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

COEF = 0.3
# Beginnings of the names in the folder, and of the four tensors beside the decoder layer.
NEXTN = ("model.layers.4.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
NAMES = {
    "deepseek_v3": NEXTN,
    "glm4_moe": NEXTN,
    "qwen2": ("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj",
              "final_layernorm"),
}  # fmt: skip


class Predictor(nn.Module):
    """The layer behind the last one, in float64."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = model.config
        layer = type(model.model.layers[-1])
        norm = type(model.model.norm)
        size = config.hidden_size
        self.enorm, self.hnorm, self.norm = (norm(size, config.rms_norm_eps) for _ in range(3))
        self.proj = nn.Linear(2 * size, size, bias=False)
        self.layer = layer(config, config.num_hidden_layers - 1)
        self.hidden_first = config.model_type == "qwen2"
        self.double()

    def forward(self, hidden: Tensor, embedded: Tensor, rotary: Any) -> Tensor:
        """[n, H] of each token and of its next one -> [n, H]."""
        pair = [self.enorm(embedded), self.hnorm(hidden)]
        if self.hidden_first:
            pair.reverse()
        x = self.proj(torch.cat(pair, dim=-1))[None]
        n = x.size(1)
        positions = torch.arange(n)[None]
        mask = torch.full((n, n), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        out = self.layer(x, attention_mask=mask, position_embeddings=rotary(x, positions))
        return self.norm((out[0] if isinstance(out, tuple) else out)[0])

    def named(self, model: Any) -> dict[str, Tensor]:
        """The tensors under their names in a folder; experts one by one."""
        prefix, *others = NAMES[model.config.model_type]
        own = zip(others, (self.enorm, self.hnorm, self.proj, self.norm))
        found = {f"{prefix}{name}.weight": module.weight for name, module in own}
        tensors = [*self.layer.named_parameters(), *self.layer.named_buffers()]
        for name, tensor in tensors:
            found |= dict(oracle._as_on_disk(model, prefix + name, tensor))
        return found


def write(folder: Path, source: Path) -> None:
    """The model of `source` with a random layer for multi-token prediction."""
    model = oracle._load(source)
    family = model.config.model_type
    torch.manual_seed(11)
    predictor = Predictor(model)
    with torch.no_grad():
        for name, parameter in predictor.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
        for name, buffer in predictor.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.05)
    config = json.loads((source / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1}
    if family == "qwen2":
        config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
        config |= {"attention_bias": True}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    added = {name: tensor.detach().float().clone().contiguous()
             for name, tensor in predictor.named(model).items()}  # fmt: skip
    tensors = {**load_file(source / "model.safetensors"), **added}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def step(folder: Path, source: Path) -> dict[str, Any]:
    """`oracle.policy_step` of the model, with the layer's own gradients and mean cross-entropy."""
    expected = oracle.policy_step(source)
    model = oracle._load(source)
    predictor = Predictor(model)
    stored = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, tensor in predictor.named(model).items():
            tensor.copy_(stored[name])
    batch = make_batch()
    weights = make_vectors(batch.num_trainable)["weights"].double()
    total = torch.zeros((), dtype=torch.float64)
    losses = []
    row = 0
    for start, end in zip(batch.cu_tokens.tolist(), batch.cu_tokens.tolist()[1:]):
        tokens = batch.tokens[start:end].long()
        trainable = batch.loss_mask[start:end].nonzero()[:, 0].tolist()
        own = weights[row : row + len(trainable)]
        row += len(trainable)
        if not trainable:
            continue
        with torch.no_grad():
            hidden = model.model(input_ids=tokens[None]).last_hidden_state[0]
            embedded = model.model.embed_tokens(tokens)
        states = predictor(hidden[:-1], embedded[1:], model.model.rotary_emb)
        log_p = (states @ model.lm_head.weight.detach().t() / TEMPERATURE).log_softmax(-1)
        for weight, at in zip(own, trainable):
            if at >= 2:
                losses.append(-log_p[at - 2, tokens[at]])
                total = total + COEF * weight * losses[-1]
    total.backward()
    # Where transformers stacks experts, so does the gradient.
    for parameter in predictor.parameters():
        parameter.data = parameter.grad if parameter.grad is not None else parameter * 0
    trained = {name for name, _ in predictor.layer.named_buffers()}
    gradients = {
        name: tensor.detach()
        for name, tensor in predictor.named(model).items()
        if not any(name.endswith(buffer) for buffer in trained)
    }
    mean = float(torch.stack(losses).detach().mean())
    return {**expected, "gradients": {**expected["gradients"], **gradients}, "mtp": mean}


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
