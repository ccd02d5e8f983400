"""What the other ranks would answer where they are asked for their coordinates in the layout."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from backends.megatron.checks.layout import layers_of_stages
from backends.megatron.convert.architecture import model_entries
from backends.megatron.model.gpt import padded_vocab_size
from backends.megatron.weights.export import _Coordinates, _Source
from rlcore.config.sections.policy import ParallelConfig

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Peers:
    """The ranks of the world, in Megatron's order "tp-cp-ep-dp-pp"."""

    parallel: ParallelConfig
    world: int
    vocab_divisible_by: int = 1

    @property
    def of_a_stage(self) -> int:
        """The number of ranks of a pipeline stage."""
        return self.world // self.parallel.pipeline

    def coordinates(self) -> list[tuple[int, int]]:
        """(data-parallel index, stage) of every rank."""
        shards = self.parallel.tensor * self.parallel.context
        return [
            (rank % self.of_a_stage // shards, rank // self.of_a_stage)
            for rank in range(self.world)
        ]

    def of_exporter(self) -> list[_Coordinates]:
        """The coordinates that a `WeightExporter` gathers."""
        p = self.parallel
        expert_tensor = p.expert_tensor or p.tensor
        found = []
        for rank in range(self.world):
            own = rank % self.of_a_stage
            found.append(
                _Coordinates(
                    tp=own % p.tensor,
                    stage=rank // self.of_a_stage,
                    replica=own // p.tensor,
                    etp=own % expert_tensor,
                    ep=own // expert_tensor % p.expert,
                    expert_replica=own // (expert_tensor * p.expert),
                )
            )
        return found

    def padded_vocab(self, exporter: Any) -> int:
        """The rows of the vocabulary, which stages without it learn from the others."""
        return padded_vocab_size(
            exporter.arch.vocab_size, self.vocab_divisible_by, self.parallel.tensor
        )

    def sources(self, exporter: Any) -> dict[str, _Source]:
        """The pipeline stage that owns each tensor."""
        stages = self._stages_of_layers(exporter.arch.num_layers)
        found: dict[str, _Source] = {}
        for entry in model_entries(exporter.arch, exporter.head):
            layer = _LAYER.search(entry.megatron)
            if layer is not None:
                stage = stages[int(layer[1])]
            else:
                stage = 0 if entry.megatron.startswith("embedding.") else self.parallel.pipeline - 1
            found |= {name: _Source(entry, piece, stage) for piece, name in enumerate(entry.hf)}
        return found

    def _stages_of_layers(self, layers: int) -> list[int]:
        chunks = self.parallel.virtual_pipeline
        each = layers_of_stages(layers, self.parallel)
        return [
            stage
            for _ in range(chunks)
            for stage, count in enumerate(each)
            for _ in range(count // chunks)
        ]
