from __future__ import annotations

import pytest

from rlcore.config.checks.all_checks import CHECKS, describe_checks

SFT = "algorithm.loss.name=sft"
DPO = "algorithm.estimator.name=dpo"
GDPO = "algorithm.estimator.name=gdpo"
CURRICULUM = "data.curriculum.name=pass_rate"
FORMAT = "{function: format, args: {pattern: x}}"
JUDGE = "{judge: {url: 'http://x:1', model: m}}"
PPO = "algorithm.estimator.name=ppo"
LORA = "policy.lora.rank=8"
TIS = "algorithm.correction.name=tis"
SGLANG = "rollout.engine.kind=sglang"
FP32 = "policy.logprobs.fp32_head=true"
FP32_HEAD = "rollout.engine.server.enable_fp32_lm_head"
BY_URL = (SGLANG, "rollout.engine.urls=[http://x:1]")
COUNT = "rollout.engine.count"
ROUTER = "rollout.engine.router_url=http://x:1"
TP_2 = (SGLANG, "rollout.engine.tensor_parallel=2")
PARTS = "rollout.engine.server.attn_dp_size"
DRAFTS = "rollout.engine.server={speculative_algorithm: NEXTN"
SERVER = "rollout.engine.server"
TWO = ("cluster.launcher=torchrun", "cluster.processes_per_node=2")


