"""The runs of test_resume.py, and comparisons of two runs."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlcore.runs.checkpoints import latest_checkpoint
from rlcore.runs.metrics import read_metrics
from rlcore.runs.rollouts import read_rollouts
from tests.fork_server import ForkServer

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5
UPDATES = 4  # optimizer steps a step
NOT_COMPARED = ("time/", "perf/")
CLOCKS = ("engine_s", "tool_s")  # measurements of conversations that the clock writes

# PPO with everything that has a state: critic, reference, schedules, a filter, groups that go back
# to the stream, and ten prompts of which a step takes three to four.
PPO: dict[str, Any] = {
    "run": {"threads": 1},
    "policy": {
        "max_tokens_per_microbatch": 64,
        "optimizer": {"lr": 5e-3, "warmup_steps": 3, "schedule": "cosine", "weight_decay": 0.01},
    },
    "critic": {
        "optimizer": {"lr": 1e-2, "schedule": "linear"},
        "value_clip": 0.2,
        "warmup_steps": 1,
    },
    "algorithm": {
        "estimator": {"name": "ppo", "gamma": 1.0, "lam": 0.95},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "kl": {"reward_coef": 0.05},
        "minibatches": 2,
        "epochs": 2,
    },
    "rollout": {
        "prompts_per_step": 3,
        "samples_per_prompt": 4,
        "oversample": 1.3,
        "filters": ["zero_variance"],
        "sampling": {"temperature": 1.0, "max_new_tokens": 6},
        "service": "in_process",
    },
    "evaluation": {"every": 2, "temperature": 1.0},
    "reward": {
        "workers": 1,
        "parts": {"digits": {"function": "tests.integration.resume_rewards:share_of_digits"}},
    },
    "training": {"steps": STEPS},
    "checkpoint": {"every": 2, "keep": 1},
}
# GRPO with the KL in the loss, a borrowed reference, and an estimator that draws random numbers.
GRPO: dict[str, Any] = {
    **{key: value for key, value in PPO.items() if key != "critic"},
    "reference": {"offload": True},
    "algorithm": {
        "estimator": {"name": "tests.integration.resume_estimator:NoisyGRPO"},
        "loss": {"name": "ppo_clip"},
        "kl": {"loss_coef": 0.1},
        "minibatches": 2,
        "epochs": 2,
    },
}
SFT: dict[str, Any] = {
    **{key: PPO[key] for key in ("run", "policy", "training", "checkpoint")},
    "algorithm": {"loss": {"name": "sft"}},
    "training": {"steps": STEPS, "batch_size": 4},
    "evaluation": {"paths": []},
}


@dataclass(frozen=True)
class Ended:
    # exit codes of the processes started; minus the signal's number for a killed one
    codes: list[int]
    seconds: float
    orphans: list[str]  # command lines of what outlived them
    output: str  # what this job printed

    @property
    def killed(self) -> bool:
        return set(self.codes) == {-9}


class Runs:
    """A folder with a model, data and runs, and the driver that starts them."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        pairs = zip((1, 33, 5, 7, 90, 12, 4, 56, 9, 10), (2, 4, 66, 8, 1, 13, 4, 7, 9, 20))
        rows = [json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b)}) + "\n" for a, b in pairs]
        (folder / "train.jsonl").write_text("".join(rows))
        (folder / "heldout.jsonl").write_text("".join(rows[:3]))
        common = {
            "run": {"name": "unnamed", "dir": str(folder)},
            "model": {"path": str(model), "dtype": "fp32"},
            "data": {"paths": [str(folder / "train.jsonl")]},
            "evaluation": {"paths": [str(folder / "heldout.jsonl")]},
        }
        for name, config in (("common", common), ("ppo", PPO), ("grpo", GRPO), ("sft", SFT)):
            (folder / f"{name}.yaml").write_text(json.dumps(config))
        kept = {
            key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")
        }
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._driver = ForkServer(Path(__file__).with_name("resume_driver.py"), {**kept, **own})

    def path(self, name: str) -> Path:
        return self.folder / name

    def train(
        self, name: str, *overrides: str, algorithm: str = "ppo", resume: bool = False, **job: Any
    ) -> Ended:
        """Run `rlcore train` once.

        `job` holds the driver's fields: ranks, at, outside.
        """
        log = self.folder / f"{name}.log"
        before = log.stat().st_size if log.exists() else 0
        files = [str(self.folder / "common.yaml"), str(self.folder / f"{algorithm}.yaml")]
        arguments = [
            "train",
            *files,
            f"run.name={name}",
            *overrides,
            *(["--resume"] if resume else []),
        ]
        self._driver.send({"arguments": arguments, "log": str(log), **job})
        answer = self._driver.answer()
        return Ended(
            answer["codes"],
            answer["seconds"],
            answer["orphans"],
            log.read_bytes()[before:].decode(),
        )

    def finish(self, name: str, *overrides: str, **job: Any) -> None:
        """Resume, or start, the run and have it end as it should."""
        ended = self.train(name, *overrides, resume=True, **job)
        assert set(ended.codes) == {0}, ended.output
        assert not ended.orphans

    def passed(self, name: str) -> dict[str, int]:
        """How often the last whole job of `name` came to each point of the driver's."""
        counts: dict[str, int] = json.loads(self.path(f"{name}.log.passed").read_text())
        return counts

    def close(self) -> None:
        self._driver.close()


