"""Every layout and layout option that is refused: the message, and that its advice is accepted.

Each row goes through `rlcore validate` as a user would type it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlcore import cli

SIZES: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 72, "num_hidden_layers": 6, "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 31, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "moe": {**SIZES, **EXPERTS, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 8,
            "norm_topk_prob": True},
    "few": {**SIZES, "num_key_value_heads": 2, "model_type": "llama",
            "architectures": ["LlamaForCausalLM"]},
    "narrow": {**SIZES, "num_attention_heads": 3, "num_key_value_heads": 3, "model_type": "llama",
               "architectures": ["LlamaForCausalLM"]},
    "two_heads": {**SIZES, "model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 16,
        "num_global_key_value_heads": 2, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0},
    "hybrid": {**SIZES, "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"],
               "head_dim": 8, "linear_num_key_heads": 6, "linear_num_value_heads": 6},
}  # fmt: skip

# model; overrides; what is said; the overrides that it names instead (`-key`: leave the key out).
# Keys without a section are those of policy.parallel; `processes` is cluster.processes_per_node.
REFUSED: list[tuple[str, str, str, str]] = [
    # ranks
    ("dense", "tensor=2",
     "policy.parallel.tensor (override): the layout needs 2 processes and the local launcher "
     "starts 1: set cluster.processes_per_node=2, or cluster.launcher=torchrun; the model's "
     "attention heads must divide by it", "processes=2"),
    ("dense", "tensor=2 context=2 processes=6",
     "policy.parallel (override): 6 processes do not divide into models of 4 (tensor x pipeline x "
     "context, and experts): set cluster.processes_per_node to a multiple of 4", "processes=8"),
    ("dense", "context=2 processes=3",
     "policy.parallel (override): 3 processes do not divide into models of 2 (tensor x pipeline x "
     "context, and experts): set cluster.processes_per_node to a multiple of 2", "processes=4"),
    ("moe", "expert=3 processes=4",
     "policy.parallel (override): 4 processes do not divide into models of 3 (tensor x pipeline x "
     "context, and experts): set cluster.processes_per_node to a multiple of 3", "processes=6"),
    # tensor and sequence parallelism
    ("dense", "tensor=8 processes=8",
     "policy.parallel.tensor: 8 does not divide the model's attention heads (12); set it to 4",
     "tensor=4"),
    ("dense", "tensor=3 processes=6",
     "policy.parallel.tensor: 3 does not fit the model's 4 KV heads of size 8: expected a divisor "
     "of 4, or a multiple of it that divides 32, the rows of all KV heads; set it to 2",
     "tensor=2"),
    # its 2 KV heads are divided over 4 ranks, but not over 12 or 6: thirds of 8 rows
    ("few", "tensor=12 processes=12",
     "policy.parallel.tensor: 12 does not fit the model's 2 KV heads of size 8: expected a divisor "
     "of 2, or a multiple of it that divides 16, the rows of all KV heads; set it to 4",
     "tensor=4"),
    ("two_heads", "tensor=4 processes=4",
     "policy.parallel.tensor: 4 does not divide the model's 4 KV heads of layers with a window and "
     "2 of the others; set it to 2", "tensor=2"),
    ("hybrid", "tensor=4 processes=4",
     "policy.parallel.tensor: 4 does not divide the model's key heads of the gated delta rule (6); "
     "set it to 2", "tensor=2"),
    ("hybrid", "tensor=2 context=4 processes=8",
     "policy.parallel: tensor 2 x context 4 = 8 does not divide the model's 6 key heads of the "
     "gated delta rule, which context-parallel ranks share; set context to 3",
     "context=3 processes=6"),
    ("dense", "sequence=true",
     "policy.parallel.sequence (override): sequence parallelism needs policy.parallel.tensor > 1: "
     "set it to false",
     "sequence=false"),
    # pipelines
    ("dense", "pipeline=4 processes=4",
     "policy.parallel: pipeline 4 does not divide the model's 6 layers: 6 are left for 4 stages; "
     "set last_stage_layers=3 alone for 3 stages of 1 and a long last one", "last_stage_layers=3"),
    ("dense", "pipeline=5 processes=5",
     "policy.parallel: pipeline 5 does not divide the model's 6 layers: 6 are left for 5 stages; "
     "set last_stage_layers=2 alone for 4 stages of 1 and a long last one", "last_stage_layers=2"),
    ("dense", "pipeline=7 processes=42",
     "policy.parallel: pipeline 7 does not divide the model's 6 layers: 6 are left for 7 stages; "
     "choose at most 6 stages",
     "pipeline=6"),
    ("dense", "pipeline=2 first_stage_layers=4 last_stage_layers=4 processes=2",
     "policy.parallel: pipeline 2, first_stage_layers 4, last_stage_layers 4 does not divide the "
     "model's 6 layers: 2 too many "
     "are given; leave first_stage_layers and last_stage_layers out for 3 in each",
     "-first_stage_layers -last_stage_layers"),
    ("dense", "pipeline=2 first_stage_layers=2 last_stage_layers=2 processes=2",
     "policy.parallel: pipeline 2, first_stage_layers 2, last_stage_layers 2 does not divide the "
     "model's 6 layers: 2 are left "
     "for 0 stages; leave first_stage_layers and last_stage_layers out for 3 in each",
     "-first_stage_layers -last_stage_layers"),
    ("dense", "pipeline=3 first_stage_layers=1 processes=3",
     "policy.parallel: pipeline 3, first_stage_layers 1 does not divide the model's 6 layers: 5 "
     "are left for 2 stages; leave "
     "first_stage_layers and last_stage_layers out for 2 in each", "-first_stage_layers"),
    ("dense", "last_stage_layers=2",
     "policy.parallel.last_stage_layers (override): there is one stage: leave it out, or set "
     "policy.parallel.pipeline",
     "-last_stage_layers"),
    ("dense", "virtual_pipeline=2",
     "policy.parallel.virtual_pipeline (override): a virtual pipeline needs "
     "policy.parallel.pipeline > 1: set it to 1",
     "virtual_pipeline=1"),
    ("dense", "pipeline=2 virtual_pipeline=2 processes=2",
     "policy.parallel: virtual_pipeline 2 does not divide the layers of every stage, [3, 3] of 6 "
     "layers; set it to 1, or "
     "first_stage_layers and last_stage_layers so that it does", "first_stage_layers=2"),
    # experts
    ("moe", "tensor=2 processes=2",
     "policy.parallel.sequence: false, but experts under tensor 2 need sequence parallelism: "
     "otherwise every tensor-parallel rank would send all tokens to them; set it to true",
     "sequence=true"),
    ("moe", "tensor=2 sequence=true expert_tensor=1 processes=2",
     "policy.parallel: tensor 2, expert_tensor 1, expert 1: megatron-core sums the gradients of "
     "experts over the data-parallel ranks of the dense weights, which misses the copies that the "
     "tensor-parallel ranks hold; leave expert_tensor out, or set expert=2", "expert=2"),
    ("moe", "tensor=4 sequence=true expert_tensor=1 processes=4",
     "policy.parallel: tensor 4, expert_tensor 1, expert 1: megatron-core sums the gradients of "
     "experts over the data-parallel ranks of the dense weights, which misses the copies that the "
     "tensor-parallel ranks hold; leave expert_tensor out",
     "-expert_tensor"),
    ("moe", "tensor=2 sequence=true expert_tensor=4 expert=2 processes=8",
     "policy.parallel.expert_tensor: 4 does not divide tensor (2); leave it out, or set it to 2",
     "expert_tensor=2"),
    ("moe", "expert=4 processes=12",
     "policy.parallel.expert: 4 does not divide the model's experts (6); set it to 3", "expert=3"),
    ("dense", "expert=2 processes=2",
     "policy.parallel.expert: the llama model has no experts to lay out; leave it out", "-expert"),
    ("dense", "tensor=2 expert_tensor=1 processes=2",
     "policy.parallel.expert_tensor: the llama model has no experts to lay out; leave it out",
     "-expert_tensor"),
    # micro-batches: one token of a prompt and 1024 of a response, and pads
    ("dense", "policy.max_tokens_per_microbatch=1024",
     "policy.max_tokens_per_microbatch (override): got 1024, less than one sample can have: "
     "rollout.sampling.max_new_tokens "
     "(1024); set it to 1025 or more", "policy.max_tokens_per_microbatch=1025"),
    ("dense", "context=2 processes=2 policy.max_tokens_per_microbatch=1027",
     "policy.max_tokens_per_microbatch (override): got 1027, less than one sample can have: "
     "rollout.sampling.max_new_tokens "
     "(1024), padded to a multiple of 4 by the layout; set it to 1028 or more",
     "policy.max_tokens_per_microbatch=1028"),
    ("dense", "context=2 tensor=2 sequence=true processes=4 data.max_prompt_tokens=17 "
     "policy.max_tokens_per_microbatch=1047",
     "policy.max_tokens_per_microbatch (override): got 1047, less than one sample can have: "
     "data.max_prompt_tokens (17) + rollout.sampling.max_new_tokens (1024), padded to a multiple "
     "of 8 by the layout; set it to 1048 or more",
     "policy.max_tokens_per_microbatch=1048"),
    # routing replay
    ("dense", "policy.routing_replay=logprobs",
     "policy.routing_replay: the llama model has no experts to replay; set it to none",
     "policy.routing_replay=none"),
    # Transformer Engine
    ("dense", "policy.transformer_engine=on",
     "policy.transformer_engine (override): got 'on', expected one of 'auto' or 'off'",
     "policy.transformer_engine=auto"),
    ("dense", "policy.fp8.recipe=tensorwise policy.transformer_engine=off",
     "policy.fp8 (override): needs Transformer Engine's layers: set policy.transformer_engine to "
     "auto",
     "policy.transformer_engine=auto"),
    ("dense", "policy.fp8.recipe=tensorwise model.dtype=fp32",
     "policy.fp8 (override): needs model.dtype: bf16, got fp32", "model.dtype=bf16"),
    # fields of Megatron
    *(("dense", f"pipeline=2 processes=2 policy.megatron.{field}=true",
       f"policy.megatron.{field}: cannot be set here: it follows from the pipeline schedule: "
       f"batched transfers are ambiguous "
       "where two stages exchange several chunks (pipeline 2 with virtual_pipeline > 1), and the "
       "gradients come out wrong without a word; leave it out", f"-policy.megatron.{field}")
      for field in ("batch_p2p_comm", "overlap_p2p_comm")),
    ("dense", "policy.megatron.context_parallel_size=2",
     "policy.megatron.context_parallel_size: cannot be set here: set it under policy.parallel",
     "-policy.megatron.context_parallel_size context=2 processes=2"),
    ("dense", "policy.megatron.moe_aux_loss_coeff=0.1",
     "policy.megatron.moe_aux_loss_coeff: cannot be set here: the model has no experts",
     "-policy.megatron.moe_aux_loss_coeff"),
    ("moe", "policy.megatron.moe_token_dropping=true",
     "policy.megatron.moe_token_dropping: cannot be set here: a token's experts would depend on "
     "the other tokens, and so would its log-prob", "-policy.megatron.moe_token_dropping"),
    ("dense", "policy.megatron={recompute_granularity: full, recompute_method: uniform, "
     "recompute_num_layers: 4}",
     "policy.megatron.recompute_num_layers: 4 does not divide the layers of a model chunk (6); set "
     "it to 3",
     "policy.megatron.recompute_num_layers=3"),
    ("moe", "policy.megatron={recompute_granularity: selective, recompute_modules: [mlp]}",
     "policy.megatron.recompute_modules: mlp: no layer of the qwen3_moe model has a dense MLP; "
     "expected some of core_attn, moe, "
     "layernorm, moe_act", "policy.megatron.recompute_modules=[moe]"),
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "data.jsonl").write_text('{"prompt": "1+1="}\n')
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "model.safetensors").touch()  # only that it is there is looked at
    return folder


def override(word: str) -> str:
    key = word.partition("=")[0]
    if key == "processes":
        return f"cluster.processes_per_node{word.removeprefix(key)}"
    return word if "." in key else f"policy.parallel.{word}"


def arguments(model: Path, *texts: str) -> list[str]:
    """The command line of overrides, a later one of a key over an earlier one."""
    words = [word for text in texts for word in re.split(r" (?=[-\w.]+)(?![^{]*})", text) if word]
    dropped = {override(word.removeprefix("-")) for word in words if word.startswith("-")}
    remaining = [override(word) for word in words if not word.startswith("-")]
    data = model.parent / "data.jsonl"
    given = ("run.name=refused", f"model.path={model}", f"data.paths={data}", "training.steps=1")
    return [*given, *(word for word in remaining if word.partition("=")[0] not in dropped)]


@pytest.mark.parametrize(
    ("model", "overrides", "says", "instead"),
    REFUSED,
    ids=[f"{row[0]} {row[1]}" for row in REFUSED],
)
def test_what_is_refused_and_what_is_right_instead(
    model: str,
    overrides: str,
    says: str,
    instead: str,
    models: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["validate", *arguments(models / model, overrides)]) == 2
    assert capsys.readouterr().err == f"rlcore: {says}\n"
    code = cli.main(["validate", *arguments(models / model, overrides, instead)])
    assert code == 0, capsys.readouterr().err


def test_other_models_are_laid_out_as_the_policy_is(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    critic = models / "narrow"
    given = arguments(
        models / "dense", f"tensor=2 processes=2 algorithm.estimator.name=ppo critic.path={critic}"
    )
    assert cli.main(["validate", *given]) == 2
    assert (
        capsys.readouterr().err
        == f"rlcore: critic.path: {critic} does not fit the policy's layout:"
        " policy.parallel.tensor: 2 does not divide the model's attention heads (3); set it"
        " to 1\n"
    )
    assert cli.main(["validate", *given, "policy.parallel.tensor=1"]) == 0


def test_what_only_the_start_of_a_run_knows(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the start of a run knows whether Transformer Engine is usable on its machine."""
    given = [
        *arguments(models / "moe", "policy.fp8.recipe=tensorwise"),
        "cluster.processes_per_node=2",
    ]
    assert cli.main(["validate", *given]) == 0
    capsys.readouterr()
    assert cli.main(["train", *given]) == 2
    assert (
        capsys.readouterr().err
        == "rlcore: policy.fp8: needs Transformer Engine's layers, got megatron-core local spec,"
        " torch RMSNorm (Transformer Engine does not run on cpu); remove policy.fp8\n"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        "tensor=3 processes=3",
        "policy.routing_replay=logprobs processes=2",
        "policy.megatron.batch_p2p_comm=true processes=2",
        (
            "policy.megatron={recompute_granularity: selective, recompute_modules: [layernorm]}"
            " processes=2"
        ),
    ],
)
def test_a_refusal_comes_before_any_rank(
    overrides: str,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("rlcore.launch.local.launch_ranks", start)
    assert cli.main(["train", *arguments(models / "dense", overrides)]) == 2
    assert capsys.readouterr().err.startswith("rlcore: policy.")
