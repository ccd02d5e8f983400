"""Computes greedy accuracy of a Hugging Face model by transformers, for both sides."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from recipe import RECIPES, Recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def read_rows(path: Path, tokenizer: Any, recipe: Recipe) -> list[dict[str, str]]:
    """Read rows whose prompts are as the model gets them."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if recipe.chat:
        for row in rows:
            messages = [{"role": "user", "content": row["prompt"]}]
            row["prompt"] = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
    return rows


@torch.no_grad()
def greedy_accuracy(
    model: Any, tokenizer: Any, rows: list[dict[str, str]], recipe: Recipe
) -> float:
    """The share of rows whose greedy completion is right. Draws no random number."""
    was_training = model.training
    model.eval()
    inputs = tokenizer(
        [row["prompt"] for row in rows], return_tensors="pt", padding=True, padding_side="left"
    )
    tokens = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        generation_config=GenerationConfig(
            do_sample=False,
            max_new_tokens=recipe.max_new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
    )
    model.train(was_training)
    responses = tokens[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    ended = (responses == tokenizer.eos_token_id).any(1).tolist()
    right = [
        recipe.is_right(text, row["label"], ended=end) for text, row, end in zip(texts, rows, ended)
    ]
    return sum(right) / len(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("data", type=Path, help="JSONL of prompt and label")
    parser.add_argument("--recipe", choices=RECIPES, default="toy")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    recipe = RECIPES[options.recipe]
    rows = read_rows(options.data, tokenizer, recipe)[: recipe.heldout]
    print(greedy_accuracy(model, tokenizer, rows, recipe))


if __name__ == "__main__":
    main()
