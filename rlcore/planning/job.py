"""The subject of a plan: the models of a run, and the work of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.planning.memory import AdapterSize, Layout, Load, Weights, rank_adapters, rank_weights
from rlcore.planning.publication import Publication
from rlcore.planning.shape import ModelShape


@dataclass(frozen=True)
class Trained:
    """A model with gradients and an optimizer, laid out like the policy.

    Attributes:
        offload: between its passes the model is in host memory, and so is its optimizer.
        distributed: overrides whether its optimizer is distributed; default: as the policy's.
        adapters: what is trained instead of the weights, which then have neither gradients nor an
            optimizer.
        shares_base: its weights below the adapters are the policy's.
    """

    name: str
    shape: ModelShape
    value_head: bool = False
    offload: bool = False
    offload_optimizer: bool = False
    fp32_gradients: bool = True
    distributed: bool | None = None
    adapters: tuple[AdapterSize, ...] = ()
    shares_base: bool = False

    @property
    def parameters(self) -> int:
        """All trained weights; a value head [H] replaces the LM head."""
        if self.adapters:
            return self.trained(Layout(), 0).total
        return rank_weights(self.shape, Layout(), 0, value_head=self.value_head).total

    def trained(self, layout: Layout, stage: int) -> Weights:
        """Return the adapters on a rank of a stage, with a value head."""
        found = rank_adapters(self.adapters, self.shape, layout, stage)
        head = self.shape.hidden * (self.value_head and stage == layout.pipeline - 1)
        return Weights(found.dense + head, found.expert)


@dataclass(frozen=True)
class Frozen:
    """A model that is only scored.

    Offloaded, it needs memory only in its passes; with `swapped_in` it uses the policy's memory.
    """

    name: str
    shape: ModelShape
    offload: bool = False
    swapped_in: bool = False


@dataclass(frozen=True)
class Job:
    """The models to plan for, and the work of one optimizer step.

    Attributes:
        trained: the policy first.
        length: maximum tokens of a sequence, of which `trainable` are trained.
        scoring_passes: forward passes without gradients: reference, old log-probs.
        pack_tokens: `policy.max_tokens_per_microbatch`.
        siblings: sequences that share a prompt (all but `trainable` tokens), which a pack holds
            once.
        publication: None for a run without engines.
    """

    trained: tuple[Trained, ...]
    frozen: tuple[Frozen, ...]
    sequences: int
    length: int
    trainable: int
    scoring_passes: int
    pack_tokens: int
    dtype_bytes: int
    vocab_multiple: int
    chunk_elements: int
    siblings: int = 1
    publication: Publication | None = None

    @property
    def shape(self) -> ModelShape:
        """The policy's sizes."""
        return self.trained[0].shape

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: each weight and its optimizer state once."""
        each = self.dtype_bytes + 8 + (4 if self.dtype_bytes < 4 else 0)
        return each * sum(model.parameters for model in self.trained)

    def load(self, layout: Layout) -> Load:
        """Return the size of a micro-batch under `layout`."""
        tokens = max(self.pack_tokens, self.length)
        return Load(
            tokens=tokens,
            micro_batches=self.micro_batches(layout),
            trainable=max(1, tokens * self.in_pack * self.trainable // self.micro_tokens),
            dtype_bytes=self.dtype_bytes,
            vocab_multiple=self.vocab_multiple,
            chunk_elements=self.chunk_elements,
        )

    def micro_batches(self, layout: Layout) -> int:
        """Return the number of micro-batches of each replica, with sequences of one length."""
        packs = -(-max(1, -(-self.sequences // layout.data)) // self.in_pack)
        multiple = layout.pipeline if layout.virtual_pipeline > 1 else 1
        return -(-packs // multiple) * multiple

    @property
    def prompt(self) -> int:
        """The tokens of a sequence that it may share with others."""
        return self.length - self.trainable

    @property
    def in_pack(self) -> int:
        """The number of whole sequences in a pack."""
        groups, behind = self._groups
        return max(1, groups * self.siblings + behind)

    @property
    def prompts_in_pack(self) -> int:
        """The number of prompts in a pack."""
        groups, behind = self._groups
        return max(1, groups + (behind > 0))

    @property
    def repeated(self) -> float:
        """The share of sequences whose prompt is already in their pack."""
        return 1 - self.prompts_in_pack / self.in_pack

    @property
    def micro_tokens(self) -> int:
        """The number of tokens in a pack, shared tokens counted once."""
        return self.prompts_in_pack * self.prompt + self.in_pack * self.trainable

    @property
    def tokens(self) -> float:
        """The number of computed tokens of the step."""
        return self.sequences * (self.length - self.repeated * self.prompt)

    @property
    def _groups(self) -> tuple[int, int]:
        """The number of whole groups in a pack, and of sequences of one further, cut group."""
        groups, rest = divmod(self.pack_tokens, self.prompt + self.siblings * self.trainable)
        return groups, max(0, (rest - self.prompt) // self.trainable)
