"""Host memory and disk of a run: a step's batch on rank 0, and checkpoints.

tests/unit/planning holds the bytes beside the arrays and the files of a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.planning.memory import Layout, Weights, optimizer_bytes, padded_vocab, rank_weights
from rlcore.planning.shape import ModelShape

WAITING_STEPS = 2  # earlier steps whose record may wait for the disk (rlcore/runs/recorder.py)


@dataclass(frozen=True)
class StepArrays:
    """The arrays of a step's batch on rank 0. Texts and Python's objects are not counted."""

    sequences: int
    tokens: int  # of all sequences
    trainable: int  # of those
    vectors: int  # fp32 vectors over trainable tokens that the step computes
    sampled: bool = True  # tokens have an engine's log-prob and a version
    routed: int = 0  # experts that an engine records of a token, over all layers

    @property
    def samples(self) -> int:
        """Bytes of the samples: tokens int32, mask uint8, log-probs fp32, experts int16."""
        return self.tokens * (4 + 1 + 2 * self.routed) + 4 * self.trainable

    @property
    def batch(self) -> int:
        """Bytes of the `RolloutBatch` as it is built.

        Tokens int32, mask bool, experts int16; log-probs fp32; of a sequence reward fp32, three
        numbers and two offsets, int64, and the version and length of a span, int64 (more, where a
        publication came in the middle).
        """
        per_sequence = 4 + 5 * 8 + 2 * 8 * self.sampled
        vectors = 4 * self.trainable * self.sampled
        return (
            self.tokens * (4 + 1 + 2 * self.routed) + vectors + self.sequences * per_sequence + 16
        )

    @property
    def held(self) -> int:
        """Bytes that stay for the step: batch and its vectors. Samples and shares are views of it.

        Supervised samples keep their log-probs, which their batch does not have.
        """
        of_samples = 0 if self.sampled else 4 * self.trainable
        return self.batch + of_samples + 4 * self.vectors * self.trainable

    @property
    def step(self) -> int:
        """Bytes that the step takes at most: samples and batch, while it is made, or what stays."""
        return max(self.samples + self.batch, self.held)

    @property
    def waiting(self) -> int:
        """Bytes of the earlier steps that wait for the disk, at most."""
        return WAITING_STEPS * self.held


def checkpoint_bytes(
    shape: ModelShape,
    layout: Layout,
    dtype_bytes: int,
    vocab_multiple: int = 1,
    value_head: bool = False,
) -> tuple[int, int]:
    """Return the bytes of a trained model in a checkpoint, and those of the rank that writes most.

    Each weight and its optimizer's state is there once. Weights are dealt out by size to the ranks
    that hold them alike, with their state where that is not divided among these ranks. A save in
    the background copies what a rank writes to host memory first, which is kept for the next save.
    """
    padding = padded_vocab(shape, layout, vocab_multiple) - shape.vocab
    heads = 1 if shape.tied or value_head else 2
    count = shape.parameters + heads * padding * shape.hidden
    if value_head:
        count += shape.hidden - (0 if shape.tied else shape.vocab * shape.hidden)

    def written(stage: int) -> int:
        weights = rank_weights(
            shape, layout, stage, vocab_multiple=vocab_multiple, value_head=value_head
        )
        own = Weights(
            max(weights.dense // (layout.data * layout.context), largest(stage)),
            weights.expert // layout.expert_data,
        )
        state = optimizer_bytes(
            weights if layout.distributed else own, layout, dtype_bytes=dtype_bytes
        )
        return dtype_bytes * own.total + state

    def largest(stage: int) -> int:
        """Return the parameters of an embedding or head, which one rank writes."""
        last = stage == layout.pipeline - 1 and not shape.tied and not value_head
        if stage > 0 and not last:
            return 0
        return padded_vocab(shape, layout, vocab_multiple) * shape.hidden // layout.tensor

    whole = count * (dtype_bytes + 8 + (4 if dtype_bytes < 4 else 0))
    return whole, max(map(written, range(layout.pipeline)))
