from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.config.load import load_config, split_arguments
from rlcore.config.messages import suggest
from rlcore.errors import ConfigError

BASE = """\
run: {name: base}
model:
  path: model
data:
  paths: [a.jsonl, b.jsonl]
training: {steps: 10}
policy:
  optimizer:
    lr: 1e-6
    beta1: 0.8
"""


# --- merging --------------------------------------------------------------------------------------


def test_maps_merge_lists_replace_and_overrides_come_last(write):
    base = write("base.yaml", BASE)
    site = write("site.yaml", "data:\n  paths: [c.jsonl]\npolicy: {optimizer: {lr: 2e-6}}\n")
    loaded = load_config([base, site], ["policy.optimizer.beta2=0.9", "run.name=mine"])

    optimizer = loaded.config.policy.optimizer
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2) == (2e-6, 0.8, 0.9)
    assert loaded.config.data.paths == ["c.jsonl"]
    assert loaded.config.run.name == "mine"


def test_every_value_has_an_origin(write):
    base = write("base.yaml", BASE)
    site = write("site.yaml", "# a comment\npolicy: {optimizer: {lr: 2e-6}}\n")
    loaded = load_config([base, site], ["run.name=mine"])

    assert loaded.origins["policy.optimizer.lr"] == f"{site}:2"
    assert loaded.origins["policy.optimizer.beta1"] == f"{base}:10"
    assert loaded.origins["data.paths"] == f"{base}:5"
    assert loaded.origins["run.name"] == "override"
    assert loaded.origins["run.seed"] == "default"
    assert loaded.origin("policy.optimizer") == f"{site}:2"
    assert loaded.origin("data.paths.1") == f"{base}:5"
    assert loaded.origin("critic") == "default"


def test_an_override_may_be_a_list_or_a_map(load):
    config = load(
        "rollout.sampling.stop=[a, 'b c']", "policy.megatron={qk_layernorm: on, foo: 1e-5}"
    ).config
    assert config.rollout.sampling.stop == ["a", "b c"]
    assert config.policy.megatron == {"qk_layernorm": True, "foo": 1e-5}


def test_the_later_of_two_overrides_wins(load):
    assert load("run.seed=2", "run.seed=3").config.run.seed == 3


def test_a_new_plugin_name_drops_the_old_keywords_and_says_so(load, write):
    base = write(
        "base.yaml",
        "algorithm: {estimator: {name: ppo, lam: 0.9}, loss: {name: ppo_clip, norm_length: 8,\n"
        "  clip_low: 0.1, aggregation: seq-mean-token-sum-norm}}\n",
    )
    loaded = load("algorithm.estimator.name=grpo", "algorithm.loss.name=gspo", files=[base])
    assert loaded.config.algorithm.estimator.options == {}
    assert loaded.config.algorithm.loss.options == {}
    # not a keyword of the plugin: it stays
    assert loaded.config.algorithm.loss.norm_length == 8
    assert [note.split(":")[0] for note in loaded.warnings] == [
        "algorithm.estimator",
        "algorithm.loss",
    ]
    assert "lam" in loaded.warnings[0]


def test_a_correction_that_is_switched_off_takes_its_options_along(load, write):
    base = write(
        "base.yaml",
        "algorithm: {correction: {name: mis, level: sequence, upper: 2, max_staleness: 3}}\n",
    )
    loaded = load("algorithm.correction.name=none", "rollout.workflow=mine:Own", files=[base])
    options = {"level": "token", "lower": None, "upper": None, "veto": None}
    assert loaded.config.algorithm.correction.options == options
    # not the correction's own: it stays
    assert loaded.config.algorithm.correction.max_staleness == 3
    said = "another name was given; dropped the earlier one's level, upper"
    assert loaded.warnings[0] == f"algorithm.correction: {said}"


def test_plugin_keywords_merge_while_the_name_stays(load, write):
    base = write("base.yaml", "algorithm: {estimator: {name: ppo, lam: 0.9}}\n")
    loaded = load("algorithm.estimator.gamma=0.5", files=[base])
    assert loaded.config.algorithm.estimator.options == {"lam": 0.9, "gamma": 0.5}


def test_null_unsets_and_an_empty_section_sets_nothing(write):
    base = write("base.yaml", BASE + "tracking:\n")
    changed = ["training.steps=null", "training.epochs=2", "tracking=null"]
    config = load_config([base], changed).config
    assert config.training.steps is None
    assert config.training.epochs == 2
    assert config.tracking.show_every == 10