def paths(lines: list[str]) -> list[str]:
    return [line.split(" ")[0].rstrip(":") for line in lines]


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        # the run's length
        (["training.steps=null"], ["training"]),
        (["training.epochs=1"], ["training.epochs"]),
        (["training.steps=null", "training.episodes=8", "training.epochs=1"], ["training.epochs"]),
        ([SFT, "training.steps=null", "training.episodes=8"], ["training.episodes"]),
        # early stopping
        (["training.early_stopping=true"], ["training.target_kl"]),
        (["training.early_stopping=true", "training.target_kl=0"], ["training.target_kl"]),
        (["training.target_kl=-1"], ["training.target_kl"]),
        ([SFT, "training.early_stopping=on", "training.target_kl=1"], ["training.early_stopping"]),
        (["training.early_stopping=on", "training.target_kl=1", "training.debug=rollout_only"],
         ["training.early_stopping"]),
        # adapters
        ([LORA, "policy.fp8.margin=0", "model.dtype=bf16"], ["policy.lora"]),
        ([LORA, "policy.mtp_coef=0.1"], ["policy.mtp_coef"]),
        ([LORA, *BY_URL, ROUTER], ["rollout.engine.router_url"]),
        ([LORA, SGLANG, "rollout.on_update=in_place", "rollout.max_staleness=1"],
         ["rollout.on_update"]),
        ([LORA, "rollout.engine.kind=other.engines:Engine"], ["rollout.engine.kind"]),
        # coefficients that nothing would read
        ([PPO, "algorithm.estimator.kl_coef=0.1"], ["algorithm.estimator.kl_coef"]),
        (["algorithm.loss.kl_coef=0.1"], ["algorithm.loss.kl_coef"]),
        # the sum of the reward, which nothing would read
        ([GDPO, "reward.non_stop_penalty=0"], ["reward.non_stop_penalty"]),
        ([GDPO, "reward.on_error=-1"], ["reward.on_error"]),
        ([GDPO, "algorithm.estimator.reward_weights=[1]"], ["algorithm.estimator.reward_weights"]),
        ([GDPO, "rollout.samples_per_prompt=1"], ["rollout.samples_per_prompt"]),
        # a curriculum without results, an order, or verdicts
        ([SFT, CURRICULUM], ["data.curriculum"]),
        ([CURRICULUM, "data.shuffle=false"], ["data.shuffle"]),
        ([CURRICULUM, f"reward.parts={{a: {FORMAT}}}"], ["data.curriculum.passes_at"]),
        ([CURRICULUM, "reward.parts={a: {service: {url: 'http://x:1'}}}"],
         ["data.curriculum.passes_at"]),
        ([CURRICULUM, f"reward.parts={{a: {JUDGE}}}"], ["data.curriculum.passes_at"]),
        (["data.curriculum.memory=1.5"], ["data.curriculum.memory"]),
        (["algorithm.kl.reward_coef=0.1"], ["algorithm.kl.reward_coef"]),
        (["algorithm.kl.reward_coef=0.1", "algorithm.estimator.name=opo"],
         ["algorithm.kl.reward_coef"]),
        ([PPO, "algorithm.estimator.distill_coef=0.1"], ["algorithm.estimator.distill_coef"]),
        ([PPO, "algorithm.distillation.coef=0.1"], ["teacher.path"]),
        (["algorithm.distillation.coef=0.1", "teacher.path=x"], ["algorithm.distillation.coef"]),
        ([SFT, "algorithm.distillation.coef=0.1"], ["algorithm.distillation.coef"]),
        ([SFT, "algorithm.kl.reward_coef=0.1"], ["algorithm.kl.reward_coef"]),
        ([SFT, "algorithm.kl.loss_coef=0.1"], ["algorithm.kl.loss_coef"]),
        ([SFT, "algorithm.entropy_coef=0.1"], ["algorithm.entropy_coef"]),
        (["algorithm.loss.aggregation=seq-mean-token-sum-norm"], ["algorithm.loss.norm_length"]),
        (["algorithm.loss.norm_length=8"], ["algorithm.loss.norm_length"]),
        (["algorithm.loss.per_rollout=true"], ["algorithm.loss.per_rollout"]),
        ([SFT, "algorithm.loss.per_rollout=true"], ["algorithm.loss.per_rollout"]),
        (["algorithm.kl.loss_unbiased=true"], ["algorithm.kl.loss_unbiased"]),
        (["algorithm.loss.name=decoupled_ppo", "algorithm.old_logprobs=rollout"],
         ["algorithm.old_logprobs"]),
        (["algorithm.normalize_advantages=groups"], ["algorithm.normalize_advantages"]),
        # corrections
        (["algorithm.correction.level=sequence"], ["algorithm.correction.level"]),
        (["algorithm.correction={lower: 0.5, upper: 2, veto: 1e-4}"],
         [f"algorithm.correction.{key}" for key in ("lower", "upper", "veto")]),
        ([TIS, "algorithm.correction.lower=1.1"], ["algorithm.correction.lower"]),
        ([TIS, "algorithm.correction.upper=0.9"], ["algorithm.correction.upper"]),
        ([TIS, "algorithm.correction.veto=1"], ["algorithm.correction.veto"]),
        ([TIS, "algorithm.correction.levle=token"], ["algorithm.correction.levle"]),
        (["algorithm.correction.name=icepopp"], ["algorithm.correction.name"]),
        (["algorithm.correction.max_staleness=-1"], ["algorithm.correction.max_staleness"]),
        ([TIS, "algorithm.old_logprobs=rollout"], ["algorithm.correction.name"]),
        ([TIS, "algorithm.loss.name=decoupled_ppo"], ["algorithm.correction.name"]),
        ([SFT, TIS], ["algorithm.correction.name"]),
        ([SFT, "algorithm.correction.max_staleness=1"], ["algorithm.correction.max_staleness"]),
        # batches
        (["rollout.samples_per_prompt=1"], ["rollout.samples_per_prompt"]),
        ([PPO, "rollout.samples_per_prompt=1", "algorithm.normalize_advantages=group"],
         ["rollout.samples_per_prompt"]),
        (["rollout.prompts_per_step=4", "algorithm.minibatches=5"], ["algorithm.minibatches"]),
        ([SFT, "training.batch_size=4", "algorithm.minibatches=5"], ["algorithm.minibatches"]),
        (["rollout.max_staleness=-1"], ["rollout.max_staleness"]),
        (["rollout.max_staleness=1", "training.debug=rollout_only"], ["rollout.max_staleness"]),
        # the layout
        ([*TWO, "policy.parallel.sequence=true"], ["policy.parallel.sequence"]),
        ([*TWO, "policy.parallel.virtual_pipeline=2"], ["policy.parallel.virtual_pipeline"]),
        (["policy.parallel.tensor=2"], ["policy.parallel.tensor"]),
        (["policy.parallel.pipeline=2"], ["policy.parallel.pipeline"]),
        (["policy.parallel.context=2"], ["policy.parallel.context"]),
        (["cluster.processes_per_node=3", "policy.parallel.tensor=2"], ["policy.parallel"]),
        (["cluster.nodes=2"], ["cluster.nodes"]),
        ([*TWO, "policy.parallel.tensor=4"], ["policy.parallel"]),
        # lengths
        (["policy.max_tokens_per_microbatch=1024"], ["policy.max_tokens_per_microbatch"]),
        (["policy.max_tokens_per_microbatch=1100", "data.max_prompt_tokens=77"],
         ["policy.max_tokens_per_microbatch"]),
        ([SFT, "policy.max_tokens_per_microbatch=10", "data.max_prompt_tokens=11"],
         ["policy.max_tokens_per_microbatch"]),
        # routing
        ([SFT, "policy.routing_replay=engine"], ["policy.routing_replay"]),
        ([SFT, "policy.routing_replay=logprobs"], ["policy.routing_replay"]),
        # keep-sets
        ([SFT, "policy.logprobs.keep_sets=true"], ["policy.logprobs.keep_sets"]),
        ([SGLANG, "policy.logprobs.keep_sets=true", "rollout.sampling.top_p=0.9"],
         ["policy.logprobs.keep_sets"]),
        ([SGLANG, "policy.logprobs.keep_sets=true", "rollout.sampling={top_p: 0.9, top_k: 1}"],
         ["policy.logprobs.keep_sets"]),
        # the engine
        (["rollout.engine.python=/x/python", "rollout.engine.tensor_parallel=2",
         "rollout.engine.transport=disk"], [f"rollout.engine.{key}" for key in ("python",
         "tensor_parallel", "transport")]),
        (["rollout.engine.urls=[http://x:1]"], ["rollout.engine.urls"]),
        (["rollout.engine.urls_file=x.json"], ["rollout.engine.urls_file"]),
        ([*BY_URL, "rollout.engine.urls_file=x.json"], ["rollout.engine.urls_file"]),
        ([SGLANG, "rollout.engine.urls_file=x.json", "rollout.engine.count=2"], [COUNT]),
        ([SGLANG, "rollout.engine.urls_file=x.json", ROUTER], ["rollout.engine.router_url"]),
        (["rollout.engine.max_in_flight=8"], ["rollout.engine.max_in_flight"]),
        (["rollout.engine.server={context_length: 9}"], ["rollout.engine.server"]),
        # data-parallel attention: parts of the server's ranks
        ([*TP_2, "rollout.engine.server={attn_dp_size: 3}"], [PARTS]),
        ([*TP_2, "rollout.engine.server={attn-dp-size: two}"], [PARTS]),
        # the logits of trainer and servers
        ([SGLANG, "rollout.engine.server={enable-fp32-lm-head: true}"], [FP32_HEAD]),
        ([SGLANG, FP32, "rollout.engine.server={enable_fp32_lm_head: false}"], [FP32_HEAD]),
        ([SGLANG, FP32, "rollout.engine.server={rl_on_policy_target: fsdp}"],
         ["rollout.engine.server.rl_on_policy_target"]),
        ([SGLANG, FP32, "model.dtype=fp32", "rollout.engine.dtype=bf16",
         "rollout.engine.server={enable_fp32_lm_head: false}"], [FP32_HEAD]),
        # speculative decoding: what is sampled, and what is said of it
        *(([SGLANG, f"{DRAFTS}, {name}: {value}}}"], [f"{SERVER}.{name}"])
          for name, value in (("speculative_accept_threshold_single", 0.9),
                              ("speculative_accept_threshold_acc", 0.5),
                              ("speculative_adaptive", "true"))),
        ([SGLANG, f"{DRAFTS}}}", "policy.logprobs.keep_sets=true",
          "rollout.sampling={top_p: 0.9, top_k: 50}"], [f"{SERVER}.speculative_algorithm"]),
        *(([SGLANG, f"{DRAFTS}{topk}}}", "policy.routing_replay=engine"],
           [f"{SERVER}.speculative_eagle_topk"])
          for topk in ("", ", speculative_eagle_topk: 4")),
        *(([SGLANG, f"{DRAFTS}, --speculative-draft-model-path: /draft}}",
            f"rollout.engine.transport={transport}"], ["rollout.engine.transport"])
          for transport in ("disk", "delta")),
        ([SGLANG, "rollout.engine.max_batch=8"], ["rollout.engine.max_batch"]),
        ([*BY_URL, "rollout.engine.count=2", "rollout.engine.threads=1"],
         [f"rollout.engine.{key}" for key in ("count", "threads")]),
        ([SGLANG, "rollout.engine.server={tp-size: 2}", "rollout.engine.host=0.0.0.0",
         "rollout.engine.device=gpu"], ["rollout.engine.server.tp-size", "rollout.engine.host",
         "rollout.engine.device"]),
        ([SGLANG, "rollout.engine.urls=[x:1]"], ["rollout.engine.urls"]),
        ([SGLANG, "rollout.engine.urls=[http://x:65536]"], ["rollout.engine.urls"]),
        ([SGLANG, "rollout.engine.urls=[http://x:1,http://x:1]"], ["rollout.engine.urls"]),
        ([SGLANG, "rollout.engine.urls=[http://x:1,http://x:1/]"], ["rollout.engine.urls"]),
        ([SGLANG, "rollout.engine.router_url=http://x:1"], ["rollout.engine.router_url"]),
        ([*BY_URL, "rollout.engine.router_url=x"], ["rollout.engine.router_url"]),
        ([*BY_URL, "rollout.engine.router_url=http://y:1", "rollout.sampling.stop=[x]",
         "policy.routing_replay=engine"], ["rollout.sampling.stop", "policy.routing_replay"]),
        ([SGLANG, "rollout.engine.weights_dir=/x"], ["rollout.engine.weights_dir"]),
        ([*BY_URL, "rollout.engine.transport=delta"], ["rollout.engine.weights_dir"]),
        ([SGLANG, "rollout.engine.transport=disk", "rollout.engine.senders=2"],
         ["rollout.engine.senders"]),
        (["rollout.engine.max_logprob_diff=0"], ["rollout.engine.max_logprob_diff"]),
        # optimizers
        (["policy.optimizer.min_lr=1"], ["policy.optimizer.min_lr"]),
        (["critic.optimizer.decay_steps=5", "critic.optimizer.warmup_steps=5",
         "critic.optimizer.schedule=linear"], ["critic.optimizer.decay_steps"]),
        # debugging
        (["training.debug=train_only"], ["training.debug"]),
        (["training.replay=x"], ["training.replay"]),
        ([SFT, "training.debug=rollout_only"], ["training.debug"]),
        # data
        (["data.paths=[]"], ["data.paths"]),
        (["data.sources={a: {paths: x}}"], ["data.sources"]),
        (["data.paths=[]", "data.sources={a: {paths: x, weight: 1}, b: {paths: []}}"],
         ["data.sources.b.paths", "data.sources.b.weight"]),
        (["data.chat_template_kwargs={tools: [], thinking: false}"],
         ["data.chat_template_kwargs.tools"]),
        ([SFT, "data.label_key=null"], ["data.label_key"]),
        (["reward.parts={}"], ["reward.parts"]),
        (["evaluation.every=3"], ["evaluation.paths"]),
        (["tracking.hub.repo=a/b", "checkpoint.export_hf=no"], ["tracking.hub.repo"]),
    ],
)  # fmt: skip
def test_refused(refusal, overrides, refused):
    assert paths(refusal(*overrides)) == refused


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.steps=null", "training.episodes=8"],
        [SFT, "training.steps=null", "training.epochs=2"],
        ["training.early_stopping=true", "training.target_kl=0.1"],
        [PPO, "algorithm.kl.reward_coef=0.1", "rollout.samples_per_prompt=1"],
        [GDPO, "reward.parts={a: {function: f1}, b: {function: math, weight: 2}}"],
        [CURRICULUM],
        [CURRICULUM, f"reward.parts={{a: {FORMAT}}}", "data.curriculum.passes_at=0.5"],
        [CURRICULUM, "reward.parts={a: {source: workflow}}"],
        [CURRICULUM, "reward.parts={a: {function: 'mine:own'}}"],
        [CURRICULUM, "reward.parts={a: {judge: {url: 'http://x:1', model: m, correct_from: 5}}}"],
        ["algorithm.kl.loss_coef=0.1"],
        [DPO, "reward=null", "algorithm.normalize_advantages=none", "evaluation.paths=[x]"],
        [DPO, "reward=null", "algorithm.loss.name=reinforce", "policy.routing_replay=logprobs"],
        ["algorithm.estimator.name=mine:Own", "algorithm.kl.reward_coef=0.1"],
        ["algorithm.loss.aggregation=seq-mean-token-sum-norm", "algorithm.loss.norm_length=8"],
        ["algorithm.loss={per_rollout: true, aggregation: seq-mean-token-mean}",
         "rollout.workflow=mine:Turns"],
        ["algorithm.kl={loss_unbiased: true, loss_coef: 0.1}"],
        ["algorithm.loss.name=decoupled_ppo"],
        ["algorithm.correction={name: mis, level: geometric, lower: 0.999, upper: 1.001, veto:"
         " 1e-4}"],
        [*TWO, "policy.parallel.tensor=2", "policy.parallel.sequence=true"],
        [*TWO, "policy.parallel.pipeline=2", "policy.parallel.virtual_pipeline=2"],
        # the world's size is torchrun's to say
        ["cluster.launcher=torchrun", "policy.parallel.tensor=4"],
        ["cluster.processes_per_node=4", "policy.parallel.tensor=2"],
        ["policy.max_tokens_per_microbatch=1100", "data.max_prompt_tokens=76"],
        ["policy.max_tokens_per_microbatch=1025"],
        ["training.debug=train_only", "training.replay=x"],
        [SGLANG, "rollout.engine.count=2", "rollout.engine.gpus=[0,1]",
         "rollout.engine.server={context_length: 4096}"],
        [*TP_2, "rollout.engine.server={attn_dp_size: 2}"],
        [SGLANG, FP32, "rollout.engine.server={enable_fp32_lm_head: true}"],
        [SGLANG, "model.dtype=fp32", "rollout.engine.server={enable_fp32_lm_head: true}"],
        [SGLANG, "model.dtype=fp32", "rollout.engine.dtype=bf16",
         "rollout.engine.server={enable_fp32_lm_head: true}"],
        [FP32, "policy.lora={rank: 4}"],
        [*BY_URL, "rollout.engine.tensor_parallel=2", "rollout.engine.router_url=http://y:1"],
        # they are connected anew as often
        [*BY_URL, "rollout.engine.restart={limit: 1000, max_backoff_s: 600}"],
        [SGLANG, "rollout.engine.transport=delta", "rollout.engine.weights_dir=/x"],
        [SGLANG, "policy.routing_replay=engine"],
        [SGLANG, f"{DRAFTS}, speculative_eagle_topk: 1}}", "policy.routing_replay=engine"],
        [SGLANG, f"{DRAFTS}, speculative_draft_model_path: /draft}}"],
        [SGLANG, "model.path=/m", f"{DRAFTS}, speculative_draft_model_path: /m/}}",
         "rollout.engine.transport=disk"],
        [SGLANG, "policy.logprobs.keep_sets=true", "rollout.sampling={top_p: 0.9, top_k: 50}"],
    ],
)  # fmt: skip
def test_accepted(load, overrides):
    assert load(*overrides).warnings == ()


