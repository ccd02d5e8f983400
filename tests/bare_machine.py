"""A Python environment like that of a machine which has torch, and nothing of ours."""

from __future__ import annotations

import os
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def with_requirements(names: Iterable[str]) -> set[str]:
    """These packages and all that they need, without extras."""
    found: set[str] = set()
    left = [canonicalize_name(name) for name in names]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += (canonicalize_name(needed) for needed in _needed(distribution(name)))
    return found


def _needed(package: Distribution) -> Iterator[str]:
    for line in package.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name


def make_environment(folder: Path, packages: Iterable[str]) -> Path:
    """Make an environment of these packages, as links to ours. Returns its interpreter."""
    venv.create(folder, symlinks=True)
    [site] = folder.glob("lib/python*/site-packages")
    for name in sorted(packages):
        for source, inside in _files(distribution(name)):
            top = inside.parts[0]
            if not (site / top).exists():
                os.symlink(Path(*source.parts[: -len(inside.parts)], top), site / top)
    return folder / "bin" / "python"


def write_wheel(name: str, folder: Path) -> Path:
    """Pack an installed package into a wheel again."""
    package = distribution(name)
    stem = f"{canonicalize_name(name).replace('-', '_')}-{package.version}"
    wheel = folder / f"{stem}-py3-none-any.whl"
    record = f"{stem}.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        lines = [f"{record},,"]
        for source, inside in _files(package):
            if inside.name not in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
                archive.write(source, inside)
                lines.append(f"{inside},,")
        archive.writestr(record, "\n".join(lines) + "\n")
    return wheel


def _files(package: Distribution) -> Iterator[tuple[Path, Path]]:
    """Where each file of a package is, and its path in site-packages."""
    for file in package.files or ():
        if ".." not in file.parts and file.suffix != ".pyc":
            yield Path(str(package.locate_file(file))), Path(str(file))