def test_null_takes_a_section_back_to_its_defaults(write, load):
    base = write(
        "a.yaml", "evaluation: {paths: e.jsonl, every: 5}\nrollout: {engine: {max_batch: 7}}"
    )
    config = load(files=[base]).config
    assert (config.evaluation.paths, config.rollout.engine.max_batch) == (["e.jsonl"], 7)
    off = load("evaluation=null", "rollout.engine=null", files=[base])
    assert (off.config.evaluation.paths, off.config.evaluation.every) == ([], 0)
    assert off.config.rollout.engine == type(config.rollout.engine)()
    assert off.origin("evaluation.paths") == "default"
    blank = write("b.yaml", "evaluation:\n")
    assert load(files=[base, blank]).config.evaluation.every == 5, "nothing written sets nothing"
    emptied = load("evaluation.paths=null", "evaluation.every=0", files=[base])
    assert emptied.config.evaluation.paths == []
    with pytest.raises(ConfigError, match=r"data\.paths: missing"):
        load("data=null", files=[base])


def test_null_empties_a_map_of_free_keys(write, load):
    base = write(
        "base.yaml",
        "rollout: {engine: {kind: sglang, server: {mem_fraction_static: 0.8}}}\npolicy:"
        " {megatron: }\n",
    )
    loaded = load("rollout.engine.server=null", files=[base])
    assert loaded.config.rollout.engine.server == loaded.config.policy.megatron == {}
    assert loaded.origin("rollout.engine.server") == "override"


def test_a_reward_part_may_change_from_service_to_function(write, load):
    base = write("base.yaml", "reward: {parts: {a: {service: {url: 'http://x:1'}}}}\n")
    changed = ("reward.parts.a.service=null", "reward.parts.a.function=math")
    part = load(*changed, files=[base]).config.reward.parts["a"]
    assert (part.service, part.function) == (None, "math")


@pytest.mark.parametrize("entries", ["reward.parts", "data.sources", "evaluation.sets"])
@pytest.mark.parametrize("later", ["file", "override"])
def test_null_takes_an_entry_of_a_map_away(entries, later, write, load):
    one = {"reward.parts": "function: math"}.get(entries, "paths: d.jsonl")
    section, _, key = entries.partition(".")
    base = write("base.yaml", f"{section}: {{{key}: {{kept: {{{one}}}, gone: {{{one}}}}}}}\n")
    dropped = f"{section}: {{{key}: {{gone: null, never: null}}}}\n"
    files = [base, write("later.yaml", dropped)] if later == "file" else [base]
    overrides = [] if later == "file" else [f"{entries}.gone=null", f"{entries}.never=null"]
    overrides += ["data.paths=[]"] if section == "data" else []
    config = load(*overrides, files=files).config
    assert list(getattr(getattr(config, section), key)) == ["kept"]


def test_anchors_and_merge_keys(write, load):
    text = (
        "policy: {optimizer: &o {lr: 3e-6, beta1: 0.5}}\ncritic:\n  optimizer:\n    <<: *o\n   "
        " beta1: 0.6\n"
    )
    config = load(files=[write("a.yaml", text)]).config
    assert (config.critic.optimizer.lr, config.critic.optimizer.beta1) == (3e-6, 0.6)


# --- values ---------------------------------------------------------------------------------------


YES = ("True", "true", "'true'", "'True'", "1", "yes", "on", "Yes", "ON", "'on'")
NO = ("False", "false", "'false'", "'False'", "0", "no", "off", "No", "OFF", "'no'")


@pytest.mark.parametrize("text", YES + NO)
def test_what_is_true_and_what_is_false(load, text):
    loaded = load(f"run.deterministic={text not in YES}", f"run.deterministic={text}")
    assert loaded.config.run.deterministic is (text in YES)


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "1E-6", "0.000001", ".000001", "'1e-6'"])
def test_what_is_a_number(load, text):
    assert load(f"policy.optimizer.lr={text}").config.policy.optimizer.lr == 1e-6


def test_whole_numbers_may_have_underscores_and_no_octals(load):
    config = load("policy.max_tokens_per_microbatch=16_384").config
    assert config.policy.max_tokens_per_microbatch == 16384
    assert load("run.seed=010").config.run.seed == 10


@pytest.mark.parametrize(
    "text", ["1e-3", "007", "2026-01-31", "12:30", "1_000", "off-policy", "a=b", "null-model"]
)
def test_text_is_taken_as_written(load, text):
    assert load(f"run.name={text}").config.run.name == text


# --- what is refused ------------------------------------------------------------------------------


