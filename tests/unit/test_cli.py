from __future__ import annotations

import argparse
import io
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore import cli, import_paths
from rlcore.config.load import load_config
from rlcore.errors import FAILED, DataError, DeadlineExceeded, RunFailed
from rlcore.launch import launchers
from rlcore.launch.commands import evaluate, export

GIVEN = ["run.name=x", "model.path=m", "data.paths=d.jsonl", "training.steps=1"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the functions that commands call, and records their arguments."""
    calls: dict[str, Any] = {}

    def stand_in(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> int:
            calls[name] = (args, kwargs)
            return 0

        return call

    monkeypatch.setattr(launchers, "train", stand_in("train"))
    monkeypatch.setattr(evaluate, "evaluate_model", stand_in("evaluate_model"))
    monkeypatch.setattr(export, "export_checkpoint", stand_in("export_checkpoint"))
    return calls


# --- train ----------------------------------------------------------------------------------------


def test_train_hands_over_the_configuration_and_its_notes(launched, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("training: {target_kl: 0.1}\ncritic: {value_clip: 0.2}\n")
    given = ["train", str(file), *GIVEN, "--resume", "run.seed=5"]
    assert cli.main(given) == 0

    (loaded,), how = launched["train"]
    assert how == {"resume": True, "overwrite": False, "arguments": given}
    assert loaded.config.run.seed == 5
    assert [note.split(":")[0] for note in loaded.warnings] == ["training.target_kl", "critic"]


def test_the_exit_code_is_the_runs_own(launched, monkeypatch):
    monkeypatch.setattr(launchers, "train", lambda loaded, **how: 7)
    assert cli.main(["train", *GIVEN]) == 7


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("d.jsonl:3: not JSON"), 2),
        (RunFailed("rank 1 died"), 1),
        (DeadlineExceeded("waited 3 s"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_exit_codes_without_a_traceback(launched, monkeypatch, capsys, error, code):
    def fail(loaded: Any, **how: Any) -> int:
        raise error

    monkeypatch.setattr(launchers, "train", fail)
    assert cli.main(["train", *GIVEN]) == code
    said = capsys.readouterr().err
    assert said == f"rlcore: {str(error) or 'interrupted'}\n"


def test_sigterm_before_the_run_handles_it_is_like_ctrl_c(launched, monkeypatch):
    def train(loaded: Any, **how: Any) -> int:
        signal.raise_signal(signal.SIGTERM)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(launchers, "train", train)
    assert cli.main(["train", *GIVEN]) == 130
    assert signal.getsignal(signal.SIGTERM) == before


def test_our_own_bugs_keep_their_traceback(launched, monkeypatch):
    def fail(loaded: Any, **how: Any) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(launchers, "train", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", *GIVEN])


def test_a_plugin_that_exits_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(launchers, "train", lambda *_, **__: sys.exit(0))
    assert cli.main(["train", *GIVEN]) == FAILED
    assert re.search(
        r"^rlcore: sys\.exit\(0\) was called \(.*test_cli\.py:\d+ in <lambda>\)$",
        capsys.readouterr().err,
        re.MULTILINE,
    )


def test_an_error_shows_no_password_and_does_not_steer_the_terminal(monkeypatch, capsys):
    def fail(*_, **__):
        raise RunFailed("http://user:hidden@10.0.0.7:1 said \x1b[2J")

    monkeypatch.setattr(launchers, "train", fail)
    cli.main(["train", *GIVEN])
    assert capsys.readouterr().err == "rlcore: http://(masked)@10.0.0.7:1 said \\x1b[2J\n"


def test_resume_and_overwrite_exclude_each_other(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", *GIVEN, "--resume", "--overwrite"])
    assert caught.value.code == 2


# --- validate -------------------------------------------------------------------------------------


def test_validate_prints_a_configuration_that_loads(capsys, tmp_path):
    assert cli.main(["validate", "--elsewhere", *GIVEN, "training.target_kl=0.1"]) == 0
    out = capsys.readouterr().out
    file = tmp_path / "merged.yaml"
    file.write_text(out)
    assert load_config([file]).config == load_config([], [*GIVEN, "training.target_kl=0.1"]).config
    assert "# notes (1):\n#   training.target_kl: 0.1 is ignored" in out
    assert "# checks made (" in out
    assert "torch is not installed" not in out


def test_validate_refuses_a_name_that_no_folder_can_have(capsys):
    assert cli.main(["validate", "--elsewhere", *GIVEN, "run.name=a/b"]) == 2
    assert "run.name must be a plain folder name" in capsys.readouterr().err


def test_validate_says_what_it_leaves_out_without_torch(capsys, monkeypatch):
    monkeypatch.setattr(import_paths, "import_torch_lazily", lambda: False)
    assert cli.main(["validate", *GIVEN, "algorithm.estimator.name=unheard_of"]) == 0
    _, _, left_out = capsys.readouterr().out.partition("# checks left out (1):")
    assert "Algorithms, functions, model and files: torch is not installed here" in left_out


@pytest.fixture
def there(tiny_model, tmp_path):
    """Overrides of a configuration whose model and data are there."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    files = [f"model.path={tiny_model}", f"data.paths={tmp_path}/rows.jsonl"]
    return [*GIVEN, *files, "rollout.sampling.max_new_tokens=8"]


@pytest.mark.parametrize("missing", ["model.path", "data.paths", "evaluation.paths"])
def test_validate_refuses_what_train_would_not_find(missing, there, capsys, tmp_path):
    given = [*there, f"run.dir={tmp_path}", f"{missing}={tmp_path}/no"]
    for command in ("validate", "train"):
        assert cli.main([command, *given]) == 2
        assert f"{tmp_path}/no" in capsys.readouterr().err
    assert cli.main(["validate", "--elsewhere", *given]) == 0
    assert "# checks left out (3):" in capsys.readouterr().out


def test_validate_does_not_load_torch(there):
    """Loading it takes longer than all the checks."""
    program = (
        "import sys; from rlcore.cli import main; code = main(sys.argv[1:]);"
        " sys.exit(code or 7 * ('torch._C' in sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "validate", *there], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "# checks made" in ended.stdout
    assert "left out" not in ended.stdout


@pytest.mark.parametrize(
    ("overrides", "starts"),
    [
        (["algorithm.estimator={name: ppo, lamda: 0.9}"],
         ["algorithm.estimator.lamda (override): unknown keyword; did you mean"
         " algorithm.estimator.lam?"]),
        (["algorithm.loss.clip_hihg=0.3"],
         ["algorithm.loss.clip_hihg (override): unknown keyword; did you mean"
         " algorithm.loss.clip_high?"]),
        (["algorithm.loss.agregation=token-mean"],
         ["algorithm.loss.agregation (override): unknown keyword; did you mean"
         " algorithm.loss.aggregation?"]),
        (["algorithm.estimator={name: ppo, lam: high}"],
         ["algorithm.estimator.lam (override): 'ppo': keyword 'lam' expected float, got"
         " 'high' (str)"]),
        (["algorithm.estimator.name=gropo"],
         ["algorithm.estimator.name (override): unknown estimator 'gropo'"]),
        (["algorithm.loss.name=ppo_clap"],
         ["algorithm.loss.name (override): unknown policy loss 'ppo_clap'"]),
        (["algorithm.estimator.name=no_such_package:Own"],
         ["algorithm.estimator.name (override): estimator 'no_such_package:Own': no module"
         " 'no_such_package'"]),
        (["reward.parts.a.function=no_such_package:f", "rollout.workflow=json:__name__",
         "rollout.filters=[x:y]"],
         ["reward.parts.a.function (override): function 'no_such_package:f': no module",
         "rollout.workflow (override): json:__name__ is 'json', expected a callable",
         "rollout.filters.0 (override): function 'x:y': no module 'x'"]),
        (["algorithm.estimator={name: ppo, a: 1}", "algorithm.loss.b=1"],
         ["algorithm.loss.b (override): unknown keyword",
         "algorithm.estimator.a (override): unknown keyword"]),
    ],
)  # fmt: skip
def test_validate_builds_what_is_named(capsys, overrides, starts):
    assert cli.main(["validate", "--elsewhere", *GIVEN, *overrides]) == 2
    captured = capsys.readouterr()
    lines = captured.err.removeprefix("rlcore: ").splitlines()
    assert captured.out == ""
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts)), lines


