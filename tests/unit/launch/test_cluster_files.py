"""The image, the RayJob, the SkyPilot task and the Slurm jobs in containers start rlcore's jobs.

The shell of each runs, with stubs for what it calls; the rest is compared with configuration,
locks and schemas.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rlcore.config import Config
from rlcore.config.load import load_config, split_arguments
from rlcore.launch.ray.placement import Resources, place
from tests.install_stubs import Checkout, packages
from tests.script_stage import ROOT, Stage, value_of
from tests.slurm_stubs import job

DOCKERFILE = ROOT / "scripts" / "docker" / "Dockerfile"
RAYJOB: dict[str, Any] = yaml.safe_load((ROOT / "scripts/kubernetes/rayjob.yaml").read_text())
SKYPILOT: dict[str, Any] = yaml.safe_load((ROOT / "scripts/skypilot/ray.yaml").read_text())


def shellcheck(text: str, shell: str) -> str:
    """What shellcheck says of a piece of shell."""
    program = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [program, "-s", shell, "-S", "warning", "-"], input=text, capture_output=True, text=True
    )
    return done.stdout


def needed(arguments: list[str]) -> tuple[Config, Resources]:
    """The configuration of `rlcore train ARGUMENTS`, and what it asks Ray for."""
    given = [word for word in arguments if word != "--resume"]
    config = load_config(*split_arguments(given)).config
    assert config.cluster.launcher == "ray"
    return config, place(config, has_gpus=True).total


# --- the image ------------------------------------------------------------------------------------


def instructions() -> Iterator[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, in order."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        word, _, rest = line.partition(" ")
        yield word, rest


def values(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def test_what_git_ignores_does_not_come_into_the_image() -> None:
    by_git = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    by_docker = (ROOT / ".dockerignore").read_text().splitlines()[1:]
    assert {line.removeprefix("**/") for line in by_docker} == by_git | {".git"}
    anywhere = [line.removeprefix("**/") for line in by_docker if line.startswith("**/")]
    for package in ("rlcore", "rollout", "backends", "scripts", "examples"):
        folders = (path for path in (ROOT / package).rglob("*") if path.is_dir())
        lost = [one for one in folders if any(fnmatch(one.name, pattern) for pattern in anywhere)]
        assert [one for one in lost if one.name != "__pycache__"] == []


def test_each_script_of_the_image_finds_what_it_needs(checkout: Checkout) -> None:
    """Each installs into an image that has only what was copied so far, and once."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()[1:]
    shutil.rmtree(checkout.folder / "scripts")
    (checkout.folder / "pyproject.toml").unlink()
    arguments = dict(word.split("=", 1) for word in map(" ".join, map(shlex.split, values("ARG"))))
    calls = []
    for word, rest in instructions():
        if word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                assert (ROOT / source).exists(), source
                assert not any(fnmatch(source, one.removeprefix("**/")) for one in ignored), source
                if source != ".":
                    copy = checkout.folder / target / Path(source).name
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / source, copy)
        elif word == "RUN" and rest.startswith("./scripts/"):
            filled = re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], rest)
            script, *given = shlex.split(filled.removeprefix("./scripts/"))
            calls.append((script, given, checkout.installs(script, *given)))
    [(engines, _, of_engines), (trainer, _, of_trainer)] = calls
    assert (engines, trainer) == ("install_sglang.sh", "install.sh")
    assert "sglang" in packages(of_engines[0])
    assert {"torch", "megatron-core", "ray"} <= packages(of_trainer[0]).keys()
    # `COPY . .` brings the same files: whoever starts a script in a container waits for nothing.
    shutil.copytree(ROOT / "scripts", checkout.folder / "scripts", dirs_exist_ok=True)
    assert [checkout.installs(script, *given) for script, given, _ in calls] == [[], []]


def test_the_image_s_base_has_the_cuda_of_the_locks() -> None:
    [base] = [rest.partition("=")[2] for rest in values("ARG") if rest.startswith("BASE=")]
    image, _, tag = base.partition(":")
    assert values("FROM") == ["${BASE}"]
    # with nvcc
    assert "-devel-" in tag
    lock = (ROOT / "scripts" / "locks" / "engine-gpu.txt").read_text()
    toolkit = re.search(r"^cuda-toolkit==(\d+\.\d+)", lock, re.MULTILINE)
    assert toolkit is not None
    assert (image, tag.startswith(f"{toolkit[1]}.")) == ("nvidia/cuda", True)


