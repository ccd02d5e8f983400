"""The lock files fit pyproject.toml, each other and what is installed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "scripts" / "locks"


def script() -> ModuleType:
    """scripts/locks/make.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("make_locks", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_locks"] = module
    spec.loader.exec_module(module)
    return module


make = script()
TRAINERS = ("trainer-cpu", "trainer-gpu")
ENGINES = ("engine-cpu", "engine-gpu")
OTHERS = ("verifiers",)
# What a wheel asks for and does not get.
OVERRIDDEN = {
    one["name"]: one["requires-dist"]
    for one in tomllib.loads(make.SOURCE_METADATA)["dependency-metadata"]
}
LOCKS = {
    name: make.read((FOLDER / f"{name}.txt").read_text()) for name in TRAINERS + ENGINES + OTHERS
}
PYTHONS = {**dict.fromkeys(TRAINERS, ("3.11", "3.12", "3.13"))}
PYTHONS |= dict.fromkeys(ENGINES + OTHERS, ("3.11", "3.12", "3.13"))
CASES = [(name, python) for name, pythons in PYTHONS.items() for python in pythons]
CPU_TAGS = ("cpu-build", "base")


def linux(python: str) -> dict[str, str]:
    return {
        "python_version": python,
        "python_full_version": f"{python}.5",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
        "extra": "",
    }


@cache
def locked(name: str, python: str, *tags: str) -> dict[str, Version]:
    """The versions that an installation with these tags gets; with none, all but cuda-build."""
    versions: dict[str, Version] = {}
    for one in LOCKS[name]:
        pin = Requirement(one.requirement)
        if pin.marker is not None and not pin.marker.evaluate(linux(python)):
            continue
        if set(one.tags) & set(tags) if tags else one.tags != ("cuda-build",):
            assert pin.name not in versions, f"{name} has two versions of {pin.name} on {python}"
            versions[pin.name] = Version(str(pin.specifier).lstrip("="))
    return versions


def unmet(wanted: str, there: dict[str, Version], python: str) -> str | None:
    one = Requirement(wanted)
    if one.marker is not None and not one.marker.evaluate(linux(python)):
        return None
    found = there.get(canonicalize_name(one.name))
    if found is None:
        return f"{wanted} is not locked"
    return None if one.specifier.contains(found, prereleases=True) else f"{wanted}: {found}"


@pytest.mark.parametrize("name", LOCKS)
def test_every_entry_is_one_version_with_its_hashes(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text()
    for one in LOCKS[name]:
        [pin] = Requirement(one.requirement).specifier
        assert pin.operator in ("==", "==="), one.requirement
        assert "*" not in pin.version, one.requirement
        assert one.tags, one.requirement
        assert one.hashes, one.requirement
        for value in one.hashes:
            assert re.fullmatch(r"sha256:[0-9a-f]{64}", value), one.requirement
    assert make.written(name, LOCKS[name]) == text, "edited by hand? scripts/locks/make.py"
    assert "://" not in text


@pytest.mark.parametrize(("name", "python"), [one for one in CASES if one[0] in TRAINERS])
def test_pyproject_is_met_with_every_extra(name: str, python: str) -> None:
    asked = {"base": make.project()["dependencies"], **make.extras()}
    for other in make.OTHER_EXTRAS:
        del asked[other]
    if name == "trainer-cpu":
        assert "te" not in {tag for one in LOCKS[name] for tag in one.tags}
        del asked["te"]
    build = "cpu-build" if name == "trainer-cpu" else "te-source"
    for tag, requirements in asked.items():
        there = locked(name, python, build, "base", tag)
        assert [line for one in requirements if (line := unmet(one, there, python))] == []


@pytest.mark.parametrize("python", PYTHONS["engine-gpu"])
def test_trainer_and_engines_fit_each_other(python: str) -> None:
    there = {name: locked(name, python) for name in LOCKS}
    nccl = "nvidia-nccl-cu13"
    assert there["trainer-gpu"][nccl] == there["engine-gpu"][nccl]
    assert nccl not in there["trainer-cpu"]
    assert not any(name.startswith(("nvidia-", "cuda-")) for name in there["engine-cpu"])
    # One CUDA, thus one driver and one CUDA toolkit, for both.
    toolkit = "cuda-toolkit"
    assert there["trainer-gpu"][toolkit] == there["engine-gpu"][toolkit]
    for name in ENGINES:
        [asked] = make.extras()["sglang"]
        assert unmet(asked, there[name], python) is None
    assert str(there["trainer-gpu"]["torch"]) == make.TRAINER_TORCH.partition("==")[2]
    cpu = f"{there['trainer-gpu']['torch']}+cpu"
    assert str(there["trainer-cpu"]["torch"]) == str(there["engine-cpu"]["torch"]) == cpu


@pytest.mark.parametrize("python", PYTHONS["verifiers"])
def test_verifiers_is_met_without_torch(python: str) -> None:
    there = locked("verifiers", python)
    assert [unmet(one, there, python) for one in make.extras()["verifiers"]] == [None]
    assert "torch" not in there


def test_every_lock_is_made_and_audited() -> None:
    """A lock that no script makes or asks about would grow old."""
    audited = re.search(r"^LOCKS = \((.*)\)$", (FOLDER / "audit.py").read_text(), re.MULTILINE)
    assert audited is not None
    found = {path.stem for path in FOLDER.glob("*.txt")} - {"torch-cpu-builds"}
    assert found == set(LOCKS) == set(re.findall(r'"([\w-]+)"', audited[1]))


@pytest.mark.parametrize("python", PYTHONS["trainer-gpu"])
def test_cpu_and_gpu_trainers_have_the_same_versions(python: str) -> None:
    gpu = locked("trainer-gpu", python)
    for name, version in locked("trainer-cpu", python).items():
        assert name == "torch" or gpu[name] == version
    # Where the index has no build of torch for the CPU.
    fallback = locked("trainer-cpu", python, "cuda-build", "base")
    assert fallback.items() <= gpu.items()
    assert "nvidia-cudnn-cu13" in fallback


# --- what is installed ----------------------------------------------------------------------------


def environments() -> dict[str, Path]:
    """The site-packages of the environments, as far as they are there."""
    beside = Path(sys.prefix).parent
    there = {"trainer-cpu": Path(sys.prefix), "engine-cpu": beside / ".venv-sglang"}
    there |= {"verifiers": beside / ".venv-verifiers"}
    return {
        name: site for name, folder in there.items() for site in folder.glob("lib/python3*/site-*")
    }


ENVIRONMENTS = environments()


def distributions(name: str) -> dict[str, metadata.Distribution]:
    found = metadata.distributions(path=[str(ENVIRONMENTS[name])])
    return {canonicalize_name(one.metadata["Name"]): one for one in found}


def python_of(name: str) -> str:
    return ENVIRONMENTS[name].parent.name.removeprefix("python")


def checksum(*paths: Path) -> str:
    text = b"".join(path.read_bytes() for path in paths)
    return subprocess.run(["cksum"], input=text, capture_output=True, check=True).stdout.decode()


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_made_from_a_lock_has_its_versions(name: str) -> None:
    stamp = ENVIRONMENTS[name].parents[2] / "installed"
    made = stamp.read_text().splitlines()[-1:] if stamp.exists() else []
    lock = FOLDER / f"{name}.txt"
    if name == "trainer-cpu":
        start = checksum(ROOT / "pyproject.toml", lock).strip() + " cpu"
        extras = made[0].removeprefix(start).split() if made else []
    else:
        package = "sglang" if name == "engine-cpu" else name
        start = f"{package} {locked(name, '3.11')[package]} {checksum(lock).strip()}"
        start = f"cpu {start}" if name == "engine-cpu" else start
        extras = []
    if not any(line.startswith(start) for line in made):
        return  # made from another lock, or by hand
    there = {name: one.version for name, one in distributions(name).items()}
    for package, version in locked(name, python_of(name), *CPU_TAGS, *extras).items():
        if package == "torch" and "+cpu" not in there["torch"]:
            continue  # the build of PyPI
        assert there.get(package) == str(version), package


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_installed_packages_ask_for_is_locked_with_them(name: str) -> None:
    """The locks were resolved by an index's metadata; these are the wheels' own."""
    python = python_of(name)
    left_out = {*make.NOT_ON_CPU, *make.names(make.CPU_ENGINE)} if name == "engine-cpu" else set()
    there = distributions(name)
    problems = []
    checked = 0
    tags_of = {one.name: one.tags for one in LOCKS[name] if one.tags != ("cuda-build",)}
    for package, version in locked(name, python).items():
        if package not in there or there[package].version != str(version):
            continue
        checked += 1
        for tag in tags_of[package]:
            # what comes as a source is installed with its extra, by a step of its own
            sources = [f"{one}-source" for one in ("reasoning-gym",) if tag in (one, "dev")]
            beside = locked(name, python, *CPU_TAGS, tag, tag.removesuffix("-source"), *sources)
            for line in OVERRIDDEN.get(package, there[package].requires or []):
                # An extra that nobody asked for; parsing all of these takes seconds.
                if "extra ==" in line or canonicalize_name(Requirement(line).name) in left_out:
                    continue
                if problem := unmet(line, beside, python):
                    problems.append(f"{package} ({tag}): {problem}")
    assert problems == []
    assert checked > (100 if name != "verifiers" else 20)


# --- resolved anew --------------------------------------------------------------------------------


@pytest.mark.full
def test_the_package_index_resolves_to_the_same_versions() -> None:
    """By metadata alone: nothing is installed but uv, into a folder of its own."""
    done = subprocess.run(
        [sys.executable, FOLDER / "make.py", "--check"],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