def test_a_problem_names_origin_reason_and_remedy(refusal, write):
    base = write("base.yaml", "algorithm:\n  kl: {reward_coef: 0.05}\n")
    (line,) = refusal(files=[base])
    assert line.startswith(f"algorithm.kl.reward_coef ({base}:2): got 0.05, but estimator 'grpo' ")
    assert "algorithm.kl.loss_coef" in line
    (line,) = refusal(PPO, "algorithm.estimator.kl_coef=1")
    assert "algorithm.kl.reward_coef" in line


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([PPO, "algorithm.distillation.coef=0.1"],
         "algorithm.distillation.coef is not 0, so name the model to learn from"),
        ([PPO, "algorithm.estimator.distill_coef=1"], "set algorithm.distillation.coef instead"),
        (["algorithm.distillation.coef=0.1", "teacher.path=x"],
         ("got 0.1, but estimator 'grpo' takes no distillation into its reward and would"
         " ignore it: choose one with token rewards")),
        (["algorithm.correction.upper=3"],
         "got 3.0, but algorithm.correction.name is none: name one (tis, mis, icepop)"),
        ([TIS, "algorithm.old_logprobs=rollout"],
         "takes the engine's for both: set recompute or auto there"),
        ([TIS, "algorithm.loss.name=decoupled_ppo"], "has this ratio as a weight of its own"),
        ([TIS, "algorithm.correction.upper=0.9"], "got 0.9, expected at least 1"),
        (["algorithm.correction.name=is"],
         "got 'is', expected one of 'none', 'tis', 'mis' or 'icepop'"),
        (["algorithm.loss.name=decoupled_ppo", "algorithm.old_logprobs=rollout"],
         "apart from the engine's: set recompute"),
        (["algorithm.kl.loss_unbiased=on"],
         "no KL in the loss to weigh: set algorithm.kl.loss_coef"),
        (["algorithm.loss.per_rollout=on"], "aggregation token-mean counts tokens alone"),
        ([SFT, "policy.routing_replay=engine"],
         "supervised fine-tuning has no engine to replay: use 'none'"),
        ([DPO, "algorithm.minibatches=2"], "got 2, but the gradient of 'dpo' is that of"),
        ([DPO, "algorithm.epochs=2"], "got 2, but the gradient of 'dpo' is that of"),
        ([DPO, "algorithm.loss.name=gspo"], "got 'gspo', which would change the gradient"),
        ([DPO, "algorithm.loss.aggregation=seq-mean-token-mean"], "'dpo' is a mean over pairs"),
        ([DPO, "algorithm.normalize_advantages=batch"], "would change the gradient of 'dpo'"),
        ([DPO, "algorithm.old_logprobs=rollout"], "no engine made the answers"),
        ([DPO, "algorithm.kl.loss_coef=0.1"], "learning from preferences has no such term"),
        ([DPO, TIS], "learning from preferences has no engine whose log-probs could differ"),
        ([DPO, "training.debug=rollout_only"], "not for learning from preferences"),
        ([DPO, "training.steps=null", "training.episodes=8"],
         "learning from preferences counts no episodes"),
        ([DPO, "policy.routing_replay=engine"], "learning from preferences has no engine"),
        (["algorithm.normalize_advantages=groups"],
         "got 'groups', expected one of 'batch', 'group' or 'none'"),
    ],
)  # fmt: skip
def test_a_refusal_says_why_and_what_to_do(refusal, overrides, said):
    (line,) = refusal(*overrides)
    assert "(override): " in line or line.startswith("teacher.path: ")
    assert said in line


