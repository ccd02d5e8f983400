"""The listing of algorithms is complete, true, and readable with plugins of any make."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore.algorithms import (
    CORRECTIONS,
    estimator_keywords,
    estimator_names,
    estimator_plugin,
    policy_loss_keywords,
    policy_loss_names,
    policy_loss_plugin,
)
from rlcore.launch.commands.catalogue import WIDTH, list_algorithms

ROOT = Path(__file__).parents[4]


def sections(lines: list[str]) -> dict[str, dict[str, list[str]]]:
    """The first word of each section -> name -> lines of its entry, without their indent."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in filter(None, lines):
        indent = len(line) - len(line.lstrip())
        if indent == 0:
            entries = found[line.split(" (")[0]] = {}
        elif indent == 2:
            entry = entries[line.split(":")[0].strip()] = [line.strip()]
        else:
            entry.append(line[4:])
    return found


@pytest.fixture(scope="module")
def listed() -> dict[str, dict[str, list[str]]]:
    return sections(list(list_algorithms()))


def test_every_estimator_and_loss_of_ours_is_whole(listed: dict[str, Any]) -> None:
    kinds = (
        ("estimators", estimator_names(), estimator_plugin, estimator_keywords),
        ("policy losses", policy_loss_names(), policy_loss_plugin, policy_loss_keywords),
    )
    for section, names, plugin_of, keywords_of in kinds:
        assert list(listed[section]) == names
        for name in names:
            plugin = plugin_of(name)
            entry = listed[section][name]
            assert plugin.formula, name
            assert plugin.source, name
            text = " ".join(" ".join(entry).split())
            summary = (plugin.factory.__doc__ or "").partition("\n\n")[0]
            assert text.startswith(f"{name}: {' '.join(summary.split())} formula ")
            assert " ".join(plugin.formula.split()) in text
            assert text.endswith(f"source {plugin.source}")
            assert all(str(keyword) in text for keyword in keywords_of(name).values())


def test_one_entry_in_full(listed: dict[str, Any]) -> None:
    assert listed["estimators"]["ppo"] == [
        "ppo: GAE over the trainable tokens of each sequence.",
        "formula   delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lam * A_{t+1}",
        (
            "needs     values; kl where kl_coef is not 0; logprobs, teacher_logprobs where"
            " distill_coef is not 0"
        ),
        "takes     token_rewards",
        "keywords  gamma: float = 1.0",
        "          lam: float = 0.95",
        "          kl_coef: float = 0.0    (set algorithm.kl.reward_coef)",
        "          distill_coef: float = 0.0    (set algorithm.distillation.coef)",
        (
            "source    Schulman et al., arXiv:1506.02438; KL in the reward: Ouyang et al.,"
            " arXiv:2203.02155"
        ),
    ]


def test_lines_fit_a_screen() -> None:
    assert max(map(len, list_algorithms())) <= WIDTH == 120


def test_corrections_are_all_there(listed: dict[str, Any]) -> None:
    assert [*listed["corrections"]] == ["none", *CORRECTIONS]
    assert "keywords  lower = 1 / upper, upper = 2" in listed["corrections"]["mis"]


PLUGINS = """
class Bare:
    def __call__(self, inputs): ...

class Demanding:
    '''Must be told its share.'''
    needs = {"values"}
    def __init__(self, *, share: float, kl_coef: float = 0.0) -> None: ...
    def __call__(self, inputs): ...

class Picky(Bare):
    '''Takes small coefficients only.'''
    formula = "A = R"
    def __init__(self, *, kl_coef: float = 0.0) -> None:
        if kl_coef > 0.5:
            raise ValueError("kl_coef")

class Swallows(Bare):
    def __init__(self, **keywords) -> None: ...
"""


def test_plugins_of_installed_packages_are_listed_whatever_they_leave_out(tmp_path: Path) -> None:
    (tmp_path / "their_package.py").write_text(PLUGINS)
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    names = {
        name.lower(): f"their_package:{name}" for name in ("Bare", "Demanding", "Picky", "Swallows")
    }
    names["gone"] = "no_such_package:Gone"
    points = "\n".join(f"theirs_{name} = {target}" for name, target in names.items())
    (info / "entry_points.txt").write_text(f"[rlcore.estimators]\n{points}\n")

    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "rlcore", "config", "--algorithms"]
    listed = subprocess.check_output(command, env=env, text=True, timeout=60)
    entries = sections(listed.splitlines())["estimators"]
    assert entries["theirs_bare"] == ["theirs_bare", "plugin    their_package:Bare"]
    assert entries["theirs_demanding"] == [
        "theirs_demanding: Must be told its share.",
        "needs     depends on its keywords",
        "keywords  share: float",
        "          kl_coef: float = 0.0    (set algorithm.kl.reward_coef)",
        "plugin    their_package:Demanding",
    ]
    assert entries["theirs_picky"][1:3] == ["formula   A = R", "needs     depends on its keywords"]
    assert entries["theirs_swallows"][0].startswith("theirs_swallows: cannot be used: ")
    text = " ".join(entries["theirs_swallows"])
    assert "its constructor takes **keywords; name every keyword instead" in text
    gone = "theirs_gone: cannot be used: No module named 'no_such_package'"
    assert entries["theirs_gone"][0] == gone
    assert "ppo" in entries
