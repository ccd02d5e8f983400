"""The files of the delta transport. A manifest names the publication that changes apply to.

update_000004/      a whole publication: safetensors, config, manifest.json
update_000005/      the changes since 4: changes.bin, manifest.json
update_000006/      the changes since 5
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rlcore.errors import RunFailed
from rollout.weight_sync.folders import number_of

CHANGES = "changes.bin"
Size = Annotated[int, Field(ge=0, lt=1 << 53)]  # bytes


class Manifest(BaseModel):
    """The content of a folder."""

    model_config = ConfigDict(strict=True, extra="forbid")

    base: int | None  # the publication that the changes apply to; None for a whole publication
    num_bytes: Size  # of the weights or changes
    fingerprints: dict[str, str]  # checksum of every tensor after the publication (rlcore.weights)
    changes: dict[str, tuple[Size, Size]] = {}  # offset, size by tensor

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a folder. Raises RunFailed naming the file."""
        path = folder / "manifest.json"
        try:
            manifest = cls.model_validate_json(path.read_bytes())
            if manifest.base is not None and not 0 < manifest.base < number_of(folder):
                raise ValueError(f"base {manifest.base}, expected one before {number_of(folder)}")
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise RunFailed(f"{path} is not a manifest of a publication: {reason}") from error
        return manifest

    def write(self, folder: Path) -> None:
        """Write the manifest of a folder. Raises OSError."""
        (folder / "manifest.json").write_text(self.model_dump_json(indent=2), encoding="utf-8")

    def read_changes(self, folder: Path, name: str) -> bytes:
        """Read the changes of tensor `name`, for `delta_codec.apply`. Raises OSError."""
        offset, size = self.changes[name]
        with (folder / CHANGES).open("rb") as file:
            file.seek(offset)
            return file.read(size)