def test_all_problems_are_reported_together(refusal):
    lines = refusal("training.epochs=1", "cluster.nodes=2", "evaluation.every=3")
    assert paths(lines) == ["training.epochs", "cluster.nodes", "evaluation.paths"]


def test_each_check_describes_itself():
    lines = describe_checks()
    assert len(set(lines)) == len(lines) > len(CHECKS)
    assert all(line[0].isupper() or line.startswith("training") for line in lines)


def test_with_tls_no_key_goes_to_an_engine_in_clear(refusal) -> None:
    overrides = ("cluster.tls.ca_file=ca.pem", "rollout.engine.kind=sglang")
    (line,) = refusal(*overrides, "rollout.engine.urls=['https://a:1', 'http://u:p@b:2']")
    assert line.startswith("rollout.engine.urls")
    assert "got 'http://(masked)@b:2', but cluster.tls is set" in line
    (line,) = refusal(*overrides)
    assert line.startswith("cluster.tls.certificate_file: not given, but the run starts engines")


def test_with_tls_engines_that_the_run_starts_need_a_certificate(load, refusal) -> None:
    given = ("cluster.tls.certificate_file=c.pem", "cluster.tls.key_file=k.pem")
    trusted = "cluster.tls.ca_file=ca.pem"
    for overrides in ((), ("rollout.engine.kind=sglang",)):
        load(trusted, *given, *overrides)
        assert "certificate_file: not given" in refusal(trusted, *overrides)[0]
    load(trusted, "rollout.service=in_process")
