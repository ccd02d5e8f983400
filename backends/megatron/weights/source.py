"""The weights of a policy as publications and folders take them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from backends.megatron.parallel.state import ParallelState
from backends.megatron.training.passes import Model
from backends.megatron.weights.export import WeightExporter
from backends.megatron.weights.folder import export_hf, export_peft
from rlcore.config import Config
from rlcore.config.derived import published_adapters
from rlcore.config.sections.policy import LoraConfig
from rlcore.weights import DTYPES, Bucket


@dataclass(frozen=True)
class PolicyWeights:
    """`rlcore.interfaces.WeightSource`: what an exporter gathers of a policy."""

    policy: Model
    exporter: WeightExporter

    def buckets(self) -> tuple[Bucket, ...]:
        """The static layout under Hugging Face names."""
        return self.exporter.layout

    def export_buckets(self, *, everywhere: bool = False) -> Iterator[tuple[Bucket, Tensor | None]]:
        """Yield each bucket in order with its bytes: uint8 [num_bytes] on rank 0, or `everywhere`.

        The next bucket overwrites the bytes.
        """
        with self.policy.on_device():
            yield from self.exporter.export_buckets(everywhere=everywhere)


class PolicyExports:
    """The exporters of a policy, which keep their buffers and one process group. Collective."""

    def __init__(self, config: Config, policy: Model, parallel: ParallelState) -> None:
        self._config = config
        self._policy = policy
        self._parallel = parallel
        lora = published_adapters(config)
        # All weights first: the group of their senders serves for adapters too.
        self._whole = self._exporter(None, merged=lora is None)
        whole = PolicyWeights(policy, self._whole)
        # The weights below the adapters, where these are published by themselves.
        self.base = None if lora is None else whole
        self.published = whole
        if lora is not None:
            self.published = PolicyWeights(policy, self._exporter(self._whole, adapters=lora))

    def write(self, folder: Path, base: Path) -> None:
        """Write the policy as a Hugging Face folder, or its adapters as a PEFT folder.

        Args:
            base: the weights below the adapters.
        """
        model = self._config.model
        lora = self._config.policy.lora
        with self._policy.on_device():
            if lora is not None:
                exporter = self._exporter(self._whole, model.dtype, adapters=lora)
                export_peft(exporter, folder, lora, base)
                return
            exporter = self._whole
            # The engine's dtype may be narrower than the model's.
            if exporter.quantised or exporter.specs[0].torch_dtype != DTYPES[model.dtype]:
                exporter = self._exporter(self._whole, model.dtype)
            export_hf(exporter, folder, Path(model.tokenizer or model.path))

    def free_buffers(self) -> None:
        """Free the buffers until the next export."""
        for exporter in (self._whole, self.published.exporter):
            exporter.free_buffers()

    def _exporter(
        self,
        sharing: WeightExporter | None,
        dtype: str | None = None,
        *,
        adapters: LoraConfig | None = None,
        merged: bool = True,
    ) -> WeightExporter:
        """An exporter in the dtype of the engines, or in another; `sharing` another's group."""
        engine = self._config.rollout.engine
        whole_for_engines = dtype is None and adapters is None
        return WeightExporter(
            self._policy.chunks,
            self._policy.arch,
            self._parallel,
            dtype=DTYPES[dtype or engine.dtype or self._config.model.dtype],
            bucket_bytes=engine.bucket_bytes,
            adapters=adapters,
            merged=merged,
            quantised=whole_for_engines and engine.quantization is not None,
            sharing=sharing,
        )
