"""Our model, one pipeline stage at a time: the embedding, each layer, and norm with head.

This process takes the place of one rank after another of a pipeline with a stage for each, so that
`build_chunks` makes the parts as it does for a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from backends.megatron.batch.pack import PackedSequences
from backends.megatron.convert.architecture import Architecture, part_shapes, tensor_shapes
from backends.megatron.convert.layout import owned_parameters, unpack
from backends.megatron.convert.load import load_hf
from backends.megatron.convert.table import Entry
from backends.megatron.cpu.shim import replaced
from backends.megatron.model.attention.core import CoreAttention
from backends.megatron.model.gpt import build_chunks, transformer_config
from backends.megatron.model.head import HeadOptions, Targets
from backends.megatron.model.layers import LOCAL_FIELDS
from backends.megatron.model.moe import padding_mask
from backends.megatron.model_check.record import Probe, Record, main_output, return_memory, sketch
from backends.megatron.parallel.state import ParallelState
from rlcore.config.sections.policy import ParallelConfig
from rlcore.planning.memory import padded_vocab_size

_CPU = torch.device("cpu")
# Embedding and head are stages without layers.
_ENDS = dict.fromkeys(
    ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), True
)
_LAYER = "decoder.layers.0"


@dataclass(frozen=True)
class Owned:
    """A weight of a stage, and the row of the table that it is made by."""

    entry: Entry
    weight: Tensor
    is_copy: bool


class Stage:
    """One stage with its weights."""

    def __init__(self, arch: Architecture, probe: Probe, chunk: Any) -> None:
        self.arch = arch
        self.probe = probe
        self.chunk = chunk
        self.owned = [Owned(*found) for found in owned_parameters([chunk], arch)]

    def tensors(self, owned: Owned, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A gradient of a weight as the tensors of the folder, by name.

        Nothing for a tensor of all experts, of which a weight is one expert's.
        """
        entry = owned.entry
        if entry.parts[0].of_experts:
            return
        pieces = self.pieces(entry, weight)
        if len(entry.names) == len(pieces):
            yield from zip(entry.names, pieces)
            return
        for name, shape in tensor_shapes(self.arch, entry).items():
            whole = weight.new_zeros(shape)
            for part, piece in zip(entry.parts, pieces):
                if part.name == name:
                    first = part.first_row(self.arch.sizes)
                    whole[first : first + len(piece)] = piece
            yield name, whole

    def pieces(self, entry: Entry, weight: Tensor) -> list[Tensor]:
        """A weight, or columns of outputs [rows, n], as the parts of its entry."""
        rows = [shape[0] for shape in part_shapes(self.arch, entry)]
        views = unpack(entry.split, weight, self.arch.sizes[entry.group], rows)
        return [view.reshape(count, *weight.shape[1:]) for view, count in zip(views, rows)]

    def embed(self) -> Tensor:
        """The embedded tokens [n, hidden]."""
        with torch.no_grad():
            return self._rows(self._forward())

    def predict(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The results of the head for the targets [M], and the final norm's output [n, hidden].

        The results are log-probs, or values.
        """
        normed: list[Tensor] = []
        norm = self.chunk.decoder.final_layernorm
        hook = norm.register_forward_hook(lambda *call: normed.append(call[2]))
        with torch.no_grad():
            self.chunk.set_input_tensor([self._spread(hidden)])
            results = main_output(self._forward())
        hook.remove()
        return results, self._rows(normed[0])

    def run(self, hidden: Tensor, cotangent: Tensor | None, forced: Record | None = None,
            children: dict[str, str] | None = None) -> Record:  # fmt: skip
        """Run the stage's layer on hidden states [n, hidden].

        Args:
            cotangent: of the output; None: without gradients.
            forced: transformers' record, whose inputs the submodules get.
            children: the submodules that get them, and transformers' names of these.
        """
        record = Record(hidden)
        leaf = hidden.clone().requires_grad_()
        with ExitStack() as stack:
            if cotangent is not None:
                self._sketch_gradients(record, stack)
            stack.enter_context(torch.set_grad_enabled(cotangent is not None))
            stack.enter_context(self._recording(record))
            for own, other in (children or {}).items():
                assert forced is not None
                given = forced.parts[other][0]
                if given is not None:
                    hook = partial(self._force, self._spread(given))
                    module = self.chunk.get_submodule(f"{_LAYER}.{own}")
                    stack.callback(module.register_forward_pre_hook(hook).remove)
            self.chunk.set_input_tensor([self._spread(leaf)])
            output = self._forward()
            record.output = self._rows(output)
            if cotangent is not None:
                output.backward(self._spread(cotangent))
                assert leaf.grad is not None
                record.input_gradient = leaf.grad
        self.chunk.set_input_tensor([None])
        return record

    def _forward(self) -> Any:
        micro = self.probe.micro
        # As in a pass of a run (training/passes.py).
        return self.chunk(
            micro.input_ids,
            None,
            None,
            labels=Targets(micro, HeadOptions(1.0, None, entropy=False)),
            packed_seq_params=micro.packed,
            padding_mask=padding_mask(micro.padding, self.chunk.config, self.chunk),
        )

    def _spread(self, rows: Tensor) -> Tensor:
        """Put the tokens' rows [n, hidden] at their slots: [T, 1, hidden], 0 at pads."""
        flat = rows.reshape(len(rows), -1)
        pack = flat.new_zeros(self.probe.micro.num_slots, flat.size(1))
        return pack.index_copy(0, self.probe.slots, flat)[:, None]

    def _rows(self, pack: Tensor) -> Tensor:
        return pack.detach()[self.probe.slots, 0]

    def _sketch_gradients(self, record: Record, stack: ExitStack) -> None:
        for owned in self.owned:
            weight = owned.weight
            # As for transformers' stacked experts.
            weight.requires_grad_(owned.entry.expert is None and isinstance(weight, nn.Parameter))

            def keep(weight: Tensor, owned: Owned = owned) -> None:
                assert weight.grad is not None
                for name, gradient in self.tensors(owned, weight.grad):
                    record.gradients[name] = sketch(gradient)
                weight.grad = None

            if weight.requires_grad:
                # A hook holds the weight, in a circle that Python does not see.
                hook = weight.register_post_accumulate_grad_hook(keep)  # type: ignore[attr-defined]
                stack.callback(hook.remove)

    @staticmethod
    def _force(given: Tensor, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (given, *args[1:])

    @contextmanager
    def _recording(self, record: Record) -> Iterator[None]:
        """Inside, the submodules of the layer write what they compute into the record."""
        probe = self.probe

        def keep(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            out = main_output(output)
            # Megatron's linear layers leave their biases to their callers.
            if isinstance(output, tuple) and isinstance(output[-1], nn.Parameter):
                out = out + output[-1]
            record.keep(name, args, kwargs, out, probe.of_pack)
            # A router: (weights, choice), [T, experts].
            if isinstance(output, tuple) and getattr(output[1], "dtype", None) == torch.bool:
                record.routing = probe.of_pack(output[0] * output[1])

        attend = CoreAttention.forward

        def recorded(core: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any,
                     packed_seq_params: PackedSequences, **kwargs: Any) -> Tensor:  # fmt: skip
            q, k, v = (x.detach()[probe.slots] for x in (query, key, value))
            record.enter_attention(q, k, v, core.scale)
            return attend(
                core, query, key, value, *args, packed_seq_params=packed_seq_params, **kwargs
            )

        with ExitStack() as stack:
            for name, module in self.chunk.get_submodule(_LAYER).named_modules():
                if name:
                    hook = module.register_forward_hook(partial(keep, name), with_kwargs=True)
                    stack.callback(hook.remove)
            stack.enter_context(replaced(CoreAttention, "forward", recorded))
            yield


@contextmanager
def stage(
    number: int, arch: Architecture, folder: Path, parallel: ParallelState, probe: Probe
) -> Iterator[Stage]:
    """Build a stage and read its weights. 0 is the embedding, the last one norm and head."""
    count = arch.num_layers + 2
    config = transformer_config(
        arch, ParallelConfig(pipeline=count), "fp32", _CPU, {}, {**LOCAL_FIELDS, **_ENDS}
    )
    with _as_rank(number, count):
        chunks = build_chunks(
            arch,
            config,
            padded_vocab=padded_vocab_size(arch.vocab_size, 128, 1),
            value_head=arch.head == "value",
        )
        chunks[0].eval()
        load_hf(chunks, arch, folder, parallel)
        yield Stage(arch, probe, chunks[0])
    # Modules refer to one another in circles, which would hold the weights for a while.
    for weight in chunks[0].parameters():
        weight.data = weight.data.new_empty(0)
    return_memory()


class _PipelineGroup:
    """What Megatron asks a pipeline group for while it builds and runs a stage."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@contextmanager
def _as_rank(rank: int, size: int) -> Iterator[None]:
    """Inside, Megatron takes this process for one rank of a pipeline."""
    with ExitStack() as stack:
        for name, value in (
            ("_MPU_PIPELINE_MODEL_PARALLEL_RANK", rank),
            ("_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", size),
            ("_PIPELINE_MODEL_PARALLEL_GROUP", _PipelineGroup(rank, size)),
        ):
            stack.enter_context(replaced(mpu, name, value))
        yield
