"""The checks of a folder: import and export, embedding, each layer, norm and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from backends.megatron.cpu.shim import expected_warnings_off, importing_megatron, megatron_device

with importing_megatron():
    from backends.megatron.convert.architecture import Architecture, tensor_shapes
    from backends.megatron.convert.folder import carried_tensors
    from backends.megatron.convert.layout import piece_of
    from backends.megatron.convert.load import SafetensorsFolder
    from backends.megatron.convert.read import read_architecture
    from backends.megatron.model_check.hugging_face import HuggingFaceModel, text_fields
    from backends.megatron.model_check.parts import LayerParts, Part
    from backends.megatron.model_check.record import (
        LENGTHS,
        Probe,
        Record,
        distance,
        make_probe,
        whole_distance,
    )
    from backends.megatron.model_check.stages import Stage, stage
    from backends.megatron.parallel.state import (
        ParallelState,
        destroy_parallel,
        init_parallel,
        init_process_group,
    )
from rlcore.config.sections.policy import ParallelConfig
from rlcore.errors import UserError

_CPU = torch.device("cpu")
# Relative differences in fp32 up to which two sides agree.
TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 2e-4
# ... and differences of log-probs.
LOGPROB_TOLERANCE = 1e-4
# Windows up to this length are probed with a sequence that is longer.
_LONGEST_WINDOW = 1024
# Two inputs this far apart are the same to a router, up to a tie.
_NUDGE = 1e-5


@dataclass
class StageReport:
    """One stage.

    Attributes:
        name: "embedding", "layer 3", "norm and head".
        output: the largest relative difference of a token's output.
        inside: ... of the outputs of a layer's submodules.
        gradient: the largest relative difference of a gradient, of the input or of a weight.
        tensors: how many tensors of the folder the stage is made of.
        changed: those that do not come back bit for bit.
        parts: what parts, where the stage does.
        gradients: the gradients that part, by name.
        ties: tokens whose experts tie, so that the choice is open; left out.
        tolerance: of `output` and `inside`.
    """

    name: str
    output: float
    inside: float = 0.0
    gradient: float | None = None
    tensors: int = 0
    changed: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    gradients: dict[str, float] = field(default_factory=dict)
    ties: int = 0
    tolerance: float = TOLERANCE

    @property
    def culprit(self) -> Part | None:
        """The first part that parts, as far inside as it is known; None if none does."""
        apart = [part for part in self.parts if part.distance > self.tolerance]
        inner = [part for part in apart[1:2] if part.depth]
        return next(iter(inner or apart), None)

    @property
    def agrees(self) -> bool:
        """Whether the stage does what transformers does, and comes back bit for bit."""
        forward = max(self.output, self.inside) <= self.tolerance
        return forward and not self.gradients and not self.changed


@dataclass(frozen=True)
class Setting:
    """What is compared."""

    arch: Architecture
    model: str  # transformers' class
    lengths: tuple[int, ...]
    layers: int


@dataclass(frozen=True)
class Leftover:
    """Tensors of the folder that the table does not convert.

    Attributes:
        used: transformers' model has them.
        carried: they are neither trained nor published, and an export copies them.
        ignored: all others.
    """

    used: list[str]
    carried: list[str]
    ignored: list[str]


def check_model(
    folder: Path,
    layers: int | None,
    begin: Callable[[Setting], None],
    report: Callable[[StageReport], None],
) -> Leftover:
    """Compare a folder's model with transformers'; calls `report` after each stage.

    Args:
        layers: check the first ones; None: all.
        begin: called once, before the first stage.

    Raises:
        UserError: `layers` is more than the model has.
        ModelError: the folder cannot be read, or transformers has no such model.
    """
    arch = read_architecture(folder)
    if layers is not None and layers > arch.num_layers:
        raise UserError(f"--layers: got {layers}, expected at most the model's {arch.num_layers}")
    with ExitStack() as stack:
        source = stack.enter_context(SafetensorsFolder(folder))
        theirs = HuggingFaceModel(arch, source)
        probe = make_probe(arch.vocab_size, _lengths(arch))
        if init_process_group(_CPU, timeout_s=60.0):
            stack.callback(dist.destroy_process_group)
        stack.enter_context(megatron_device(_CPU))
        stack.enter_context(expected_warnings_off())
        parallel = init_parallel(ParallelConfig(), timeout_s=60.0, seed=0)
        stack.callback(destroy_parallel)
        count = arch.num_layers if layers is None else layers
        begin(Setting(arch, theirs.name, probe.lengths, count))
        check = _Check(arch, folder, source, theirs, parallel, probe, report)
        logits = theirs.run(probe, count, check.layer)
        check.head(logits)
    carried = {tensor.spec.name for tensor in carried_tensors(arch)}
    converted = {source.stored_name(name) for entry in arch.entries() for name in entry.names}
    used = theirs.target.keys() - converted - carried
    ignored = {*theirs.ignored} - converted - carried
    return Leftover(sorted(used), sorted(carried), sorted(ignored))


def _lengths(arch: Architecture) -> tuple[int, ...]:
    """The lengths of the probed sequences: one is longer than an attention window."""
    window = text_fields(arch).get("sliding_window") or 0
    longest = window + 8 if 0 < window <= _LONGEST_WINDOW else 0
    lengths = (max(LENGTHS[0], longest), *LENGTHS[1:])
    return tuple(min(length, arch.max_position_embeddings) for length in lengths)


class _Check:
    """The stages of one model, in the order of transformers' forward pass."""

    def __init__(
        self, arch: Architecture, folder: Path, source: SafetensorsFolder,
        theirs: HuggingFaceModel, parallel: ParallelState, probe: Probe,
        report: Callable[[StageReport], None],
    ) -> None:  # fmt: skip
        self._arch = arch
        self._folder = folder
        self._source = source
        self._theirs = theirs
        self._parallel = parallel
        self._probe = probe
        self._report = report
        self._hidden: Tensor | None = None

    def _stage(self, number: int) -> AbstractContextManager[Stage]:
        return stage(number, self._arch, self._folder, self._parallel, self._probe)

    def layer(self, number: int, theirs: Record) -> None:
        """Compare a layer with what transformers' layer computed."""
        if number == 0:
            self._embedding(theirs.input)
        self._hidden = theirs.output
        with self._stage(number + 1) as own:
            parts = LayerParts(own, self._theirs)
            vector = self._probe.cotangent(theirs.output.size(1), number)
            ours = own.run(theirs.input, vector)
            found = StageReport(f"layer {number}", distance(ours.output, theirs.output))
            found.inside = parts.largest(ours, theirs)
            found.tensors, found.changed = self._round_trip(own)
            if not found.agrees:
                self._without_ties(found, own, parts, ours, theirs)
            if max(found.output, found.inside) > TOLERANCE:
                forced = own.run(theirs.input, None, theirs, parts.children)
                found.parts = list(parts.compare(forced, theirs, TOLERANCE))
            elif not found.ties:
                _compare_gradients(found, ours, theirs)
        self._report(found)

    def head(self, logits: Tensor) -> None:
        """Compare norm and head, on the last hidden states of transformers' layers."""
        assert self._hidden is not None
        probe = self._probe
        with self._stage(self._arch.num_layers + 1) as own:
            results, normed = own.predict(self._hidden)
            if self._arch.head == "value":
                expected = logits[probe.targets - 1, 0]
            else:
                every = logits[probe.targets - 1].log_softmax(-1)
                expected = every.gather(1, probe.micro.target_tokens[:, None])[:, 0]
            apart = float((results - expected).abs().max())
            found = StageReport("norm and head", apart, tolerance=LOGPROB_TOLERANCE)
            found.tensors, found.changed = self._round_trip(own)
            if not apart <= LOGPROB_TOLERANCE:
                found.parts = list(self._ends(normed, apart))
        self._report(found)

    def _ends(self, normed: Tensor, apart: float) -> Iterator[Part]:
        """Name what parts of norm and head, the last modules of transformers' model."""
        *_, norm, head = self._theirs.outputs
        expected = self._theirs.outputs[norm]
        yield Part(norm, distance(normed, expected), tuple(self._theirs.sources(norm)), 0)
        yield Part(head, apart, tuple(self._theirs.sources(head)), 0)

    def _embedding(self, hidden: Tensor) -> None:
        with self._stage(0) as own:
            found = StageReport("embedding", distance(own.embed(), hidden))
            found.tensors, found.changed = self._round_trip(own)
            if found.output > TOLERANCE:
                found.parts = [
                    Part("embedding", found.output, owned.entry.names) for owned in own.owned
                ]
        self._report(found)

    def _round_trip(self, own: Stage) -> tuple[int, list[str]]:
        """Count the tensors of a stage, and name those that do not come back bit for bit."""
        names: set[str] = set()
        changed: dict[str, None] = {}
        arch = own.arch
        for owned in own.owned:
            entry = owned.entry
            shapes = tensor_shapes(arch, entry)
            for index, piece in enumerate(own.pieces(entry, owned.weight.detach())):
                name = entry.parts[index].name
                whole = piece_of(entry, index, arch, 0, 1, arch.vocab_size)
                stored = self._source.read_piece(name, shapes[name], whole)
                names.add(name)
                if not torch.equal(piece.to(stored.dtype), stored):
                    changed[name] = None
        return len(names), [*changed]

    def _without_ties(
        self, found: StageReport, own: Stage, parts: LayerParts, ours: Record, theirs: Record
    ) -> None:
        """Leave out the tokens whose experts tie.

        A token's experts tie if our own router chooses others after a nudge of the layer's input.
        """
        if ours.routing is None or theirs.routing is None:
            return
        moved = ((ours.routing != 0) != (theirs.routing != 0)).any(1)
        open_choice = torch.zeros_like(moved)
        for seed in range(4):
            noise = self._probe.cotangent(theirs.input.size(1), seed)
            nudged = own.run(theirs.input * (1 + _NUDGE * noise), None)
            assert nudged.routing is not None
            open_choice |= ((nudged.routing != 0) != (ours.routing != 0)).any(1)
        if not moved.any() or not open_choice[moved].all():
            return
        kept = ~moved
        for record in (ours, theirs):
            _keep_rows(record, kept)
        found.ties = int(moved.sum())
        found.output = distance(ours.output, theirs.output)
        found.inside = parts.largest(ours, theirs)


def _keep_rows(record: Record, kept: Tensor) -> None:
    record.output = record.output[kept]
    record.parts = {
        name: (None if given is None else given[kept], None if out is None else out[kept])
        for name, (given, out) in record.parts.items()
    }


def _compare_gradients(found: StageReport, ours: Record, theirs: Record) -> None:
    named = {"the input": (ours.input_gradient, theirs.input_gradient)}
    named |= {
        name: (ours.gradients[name], theirs.gradients[name])
        for name in ours.gradients.keys() & theirs.gradients.keys()
    }
    apart = {name: whole_distance(*both) for name, both in sorted(named.items())}
    found.gradient = max(apart.values())
    found.gradients = {name: d for name, d in apart.items() if not d <= GRADIENT_TOLERANCE}
