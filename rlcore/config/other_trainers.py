"""The keys of other trainers and their counterparts here.

The columns are verl, slime, TRL and OpenRLHF; the last also has names of NeMo-RL, prime-rl, AReaL
and open-instruct. The README shows the rows that are marked with `*`; errors about unknown keys use
all rows. A first column without a key says, in parentheses, why there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

# fmt: off
TABLE = """
* model.path | model.path | hf_checkpoint | model_name_or_path | actor.model_name_or_path model.name model.pretrained_checkpoint pretrain
* data.paths | data.train_files | prompt_data | train_dataset dataset_name | data.prompt_dataset data.dataset
* data.prompt_key | data.prompt_key | input_key | | data.input_key dataset_text_field
* data.label_key | | label_key | |
* rollout.prompts_per_step | data.train_batch_size | rollout_batch_size | | rollout.batch_size num_prompts_per_step
* rollout.samples_per_prompt | rollout.n | n_samples_per_prompt | num_generations | n_samples_per_prompt rollouts_per_example group_size num_samples_per_prompt_rollout num_generations_per_prompt
* algorithm.minibatches (a count) | actor.ppo_mini_batch_size | global_batch_size num_steps_per_rollout | steps_per_generation gradient_accumulation_steps | train.batch_size num_mini_batches
* algorithm.epochs | actor.ppo_epochs | | num_iterations | train.max_epochs
* policy.max_tokens_per_microbatch | actor.ppo_max_token_len_per_gpu | max_tokens_per_gpu | per_device_train_batch_size | train.max_tokens_per_gpu
* algorithm.estimator.name | algorithm.adv_estimator | advantage_estimator | | algo.advantage.estimator
* algorithm.kl.loss_coef | actor.kl_loss_coef use_kl_loss | kl_loss_coef use_kl_loss | beta | algo.kl.use_loss
* algorithm.kl.reward_coef | algorithm.kl_ctrl.kl_coef algorithm.use_kl_in_reward | kl_coef | | algo.kl.init_coef
* algorithm.loss.clip_low | actor.clip_ratio_low actor.clip_ratio | eps_clip | epsilon | actor.eps_clip_low_high cliprange ratio_clip_min
* algorithm.loss.clip_high | actor.clip_ratio_high | eps_clip_high | epsilon_high | ratio_clip_max
* algorithm.loss.aggregation | actor.loss_agg_mode | calculate_per_token_loss | loss_type | token_level_loss
* rollout.sampling.max_new_tokens | data.max_response_length | rollout_max_response_len | max_completion_length | rollout.max_new_tokens response_length max_tokens
* reward.parts | custom_reward_function reward_model.reward_manager | custom_rm_path rm_type | reward_funcs | reward.remote_url
* policy.parallel.tensor | actor.megatron.tensor_model_parallel_size ref.megatron.tensor_model_parallel_size | tensor_model_parallel_size | | ds.tensor_parallel_size
algorithm.loss.name | policy_loss.loss_mode | loss_type | importance_sampling_level |
algorithm.loss.dual_clip | actor.clip_ratio_c | eps_clip_c | delta |
algorithm.loss.norm_length | loss_scale_factor | | |
algorithm.entropy_coef | actor.entropy_coeff | entropy_coef | entropy_coef | entropy_loss_coef
algorithm.kl.loss_kind | actor.kl_loss_type | kl_loss_type | | algo.kl.estimator
algorithm.kl.loss_unbiased | | use_unbiased_kl | use_bias_correction_kl |
algorithm.estimator.gamma | algorithm.gamma | gamma | | algo.advantage.gamma
algorithm.estimator.lam | algorithm.lam | lambd | | algo.advantage.lambd
algorithm.estimator.normalize_std | norm_adv_by_std_in_grpo | disable_grpo_std_normalization | scale_rewards | reward.normalize_enable
algorithm.normalize_advantages | | normalize_advantages | whiten_advantages | advantages_norm
algorithm.old_logprobs | algorithm.rollout_correction.bypass_mode | use_rollout_logprobs | |
algorithm.correction.name | rollout_is algorithm.rollout_correction.rollout_is | use_tis | vllm_importance_sampling_correction | algo.advantage.is_correction_enable algo.advantage.is_correction_type
algorithm.correction.upper | rollout_is_threshold | tis_clip tis_imp_ratio_cap | vllm_importance_sampling_cap vllm_importance_sampling_clip_max |
algorithm.correction.lower | | tis_clip_low | vllm_importance_sampling_clip_min |
algorithm.distillation.coef | | opd_kl_coef use_opd | |
teacher.path | | opd_teacher_load | |
reference.path | ref.model.path | ref_load | | ref.model_name_or_path
reference.offload | ref.fsdp_config.param_offload ref.megatron.param_offload | | |
critic.path | critic.model.path | critic_load | | critic.model_name_or_path
critic.optimizer.lr | critic.optim.lr | critic_lr | | critic.adam.lr
critic.warmup_steps | trainer.critic_warmup | num_critic_only_steps | |
critic.value_clip | cliprange_value | value_clip | | vf_clip
policy.optimizer.lr | actor.optim.lr | lr | learning_rate | actor.adam.lr adam.lr
policy.optimizer.min_lr | min_lr_ratio | min_lr | |
policy.optimizer.schedule | lr_scheduler_type warmup_style | lr_decay_style | lr_scheduler_type |
policy.optimizer.warmup_steps | lr_warmup_steps lr_warmup_steps_ratio | lr_warmup_iters lr_warmup_fraction | warmup_steps warmup_ratio lr_warmup_steps |
policy.optimizer.decay_steps | lr_decay_steps | lr_decay_iters | |
policy.optimizer.weight_decay | actor.optim.weight_decay | weight_decay | weight_decay | l2
policy.optimizer.beta1 | | adam_beta1 | adam_beta1 |
policy.optimizer.beta2 | betas | adam_beta2 | adam_beta2 | adam_betas
policy.optimizer.clip_grad | actor.grad_clip | clip_grad | max_grad_norm | max_norm
policy.optimizer.distributed | | use_distributed_optimizer | | ds.zero_stage
policy.optimizer.offload | optimizer_offload | optimizer_cpu_offload use_precision_aware_optimizer | | ds.adam_offload
policy.parallel.pipeline | pipeline_model_parallel_size | pipeline_model_parallel_size | |
policy.parallel.virtual_pipeline | virtual_pipeline_model_parallel_size | num_layers_per_virtual_pipeline_stage | |
policy.parallel.context | context_parallel_size ulysses_sequence_parallel_size | context_parallel_size | | ds.ring_attn_size
policy.parallel.expert | expert_model_parallel_size | expert_model_parallel_size | |
policy.parallel.expert_tensor | expert_tensor_parallel_size | expert_tensor_parallel_size | |
policy.parallel.sequence | sequence_parallel | sequence_parallel | |
policy.megatron | override_transformer_config enable_gradient_checkpointing | recompute_granularity recompute_method recompute_num_layers moe_token_dispatcher_type | gradient_checkpointing | gradient_checkpointing_enable
model.dtype | | bf16 fp16 | bf16 fp16 dtype | ds.param_dtype
policy.routing_replay | router_replay | use_routing_replay use_rollout_routing_replay | |
policy.logprobs.keep_sets | | sampling_mask | |
policy.logprobs.fp32_head | | | cast_lm_head_to_fp32 |
rollout.engine.kind | rollout.name | | use_vllm vllm_mode | vllm_sync_backend
rollout.engine.count | | rollout_num_gpus | | vllm.num_engines
rollout.engine.tensor_parallel | rollout.tensor_model_parallel_size | rollout_num_gpus_per_engine | vllm_tensor_parallel_size | vllm.tensor_parallel_size
rollout.engine.server | gpu_memory_utilization enforce_eager enable_chunked_prefill max_num_batched_tokens max_num_seqs | sglang_mem_fraction_static | vllm_gpu_memory_utilization | vllm.gpu_memory_utilization
rollout.engine.urls | | rollout_external_engine_addrs | vllm_server_base_url vllm_server_host |
rollout.engine.colocated | hybrid_engine free_cache_engine | colocate | vllm_enable_sleep_mode | train.colocate_all vllm.enable_sleep
rollout.sampling.temperature | rollout.temperature | rollout_temperature | temperature | rollout.temperature
rollout.sampling.top_p | rollout.top_p | rollout_top_p | top_p | rollout.top_p
rollout.sampling.top_k | rollout.top_k | rollout_top_k | top_k |
rollout.sampling.stop | | rollout_stop | | stop_strings
rollout.sampling.stop_token_ids | | rollout_stop_token_ids | |
rollout.max_staleness | staleness_threshold async_training.staleness_threshold | update_weights_interval | | train.async_enable max_off_policy_steps max_async_level max_head_offpolicyness
rollout.on_update | async_training.partial_rollout | partial_rollout | |
rollout.filters | algorithm.filter_groups | dynamic_sampling_filter_path | | algo.dynamic_filtering_enable algo.dynamic_filtering_range
rollout.oversample | gen_batch_size | over_sampling_batch_size | |
rollout.workflow.name | rollout.multi_turn.enable multi_turn.tool_config_path agent_loop | custom_generate_function_path rollout_function_path | rollout_func environment_factory | train.agent_func_path
rollout.workflow.max_turns | max_assistant_turns max_user_turns | | max_tool_calling_iterations | max_steps_per_episode
rollout.tool_parser | multi_turn.format | | |
data.max_prompt_tokens | data.max_prompt_length filter_overlong_prompts truncation | rollout_max_prompt_len | max_prompt_length | data.max_len
data.shuffle | data.shuffle | rollout_shuffle | shuffle_dataset |
data.as_chat | return_raw_chat | apply_chat_template | | data.apply_chat_template
data.chat_template_kwargs | apply_chat_template_kwargs | | chat_template_kwargs |
data.tools_key | | tool_key | tools |
reward.by | reward_fn_key | | |
reward.parts.NAME.service.url | reward_model.model.path | rm_url | reward_model_path | remote_rm_url reward.model_name_or_path
reward.parts.NAME.weight | | | reward_weights |
reward.parts.NAME.args | reward_kwargs overlong_buffer_cfg overlong_buffer_cfg.len | | |
reward.non_stop_penalty | | | mask_truncated_completions missing_eos_penalty | stop_properly_penalty_coef
training.steps | total_training_steps | num_rollout train_iters | max_steps | max_num_steps
training.epochs | total_epochs | num_epoch | num_train_epochs | max_num_epochs
training.episodes | | | total_episodes | train.num_episodes
evaluation.paths | data.val_files | eval_prompt_data | eval_dataset | eval.dataset
evaluation.every | trainer.test_freq | eval_interval | eval_steps | eval.steps val_period
evaluation.at_start | val_before_train | skip_eval_before_train | eval_on_start |
evaluation.samples_per_prompt | val_kwargs.n | n_samples_per_eval_prompt | num_generations_eval |
evaluation.temperature | val_kwargs.temperature val_kwargs.do_sample | eval_temperature | |
evaluation.top_p | val_kwargs.top_p | eval_top_p | |
evaluation.max_new_tokens | | eval_max_response_len | |
run.name | trainer.experiment_name | wandb_group | run_name | wandb.run_name
run.dir | trainer.default_local_dir | save | output_dir | ckpt.output_dir ckpt.path
run.seed | data.seed | rollout_seed | seed |
checkpoint.every | trainer.save_freq | save_interval | save_steps | ckpt.save_steps
checkpoint.keep | max_actor_ckpt_to_keep | | save_total_limit | max_ckpt_num keep_top_k
checkpoint.export_hf | | save_hf | | ckpt.save_hf
checkpoint.best.metric | | | metric_for_best_model | metric_name
tracking.wandb.enabled | trainer.logger | use_wandb | report_to | use_wandb wandb with_tracking
tracking.wandb.project | trainer.project_name | wandb_project | | wandb.project wandb_project_name
tracking.wandb.entity | | wandb_team | | wandb_entity
tracking.wandb.mode | | wandb_mode | |
tracking.tensorboard | | tb_project_name use_tensorboard | logging_dir | logger.tensorboard_dir
tracking.show_samples | log_val_generations | | num_completions_to_print log_completions | num_val_samples_to_print
cluster.processes_per_node | trainer.n_gpus_per_node | actor_num_gpus_per_node num_gpus_per_node | | actor.num_gpus_per_node gpus_per_node
cluster.nodes | trainer.nnodes | actor_num_nodes | | actor.num_nodes num_nodes
cluster.ray.runtime_env | | runtime_env_json | |
(no key: sequences are always packed, without padding) | use_remove_padding use_dynamic_bsz | use_dynamic_batch_size balance_data | | ds.packing_samples
policy.max_tokens_per_microbatch (for every pass) | ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu log_prob_use_dynamic_bsz | micro_batch_size log_probs_max_tokens_per_gpu | | train.micro_batch_size rollout.micro_batch_size
policy.optimizer.offload | actor.fsdp_config.param_offload actor.megatron.param_offload | offload offload_train | | ds.enable_sleep
(no key: `rlcore train ... --resume` continues a run) | trainer.resume_mode | load | resume_from_checkpoint | ckpt.load_enable
(no key: WANDB_API_KEY in the environment) | | wandb_key | | logger.wandb.key
policy.lora.rank | lora_rank model.lora.rank | | lora_r peft_config use_peft | lora_rank model.lora_config.dim
policy.lora.alpha | lora_alpha model.lora.alpha | | lora_alpha | lora_alpha model.lora_config.alpha
policy.lora.targets | target_modules model.lora.target_modules | | lora_target_modules | lora_target_modules
policy.lora.path | lora_adapter_path model.lora.adapter_path | | |
(no key: every step is printed and logged) | | | logging_steps | logger.logging_steps
"""  # noqa: E501
# fmt: on


def keys_like(path: Sequence[str]) -> list[str]:
    """Return the counterparts of another trainer's key: keys, or the reason for none.

    A path matches a name of the table if one ends with the other, as `rollout.n` and
    `actor_rollout_ref.rollout.n`; the longest match counts.
    """
    given = tuple(_plain(part) for part in path)
    best: list[str] = []
    rank = (0, False)
    for name, here in _names():
        common = min(len(name), len(given))
        ranked = (common, len(name) <= len(given))
        if name[-common:] != given[-common:] or ranked < rank:
            continue
        if ranked > rank:
            best = []
            rank = ranked
        if here not in best:
            best.append(here)
    return best


def rows() -> Iterator[tuple[str, list[str]]]:
    """Yield the key of each row (with `*` if the README shows it) and each trainer's names."""
    for line in TABLE.strip().splitlines():
        here, *names = [cell.strip() for cell in line.split("|")]
        yield here, names


@cache
def _names() -> tuple[tuple[tuple[str, ...], str], ...]:
    return tuple(
        (tuple(_plain(part) for part in name.split(".")), here.removeprefix("* "))
        for here, cells in rows()
        for cell in cells
        for name in cell.split()
    )


def _plain(part: str) -> str:
    return part.strip("-+").replace("-", "_").lower()
