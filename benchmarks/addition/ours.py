"""Runs rlcore's side of the comparison: an example's files with the recipe as overrides."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from addition.recipe import RECIPES, Recipe
from process import Finished, run

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
RLCORE = [sys.executable, "-m", "rlcore"]


def make_data(work: Path, recipe: Recipe) -> None:
    """Make the addition problems in `work/data`."""
    chat = ["--chat"] if recipe.chat else []
    run(
        [sys.executable, EXAMPLES / "addition" / "make_data.py", work / "data", *chat],
        log=work / "data.log",
        threads=1,
        deadline_s=60,
    )


def smollm2(work: Path) -> Path:
    """Make the folder of SmolLM2-135M-Instruct. Returns it."""
    folder = work / "smollm2"
    make = [sys.executable, EXAMPLES / "smollm2" / "make_model.py", folder]
    run(make, log=work / "model.log", threads=1, deadline_s=300)
    return folder


def warm_up(work: Path, *, threads: int, steps: int = 500, deadline_s: float = 1800.0) -> Path:
    """Warm up a tiny Qwen3 by supervised training on `work/data`. Returns its folder."""
    log = work / "warmup.log"
    init = [*RLCORE, "init-model", str(work / "model"), "--preset", "addition", "--overwrite"]
    run(init, log=log, threads=threads, deadline_s=120, cwd=REPOSITORY)
    overrides = {
        "run.name": "warmup",
        "run.dir": work,
        "run.threads": threads,
        "model.path": work / "model",
        "data.paths": work / "data" / "warmup.jsonl",
        "training.steps": steps,
    }
    run(
        _train(["addition/sft.yaml"], overrides),
        log=log,
        threads=threads,
        deadline_s=deadline_s,
        cwd=REPOSITORY,
    )
    return exported(work / "warmup")


def train(
    model: Path,
    data: Path,
    output: Path,
    *,
    recipe: Recipe,
    seed: int,
    steps: int,
    threads: int,
    aggregation: str,
    deadline_s: float,
) -> Finished:
    """Run on one rank, with metrics in `output/metrics.jsonl`."""
    files = ["smollm2/base.yaml"] if recipe.chat else ["addition/base.yaml", "addition/grpo.yaml"]
    command = _train(
        files, overrides(model, data, output, recipe, seed, steps, threads, aggregation)
    )
    return run(
        command,
        log=output.with_suffix(".log"),
        threads=threads,
        deadline_s=deadline_s,
        cwd=REPOSITORY,
    )


def overrides(
    model: Path,
    data: Path,
    output: Path,
    recipe: Recipe,
    seed: int,
    steps: int,
    threads: int,
    aggregation: str,
) -> dict[str, object]:
    evaluated = [step for step in recipe.eval_steps if step > 0]
    return {
        "run.name": output.name,
        "run.dir": output.parent,
        "run.seed": seed,
        "run.threads": threads,
        "model.path": model,
        "model.dtype": "fp32",
        "data.paths": data / "train.jsonl",
        "training.steps": steps,
        "policy.optimizer.lr": recipe.learning_rate,
        "policy.optimizer.schedule": "constant",
        "policy.optimizer.warmup_steps": 0,
        "policy.optimizer.beta1": recipe.beta1,
        "policy.optimizer.beta2": recipe.beta2,
        "policy.optimizer.eps": recipe.adam_eps,
        "policy.optimizer.weight_decay": recipe.weight_decay,
        "policy.optimizer.clip_grad": recipe.clip_grad,
        "algorithm.estimator.name": "grpo",
        "algorithm.estimator.eps": recipe.advantage_eps,
        "algorithm.normalize_advantages": "false",
        "algorithm.loss.name": "ppo_clip",
        "algorithm.loss.clip_low": recipe.clip_ratio,
        "algorithm.loss.clip_high": recipe.clip_ratio,
        "algorithm.loss.aggregation": aggregation,
        **(
            {"algorithm.loss.norm_length": recipe.max_new_tokens}
            if aggregation.endswith("sum-norm")
            else {}
        ),
        "algorithm.entropy_coef": 0,
        "rollout.filters": "[]",
        "rollout.prompts_per_step": recipe.prompts_per_step,
        "rollout.samples_per_prompt": recipe.samples_per_prompt,
        "rollout.sampling.temperature": recipe.temperature,
        "rollout.sampling.max_new_tokens": recipe.max_new_tokens,
        "evaluation.paths": f"[{data / 'heldout.jsonl'}]",
        "evaluation.every": min(evaluated),
        "evaluation.max_prompts": recipe.heldout,
        # TRL neither saves nor logs samples on the way, so neither do we.
        "checkpoint.every": 0,
        "tracking.save_rollouts": "false",
        "tracking.show_samples": 0,
    }


def rescore(output: Path, data: Path, recipe: Recipe, *, threads: int) -> float:
    """Compute the greedy accuracy of an exported model, by the code that scores TRL's."""
    log = output.with_suffix(".rescored")
    script = REPOSITORY / "benchmarks" / "addition" / "greedy.py"
    name = next(name for name, one in RECIPES.items() if one is recipe)
    command = [sys.executable, str(script), str(exported(output)), str(data / "heldout.jsonl")]
    command += ["--recipe", name, "--threads", str(threads)]
    run(command, log=log, threads=threads, deadline_s=300)
    return float(log.read_text().split()[-1])


def exported(run_folder: Path) -> Path:
    """The Hugging Face folder that a run left."""
    folder = run_folder / "hf"
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"{run_folder} left no Hugging Face folder {folder}; see its log beside it"
        )
    return folder


def _train(files: Iterable[str], overrides: dict[str, object]) -> list[str]:
    configs = [str(EXAMPLES / name) for name in files]
    return [
        *RLCORE,
        "train",
        *configs,
        *(f"{key}={value}" for key, value in overrides.items()),
        "--overwrite",
    ]
