"""Named defects in the Megatron backend, each of which must turn a case of a few ranks red.

    python tests/backend_mutants.py             all, as a table; exit code 1 unless each is caught
    python tests/backend_mutants.py NAME ...    these

Runner and rows are those of tests/mutants.py; the cases are tests/parity/mutant_probe.py.
"""

# ruff: noqa: E501  (a row reads better whole)

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
B = "backends/megatron/"
FINALIZE = "model.config.finalize_model_grads_func = finalize_model_grads"


def on(*cases: str) -> str:
    return " ".join(
        f"tests/parity/mutant_probe.py::test_a_layout_equals_plain_torch[{case}]" for case in cases
    )


def without_step(name: str) -> str:
    """Replace FINALIZE by Megatron's finalizing without one of its steps."""
    module = "__import__('sys').modules[finalize_model_grads.__module__]"
    return f"setattr({module}, {name!r}, lambda *args, **kwargs: None)\n            {FINALIZE}"


MUTANTS = [
    # targets and token counts
    ("targets not shifted", B + "batch/pack.py", "index = where[slots[trainable - 1]]", "index = where[slots[trainable]]", on("dp2")),
    ("pads count as tokens", B + "batch/pack.py", "num_tokens=int((where[slots] >= 0).sum())", "num_tokens=len(local)", on("pp2_tied")),
    ("tokens of the step without the other replicas", B + "batch/local_batch.py", "int(lengths[everyone].sum())",
     "int(lengths[list(plan.sequences(d))].sum())", on("dp2")),
    ("divided by the micro-batches", B + "training/passes.py", "whole(micro, output)) * step_tokens",
     "whole(micro, output)) * step_tokens / len(micro_batches)", on("tp2")),
    ("every micro-batch scales itself", B + "training/passes.py", "whole(micro, output)) * step_tokens",
     "whole(micro, output)) * micro.num_tokens", on("tp2")),
    # multi-token prediction
    ("the embedding of the token itself, not of the next", B + "batch/pack.py", "tokens.roll(-1)", "tokens", on("mtp_tp2_sp")),
    ("a further token predicted from the slot before it", B + "batch/pack.py", "trainable[predicted] - 2", "trainable[predicted] - 1", on("mtp_tp2_sp")),
    ("further tokens train the trunk", B + "model/mtp.py", "self.hnorm(hidden.detach())", "self.hnorm(hidden)", on("mtp_tp2_sp")),
    ("further tokens train the head", B + "model/gpt.py", "self.true_vocab_size, weight.detach()", "self.true_vocab_size, weight", on("mtp_tp2_sp")),
    ("the projection of a rank's own tokens alone under SP", B + "model/mtp.py",
     "self.eh_proj.weight.sequence_parallel = config.sequence_parallel", "self.eh_proj.weight.sequence_parallel = False", on("mtp_tp2_sp")),
    ("the clip counts further tokens", B + "model/mtp.py", "parameter.shared = True", "parameter.shared = False", on("mtp_tp2_sp")),
    # prefixes that sequences share
    ("a target predicted from the slot before its own", B + "batch/pack.py", "index = where[slots[trainable - 1]]",
     "index = where[slots[trainable] - 1]", on("tp2")),
    ("positions of own tokens from 0", B + "batch/cp_layout.py", "torch.zeros_like(sizes) if prefixes is None else prefixes.counts",
     "torch.zeros_like(sizes)", on("tp2")),
    ("a shared token counts once in the step", B + "batch/pack.py", "num_tokens=int((where[slots] >= 0).sum())",
     "num_tokens=int((counts[local] > 0).sum())", on("dp2")),
    ("keys of a prefix by slot, not by row", B + "batch/cp_layout.py", "return rows[prefixes.slots]", "return prefixes.slots", on("cp2")),
    ("keys of a prefix left out", B + "batch/cp_layout.py", "keys[ranges(starts, counts)] = rows", "keys[ranges(starts, counts)] = 0", on("tp2")),
    # the head
    ("padding in the softmax", B + "model/head.py", "live = min(max(vocab_size - first, 0), weight.size(0))", "live = weight.size(0)",
     on("tp2")),
    ("gradients of the hidden states not summed over TP", B + "model/head.py",
     "rows = copy_to_tensor_model_parallel_region(", "rows = (lambda own, group: own)(", on("tp2")),
    ("the head's gather under SP sums nothing", B + "model/head.py", "tensor_parallel_output_grad=True", "tensor_parallel_output_grad=False",
     on("tp2_sp")),
    ("the value head's gather under SP sums", B + "model/head.py", "tensor_parallel_output_grad=False", "tensor_parallel_output_grad=True",
     on("tp2_sp")),
    # gradients that several ranks hold a part of
    ("gradients of norms not reduced under SP", B + "model/attention/core.py",
     "self.weight.sequence_parallel = config.sequence_parallel", "self.weight.sequence_parallel = False", on("tp2_sp")),
    ("the value head without its mark", B + "model/head.py",
     "self.weight.sequence_parallel = config.sequence_parallel", "self.weight.sequence_parallel = False", on("tp2_sp")),
    ("tied embeddings not reduced over the pipeline", B + "build.py",
     FINALIZE, without_step("_allreduce_word_embedding_grads"), on("pp2_tied")),
    ("the gradient reduction of SP dropped", B + "build.py",
     FINALIZE, without_step("_allreduce_non_tensor_model_parallel_grads"), on("tp2_sp")),
    ("gradients not finalized", B + "build.py", FINALIZE, "model.config.finalize_model_grads_func = None", on("dp2")),
    # KV heads that ranks divide
    ("a KV head's gradient without the other ranks' queries", B + "model/attention/divided_heads.py", "tensor_parallel_output_grad=True",
     "tensor_parallel_output_grad=False", on("tp4")),
    ("the KV head of other queries", B + "model/attention/divided_heads.py", "parts.narrow(0, self.head * self.ranks_of_head, ", "parts.narrow(0, 0, ", on("tp4")),
    ("a KV head with its parts interleaved", B + "model/attention/divided_heads.py", "permute(3, 1, 2, 0, 4)", "permute(3, 1, 2, 4, 0)", on("tp4")),
    ("key and value of a rank exchanged", B + "model/attention/divided_heads.py", "key, value = of_head", "value, key = of_head", on("tp4")),
    # adapters
    ("nothing recorded behind a frozen embedding", B + "model/lora.py", "model.embedding.register_forward_hook(_with_gradient)", "pass", on("lora_tp2_sp")),
    ("a whole factor without its mark under SP", B + "model/lora.py", "whole.sequence_parallel = self.sequence_parallel", "whole.sequence_parallel = False", on("lora_tp2_sp")),
    ("a cut factor counted as whole in the norm", B + "model/lora.py",
     "set_tensor_model_parallel_attributes(cut, True, 0 if self.by_column else 1, 1)", "pass", on("lora_tp2")),
    ("low-rank products of ranks not summed", B + "model/lora.py", "low = self._over_ranks(low)", "pass", on("lora_tp2")),
    ("an adapter not scaled", B + "model/lora.py", "F.linear(low * self.scale, ", "F.linear(low, ", on("lora_tp2")),
    ("k's adapter in the rows of v", B + "model/lora.py", "before = rank * place[index]", "before = rank * (len(found) - 1 - place[index])", on("lora_tp2")),
    ("an expert's factor summed over all ranks", B + "model/lora.py", 'factor.allreduce = getattr(weight, "allreduce", True)', "factor.allreduce = True", on("lora_ep2")),
    ("a whole factor of a split expert not summed", B + "model/lora.py", "if self.silent and self.group.size() > 1:", "if False:", on("lora_etp2")),
    ("grouped experts without their adapters", B + "model/grouped_experts.py", "    if not found:\n        return out\n", "    return out\n", on("lora_ep2")),
    # the pipeline
    ("batched transfers in the interleaved schedule", B + "model/gpt.py", '"overlap_p2p_comm": interleaved,\n        "batch_p2p_comm": not interleaved,',
     '"overlap_p2p_comm": False,\n        "batch_p2p_comm": True,', on("vpp2")),
    ("layers numbered from their own stage", B + "convert/layout.py", "{int(layer.layer_number) - 1}", "{match[1]}", on("pp2_uneven")),
    # context parallelism
    ("targets shifted after the split", B + "batch/pack.py", "target_tokens=tokens[trainable[own]].to(device)",
     "target_tokens=ids[local].roll(-1)[index[own]].to(device)", on("cp2")),
    ("keys of a chunk taken from the rank's first", B + "batch/cp_layout.py", "+ int(k > m) * chunk for k, m in zip", "for k, m in zip", on("cp2")),
    ("positions of the pack, not of the rank's slots", B + "batch/cp_layout.py", "whole[own_slots(present, cp)].to(device)",
     "whole[: len(whole) // cp.size].to(device)", on("cp2")),
    ("the loss multiplied by CP", B + "training/passes.py", "whole(micro, output)) * step_tokens",
     "whole(micro, output)) * step_tokens * model.config.context_parallel_size", on("cp2")),
    ("the backward of CP's gather summed", B + "batch/pack.py", "return gradients[0].index_select(1, own), None, None, None",
     "from megatron.core import mpu\n"
     "        dist.all_reduce(whole := gradients[0].contiguous(), group=mpu.get_context_parallel_group())\n"
     "        return whole.index_select(1, own), None, None, None", on("cp2")),
    ("gradients of keys and values stay with the queries", B + "batch/pack.py", "tensor_parallel_output_grad=True",
     "tensor_parallel_output_grad=False", on("cp2")),
    # routers
    ("router losses too small by the ranks of a pack", B + "model/moe.py", "MoEAuxLossAutoScaler.apply(activation, coeff * part)",
     "MoEAuxLossAutoScaler.apply(activation, coeff * part / self.tp_cp_group.size())", on("cp2_moe")),
    ("choices counted on the own rank alone", B + "model/moe.py",
     "reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), self.tp_cp_group)", "routing_map.sum(dim=0)", on("cp2_moe")),
    ("pads in the z-loss", B + "model/moe.py", "squares = squares.masked_fill(padding_mask, 0.0)", "pass", on("cp2_moe")),
    ("pads seen by the routers", B + "training/passes.py", "padding_mask=padding_mask(micro.padding,", "padding_mask=(lambda *_: None)(micro.padding,",
     on("cp2_moe")),
]  # fmt: skip


def preload() -> None:
    """Megatron and transformers for all forked children; our own packages are left for each to
    import from the copy.
    """
    sys.path.insert(0, str(HERE.parent))
    from backends.megatron.cpu.shim import importing_megatron

    with importing_megatron():
        importlib.import_module("backends.megatron.backend")
    models = ("qwen3.modeling_qwen3", "qwen3_moe.modeling_qwen3_moe")
    for name in ("torch._dynamo", *(f"transformers.models.{model}" for model in models)):
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("backends", "rlcore")]:
        del sys.modules[name]


def main() -> int:
    sys.path.insert(0, str(HERE))
    import mutants

    preload()
    return mutants.main([*sys.argv[1:], "--table", __file__])


if __name__ == "__main__":
    sys.exit(main())