# --- comparing runs -------------------------------------------------------------------------------


def metrics_of(run: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl without what the clock writes."""
    rows = read_metrics(run / "metrics.jsonl")
    return [
        {
            key: value
            for key, value in row.items()
            if not key.startswith(NOT_COMPARED) and not key.endswith(CLOCKS)
        }
        for row in rows
    ]


def result_of(run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run / "result.json").read_text())
    return result


def contents(folder: Path) -> dict[str, bytes]:
    """Relative path -> content of every file below `folder`."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def assert_same_run(run: Path, reference: Path) -> None:
    """Compare bit for bit: metrics, samples, weights, optimizers, generators, prompt accounting."""
    rows = metrics_of(run)
    expected = metrics_of(reference)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        # As text: NaN equals NaN, and no two floats look alike.
        assert {key: repr(value) for key, value in row.items()} == {
            key: repr(value) for key, value in other.items()
        }
    assert contents(run / "hf") == contents(reference / "hf")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == sorted(
        path.name for path in (reference / "checkpoints").iterdir()
    )
    assert _last_shards(run) == _last_shards(reference)
    assert _state(run) == _state(reference)
    assert _samples(run) == _samples(reference)
    assert {**result_of(run), "seconds": 0} == {**result_of(reference), "seconds": 0}


def assert_close_run(
    run: Path, reference: Path, *, tolerance: float, sampled: Collection[str] = ()
) -> None:
    """To round-off: every metric of every step, and every weight.

    `sampled` metrics are measured on a part of the tokens, which depends on the layout: they may
    differ by half.
    """
    rows = metrics_of(run)
    expected = metrics_of(reference)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        for key, value in row.items():
            relative = 0.5 if key in sampled else tolerance
            torch.testing.assert_close(
                value, other[key], rtol=relative, atol=tolerance, equal_nan=True,
                msg=lambda text, key=key, step=row["step"]: f"{key} of step {step}: {text}",
            )  # fmt: skip
    weights, others = (
        load_file(folder / "hf" / "model.safetensors") for folder in (run, reference)
    )
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(
            weight,
            others[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def _last_shards(run: Path) -> dict[str, bytes]:
    found = latest_checkpoint(run / "checkpoints")
    assert found is not None
    return {
        name: content
        for name, content in contents(found.model).items()
        if name.endswith((".distcp", ".pt"))
    }


def _state(run: Path) -> str:
    found = latest_checkpoint(run / "checkpoints")
    assert found is not None
    # a run that is resumed has published more often
    return repr({**found.state, "seconds": 0, "version": 0})


def _samples(run: Path) -> dict[str, list[str]]:
    """Return the records of every step without versions, as text.

    Versions count publications, of which a resumed run makes more. NaN equals NaN as text.
    """
    return {
        path.name: [repr(_unchanging(record)) for record in read_rollouts(path)]
        for path in sorted((run / "rollouts").glob("step_*"))
    }


def _unchanging(record: dict[str, Any]) -> dict[str, Any]:
    measured = {k: v for k, v in record["measured"].items() if k not in CLOCKS}
    return {k: v for k, v in record.items() if "version" not in k} | {"measured": measured}
