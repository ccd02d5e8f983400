"""Ten steps of GRPO on two tensor-parallel ranks, with two embedded engines and a reward worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.integration.accounting_checks import PROMPTS, SAMPLES

STEPS = 10
CONVERSATIONS = {"workflow": {"name": "tests.soak.conversations:FailingBranches"}}
CONFIG: dict[str, Any] = {
    "run": {"threads": 1},
    "model": {"dtype": "fp32"},
    "policy": {
        "parallel": {"tensor": 2},
        "optimizer": {"lr": 3e-3},
        "max_tokens_per_microbatch": 128,
    },
    "algorithm": {"estimator": {"name": "grpo"}, "loss": {"name": "ppo_clip"}},
    "rollout": {
        "prompts_per_step": PROMPTS,
        "samples_per_prompt": SAMPLES,
        "sampling": {"max_new_tokens": 24},
        "engine": {
            "threads": 1,
            "count": 2,
            "senders": 2,  # each rank publishes to one of them
            "bucket_bytes": 8192,  # many buckets: a kill can fall between two
            "health_every_s": 0.5,
            "restart": {"backoff_s": 0.1},
        },
    },
    "reward": {
        "workers": 1,
        "parts": {"digits": {"function": "tests.integration.resume_rewards:share_of_digits"}},
    },
    "training": {"steps": STEPS},
    "checkpoint": {"every": 2},
    "tracking": {"show_samples": 0},
    # How long a rank waits for a rank that was killed on another node.
    "cluster": {"heartbeat_timeout_s": 30.0},
}


def prepare(folder: Path, *, conversations: bool, adapters: bool = False) -> Path:
    """Make a model, problems, and the configuration of every run in `folder`; return its path."""
    from transformers.utils import logging

    from rlcore.launch.commands.init_model import ModelSpec, init_model

    logging.disable_progress_bar()
    init_model(
        folder / "model", ModelSpec(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=64)
    )
    rows = [json.dumps({"prompt": f"{a}+{7 * a % 100}="}) + "\n" for a in range(60)]
    (folder / "train.jsonl").write_text("".join(rows))
    places: dict[str, Any] = {
        "run": {"dir": str(folder / "runs")},
        "model": {"path": str(folder / "model")},
        "data": {"paths": [str(folder / "train.jsonl")], "label_key": None},
    }
    if conversations:
        places["rollout"] = CONVERSATIONS
    if adapters:
        places["policy"] = {"lora": {"rank": 4}, "optimizer": {"lr": 1e-2}}
    merged = {
        section: {**CONFIG.get(section, {}), **places.get(section, {})}
        for section in {**CONFIG, **places}
    }
    config = folder / "soak.yaml"
    config.write_text(yaml.safe_dump(merged))
    return config
