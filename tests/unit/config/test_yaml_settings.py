from __future__ import annotations

from rlcore.config.load import Loaded, load_config
from rlcore.config.yaml_settings import render_config

AWKWARD = (
    "run.name='1e-3'",
    "run.dir='#x: y'",
    "model.path='true'",
    "data.paths=['null', '2026-01-31', 'a, b', '{c}']",
    "data.prompt_key='zwölf \\n'",
    "rollout.sampling.stop=[\"\\n\", ' ', '']",
    "policy.optimizer.lr=1e-6",
    "policy.megatron={a: '1e-6', b: 1e-6, c: null, d: [1, 'on', on], e: {f: '010'}}",
    "algorithm.estimator={name: ppo, lam: 0.95, on: 'off'}",
    "reward.parts={a: {function: 'm:f'}, 'b c': {model: {path: x}}}",
)


def render(loaded: Loaded) -> str:
    return render_config(loaded.config.model_dump(), loaded.origins)


def test_what_is_printed_loads_to_the_same_configuration(load, write):
    loaded = load(*AWKWARD)
    again = load_config([write("config.yaml", render(loaded))])
    assert again.config == loaded.config
    assert again.notes == loaded.notes


def test_each_value_has_its_origin_behind_it(load, write):
    base = write("base.yaml", "policy:\n  optimizer:\n    lr: 3e-6\n")
    lines = [line.split() for line in render(load("run.seed=4", files=[base])).splitlines()]
    assert ["seed:", "4", "#", "override"] in lines
    assert ["lr:", "3e-06", "#", f"{base}:3"] in lines
    assert ["beta1:", "0.9", "#", "default"] in lines
