"""Runs TRL's GRPOTrainer on the addition task, in TRL's own environment.

Writes what rlcore writes, one JSON object a step in `metrics.jsonl`, so that `end_to_end.py` reads
both alike: `time/step` (s, the whole step; evaluation is not in it), `time/generation` (s,
completions, rewards and advantages), `time/training` (s, the rest), `rollout/reward`, and
`eval/accuracy` on the evaluated steps.

TRL runs at its best here: no gradient checkpointing (its default), no logging, no saving, fused
AdamW, SDPA attention.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from greedy import greedy_accuracy, read_rows
from recipe import RECIPES, TRL_LOSS_TYPES, Recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]


def reward_of(recipe: Recipe, end: int) -> Callable[..., list[float]]:
    """Make the reward function; `end` is the model's end token."""

    def right(
        completions: list[str], completion_ids: list[list[int]], label: list[str], **_: Any
    ) -> list[float]:
        return [
            float(recipe.is_right(text, answer, ended=end in ids))
            for text, ids, answer in zip(completions, completion_ids, label)
        ]

    return right


class TimedTrainer(GRPOTrainer):
    """Adds up the seconds of the rollout phase and keeps the mean reward."""

    recipe: Recipe
    rollout_seconds = 0.0
    mean_reward = 0.0

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        started = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        self.rollout_seconds += time.perf_counter() - started
        return output

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *arguments: Any) -> torch.Tensor:
        groups = {row["prompt"] for row in inputs}
        recipe = self.recipe
        if len(inputs) != recipe.samples_per_step or len(groups) != recipe.prompts_per_step:
            raise ValueError(
                f"a batch of {len(inputs)} samples of {len(groups)} prompts; the recipe has"
                f" {recipe}"
            )
        rewards = super()._calculate_rewards(inputs, *arguments)
        self.mean_reward = rewards.mean().item()
        return rewards


class Recorder(TrainerCallback):
    """Writes one line a step. Its clock stands still while it evaluates."""

    def __init__(self, path: Path, evaluate: Callable[[], float], eval_steps: set[int]) -> None:
        self._file = path.open("w")
        self._evaluate = evaluate
        self._eval_steps = eval_steps
        self._started = 0.0
        self.trainer: TimedTrainer | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._write({"step": 0})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.trainer is not None
        step = time.perf_counter() - self._started
        generation = self.trainer.rollout_seconds
        self.trainer.rollout_seconds = 0.0
        row = {
            "step": state.global_step,
            "time/step": step,
            "time/generation": generation,
            "time/training": step - generation,
        }
        self._write({**row, "rollout/reward": self.trainer.mean_reward})

    def _write(self, row: dict[str, float]) -> None:
        if row["step"] in self._eval_steps:
            row["eval/accuracy"] = self._evaluate()
        print(json.dumps(row), file=self._file, flush=True)
        self._started = time.perf_counter()


def configuration(options: argparse.Namespace, recipe: Recipe) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(options.output),
        seed=options.seed,
        max_steps=options.steps,
        # one batch, one micro-batch, one optimizer step
        per_device_train_batch_size=recipe.samples_per_step,
        gradient_accumulation_steps=1,
        num_generations=recipe.samples_per_prompt,
        num_iterations=1,
        temperature=recipe.temperature,
        top_p=1.0,
        top_k=0,
        max_completion_length=recipe.max_new_tokens,
        loss_type=TRL_LOSS_TYPES[options.aggregation],
        scale_rewards="group",
        beta=0.0,
        epsilon=recipe.clip_ratio,
        mask_truncated_completions=False,
        learning_rate=options.lr or recipe.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        optim="adamw_torch_fused",
        adam_beta1=recipe.beta1,
        adam_beta2=recipe.beta2,
        adam_epsilon=recipe.adam_eps,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.clip_grad,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("data", type=Path, help="folder that examples/addition/make_data.py wrote")
    parser.add_argument("output", type=Path, help="folder for metrics.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--recipe", choices=RECIPES, default="toy")
    parser.add_argument("--lr", type=float, help="default: the recipe's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--aggregation", choices=sorted(TRL_LOSS_TYPES), default="token-mean")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    recipe = RECIPES[options.recipe]
    heldout = read_rows(options.data / "heldout.jsonl", tokenizer, recipe)[: recipe.heldout]
    recorder = Recorder(
        options.output / "metrics.jsonl",
        lambda: greedy_accuracy(model, tokenizer, heldout, recipe),
        set(recipe.eval_steps),
    )
    trainer = TimedTrainer(
        model=model,
        reward_funcs=reward_of(recipe, tokenizer.eos_token_id),
        args=configuration(options, recipe),
        train_dataset=Dataset.from_list(read_rows(options.data / "train.jsonl", tokenizer, recipe)),
        processing_class=tokenizer,
        callbacks=[recorder],
    )
    trainer.recipe = recipe
    recorder.trainer = trainer
    trainer.train()
    if torch.get_num_threads() != options.threads:
        raise RuntimeError(
            f"TRL ran on {torch.get_num_threads()} threads, not on {options.threads}"
        )


if __name__ == "__main__":
    main()
