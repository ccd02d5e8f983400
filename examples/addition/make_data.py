"""Write the addition problems: `12+34=` to `46`.

`train.jsonl` and `heldout.jsonl` split the 10,000 pairs of 0..99; `warmup.jsonl` holds the training
pairs with labels of which a share drops its carries (27+38 to 55). A model warmed up on those can
add but mostly does not, which gives reinforcement learning something to bring out. The files with
`preferences` in their names prefer the right sum to the one without carries, where they differ.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

EQUATION = "{a}+{b}="
QUESTION = "What is {a}+{b}? Answer with the number only."


def add_without_carries(a: int, b: int) -> int:
    """Digit by digit, each sum modulo ten: 27 + 38 is 55."""
    return (a // 10 + b // 10) % 10 * 10 + (a + b) % 10


def problem(a: int, b: int, answer: int, template: str) -> dict[str, str]:
    return {"prompt": template.format(a=a, b=b), "label": str(answer)}


def preference(a: int, b: int, template: str) -> dict[str, str]:
    prompt = template.format(a=a, b=b)
    return {"prompt": prompt, "chosen": str(a + b), "rejected": str(add_without_carries(a, b))}


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(
    folder: Path,
    *,
    seed: int = 0,
    template: str = EQUATION,
    heldout: float = 0.05,
    carryless: float = 0.6,
    copies: int = 4,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(100) for b in range(100)]
    rng.shuffle(pairs)
    cut = round(len(pairs) * heldout)
    write(folder / "heldout.jsonl", [problem(a, b, a + b, template) for a, b in pairs[:cut]])
    write(folder / "train.jsonl", [problem(a, b, a + b, template) for a, b in pairs[cut:]])
    for name, part in (("preferences", pairs[cut:]), ("heldout_preferences", pairs[:cut])):
        carried = [(a, b) for a, b in part if add_without_carries(a, b) != a + b]
        write(folder / f"{name}.jsonl", [preference(a, b, template) for a, b in carried])
    warmup = [
        problem(a, b, add_without_carries(a, b) if rng.random() < carryless else a + b, template)
        for _ in range(copies)
        for a, b in pairs[cut:]
    ]
    write(folder / "warmup.jsonl", warmup)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chat", action="store_true", help=f"as a question: {QUESTION}")
    arguments = parser.parse_args()
    template = QUESTION if arguments.chat else EQUATION
    make(arguments.folder, seed=arguments.seed, template=template)


if __name__ == "__main__":
    main()