PLUGINS = """
from rlcore.algorithms import Advantages

class TakesKL:
    needs = {"kl"}
    def __init__(self, *, kl_coef: float = 0.0) -> None: ...
    def __call__(self, inputs): return Advantages(inputs.kl)

class TakesNone(TakesKL):
    def __init__(self) -> None: ...

class NeedsTeacher(TakesNone):
    needs = {"teacher_logprobs"}

class Picky(TakesNone):
    def __init__(self, *, share: float = 0.5) -> None:
        if share > 1:
            raise ValueError(f"share: got {share}, expected at most 1")
"""


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    (tmp_path / "cli_plugins.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "algorithm.estimator.name=cli_plugins:"
    sys.modules.pop("cli_plugins", None)


@pytest.mark.parametrize(
    ("name", "override", "said"),
    [
        ("TakesNone", "algorithm.kl.reward_coef=0.1",
         "algorithm.kl.reward_coef (override): got 0.1, but estimator"),
        ("NeedsTeacher", "run.seed=1",
         "algorithm.estimator (override): estimator 'cli_plugins:NeedsTeacher'"),
        ("Picky", "algorithm.estimator.share=2",
         "algorithm.estimator (override): share: got 2, expected at most 1"),
    ],
)  # fmt: skip
def test_plugins_are_asked_what_they_take(capsys, plugins, name, override, said):
    assert cli.main(["validate", "--elsewhere", *GIVEN, plugins + name, override]) == 2
    assert capsys.readouterr().err.startswith(f"rlcore: {said}")


def test_a_plugin_that_takes_kl_gets_the_coefficient(capsys, plugins):
    given = [*GIVEN, plugins + "TakesKL", "algorithm.kl.reward_coef=0.1"]
    assert cli.main(["validate", "--elsewhere", *given]) == 0


# --- the other commands ---------------------------------------------------------------------------


def test_eval_takes_a_folder_or_a_checkpoint(launched, tiny_model, tmp_path):
    given = [*GIVEN, "evaluation.paths=[e.jsonl]"]
    command = ["eval", *given, "--model", str(tiny_model), "--output", "scores.json", "--all-ranks"]
    assert cli.main(command) == 0
    (loaded,), how = launched["evaluate_model"]
    assert loaded.config.model.path == str(tiny_model)
    output = Path("scores.json")
    assert how == {"output": output, "sets": [], "all_ranks": True, "arguments": command}

    assert cli.main(["eval", *given, "--model", str(tmp_path)]) == 0
    (loaded,), _ = launched["evaluate_model"]
    assert (loaded.config.model.path, loaded.config.policy.checkpoint) == ("m", str(tmp_path))


def test_eval_takes_named_sets(launched):
    given = [*GIVEN, "evaluation.sets={a: {paths: a}, b: {paths: b}}"]
    assert cli.main(["eval", *given, "--set", "b", "--checkpoint", "runs/x@best"]) == 0
    (loaded,), how = launched["evaluate_model"]
    assert (how["sets"], loaded.config.policy.checkpoint) == (["b"], "runs/x@best")


def test_eval_of_an_unknown_set_names_those_there_are(capsys):
    given = [*GIVEN, "evaluation.sets={a: {paths: a}, b: {paths: b}}"]
    assert cli.main(["eval", *given, "--set", "c"]) == 2
    said = capsys.readouterr().err
    assert said == "rlcore: evaluation.sets (override): there is no set 'c', but: a, b\n"


def test_eval_needs_prompts(launched, capsys):
    assert cli.main(["eval", *GIVEN]) == 2
    assert capsys.readouterr().err.startswith("rlcore: evaluation.paths: empty")


def test_export(launched):
    assert cli.main(["export", "runs/x", "out"]) == 0
    assert launched["export_checkpoint"] == ((Path("runs/x"), Path("out")), {"merged": False})
    assert cli.main(["export", "runs/x", "out", "--best", "--merged"]) == 0
    assert launched["export_checkpoint"] == ((Path("runs/x@best"), Path("out")), {"merged": True})


def test_metrics_and_algorithms_are_listed(capsys):
    assert cli.main(["metrics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [kl] = [line for line in lines if line.startswith("rollout/kl ")]
    assert kl.endswith("against the reference")
    assert cli.main(["config", "--algorithms"]) == 0
    out = capsys.readouterr().out
    ppo = out.partition("\n  ppo: ")[2].splitlines()
    words = [line.split(maxsplit=1)[0] for line in ppo[1:5]]
    assert words == ["formula", "needs", "takes", "keywords"]


@pytest.mark.parametrize(
    "arguments", [[], ["no-such-command"], ["train"], ["train", "a=1", "--rsume"], ["metrics", "x"]]
)
def test_wrong_usage(arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_python_m_rlcore(tmp_path):
    command = [sys.executable, "-m", "rlcore", "train", "missing.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    said = "rlcore: missing.yaml: no such file\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_validate_shows_no_secret(capsys, tmp_path):
    values = ["run.name=a", "model.path=none", "data.paths=d.jsonl", "training.steps=1"]
    secret = "cluster.ray.runtime_env.env_vars.WANDB_API_KEY=hidden"
    assert cli.main(["validate", "--elsewhere", *values, secret]) == 0
    shown = capsys.readouterr().out
    assert "hidden" not in shown
    assert "WANDB_API_KEY: (masked)" in shown
    written = tmp_path / "config.yaml"
    written.write_text(shown)
    assert cli.main(["validate", "--elsewhere", str(written)]) == 2
    assert "stands for a secret" in capsys.readouterr().err
    assert cli.main(["validate", "--elsewhere", str(written), secret]) == 0


@pytest.mark.parametrize(("command", "code"), [("train", 1), ("metrics", 0)])
def test_a_broken_pipe_is_no_success_of_a_run(
    command: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)

    def breaks(_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setitem(cli.COMMANDS, command, breaks)
    assert cli._run(argparse.Namespace(command=command)) == code
    assert said.closed == (code == 0)
    if code:
        assert "standard output or another pipe was closed" in said.getvalue()
