"""Notes on a configuration: what is accepted, and may not be what was meant."""

from __future__ import annotations

import pytest

SFT = "algorithm.loss.name=sft"
TIS = "algorithm.correction.name=tis"
SGLANG = "rollout.engine.kind=sglang"
ARMED = ("training.early_stopping=on", "training.target_kl=1")


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        (["training.target_kl=0.1"], ["training.target_kl"]),
        ([*ARMED, "rollout.max_staleness=1"], ["training.early_stopping"]),
        ([*ARMED, "rollout.max_staleness=1", "algorithm.kl.reward_kind=k2"], []),
        (ARMED, []),
        (["rollout.on_update=in_place"], ["rollout.on_update"]),
        (["rollout.max_staleness=1", "rollout.on_update=retract"], []),
        (["rollout.max_staleness=2"], ["algorithm.correction.name"]),
        (["rollout.max_staleness=2", TIS], []),
        (["rollout.max_staleness=2", "algorithm.old_logprobs=rollout",
         "algorithm.loss.name=reinforce"], ["algorithm.correction.name"]),
        (["rollout.max_staleness=2", "algorithm.loss.name=reinforce", TIS], []),
        (["rollout.oversample=1.5"], ["rollout.oversample"]),
        (["rollout.oversample=1.5", "rollout.filters=[zero_variance]"], []),
        (["training.steps=null", "training.epochs=2", "rollout.filters=[zero_variance]"],
         ["training.epochs"]),
        (["training.steps=null", "training.epochs=2"], []),
        (["rollout.max_staleness=2", "algorithm.old_logprobs=rollout"], []),
        (["rollout.max_staleness=2", "algorithm.loss.name=decoupled_ppo"], []),
        ([SGLANG, "run.deterministic=true"], ["run.deterministic"]),
        (["training.target_kl=0"], []),
        (["training.max_update_kl=0.1"], ["training.max_update_kl"]),
        (["training.max_update_kl=0.1", "algorithm.epochs=2"], []),
        (["training.max_update_kl=0.1", "algorithm.epochs=2", "algorithm.old_logprobs=rollout"],
         ["training.max_update_kl"]),
        (["algorithm.loss.name=kl_cov"], ["algorithm.loss.name"]),
        (["algorithm.loss.name=kl_cov", "algorithm.epochs=2"], []),
        (["algorithm.loss.name=kl_cov", "algorithm.old_logprobs=rollout"], []),
        (["algorithm.loss={per_rollout: true, aggregation: seq-mean-token-sum}"],
         ["algorithm.loss.per_rollout"]),
        (["algorithm.correction.max_staleness=1", "algorithm.old_logprobs=rollout"],
         ["algorithm.correction.max_staleness"]),
        (["rollout.max_staleness=1", "algorithm.correction.max_staleness=0"],
         ["algorithm.correction.max_staleness"]),
        (["rollout.max_staleness=1", "algorithm.correction.max_staleness=0",
         "rollout.on_update=in_place"], []),
        (["algorithm.correction.max_staleness=1", "training.debug=train_only", "training.replay=x"],
         []),
        ([SFT, "algorithm.normalize_advantages=batch"], ["algorithm.normalize_advantages"]),
        ([SFT, "algorithm.kl.monitor=true"], ["algorithm.kl.monitor"]),
        ([SFT, "algorithm.old_logprobs=recompute"], ["algorithm.old_logprobs"]),
        ([SFT, "training.max_update_kl=0.1"], ["training.max_update_kl"]),
        ([SFT, "training.max_update_kl=0.1", "algorithm.minibatches=2"],
         ["training.max_update_kl"]),
        (["policy.optimizer.decay_steps=3"], ["policy.optimizer.decay_steps"]),
        (["policy.optimizer.decay_steps=3", "policy.optimizer.schedule=cosine"], []),
        (["evaluation.paths=[x]", "evaluation.samples_per_prompt=4"],
         ["evaluation.samples_per_prompt"]),
        (["rollout.sampling.temperature=0"], ["rollout.sampling.temperature"]),
        (["policy.logprobs.keep_sets=true"], ["policy.logprobs.keep_sets"]),
        (["policy.logprobs.keep_sets=true", "rollout.sampling.top_k=5"], []),
        (["rollout.sampling.top_p=0.9"], ["rollout.sampling"]),
        ([SFT, "rollout.prompts_per_step=4", "reward.workers=1", "critic.path=x",
         "reference.path=x", "teacher.path=x", "algorithm.estimator.name=ppo"], ["reward",
         "rollout", "critic", "reference", "teacher", "algorithm.estimator"]),
        ([SFT, "rollout.prompts_per_step=32"], []),  # the default, written out
    ],
)  # fmt: skip
def test_notes(load, overrides, noted):
    assert [note.partition(":")[0] for note in load(*overrides).warnings] == noted


def test_an_ignored_target_is_kept(load):
    loaded = load("training.target_kl=0.1")
    assert loaded.config.training.target_kl == 0.1
    assert loaded.warnings == (
        "training.target_kl: 0.1 is ignored: training.early_stopping is off",
    )
