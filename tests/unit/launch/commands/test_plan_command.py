"""`rlcore plan` as a user calls it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.launch.commands.plan_kit import ALONE, CONFIG, EXAMPLES, changed, first_layout

# --- what it prints -------------------------------------------------------------------------------


def test_a_layout_that_fits(plan) -> None:
    code, out, err = plan("--trainer-gpus", "8")
    assert (code, err) == (0, "")
    assert out.startswith("7.62 B parameters; 8 x H100 of 80.0 GiB for the trainer, 8% reserved\n")
    assert "TP 4 x DP 2, SP, distributed optimizer: fits, " in out
    for part in (
        "policy weights",
        "policy gradients",
        "policy optimizer",
        "(the largest phase)",
        "left for KV of an engine of TP 1",
    ):
        assert part in out
    assert first_layout(out).endswith("TP 2 x CP 2 x DP 2, SP, distributed optimizer")


def test_what_is_next_to_a_step(plan) -> None:
    engines = ("rollout.engine.kind=sglang", "rollout.engine.count=8")
    out = plan("--trainer-gpus", "16", *engines)[1]
    assert "2.3 GiB  buckets of publications" in out
    assert "4.1 GiB  NCCL's buffers, 6 communicators" in out
    assert "a publication: 14.2 GiB in 86 buckets of at most 1.0 GiB to 8 engines\n" in out
    assert "a checkpoint: 99.3 GiB on disk\n" in out
    assert re.search(r"time: arithmetic [\d.]+ s, communication [\d.]+ s\n", out)

    out = plan("--trainer-gpus", "16", *engines, "rollout.engine.quantization=fp8")[1]
    assert "a publication: 8.1 GiB in 86 buckets" in out
    assert "2.5 GiB  buckets of publications" in out, "two in FP8, and one before it is rounded"

    colocated = plan("--trainer-gpus", "8", *engines, "rollout.engine.colocated=true")[1]
    assert "buckets of publications" not in colocated, "engines get that memory"


@pytest.mark.parametrize(
    ("model", "gpus", "layout"),
    [
        ("Qwen3-30B-A3B", 16, "CP 2 x EP 8 x ETP 1 x DP 2, SP, distributed optimizer"),
        ("Qwen3-30B-A3B", 64, "CP 4 x EP 8 x DP 16, distributed optimizer"),
        ("Llama-3.1-70B", 64, "TP 4 x PP 4 x CP 4, SP, distributed optimizer"),
    ],
)
def test_the_fastest_layouts_of_large_models(plan, model: str, gpus: int, layout: str) -> None:
    code, out, _ = plan("--trainer-gpus", str(gpus), model=model)
    assert code == 0
    assert first_layout(out).endswith(layout)


def test_each_cut_is_printed_once_and_the_configured_one_is_marked(plan) -> None:
    _, out, _ = plan("--trainer-gpus", "8", "policy.parallel={tensor: 2, context: 2}")
    shown = [line for line in out.splitlines() if " s   " in line]
    cuts = [line.split("GiB")[1].split(", recompute")[0] for line in shown]
    assert len(cuts) == len(set(cuts)) > 3
    assert [line for line in shown if line.startswith(" *")] == shown[:1]


def test_a_printed_layout_is_taken_when_it_is_configured(plan) -> None:
    """Experts are cut by EP alone, so under TP the layout names ETP: its default is TP."""
    larger = ("--trainer-gpus", "8", "--gpu-memory", "96G")
    _, out, _ = plan(*larger, model="Qwen3-30B-A3B")
    line = next(line for line in out.splitlines() if "TP 2 x EP 8 x ETP 1 x DP 4" in line)
    shown = line.split("GiB")[1].strip()
    keys = {"tensor": 2, "expert": 8, "expert_tensor": 1, "sequence": "true"}
    given = [f"policy.parallel.{key}={value}" for key, value in keys.items()]
    given.append(
        "policy.megatron={recompute_granularity: full, recompute_method: uniform,"
        " recompute_num_layers: 1}"
    )
    assert f"layout:\n  {shown}: " in plan(*larger, *given, model="Qwen3-30B-A3B")[1]


def test_a_model_that_cannot_fit_is_told_by_how_much_and_what_would_help(plan) -> None:
    code, out, _ = plan("--trainer-gpus", "8", model="Llama-3.1-70B")
    assert code == 0, "the plan was made; that nothing fits is what it says"
    assert "does NOT fit, " in out
    nearest = out[out.index("No layout fits. The nearest is ") :].splitlines()
    assert nearest[0].startswith("No layout fits. The nearest is TP 8, SP, recompute full: 15")
    assert " more than 73.6 GiB. What would help:" in nearest[1]
    assert any(
        line.strip().startswith("policy.optimizer.offload=true lowers the peak by ")
        for line in nearest
    )
    assert any("times the GPUs, or GPUs of " in line for line in nearest)


def test_a_parked_reference_and_a_critic_are_counted(plan) -> None:
    resident = plan("--trainer-gpus", "8", "reference.offload=false")[1]
    assert "reference weights" in resident
    assert "reference weights" not in plan("--trainer-gpus", "8")[1], (
        "it is swapped into the policy's place"
    )
    critic = plan("--trainer-gpus", "8", "algorithm.estimator.name=ppo")[1]
    assert "critic weights" in critic
    assert "critic optimizer" in critic
    ppo = ("algorithm.estimator.name=ppo", "critic.offload=true")
    offloaded = plan("--trainer-gpus", "8", *ppo)[1]
    assert "GiB  critic weights" not in offloaded


@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta"])
def test_an_offloaded_reference_that_computes_otherwise_has_weights_of_its_own(
    plan, tmp_path: Path, field: str
) -> None:
    """Its sizes are the policy's. Packs are so small that weights make the largest phase."""
    small = (
        "policy.parallel={tensor: 1, sequence: false}",
        "policy.max_tokens_per_microbatch=1024",
        "data.max_prompt_tokens=512",
        "rollout.sampling.max_new_tokens=512",
    )
    like = changed(tmp_path / "like")
    other = changed(tmp_path / "other", **{field: 1e-4})
    swapped = plan("--trainer-gpus", "8", *small, f"reference.path={like}")[1]
    assert "reference pass (the largest phase)" not in swapped
    beside = plan("--trainer-gpus", "8", *small, f"reference.path={other}")[1]
    (line,) = [line for line in beside.splitlines() if "(the largest phase)" in line]
    assert line.endswith("reference pass (the largest phase)")
    assert float(line.split()[0]) > 7.6e9 * 2 / 2**30


