"""Keys of other trainers lead to ours, and the README prints the same table."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.config.messages import suggest, unknown_key
from rlcore.config.other_trainers import keys_like, rows
from rlcore.config.schema import known_keys, sections

README = Path(__file__).parents[3] / "README.md"

# The keys that the example scripts of each trainer set most often, counted in their repositories.
# What a trainer shares with megatron-core's shapes of a model is left out: config.json says it.
VERL = """
trainer.project_name trainer.logger trainer.experiment_name data.train_files data.val_files
trainer.total_epochs data.train_batch_size trainer.nnodes trainer.n_gpus_per_node data.truncation
data.max_response_length data.max_prompt_length algorithm.adv_estimator
actor_rollout_ref.rollout.name actor_rollout_ref.model.path
actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.optim.lr trainer.save_freq
actor_rollout_ref.actor.use_kl_loss trainer.test_freq
actor_rollout_ref.rollout.tensor_model_parallel_size
actor_rollout_ref.rollout.gpu_memory_utilization algorithm.use_kl_in_reward
data.filter_overlong_prompts trainer.critic_warmup
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu actor_rollout_ref.rollout.n
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
actor_rollout_ref.model.enable_gradient_checkpointing actor_rollout_ref.actor.kl_loss_coef
actor_rollout_ref.actor.fsdp_config.param_offload actor_rollout_ref.model.use_remove_padding
actor_rollout_ref.actor.entropy_coeff actor_rollout_ref.actor.fsdp_config.optimizer_offload
actor_rollout_ref.actor.kl_loss_type actor_rollout_ref.ref.fsdp_config.param_offload
trainer.val_before_train actor_rollout_ref.actor.use_dynamic_bsz
actor_rollout_ref.rollout.enable_chunked_prefill
actor_rollout_ref.actor.ppo_max_token_len_per_gpu data.return_raw_chat
actor_rollout_ref.actor.megatron.tensor_model_parallel_size critic.optim.lr critic.model.path
trainer.default_local_dir algorithm.kl_ctrl.kl_coef data.prompt_key trainer.total_training_steps
actor_rollout_ref.rollout.multi_turn.tool_config_path trainer.resume_mode
actor_rollout_ref.actor.clip_ratio_low actor_rollout_ref.actor.clip_ratio_high
actor_rollout_ref.actor.policy_loss.loss_mode actor_rollout_ref.actor.loss_agg_mode
reward_model.reward_kwargs.overlong_buffer_cfg.len actor_rollout_ref.rollout.temperature
"""
SLIME = """
hf-checkpoint tensor-model-parallel-size rollout-batch-size prompt-data
pipeline-model-parallel-size lr-decay-style lr input-key expert-tensor-parallel-size
expert-model-parallel-size context-parallel-size actor-num-nodes actor-num-gpus-per-node
weight-decay use-dynamic-batch-size sequence-parallel rollout-shuffle ref-load max-tokens-per-gpu
adam-beta1 adam-beta2 global-batch-size rollout-num-gpus-per-engine rollout-max-response-len
recompute-num-layers recompute-granularity num-rollout n-samples-per-prompt kl-loss-type
kl-loss-coef advantage-estimator wandb-project wandb-group use-wandb sglang-mem-fraction-static
rollout-temperature entropy-coef apply-chat-template save-interval save label-key load eps-clip
use-kl-loss rm-type eval-prompt-data eval-interval eps-clip-high colocate balance-data wandb-key
n-samples-per-eval-prompt eval-max-response-len eval-top-p micro-batch-size optimizer-cpu-offload
custom-rm-path custom-generate-function-path dynamic-sampling-filter-path use-tis
"""
TRL = """
model_name_or_path dataset_name train_dataset reward_funcs num_generations max_completion_length
max_prompt_length beta epsilon epsilon_high delta num_iterations loss_type scale_rewards
importance_sampling_level steps_per_generation gradient_accumulation_steps learning_rate
lr_scheduler_type warmup_ratio max_grad_norm per_device_train_batch_size num_train_epochs
max_steps save_steps eval_steps logging_steps output_dir report_to run_name seed bf16
gradient_checkpointing use_vllm vllm_mode vllm_gpu_memory_utilization vllm_server_base_url
temperature top_p top_k reward_weights mask_truncated_completions chat_template_kwargs
shuffle_dataset peft_config max_tool_calling_iterations log_completions
vllm_importance_sampling_correction use_bias_correction_kl
"""
OPENRLHF = """
actor.model_name_or_path data.prompt_dataset data.input_key data.label_key data.apply_chat_template
data.max_len train.batch_size rollout.batch_size rollout.n_samples_per_prompt
rollout.max_new_tokens vllm.tensor_parallel_size vllm.num_engines vllm.gpu_memory_utilization
algo.kl.init_coef algo.kl.estimator algo.kl.use_loss algo.advantage.estimator algo.advantage.gamma
algo.advantage.is_correction_enable actor.adam.lr critic.adam.lr actor.num_nodes
actor.num_gpus_per_node ckpt.save_steps ckpt.output_dir ckpt.save_hf ckpt.load_enable
train.colocate_all train.async_enable train.agent_func_path train.num_episodes train.max_epochs
train.micro_batch_size reward.remote_url reward.normalize_enable eval.steps logger.wandb.key
ds.packing_samples ds.zero_stage ds.adam_offload ds.ring_attn_size
actor.gradient_checkpointing_enable actor.eps_clip_low_high algo.dynamic_filtering_enable
"""
TRAINERS = {"verl": VERL, "slime": SLIME, "TRL": TRL, "OpenRLHF": OPENRLHF}
ALL = [(trainer, key) for trainer, keys in TRAINERS.items() for key in keys.split()]


@pytest.mark.parametrize(("trainer", "key"), ALL)
def test_the_commonest_keys_of_other_trainers_have_a_hint(trainer, key):
    found = keys_like(key.split("."))
    assert found, f"{trainer}'s {key} leads nowhere"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("loss_type", "algorithm.loss.aggregation or algorithm.loss.name"),
        ("model.name", "model.path"),
        ("data.train_files", "data.paths"),
        ("rollout.n", "rollout.samples_per_prompt"),
        ("actor_rollout_ref.rollout.n", "rollout.samples_per_prompt"),
        ("reward_funcs", "reward.parts"),
        ("eps-clip", "algorithm.loss.clip_low"),
        ("rollout-batch-size", "rollout.prompts_per_step"),
        ("--rollout-batch-size", "rollout.prompts_per_step"),
        ("wandb", "tracking.wandb.enabled"),
        # the longer name counts
        ("rollout.tensor_model_parallel_size", "rollout.engine.tensor_parallel"),
        ("actor.megatron.tensor_model_parallel_size", "policy.parallel.tensor"),
        ("critic.optim.lr", "critic.optimizer.lr"),
    ],
)
def test_keys_of_other_trainers(key, meant):
    assert suggest(tuple(key.split("."))) == meant


def test_a_section_of_another_trainer_is_looked_up_key_by_key():
    given = {"rollout": {"n": 8}, "model": {"path": "x", "zzzzzz": 1}}
    assert unknown_key(("actor_rollout_ref",), given) == (
        "unknown key; actor_rollout_ref.rollout.n is rollout.samples_per_prompt here,"
        " actor_rollout_ref.model.path is model.path here"
    )


def test_what_has_no_key_says_why():
    assert unknown_key(("actor_rollout_ref", "model", "use_remove_padding")) == (
        "unknown key (no key: sequences are always packed, without padding)"
    )


@pytest.mark.parametrize("here", [here.removeprefix("* ") for here, _ in rows()])
def test_each_row_names_a_key_that_exists_or_a_reason(here):
    if here.startswith("("):
        assert here.endswith(")")
        return
    key = here.partition(" ")[0]
    own_keywords = key.startswith(("algorithm.loss.", "algorithm.estimator."))
    known = {*known_keys(), *(".".join(path) for path in sections())}
    assert key in known or f"{key}.NAME" in known or own_keywords


def markdown() -> str:
    """The README's table: the marked rows, with the first name of each trainer."""
    lines = ["| here | verl | slime | TRL | OpenRLHF |", "|---" * 5 + "|"]
    for here, cells in rows():
        if here.startswith("* "):
            key, _, words = here.removeprefix("* ").partition(" ")
            firsts = [cell.partition(" ")[0] for cell in cells]
            # slime's are flags
            firsts[1] = firsts[1] and f"--{firsts[1].replace('_', '-')}"
            row = [f"`{key}` {words}".strip(), *(first and f"`{first}`" for first in firsts)]
            lines.append("".join(f"| {cell} " if cell else "| " for cell in row) + "|")
    return "\n".join(lines)


def test_the_readme_prints_the_table():
    assert markdown() in README.read_text(encoding="utf-8")
