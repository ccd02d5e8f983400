"""What one layer computed for the probed tokens, on either side, and how far two results part."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from backends.megatron.batch.pack import MicroBatch, make_micro_batch
from rlcore.data.batch import RolloutBatch
from rlcore.data.packing.sharing import share_nothing

# Lengths of the probed sequences; the number of rows of a padded batch is no size of a model.
LENGTHS = (23, 9, 1, 17)
_PADS = 6  # slots of the pack without a token
_COLUMNS = 8  # of a sketch


@dataclass(frozen=True)
class Probe:
    """B sequences with n tokens: a right-padded batch for transformers, a pack for our model.

    A causal model computes the same for a token, whatever pads follow its sequence.
    """

    ids: Tensor  # int64 [B, L]
    rows: Tensor  # int64 [n]: each token's row among the B * L of the batch
    slots: Tensor  # int64 [n]: each token's slot in the pack
    micro: MicroBatch
    targets: Tensor  # int64 [M]: indices among the n tokens of what is predicted
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """n."""
        return len(self.rows)

    def of_batch(self, x: Tensor) -> Tensor | None:
        """The tokens' rows of a result of transformers; None if it is of another shape."""
        if x.shape[:2] == self.ids.shape:
            return x.detach().flatten(0, 1)[self.rows]
        if x.dim() > 1 and x.size(0) == self.ids.numel():
            return x.detach()[self.rows]
        return None

    def of_pack(self, x: Tensor) -> Tensor | None:
        """The tokens' rows of a result of our model; None if it is of another shape."""
        if x.dim() < 2 or x.size(0) != self.micro.num_slots:
            return None
        return x.detach()[self.slots]

    def cotangent(self, hidden: int, seed: int) -> Tensor:
        """A random vector [n, hidden] for the outputs of a layer."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.num_tokens, hidden, generator=generator)


def make_probe(vocab_size: int, lengths: Sequence[int]) -> Probe:
    """Draw random tokens for sequences of these lengths, and pack them with pads at the end."""
    count = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (count,), generator=generator)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    first = torch.zeros(count, dtype=torch.bool)
    first[cu[:-1]] = True
    batch = RolloutBatch(tokens.int(), cu, ~first, {})
    sharing = share_nothing(torch.tensor(lengths))
    micro = make_micro_batch(
        batch, 0, len(lengths), count + _PADS, torch.device("cpu"), sharing=sharing
    )
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    real = torch.arange(ids.size(1)) < torch.tensor(lengths)[:, None]
    ids[real] = tokens
    rows = real.flatten().nonzero()[:, 0]
    targets = (~first).nonzero()[:, 0]
    return Probe(ids, rows, sharing.slots, micro, targets, tuple(lengths))


@dataclass
class Record:
    """What a layer computed for the n tokens.

    Attributes:
        input, output: [n, hidden].
        parts: the first input and the output of each submodule, by its path in the layer: [n, ...],
            or None if it is no tensor with a row for each token.
        core: what enters attention: query and key as products of their heads' vectors, value [n,
            heads, d], and scale.
        routing: the weights of the experts, 0 if not chosen, [n, experts].
        input_gradient: [n, hidden], of the product of output and cotangent.
        gradients: sketches of the weights' gradients, by their names in the folder.
    """

    input: Tensor
    output: Tensor = field(init=False)
    parts: dict[str, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)
    core: dict[str, Tensor] = field(default_factory=dict)
    routing: Tensor | None = None
    input_gradient: Tensor = field(init=False)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def keep(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: Any,
        rows: Callable[[Tensor], Tensor | None],
    ) -> None:
        """Keep the first input and the output of a submodule, by the tokens' `rows`."""
        inputs = (*args, kwargs.get("hidden_states"))
        given = next((x for x in inputs if isinstance(x, Tensor)), None)
        self.parts[name] = (
            None if given is None else rows(given),
            rows(output) if isinstance(output, Tensor) else None,
        )

    def enter_attention(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> None:
        """Keep query, key and value [n, heads, d], and the scale of the scores.

        The dimensions of a head may come in another order on the other side, in q and k alike.
        """
        for name, x in (("query", query), ("key", key)):
            self.core[name] = torch.einsum("ihd,jhd->ihj", x, x)
        self.core["value"] = value
        if scale is not None:
            self.core["scale"] = torch.full((1, 1), float(scale))


def return_memory() -> None:
    """Return freed memory to the system: glibc keeps blocks of a few MiB, such as experts."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def main_output(output: Any) -> Any:
    """The output of a module without what comes with it: a bias, weights of attention."""
    return output[0] if isinstance(output, tuple) else output


def distance(ours: Tensor | None, theirs: Tensor | None) -> float:
    """The largest relative difference of a token's vector, over n tokens.

    A vector that is small next to the other tokens' is compared with a thousandth of their size. No
    row or other sizes on one side: infinity.
    """
    if ours is None or theirs is None or ours.numel() != theirs.numel():
        return float("inf")
    a, b = (x.reshape(len(x), -1).double() for x in (ours, theirs))
    if not bool(a.isfinite().all() & b.isfinite().all()):
        return float("inf")
    sizes = b.norm(dim=1)
    floor = 1e-3 * float(sizes.square().mean().sqrt())
    return float(((a - b).norm(dim=1) / sizes.clamp(min=max(floor, 1e-30))).max())


def sketch(gradient: Tensor) -> Tensor:
    """The product of a gradient with random columns, [rows, 8] or [rows].

    Two gradients are as far from each other as their sketches, within a third, and a sketch of a
    matrix needs no memory to speak of.
    """
    flat = gradient.detach().float().reshape(gradient.size(0), -1)
    if gradient.dim() == 1:
        return flat
    generator = torch.Generator().manual_seed(flat.size(1))
    return flat @ torch.randn(flat.size(1), _COLUMNS, generator=generator)


def whole_distance(ours: Tensor, theirs: Tensor) -> float:
    """The relative difference of two tensors as wholes; infinity if the sizes are not the same."""
    if ours.shape != theirs.shape:
        return float("inf")
    size = float(theirs.double().norm())
    apart = float((ours.double() - theirs.double()).norm())
    return apart / size if size else (float("inf") if apart else 0.0)
