"""The plan's publications and checkpoints beside those of models really built, on real ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from cases import make_config
from spawn import run_ranks

from backends.megatron.convert.read import read_architecture
from rlcore.launch.commands.plan import configured_layout, make_job, make_publication

RANKS = Path(__file__).with_name("plan_ranks.py")
# Large enough that most parts travel alone, from 1 MB on.
SIZES: dict[str, Any] = {
    "vocab_size": 4001, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[int, list[dict[str, Any]]] = {
    1: [{"name": "one", "dtype": "bf16"}],
    2: [
        {"name": "tp2", "parallel": {"tensor": 2}},
        {"name": "pp2", "parallel": {"pipeline": 2}},
        {"name": "dp2_distributed", "data": 2, "dtype": "bf16", "distributed": True},
    ],
}
ALL = [pytest.param(size, one, id=one["name"]) for size, cases in CASES.items() for one in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("plan")
    config = transformers.Qwen3Config(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "models" / "qwen3")
    for size, cases in CASES.items():
        run_ranks(
            RANKS,
            size,
            folder / f"world{size}",
            [{"model": "qwen3", **case} for case in cases],
            deadline_s=240,
        )
    yield folder
    # More than a gigabyte of checkpoints.
    shutil.rmtree(folder)


@pytest.mark.parametrize(("size", "case"), ALL)
def test_publications_and_checkpoints(folder: Path, size: int, case: dict[str, Any]) -> None:
    arch = read_architecture(folder / "models" / "qwen3")
    optimizer = {"distributed": case.get("distributed", False)}
    given = {"model": "qwen3", **case, "optimizer": optimizer}
    config = make_config(given, folder / "models")
    found = [
        json.loads((folder / f"world{size}" / f"{case['name']}{rank}.json").read_text())
        for rank in range(size)
    ]
    published = make_publication(config, arch)
    assert published is not None
    sizes = list(published.buckets)
    assert len(sizes) > 3
    assert found[0]["alone"]["sent"] == sizes, "what rank 0 has of each bucket to send"
    assert all(rank["everywhere"]["sent"] == sizes for rank in found)

    assert found[0]["on_disk"] == pytest.approx(
        make_job(config, arch, {}).checkpoint_bytes, rel=0.02
    )


@pytest.mark.parametrize(("size", "case"), ALL)
@pytest.mark.parametrize("everywhere", [False, True], ids=["rank0", "everywhere"])
def test_no_rank_has_larger_buffers(
    folder: Path, size: int, case: dict[str, Any], everywhere: bool
) -> None:
    arch = read_architecture(folder / "models" / "qwen3")
    config = make_config({"model": "qwen3", **case}, folder / "models")
    engine = config.rollout.engine.model_copy(
        update={"kind": "sglang", "senders": size if everywhere else 1, "count": size}
    )
    rollout = config.rollout.model_copy(update={"engine": engine})
    published = make_publication(config.model_copy(update={"rollout": rollout}), arch)
    assert published is not None
    layout = configured_layout(config, arch, size)
    assert published.is_everywhere(layout) == (everywhere and size > 1)
    found = max(
        json.loads((folder / f"world{size}" / f"{case['name']}{rank}.json").read_text())[
            "everywhere" if everywhere else "alone"
        ]["buffers"]
        for rank in range(size)
    )
    # norms, which are less than 1 MB, are not counted
    planned = published.buffers(layout)
    assert 0.99 * found <= planned <= found + published.bucket_limit