def test_the_image_s_shell_is_clean() -> None:
    assert shellcheck("".join(f"{rest}\n" for rest in values("RUN")), "sh") == ""
    [system] = [rest for rest in values("RUN") if "apt-get" in rest]
    update, install, remove = system.split(" && ")
    assert update == "apt-get update"
    assert install.startswith("apt-get install -y --no-install-recommends ")
    assert remove == "rm -rf /var/lib/apt/lists/*"


# --- KubeRay --------------------------------------------------------------------------------------

# What the custom resource of KubeRay 1.7 has, of what the RayJob uses; a field that it does not
# have is dropped by Kubernetes without a word.
TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}


def fields(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "required": required.split(),
    }


def listed(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


AMOUNTS = {"type": "object", "additionalProperties": TEXT}
POD = fields(
    "spec",
    spec=fields(
        "containers",
        containers=listed(
            fields(
                "name",
                name=TEXT,
                image=TEXT,
                env=listed(fields("name", name=TEXT, value=TEXT)),
                resources=fields(requests=AMOUNTS, limits=AMOUNTS),
                volumeMounts=listed(fields("name mountPath", name=TEXT, mountPath=TEXT)),
            )
        ),
        volumes=listed(
            fields("name", name=TEXT, persistentVolumeClaim=fields("claimName", claimName=TEXT))
        ),
    ),
)
PARAMETERS = {"type": "object", "additionalProperties": TEXT}
SCHEMA = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=fields("name", name=TEXT),
    spec=fields(
        entrypoint=TEXT,
        backoffLimit=COUNT,
        shutdownAfterJobFinishes={"type": "boolean"},
        rayClusterSpec=fields(
            "headGroupSpec",
            rayVersion=TEXT,
            authOptions=fields(mode={"enum": ["disabled", "token"]}),
            headGroupSpec=fields("template", rayStartParams=PARAMETERS, template=POD),
            workerGroupSpecs=listed(
                fields(
                    "groupName maxReplicas minReplicas template",
                    groupName=TEXT,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    rayStartParams=PARAMETERS,
                    template=POD,
                )
            ),
        ),
    ),
)


def test_the_ray_job_has_no_field_that_kuberay_does_not_know() -> None:
    jsonschema.validate(RAYJOB, SCHEMA)