def test_unknown_key_names_path_file_line_and_the_nearest_key(write, refusal):
    site = write("site.yaml", "\npolicy:\n  lr: 1\n")
    assert refusal(files=[site]) == [
        f"policy.lr ({site}:3): unknown key; did you mean policy.optimizer.lr?"
    ]


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("training.early_stoping", "training.early_stopping"),
        ("policy.optimizer.learning_rate", "policy.optimizer.lr"),
        ("rollout.temperature", "rollout.sampling.temperature"),
        ("critic.lr", "critic.optimizer.lr"),
        ("polcy.optimizer.lr", "policy.optimizer.lr"),
        ("lr", "policy.optimizer.lr"),
        ("max_new_tokens", "rollout.sampling.max_new_tokens"),
        ("tensor", "policy.parallel.tensor"),
        ("reward.parts.answer.wieght", "reward.parts.answer.weight"),
        ("evaluations.every", "evaluation.every"),
    ],
)
def test_nearest_key(key, nearest):
    assert suggest(tuple(key.split("."))) == nearest


def test_no_suggestion_where_nothing_is_near():
    assert suggest(("zzz", "qqqqqq")) is None


def test_several_errors_are_one_a_line(write, refusal):
    site = write(
        "site.yaml",
        "policy:\n  optimizer: {lr: fast}\nrollout:\n  prompts_per_step: 0\nmodel: {dtype: fp64}\n",
    )
    lines = refusal("run.deterministic=maybe", "rollout.samples_per_prompt=true", files=[site])
    assert sorted(lines) == [
        f"model.dtype ({site}:5): got 'fp64', expected one of 'fp32' or 'bf16'",
        f"policy.optimizer.lr ({site}:2): got 'fast', expected a number",
        "rollout.prompts_per_step " + f"({site}:4): got 0, expected more than 0",
        "rollout.samples_per_prompt (override): got true, expected a number",
        "run.deterministic (override): got 'maybe', expected true or false",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.optimizer.lr=null", "policy.optimizer.lr (override): got null, expected a number"),
        ("policy.optimizer.lr=.nan",
         "policy.optimizer.lr (override): got nan, expected a finite number"),
        ("policy.optimizer=3", "policy.optimizer (override): got 3, expected a map of keys"),
        ("training.steps=1.5", "training.steps (override): got 1.5, expected a whole number"),
        ("model.path=null", "model.path (override): got null, expected text"),
        ("model.path=yes", "model.path (override): got true, expected text (put it in quotes)"),
        ("rollout.sampling.stop=x", "rollout.sampling.stop (override): got 'x', expected a list"),
        ("reward.parts.a.weight=1",
         ("reward.parts.a (override): a reward part is one of `function: NAME`, `service:"
         " {url: URL}`, `judge: {url: URL, model: NAME}` or `source: workflow`")),
        ("run.name=", "override 'run.name=': no value after '='; `run.name=null` unsets a key"),
        ("run..name=1", "override 'run..name=1': expected a.b.c=value"),
    ],
)  # fmt: skip
def test_wrong_value(refusal, override, message):
    assert refusal(override) == [message]


def test_what_is_missing_is_named():
    with pytest.raises(ConfigError) as caught:
        load_config([], ["run.name=x"])
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["model.path", "data.paths"]
    assert "model.path=VALUE" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("run: {name: x}\nmodel:\n  path: a\n  path: b\n",
         ":4: key 'path' is given twice, first at"),
        ("rollout:\n  filters:\n  - {a: 1, a: 2}\n", ":3: key 'a' is given twice"),
        ("run: [1\n", ":2:1: not valid YAML: "),
        ("run:\n\tname: x\n", ":2:1: not valid YAML: "),
        ("run: !!python/object:os.system {}\n",
         ":1: tag 'tag:yaml.org,2002:python/object:os.system' has"),
        ("run: !env HOME\n", ":1:6: not valid YAML: "),
        ("- a\n", ":1: got ['a'], expected `key: value` lines"),
        ("a: &a {b: *a}\n", ":1: this part contains itself"),
        ("a: \x00\n", ": not valid YAML: "),
    ],
)  # fmt: skip
def test_a_file_that_is_not_ours_to_read(write, text, where):
    path = write("bad.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_config([path], [])
    assert str(caught.value).startswith(f"{path}{where}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        load_config([tmp_path / "none.yaml"], [])


def test_dotted_keys_in_a_file_are_told_to_nest(write, refusal):
    (line,) = refusal(files=[write("a.yaml", "policy.optimizer.lr: 1\n")])
    assert "nest" in line


# --- the command line's arguments -----------------------------------------------------------------


def test_files_and_overrides_are_told_apart():
    files, overrides = split_arguments(
        ["a.yaml", "data.paths=x.yaml", "runs/k=v/b.yml", "reward.parts.my-part.weight=-1"]
    )
    assert files == [Path("a.yaml"), Path("runs/k=v/b.yml")]
    assert overrides == ["data.paths=x.yaml", "reward.parts.my-part.weight=-1"]


def test_an_argument_that_is_neither():
    with pytest.raises(ConfigError, match="'train'"):
        split_arguments(["train"])
