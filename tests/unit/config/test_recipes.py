"""Recipes are valid for models of the real sizes, and their trainers fit the GPUs by the plan."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlcore import cli
from rlcore.config import Config
from rlcore.config.load import load_config

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FOLDER = EXAMPLES / "recipes"


@dataclass(frozen=True)
class Recipe:
    """On how many nodes of how many GPUs, and which of examples/models has the sizes."""

    name: str
    model: str
    nodes: int
    gpus: int = 8
    memory: str = "80G"  # of a GPU
    trainer_gpus: int | None = None  # of a node; None: all, where any train

    @property
    def files(self) -> list[Path]:
        servers = FOLDER / f"{self.name}.servers.yaml"
        return [FOLDER / f"{self.name}.yaml", *([servers] if servers.exists() else [])]

    @property
    def config(self) -> Config:
        return load_config(self.files).config


RECIPES = [
    Recipe("llama-3.1-8b-ppo", "Llama-3.1-8B", 2),
    Recipe("qwen2.5-7b-grpo-1node", "Qwen2.5-7B", 1),
    Recipe("qwen2.5-7b-grpo-2nodes", "Qwen2.5-7B", 2),
    Recipe("qwen3-30b-a3b-grpo-1node", "Qwen3-30B-A3B", 1),
    Recipe("qwen3-30b-a3b-grpo-2nodes", "Qwen3-30B-A3B", 2),
    Recipe("qwen3-30b-a3b-grpo-4nodes", "Qwen3-30B-A3B", 4),
    Recipe("qwen3-8b-lora-1gpu", "Qwen3-8B", 1, gpus=1),
    Recipe("qwen3-30b-a3b-lora-1node", "Qwen3-30B-A3B", 1, trainer_gpus=4),
    Recipe("qwen3-235b-a22b-gspo-32nodes", "Qwen3-235B-A22B", 32),
    Recipe("glm-4.5-air-drafts-8nodes", "GLM-4.5-Air", 8),
    Recipe("gsm8k/qwen2.5-0.5b-grpo", "Qwen2.5-0.5B", 1, gpus=1, memory="24G"),
    Recipe("gsm8k/qwen2.5-0.5b-ppo", "Qwen2.5-0.5B", 1, gpus=1, memory="24G"),
    Recipe("dapo/qwen2.5-math-7b", "Qwen2.5-Math-7B", 1),
    Recipe("code/qwen2.5-coder-7b", "Qwen2.5-7B", 1),
    Recipe("judge/qwen2.5-7b", "Qwen2.5-7B", 1),
    Recipe("search/qwen2.5-7b", "Qwen2.5-7B", 1),
]
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def test_no_recipe_is_left_out() -> None:
    files = sorted(path for recipe in RECIPES for path in recipe.files)
    assert files == sorted(FOLDER.rglob("*.yaml"))


@pytest.fixture
def models(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides that name folders with the model's sizes and, of weights, no more than the name.

    The recipe's own folder can be imported from.
    """
    monkeypatch.syspath_prepend(str(recipe.files[0].parent))
    given = json.loads((EXAMPLES / "models" / recipe.model / "config.json").read_text())
    written = {"policy": given}
    if recipe.config.critic.path is not None:
        head = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
        written["critic"] = {**given, **head}
    index = json.dumps({"weight_map": {}})
    for name, config in written.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "model.safetensors.index.json").write_text(index)
    critic = [f"critic.path={tmp_path / 'critic'}"] if "critic" in written else []
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    files = [f"data.paths={rows}"]
    files += [f"evaluation.paths={rows}"] if recipe.config.evaluation.paths else []
    files += [f"evaluation.sets.{name}.paths={rows}" for name in recipe.config.evaluation.sets]
    return [f"model.path={tmp_path / 'policy'}", *critic, *files]


@each_recipe
def test_it_is_valid_for_its_model(
    recipe: Recipe, models: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["validate", *map(str, recipe.files), *models])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "The model can be converted, and the layout and policy.megatron fit it" in said.out
    assert "# notes" not in said.out