def test_the_ray_job_s_nodes_have_room_for_its_run() -> None:
    program, command, *arguments = shlex.split(RAYJOB["spec"]["entrypoint"])
    assert (program, command) == ("rlcore", "train")
    config, total = needed(arguments)
    cluster = RAYJOB["spec"]["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    pods = [one["template"]["spec"] for one in (cluster["headGroupSpec"], workers)]
    [head, worker] = [container for pod in pods for container in pod["containers"]]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert total["GPU"] == 8 * workers["replicas"]
    assert total["CPU"] <= int(worker["resources"]["requests"]["cpu"]) * workers["replicas"]
    # The head has no room for ranks, which would begin there without a GPU.
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert head["image"] == worker["image"]
    # Every node sees the models, the data and the run under one path.
    for pod, container in zip(pods, (head, worker), strict=True):
        [mount] = container["volumeMounts"]
        assert [mount["name"]] == [volume["name"] for volume in pod["volumes"]]
        paths = [config.model.path, config.run.dir, *config.data.paths]
        assert all(str(path).startswith(f"{mount['mountPath']}/") for path in paths), paths


def test_the_ray_job_names_the_image_s_ray() -> None:
    lock = (ROOT / "scripts" / "locks" / "trainer-gpu.txt").read_text()
    [ray] = re.findall(r"^ray==(\S+)", lock, re.MULTILINE)
    assert RAYJOB["spec"]["rayClusterSpec"]["rayVersion"] == ray
    [extras] = [rest for rest in values("ARG") if rest.startswith("EXTRAS=")]
    assert "ray" in extras.partition("=")[2].strip('"').split()


# --- SkyPilot -------------------------------------------------------------------------------------


def test_the_sky_pilot_task_is_a_head_and_its_nodes(stage: Stage) -> None:
    task = SKYPILOT["run"]
    assert shellcheck(task, "bash") == ""
    [folder] = values("WORKDIR")
    assert task.startswith(f"cd {folder} || exit\n")
    script = Path(stage.script("skypilot/task"))
    script.write_text(
        f"#!/usr/bin/env bash\n{task}".replace(folder, str(stage.folder / "checkout"), 1)
    )
    script.chmod(0o755)
    addresses = [f"10.0.0.{number + 1}" for number in range(SKYPILOT["num_nodes"])]
    given = {**SKYPILOT["envs"], **dict.fromkeys(SKYPILOT["secrets"], "x")}
    given |= {"SKYPILOT_NODE_IPS": "\n".join(addresses), "NODES": " ".join(addresses)}
    nodes = [
        stage.start("skypilot/task", **given, SKYPILOT_NODE_RANK=str(rank), HOST_ADDRESS=address)
        for rank, address in enumerate(addresses)
    ]
    assert [node.wait(60) for node in nodes] == [0, 0]
    [driver] = stage.calls("train")
    arguments = driver["arguments"][driver["arguments"].index("train") + 1 :]
    assert driver["environment"]["RAY_AUTH_TOKEN"] == "x"
    assert f"cluster.ray.address={addresses[0]}:6379" in arguments
    said = (stage.records / "ray.txt").read_text().splitlines()
    started = [shlex.split(line) for line in said if line.startswith("start ")]
    assert sorted(value_of(line, "--node-ip-address") for line in started) == addresses
    assert {value_of(line, "--dashboard-agent-listen-port") for line in started} == {"52366"}
    _, total = needed(arguments)
    _, _, gpus = SKYPILOT["resources"]["accelerators"].partition(":")
    assert total["GPU"] == int(gpus) * len(addresses)


# --- Slurm with pyxis -----------------------------------------------------------------------------

SBATCH = """#!/usr/bin/env bash
echo "$PYTHON" > "$RECORDS/python.txt"
echo "$SRUN_ARGS" > "$RECORDS/srun.txt"
while [[ $1 == --* ]]; do shift; done
PYTHON=$STUB exec "$@"
"""


@pytest.mark.parametrize(
    ("script", "word"), [("ray.sbatch", "train"), ("torchrun.sbatch", "engine")]
)
def test_jobs_in_containers_run_the_checkout_with_the_image_s_packages(
    stage: Stage, script: str, word: str
) -> None:
    sbatch = stage.folder / "sbatch"
    sbatch.write_text(SBATCH)
    sbatch.chmod(0o755)
    given = {"IMAGE": "rl.sqsh", "MOUNTS": "/shared:/shared", "ENGINE_NODES": "1"}
    given |= {"PRELUDE": "export SITE=$PYTHONPATH", "STUB": stage.environment["PYTHON"]}
    done = stage.run(
        "slurm/pyxis.sh", "--nodes=2", f"scripts/slurm/{script}", "run.yaml", "a.b=1",
        **job(2), **given, SRUN_ARGS="--mpi=none",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [call] = stage.calls(word)
    [folder] = values("WORKDIR")
    assert f"rollout.engine.python={folder}/.venv-sglang/bin/python" in call["arguments"]
    assert {"run.yaml", "a.b=1"} <= set(call["arguments"])
    assert call["environment"]["IMAGE"] == "rl.sqsh"
    checkout = str(stage.folder / "checkout")
    assert call["environment"]["SITE"] == checkout
    assert (stage.records / "python.txt").read_text() == f"{folder}/.venv/bin/python\n"
    srun = shlex.split((stage.records / "srun.txt").read_text())
    assert srun == [
        "--container-image=rl.sqsh",
        f"--container-mounts={checkout}:{checkout},/shared:/shared",
        "--mpi=none",
    ]  # fmt: skip


def test_a_job_in_containers_needs_an_image(stage: Stage) -> None:
    done = stage.run("slurm/pyxis.sh", "scripts/slurm/ray.sbatch", "run.yaml")
    assert done.returncode != 0
    assert "IMAGE: an image of enroot" in done.stderr


def test_the_page_names_every_file_with_a_command() -> None:
    page = (ROOT / "docs" / "multinode.md").read_text()
    names = ("docker/Dockerfile", "kubernetes/rayjob.yaml", "skypilot/ray.yaml", "slurm/pyxis.sh")
    for file in names:
        commands = [line for line in page.splitlines() if line.startswith("    ")]
        assert any(f"scripts/{file}" in line for line in commands), file
    assert os.access(ROOT / "scripts" / "slurm" / "pyxis.sh", os.X_OK)
