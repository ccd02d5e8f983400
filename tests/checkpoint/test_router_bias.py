"""The bias of a sigmoid router, no parameter, is whole and fp32 in checkpoints and exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_folders import write_model
from plan import LAYOUTS
from world_outputs import read_weights

from tests.parity.spawn import run_ranks

NAMES = ("pp2", "tp2_sequence", "ep2", "cp2")  # saved under the first
BIAS = "e_score_correction_bias"


def trained(folder: Path) -> dict[str, torch.Tensor]:
    """The weights but the layer for multi-token prediction, which comes from the run's folder."""
    weights = read_weights(folder)
    return {name: tensor for name, tensor in weights.items() if ".layers.4." not in name}


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])
def test_a_checkpoint_brings_the_bias(dtype: str, tmp_path: Path) -> None:
    source = write_model("deepseek_v3", tmp_path / "source")
    other = write_model("deepseek_v3", tmp_path / "other", seed=1)
    payload = {
        "root": str(tmp_path), "dtype": dtype, "source": str(source), "other": str(other),
        "saved_under": NAMES[0],
        "layouts": {name: LAYOUTS[name] for name in NAMES},
    }  # fmt: skip
    run_ranks(
        Path(__file__).with_name("router_bias_ranks.py"),
        2,
        tmp_path / "world",
        payload,
        deadline_s=240,
    )
    before = read_weights(source)
    saved = trained(tmp_path / "saved")
    biases = [name for name in saved if name.endswith(BIAS)]
    assert len(biases) == 3
    for name in biases:
        assert saved[name].dtype == torch.float32
        assert torch.equal(saved[name], before[name]), "no step may move it"
        assert not torch.equal(saved[name], read_weights(other)[name])
    assert not torch.equal(saved["./lm_head.weight"].float(), before["./lm_head.weight"].float()), (
        "the step did nothing"
    )
    for layout in NAMES:
        got = trained(tmp_path / layout)
        assert got.keys() == saved.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in saved.items()), layout
