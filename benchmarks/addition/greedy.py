"""Computes greedy accuracy of a Hugging Face model by transformers, for both sides."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@torch.no_grad()
def greedy_accuracy(
    model: Any, tokenizer: Any, rows: list[dict[str, str]], max_new_tokens: int
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
            max_new_tokens=max_new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
    )
    model.train(was_training)
    texts = tokenizer.batch_decode(
        tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return sum(is_right(text, row["label"]) for text, row in zip(texts, rows)) / len(rows)


def is_right(text: str, label: str) -> bool:
    """Compare text and label as `exact_match` does: without special tokens and spaces."""
    return text.strip() == label.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("data", type=Path, help="JSONL of prompt and label")
    parser.add_argument("--max-new-tokens", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    print(greedy_accuracy(model, tokenizer, read_rows(options.data), options.max_new_tokens))


if __name__ == "__main__":
    main()
