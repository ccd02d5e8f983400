"""The files of the worlds of this folder, and how to read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file


@dataclass(frozen=True)
class Outputs:
    """The files of the worlds, below `root`."""

    root: Path

    def model(self, name: str) -> Path:
        return self.root / "hf" / name

    def export(self, layout: str, model: str) -> Path:
        return self.root / "converted" / f"{model}-{layout}"

    def checkpoint(self, variant: str, source: str) -> Path:
        return self.root / "checkpoints" / f"{variant}-{source}"

    def trained(self, when: str, variant: str, source: str, target: str = "") -> Path:
        """`when`: "before" or "after" the third step; `target`: the layout it was loaded under."""
        return self.root / when / f"{variant}-{source}-{target}"

    def refused(self, name: str) -> Path:
        return self.root / "refused" / name


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor below a folder, by its path and name."""
    return {
        f"{path.parent.relative_to(folder).as_posix()}/{name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