def test_a_critic_with_a_folder_of_its_own_has_its_sizes(plan, tmp_path: Path) -> None:
    ppo = ("--trainer-gpus", "8", "algorithm.estimator.name=ppo")
    shallow = changed(tmp_path / "critic", num_hidden_layers=14)

    def critic_weights(*arguments: str) -> float:
        (line,) = [
            line
            for line in plan(*ppo, *arguments)[1].splitlines()
            if line.endswith("critic weights")
        ]
        return float(line.split()[0])

    assert 0.4 < critic_weights(f"critic.path={shallow}") / critic_weights() < 0.65


def test_the_policy_alone_has_a_layer_for_further_tokens(plan) -> None:
    layout = "policy.parallel={tensor: 4, expert: 16, expert_tensor: 1, sequence: true}"
    ppo = (
        "--trainer-gpus",
        "64",
        "algorithm.estimator.name=ppo",
        "reference.offload=false",
        layout,
    )

    def weights(*arguments: str) -> dict[str, float]:
        out = plan(*ppo, *arguments, model="GLM-4.5-Air")[1]
        return {name: float(size) for size, name in re.findall(r"([\d.]+) GiB  (\w+) weights", out)}

    without = weights()
    predicting = weights("policy.mtp_coef=0.1")
    # A layer of 8 experts, and on every rank the projection [4096, 8192].
    added = (8 * 3 * 4096 * 1408 + 2 * 4096**2) * 2 / 2**30
    assert predicting.pop("policy") - without.pop("policy") == pytest.approx(added, rel=0.5)
    assert set(without) == {"reference", "critic"}
    assert predicting == without


def room(out: str) -> str:
    """Return the line on the room of an engine."""
    (line,) = [line.strip() for line in out.splitlines() if re.search(r" engine of TP \d+: ", line)]
    return line


