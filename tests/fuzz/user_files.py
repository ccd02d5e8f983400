"""What users write: YAML configurations, overrides, and rows of data.

Bad input is exit code 2 and a message that names it, never a traceback.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml

from rlcore.cli import main
from rlcore.config.load import load_config, split_arguments
from rlcore.config.sections.data import DataConfig
from rlcore.config.sections.root import Config
from rlcore.config.yaml_settings import ConfigDumper, ConfigLoader
from rlcore.data.examples import open_examples
from rlcore.data.prompts import PromptSet
from rlcore.errors import ConfigError, UserError
from rlcore.launch.commands.init_model import ALPHABETS, char_tokenizer
from rlcore.trainer.sft_answers import labelled_rows
from tests.fuzz.harness import ACCEPTED, Case, Target
from tests.fuzz.mutation import Mutator, written
from tests.fuzz.oracle import check_tokens, need

ROOT = Path(__file__).parents[2]
EXAMPLES = (
    "recipes/gsm8k/qwen2.5-0.5b-grpo.yaml",
    "addition/ppo.yaml",
    "recipes/judge/qwen2.5-7b.yaml",
)
OVERRIDES = (
    "rollout.sampling.temperature=0.7",
    "algorithm.estimator={name: ppo, lam: 0.9}",
    "data.paths=[a.jsonl, b.jsonl]",
    "reward.parts.a={function: exact_match, weight: 0.5}",
    "run.name=1e-3",
    "policy.parallel.tensor=2",
)
COMMAND = 0.02  # of the cases go through the command itself, which is slower


@contextmanager
def open_configurations() -> Iterator[Case]:
    """Files and overrides, as every command loads them."""
    texts = [(ROOT / "examples" / name).read_bytes() for name in EXAMPLES]
    trees = [yaml.load(text.decode(), Loader=ConfigLoader) for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        (Path(folder) / "a.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')

        def given(mutator: Mutator) -> list[str]:
            random = mutator.random
            at = random.randrange(len(texts))
            by_bytes = random.random() < 0.4
            path.write_bytes(mutator.bytes(texts[at]) if by_bytes else _tree(mutator, trees[at]))
            chosen = random.sample(OVERRIDES, random.choice((0, 0, 1, 2)))
            base = str(ROOT / "examples" / "addition/base.yaml")
            files = [base, str(path)] if at == 1 else [str(path)]
            return [*files, *map(mutator.text, chosen if mutator.changed else ())]

        def case(mutator: Mutator) -> str:
            arguments = given(mutator)
            if mutator.changed and mutator.random.random() < COMMAND:
                return _command(arguments)
            try:
                loaded = load_config(*split_arguments(arguments))
            except ConfigError as error:
                need(bool(str(error)), "an error without words")
                return "ConfigError"
            need(isinstance(loaded.config, Config), "no configuration")
            return ACCEPTED

        yield case


def _tree(mutator: Mutator, tree: Any) -> bytes:
    """Write a changed tree as YAML, or as JSON, which YAML reads too."""
    changed = mutator.value(tree)
    try:
        return yaml.dump(changed, Dumper=ConfigDumper, allow_unicode=True).encode(
            "utf-8", "surrogatepass"
        )
    except (yaml.YAMLError, RecursionError):
        return written(changed)


def _command(arguments: list[str]) -> str:
    """Run `rlcore validate`."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(["validate", "--elsewhere", *arguments])
        except SystemExit as error:  # argparse
            code = error.code  # type: ignore[assignment]
    need(code in (0, 2), f"exit code {code}")
    need("Traceback" not in said.getvalue(), said.getvalue())
    return ACCEPTED if code == 0 else "exit code 2"


# --- rows -----------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLS = [
    {"role": "user", "content": [{"type": "text", "text": "1+2="}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}],
    },
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"prompt": "1+2=", "label": "3", "level": 1}, {"prompt": "4+4=", "label": 8}],
    "chat": [{"prompt": CHAT[:1], "label": "3"}, {"prompt": CHAT[:1], "label": "4"}],
    "verl": [{"prompt": CHAT[:1], "reward_model": {"ground_truth": "3"}, "data_source": "sums"}]
    * 2,
    "openai": [{"messages": CHAT, "tools": [TOOL]}, {"messages": CALLS}],
    "open-instruct": [{"messages": CHAT, "ground_truth": ["3"], "dataset": ["sums"]}] * 2,
    "trl": [{"prompt": CHAT[:1], "completion": CHAT[1:]}] * 2,
}
TEMPLATE = "{% for m in messages %}<{{ m['content'] }}\n{% endfor %}"


@contextmanager
def open_rows() -> Iterator[Case]:
    """JSONL and parquet files, read as a run and as supervised fine-tuning read them."""
    tokenizer = char_tokenizer(ALPHABETS["addition"])
    chats = char_tokenizer(ALPHABETS["addition"])
    chats.chat_template = TEMPLATE
    with tempfile.TemporaryDirectory() as folder:
        jsonl = Path(folder) / "rows.jsonl"
        parquet = Path(folder) / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS["chat"]), parquet)
        of_parquet = parquet.read_bytes()

        def read(path: Path, mutator: Mutator) -> None:
            data = DataConfig(paths=[str(path)])
            used = chats if mutator.random.random() < 0.7 else tokenizer
            if mutator.random.random() < 0.2:
                config = Config.model_validate(
                    {
                        "run": {"name": "fuzz"},
                        "model": {"path": folder},
                        "data": {"paths": [str(path)]},
                        "training": {"epochs": 1, "batch_size": 1},
                        "algorithm": {"loss": {"name": "sft"}},
                    }
                )
                prompts, answers, _ = labelled_rows(config, used)
                need(len(answers.lengths) == len(prompts), "a label for each prompt")
            else:
                prompts = PromptSet.of(open_examples(data), used)
            for index in range(len(prompts)):
                prompt = prompts[index]
                check_tokens("prompt", prompt.tokens, len(used))
                need(len(prompt.tokens) > 0 and isinstance(prompt.text, str), f"{prompt}")
                need(str(path) in prompt.prompt_id, prompt.prompt_id)

        def case(mutator: Mutator) -> str:
            kind = mutator.random.choice((*ROWS, "parquet"))
            if kind == "parquet":
                path = parquet
                path.write_bytes(mutator.bytes(of_parquet))
            else:
                path = jsonl
                lines = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS[kind])
                path.write_bytes(mutator.lines(lines))
            try:
                read(path, mutator)
            except UserError as error:
                # a prompt that this tokenizer cannot read, or no template: not of the row
                named = str(path) in str(error) or "rows." in str(error)
                need(named or isinstance(error, ConfigError), f"{error} names no file")
                return f"{kind}: {type(error).__name__}" if mutator.changed else ACCEPTED
            return ACCEPTED

        yield case


TARGETS = (Target("configurations", open_configurations), Target("data-rows", open_rows))
