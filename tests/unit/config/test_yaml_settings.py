from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.config.load import Loaded, load_config
from rlcore.config.yaml_settings import plain, read_file, read_override, render_config

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
    "reward.parts={a: {function: 'm:f'}, 'b c': {service: {url: 'http://x:1'}}}",
)


def render(loaded: Loaded) -> str:
    return render_config(loaded.config.model_dump(), loaded.origins)


def test_what_is_printed_loads_to_the_same_configuration(load, write):
    loaded = load(*AWKWARD)
    again = load_config([write("config.yaml", render(loaded))])
    assert again.config == loaded.config
    assert again.warnings == loaded.warnings


def test_each_value_has_its_origin_behind_it(load, write):
    base = write("base.yaml", "policy:\n  optimizer:\n    lr: 3e-6\n")
    lines = [line.split() for line in render(load("run.seed=4", files=[base])).splitlines()]
    assert ["seed:", "4", "#", "override"] in lines
    assert ["lr:", "3e-06", "#", f"{base}:3"] in lines
    assert ["beta1:", "0.9", "#", "default"] in lines


# Any text, with what PyYAML folds, strips or reads as something else more often than by chance.
TEXT = st.text(
    st.characters(exclude_categories=())
    | st.sampled_from("\x85\u2028\u2029\ufeff\xa0\x00\x1b\x7f\r\n\t \ud800\udfff:#'\"\\-.01e"),
    max_size=12,
)


@given(TEXT, TEXT, st.lists(TEXT, max_size=3))
def test_any_text_comes_back_as_it_was(name, text, items):
    values = {name: text, f"{name}.list": items, "map": {text: {"lists": [items, text]}}}
    rendered = render_config(values, {"map": "default", name: text})
    path = Path(tempfile.gettempdir()) / f"rlcore-text-{os.getpid()}.yaml"
    path.write_bytes(rendered.encode("utf-8"))
    try:
        assert plain(read_file(path)) == values
        for key, value in (("text", text), ("items", items)):
            line = render_config({key: value}, {}).partition(": ")[2]
            assert plain(read_override(f"{key}={line}")) == {key: value}
    finally:
        path.unlink()


@pytest.mark.parametrize("mark", ["\x85", "\u2028", "\u2029", "\ufeff", "\U000f0000"])
@pytest.mark.parametrize("form", ["{}", "a{}b", "a {} b", "{0}{0}"])
@pytest.mark.parametrize("quote", ["'", '"', ""])
def test_what_is_no_line_break_in_yaml_1_2_is_none(mark, form, quote, write):
    text = form.format(mark)
    written = f"{quote}{text}{quote}"
    assert plain(read_override(f"key={written}")) == {"key": text}
    path = write("raw.yaml", f"\ufeffkey: {written}\n# {mark}\n{quote}{mark}{quote}: 1e-3\n")
    tree = read_file(path)
    assert plain(tree) == {"key": text, mark: 1e-3}
    assert tree[mark].origin == f"{path}:3"