@pytest.mark.parametrize(
    ("tensor", "dtype", "item"), [(1, "bf16", 2), (4, "bf16", 2), (8, "bf16", 2), (2, "fp32", 4)]
)
@pytest.mark.parametrize("colocated", [False, True])
def test_an_engine_has_the_gpu_but_for_its_weights(
    plan, tensor: int, dtype: str, item: int, colocated: bool
) -> None:
    """7.616e9 parameters; K and V of a token: 28 layers x 4 heads x 128, of a rank at least one."""
    keys = ("kind=sglang", f"tensor_parallel={tensor}", f"dtype={dtype}", f"colocated={colocated}")
    out = plan("--trainer-gpus", "8", *(f"rollout.engine.{key}" for key in keys))[1]
    left = 80 * 0.92 - 7.616e9 * item / tensor / 2**30
    name = "a colocated engine" if colocated else "an engine"
    assert room(out).startswith(f"{left:.1f} GiB  left for KV of {name} of TP {tensor}: ")
    per_token = 2 * 28 * max(1, 4 // tensor) * 128 * item
    assert abs(int(room(out).split()[-2].replace(",", "")) - left * 2**30 / per_token) < 1e4


def test_a_colocated_engines_weights_must_fit_next_to_the_trainer(plan) -> None:
    """In FP8 they take little more than half; the embedding and the head stay."""
    engine = ("rollout.engine.kind=sglang", "rollout.engine.colocated=true")
    given = ("--trainer-gpus", "4", ALONE, "policy.optimizer.distributed=false", *engine)
    none = "none  for a colocated engine of TP 1: its weights ("
    assert room(plan(*given)[1]).startswith(none + "14.2 GiB) next to the trainer's state")
    fp8 = plan(*given, "rollout.engine.quantization=fp8")[1]
    assert room(fp8).startswith(none + "8.1 GiB) next to the trainer's state")


def test_a_layout_that_leaves_no_room_for_a_colocated_engines_weights_does_not_fit(plan) -> None:
    """On GPUs of 52 GiB the trainer alone fits, and both fit only on larger ones."""
    sglang = ("--trainer-gpus", "8", "rollout.engine.kind=sglang", "--gpu-memory", "52G")
    assert "SP, distributed optimizer: fits, " in plan(*sglang)[1]
    without = first_layout(plan(*sglang)[1])
    both = plan(*sglang, "rollout.engine.colocated=true")[1]
    fitting = both[both.index("Layouts that fit") :]
    assert float(re.findall(r"([\d.]+) GiB", without)[0]) <= 52 * 0.92
    for line in re.findall(r"s +([\d.]+) GiB", fitting):
        assert float(line) <= 52 * 0.92


def test_an_engine_whose_weights_exceed_its_gpu(plan) -> None:
    given = ("--trainer-gpus", "64", "rollout.engine.kind=sglang", "cluster.nodes=8")
    out = plan(*given, model="Llama-3.1-70B")[1]
    assert room(out).startswith("none  for an engine of TP 1: its weights (131.4 GiB) are ")
    assert room(out).endswith(" too much; raise rollout.engine.tensor_parallel")
    assert (
        "left for KV of an engine of TP 4"
        in (plan(*given, "rollout.engine.tensor_parallel=4", model="Llama-3.1-70B")[1])
    )


def test_a_run_without_engines_leaves_no_room_for_one(plan) -> None:
    code, out, err = plan("--trainer-gpus", "8", "training.replay=x", "training.debug=train_only")
    assert (code, err) == (0, "")
    assert "colocated" not in out


def test_recomputation_of_whole_layers_is_counted_as_it_is_configured(plan) -> None:
    """A dry run's forward and backward passes differ by 0.1 % from those."""
    cut = "policy.parallel={tensor: 2, sequence: true}"
    found: dict[str, float] = {}
    for method in ("uniform 1", "uniform 14", "block 1"):
        name, count = method.split()
        full = (
            f"policy.megatron={{recompute_granularity: full, recompute_method: {name},"
            f" recompute_num_layers: {count}}}"
        )
        out = plan("--trainer-gpus", "8", cut, full)[1]
        (line,) = [line for line in out.splitlines() if line.startswith("  TP 2 x DP 4")]
        found[method] = float(re.findall(r", ([\d.]+) GiB", line)[0])
    assert found["uniform 14"] - found["uniform 1"] == pytest.approx(15.2, abs=0.2)
    assert found["block 1"] - found["uniform 1"] == pytest.approx(31.8, abs=0.2)


@pytest.mark.parametrize("given", ["block", "uniform, recompute_num_layers: 0"])
def test_recomputation_of_no_number_of_layers(plan, given: str) -> None:
    full = f"policy.megatron={{recompute_granularity: full, recompute_method: {given}}}"
    code, _, err = plan("--trainer-gpus", "8", full)
    assert code == 2
    assert "set uniform or block, and a number of layers" in err


def test_a_critic_of_another_shape_is_laid_out_as_the_policy_is(plan, tmp_path: Path) -> None:
    critic = changed(tmp_path / "critic", num_attention_heads=7, num_key_value_heads=7)
    given = ("algorithm.estimator.name=ppo", f"critic.path={critic}")
    code, out, _ = plan("--trainer-gpus", "8", "--gpu-memory", "96G", *given)
    assert code == 0
    assert (
        f"refused: critic.path: {critic} does not fit the policy's layout: policy.parallel.tensor:"
        " 4 does not divide" in out
    )
    assert first_layout(out)
    assert "TP " not in out[out.index("Layouts that fit") :]


def test_more_memory_and_other_gpus_change_the_verdict(plan) -> None:
    assert "fits, 46" in plan("--trainer-gpus", "8", "--gpu-memory", "52G")[1]
    assert "does NOT fit" in plan("--trainer-gpus", "8", "--gpu-memory", "24G")[1]
    said = (plan("--trainer-gpus", "8", "--gpu", gpu)[1] for gpu in ("A100", "B200"))
    slow, fast = (float(out.split("about ")[1].split(" s")[0]) for out in said)
    assert slow > 5 * fast


@pytest.mark.parametrize("size", ["80", "80G", "80g", "80GB", "80GiB"])
def test_spellings_of_a_size(plan, size: str) -> None:
    assert "8 x H100 of 80.0 GiB" in plan("--trainer-gpus", "8", "--gpu-memory", size)[1]


def test_a_plan_imports_no_torch() -> None:
    script = f"""
import sys
from rlcore.cli import main
model = "model.path={EXAMPLES / "Qwen2.5-7B"}"
assert main(["plan", {CONFIG!r}, model, "--trainer-gpus", "8"]) == 0
assert not {{"torch", "numpy", "transformers"}} & sys.modules.keys()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}

# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *[
            (("--trainer-gpus", gpus), f"--trainer-gpus: got {gpus!r}, expected a positive integer")
            for gpus in ("0", "-8", "8.5", "many", "")
        ],
        *[
            (("--gpu-memory", size), f"--gpu-memory: got {size!r}, expected gibibytes, as 80G")
            for size in ("80T", "0G", "1.5G", "G", "lots", "80000M")
        ],
        (("--gpu", "H900"), "'H900' (choose from"),
        (("policy.parallel.tensr=2",), "tensr"),
    ],
)
def test_arguments_that_are_refused(plan, arguments: tuple[str, ...], said: str) -> None:
    code, _, err = plan(*arguments)
    assert (code, said in err) == (2, True), err


def test_gpus_that_the_configured_layout_does_not_divide(plan) -> None:
    code, out, _ = plan("--trainer-gpus", "6")
    assert code == 0, "others are found"
    assert (
        "refused: policy.parallel: tensor 4 x pipeline 1 x context 1 = 4 does not divide the world"
        " size 6" in out
    )
    assert "Layouts that fit" in out


def test_a_folder_without_a_readable_config(plan, tmp_path: Path) -> None:
    code, out, err = plan("--trainer-gpus", "8", model=tmp_path / "none")
    assert (code, out) == (2, "")
    assert str(tmp_path / "none") in err
    assert "Traceback" not in err
    code, _, err = plan("--trainer-gpus", "8", model=tmp_path)
    assert (code, f"{tmp_path}: no config.json" in err) == (2, True)
    (tmp_path / "config.json").write_text("{")
    code, _, err = plan("--trainer-gpus", "8", model=tmp_path)
    assert (code, "not valid JSON" in err) == (2, True)


@pytest.mark.parametrize(
    ("dropped", "values", "said"),
    [
        (["num_hidden_layers"], {}, "num_hidden_layers: got nothing, expected a positive integer"),
        ([], {"hidden_size": "3584"}, "hidden_size: got '3584', expected a positive integer"),
        ([], GPT2, "GPT2LMHeadModel is not converted; converted are"),
        ([], {"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected 'silu'"),
    ],
)
def test_a_config_that_we_do_not_convert(plan, tmp_path: Path, dropped, values, said) -> None:
    code, out, err = plan("--trainer-gpus", "8", model=changed(tmp_path, *dropped, **values))
    assert (code, out) == (2, "")
    assert said in err


def test_keys_that_say_nothing_of_the_model_are_ignored(plan, tmp_path: Path) -> None:
    same = changed(tmp_path, bos_token_id=151643, unheard_of="x")
    assert plan("--trainer-gpus", "8", model=same) == plan("--trainer-gpus", "8")
