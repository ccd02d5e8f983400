"""`rlcore dryrun` against `rlcore plan` in the layouts of the shipped recipes, with few layers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlcore.config.load import load_config
from rlcore.launch.commands.dryrun import dry_run

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Case:
    """A configuration, the sizes of its models, and how many layers are left of them."""

    files: tuple[str, ...]
    model: str
    layers: int
    overrides: tuple[str, ...] = ()
    world: int | None = None

    @property
    def name(self) -> str:
        name = f"{self.files[0].split('/')[-1].removesuffix('.yaml')}-{self.model}"
        name += "-tp8" if any("tensor: 8, pipeline: 8" in one for one in self.overrides) else ""
        name += "-moe" if any("recompute_modules: [moe]" in one for one in self.overrides) else ""
        name += "-mtp" if "policy.mtp_coef=0.1" in self.overrides else ""
        name += "-fp32" if "model.dtype=fp32" in self.overrides else ""
        return f"{name}-shared" if "policy.share_prefixes=on" in self.overrides else name


CUT = "policy.parallel={tensor: 1, sequence: false}"
SHORT = ("policy.max_tokens_per_microbatch=8192", "rollout.sampling.max_new_tokens=3072")

CASES = [
    Case(("recipes/llama-3.1-8b-ppo.yaml",), "Llama-3.1-8B", 4),
    Case(("recipes/qwen2.5-7b-grpo-1node.yaml",), "Qwen2.5-7B", 4),
    Case(
        ("recipes/qwen2.5-7b-grpo-1node.yaml",),
        "Qwen2.5-7B",
        4,
        (
            "policy.transformer_engine=off",
            "policy.share_prefixes=on",
            "policy.parallel={tensor: 2, sequence: true}",
            "data.max_prompt_tokens=4096",
            "rollout.sampling.max_new_tokens=512",
        ),
    ),
    Case(("recipes/qwen2.5-7b-grpo-2nodes.yaml",), "Qwen2.5-7B", 4),
    Case(("recipes/dapo/qwen2.5-math-7b.yaml",), "Qwen2.5-Math-7B", 4),
    Case(("recipes/gsm8k/qwen2.5-0.5b-grpo.yaml",), "Qwen2.5-0.5B", 4),
    Case(("recipes/qwen3-30b-a3b-grpo-1node.yaml",), "Qwen3-30B-A3B", 4),
    Case(("recipes/qwen3-30b-a3b-grpo-2nodes.yaml",), "Qwen3-30B-A3B", 4),
    Case(("recipes/qwen3-30b-a3b-grpo-4nodes.yaml",), "Qwen3-30B-A3B", 4),
    Case(("recipes/qwen3-8b-lora-1gpu.yaml",), "Qwen3-8B", 4),
    Case(("recipes/qwen3-30b-a3b-lora-1node.yaml",), "Qwen3-30B-A3B", 4),
    Case(
        ("recipes/qwen3-8b-lora-1gpu.yaml",),
        "Qwen3-8B",
        4,
        (
            "policy.parallel={tensor: 2, pipeline: 2}",
            "algorithm.estimator.name=ppo",
            "algorithm.kl.loss_coef=0.01",
            "rollout.engine.colocated=false",
            "cluster.launcher=torchrun",
            "cluster.processes_per_node=4",
        ),
        4,
    ),
    Case(
        ("recipes/qwen3-235b-a22b-gspo-32nodes.yaml",),
        "Qwen3-235B-A22B",
        15,
        ("policy.parallel.last_stage_layers=1",),
    ),
    # Two ranks hold a KV head.
    Case(
        ("recipes/qwen3-235b-a22b-gspo-32nodes.yaml",),
        "Qwen3-235B-A22B",
        15,
        (
            "policy.parallel={tensor: 8, pipeline: 8, context: 1, last_stage_layers: 1, expert: 8,"
            " expert_tensor: 1, sequence: true}",
        ),
    ),
    Case(
        ("models/grpo.yaml",),
        "DeepSeek-V3",
        13,
        (
            "policy.parallel={tensor: 4, pipeline: 4, last_stage_layers: 1, expert: 64,"
            " expert_tensor: 1, sequence: true}",
            "policy.megatron={recompute_granularity: full, recompute_method: uniform,"
            " recompute_num_layers: 1}",
        ),
        256,
    ),
    # Gated delta rules, and two KV heads over four ranks.
    Case(
        ("models/grpo.yaml",),
        "Qwen3-Next-80B-A3B",
        4,
        ("policy.parallel={tensor: 4, sequence: true, expert: 8, expert_tensor: 1}",),
        8,
    ),
    Case(
        ("models/grpo.yaml",),
        "Llama-3.1-70B",
        8,
        (
            "policy.parallel={tensor: 8, pipeline: 2, virtual_pipeline: 2, sequence: true}",
            "algorithm.estimator.name=ppo",
            "critic.offload=true",
            "policy.optimizer.offload=true",
            "reference.offload=false",
        ),
        32,
    ),
    Case(("models/grpo.yaml",), "Llama-3.1-8B", 2, ("model.dtype=fp32", CUT, *SHORT), 2),
    # Layers with other heads.
    Case(
        ("models/grpo.yaml",),
        "Gemma-4-31B",
        6,
        ("policy.parallel={tensor: 4, sequence: true}",),
        8,
    ),
    # Families with the layers of others, in a layout of each.
    *(
        Case(("models/grpo.yaml",), name, 4, (f"policy.parallel={layout}",), 8)
        for name, layout in (
            ("Gemma-3-27B", "{tensor: 4, sequence: true}"),
            ("Olmo-3-7B", "{tensor: 2, sequence: true}"),
            ("Mistral-Nemo-12B", "{tensor: 4, sequence: true}"),
            ("Ministral-3-8B", "{tensor: 2, context: 2, sequence: true}"),
            ("Seed-OSS-36B", "{tensor: 4, pipeline: 2, sequence: true}"),
            ("SmolLM3-3B", "{tensor: 1, pipeline: 2, sequence: false}"),
        )
    ),
    *(
        Case(
            ("models/grpo.yaml",),
            name,
            4,
            (
                f"policy.parallel={{tensor: {tp}, expert: {ep}, expert_tensor: 1, sequence: true}}",
                "policy.megatron={recompute_granularity: full, recompute_method: uniform,"
                " recompute_num_layers: 1}",
            ),
            64,
        )
        for name, tp, ep in (
            ("Moonlight-16B-A3B", 2, 8),
            ("GLM-4.7-Flash", 4, 8),
            ("Kimi-K2", 8, 64),
            ("Kimi-K2.5", 8, 64),
            ("gpt-oss-120b", 4, 16),
            ("MiniMax-M2", 4, 32),
            ("GLM-5", 8, 64),
        )
    ),
    # Layers that are one block each, and two KV heads over four ranks.
    *(
        Case(
            ("models/grpo.yaml",),
            "Nemotron-3-Nano-30B-A3B",
            7,
            (
                "policy.parallel={tensor: 4, sequence: true, expert: 8, expert_tensor: 1}",
                f"policy.megatron={megatron}",
            ),
            8,
        )
        for megatron in ("{}", "{recompute_granularity: selective, recompute_modules: [moe]}")
    ),
    # Multi-token prediction, on a stage without the embedding and on the only one.
    Case(
        ("recipes/glm-4.5-air-drafts-8nodes.yaml",),
        "GLM-4.5-Air",
        13,
        ("policy.parallel.last_stage_layers=1",),
    ),
    Case(
        ("models/grpo.yaml",),
        "DeepSeek-V3",
        4,
        (
            "policy.parallel={tensor: 4, expert: 64, expert_tensor: 1, sequence: true}",
            "policy.mtp_coef=0.1",
        ),
        64,
    ),
    # packs so small that the embedding's gradient is the peak
    Case(
        ("models/grpo.yaml",),
        "Qwen2.5-7B",
        4,
        (
            "policy.parallel={pipeline: 2, tensor: 1, sequence: false}",
            "policy.max_tokens_per_microbatch=1024",
            "data.max_prompt_tokens=512",
            "rollout.sampling.max_new_tokens=512",
        ),
        4,
    ),
]  # fmt: skip


def cut(folder: Path, model: str, layers: int, **others: object) -> Path:
    """A folder with the sizes of an example, and fewer layers."""
    given = json.loads((EXAMPLES / "models" / model / "config.json").read_text())
    folder.mkdir()
    text = given.get("text_config", given)
    text["num_hidden_layers"] = layers
    if "hybrid_override_pattern" in text:
        text["hybrid_override_pattern"] = text["hybrid_override_pattern"][:layers]
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps({**given, **others}))
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plan_and_dry_run_agree(case: Case, tmp_path: Path) -> None:
    overrides = [*case.overrides, f"model.path={cut(tmp_path / 'model', case.model, case.layers)}"]
    if "ppo" in case.files[0]:
        classifier = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
        critic = cut(tmp_path / "critic", case.model, case.layers, **classifier)
        overrides.append(f"critic.path={critic}")
    files = [EXAMPLES / name for name in case.files]
    config = load_config(files, overrides).config
    report = "\n".join(dry_run(config, world=case.world, gpu_memory=1 << 44))
    print(report)
    numbers = re.findall(r"^  (\S.*?) +([\d.,]+)(?: GiB)? +([\d.,]+)", report, re.MULTILINE)
    assert len(numbers) >= 6
    for name, own, planned in numbers:
        found, expected = (float(x.replace(",", "")) for x in (own, planned))
        if name.endswith("optimizer step") and config.policy.optimizer.offload:
            # Planned is a piece of one whole matrix, of which a rank may have a part.
            assert expected * 0.5 < found < expected * 1.05, name
            continue
        assert found == pytest.approx(expected, rel=0.05, abs=0.01), name