@each_recipe
def test_its_trainer_fits_the_gpus(
    recipe: Recipe, models: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = recipe.config.cluster
    ranks = str(cluster.nodes * cluster.processes_per_node)
    flags = ["--trainer-gpus", ranks, "--gpu-memory", recipe.memory]
    code = cli.main(["plan", *map(str, recipe.files), *models, *flags])
    said = capsys.readouterr()
    assert code == 0, said.err
    own = said.out[said.out.index("The configuration's layout:") :].splitlines()[1]
    assert re.search(r": fits, [\d.]+ GiB of (73\.6|22\.1) GiB; about ", own), own


@each_recipe
def test_trainer_and_engines_take_all_of_the_nodes(recipe: Recipe) -> None:
    cluster = recipe.config.cluster
    engine = recipe.config.rollout.engine
    assert cluster.processes_per_node == (recipe.trainer_gpus or recipe.gpus)
    if engine.colocated:
        assert engine.count * engine.tensor_parallel == recipe.gpus * recipe.nodes
    else:
        trains = cluster.nodes * cluster.processes_per_node
        assert trains + engine.count * engine.tensor_parallel == 8 * recipe.nodes


@each_recipe
def test_without_ray_its_engines_are_given_by_url(recipe: Recipe) -> None:
    """As scripts/torchrun_multinode.sh does: what only servers read is in a file of its own."""
    if not recipe.config.rollout.engine.colocated:
        url = "http://10.0.0.7:30000"
        given = ["cluster.launcher=torchrun", f'rollout.engine.urls=["{url}"]']
        assert load_config(recipe.files[:1], given).config.rollout.engine.urls == [url]


@each_recipe
def test_it_can_be_debugged(
    recipe: Recipe, models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What scripts/debug.sh makes of it is valid, for one process."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    command = [str(EXAMPLES.parent / "scripts" / "debug.sh"), *map(str, recipe.files), *models]
    environment = {**os.environ, "PYTHON": str(python)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    words = said.stdout.splitlines()
    given = words[words.index("train") + 1 : words.index("--overwrite")]
    assert cli.main(["validate", "--elsewhere", *given]) == 0, capsys.readouterr().err


OTHERS = [
    ["addition/sft.yaml"], ["addition/dpo.yaml"],
    *(["addition/base.yaml", f"addition/{name}.yaml"]
      for name in ("grpo", "ppo", "reinforce_pp", "revise")),
    ["addition/base.yaml", "addition/grpo.yaml", "addition/sglang.yaml"], ["models/grpo.yaml"],
    *(["word_problems/data.yaml", f"word_problems/{name}.yaml"] for name in ("sft", "grpo")),
    *(["calculator/base.yaml", f"calculator/{name}.yaml"] for name in ("sft", "grpo")),
    ["calculator/base.yaml", "agent/grpo.yaml"], ["smollm2/base.yaml", "smollm2/addition.yaml"],
    ["smollm2/base.yaml", "smollm2/addition.yaml", "smollm2/lora.yaml"],
    *(["smollm2/base.yaml", f"smollm2/{task}.yaml"] for task in ("chain_sum", "products")),
]  # fmt: skip


def test_no_example_is_left_out() -> None:
    planned = {EXAMPLES / file for files in OTHERS for file in files} | {
        path for recipe in RECIPES for path in recipe.files
    }
    assert planned == set(EXAMPLES.rglob("*.yaml"))


@pytest.mark.parametrize("files", OTHERS, ids=lambda files: "+".join(files))
def test_other_examples_are_planned_too(
    files: list[str], tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = "models" in files[0]
    model = "examples/models/Qwen2.5-7B" if real else tiny_model
    gpus = "8" if real else "1"
    paths = [str(EXAMPLES / file) for file in files]
    assert cli.main(["plan", *paths, f"model.path={model}", "--trainer-gpus", gpus]) == 0
    assert ": fits, " in capsys.readouterr().out
