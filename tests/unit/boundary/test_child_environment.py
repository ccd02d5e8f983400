"""Children get variables by a list, whatever else the shell has."""

from __future__ import annotations

import os

import pytest

from rlcore.boundary.child_environment import ENGINES, allowed_environment, service_environment
from rlcore.config.sections.rollout import EngineConfig, WorkflowConfig
from rlcore.errors import ConfigError
from rollout.engines.child_process import engine_environment
from rollout.workflows.mcp_tools import McpTools
from rollout.workflows.registry import check_options

SECRETS = (
    *("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "GITHUB_PAT", "AWS_SECRET_ACCESS_KEY"),
    *("RLCORE_ENGINE_API_KEY", "RLCORE_ENGINE_ADMIN_KEY", "RLCORE_RESOLVED", "RAY_AUTH_TOKEN"),
    *("SSH_AUTH_SOCK", "HTTPS_PROXY", "OPENAI_API_KEY", "SOMETHING_NEW", "LD_AUDIT"),
)
USUAL = {"PATH": "/bin", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    for name, value in USUAL.items():
        monkeypatch.setenv(name, value)


def test_what_is_not_on_the_list_stays() -> None:
    for found in (
        allowed_environment(),
        allowed_environment(more=ENGINES),
        engine_environment(EngineConfig(), on_gpu=False),
    ):
        assert not {*SECRETS} & found.keys()
        assert USUAL.items() <= found.items()


def test_names_that_are_asked_for_are_added(caplog: pytest.LogCaptureFixture) -> None:
    names = ["OPENAI_API_KEY", "NOT_SET_ANYWHERE"]
    for _ in range(3):
        found = allowed_environment(names, key="reward.environment")
        assert {*SECRETS} & found.keys() == {"OPENAI_API_KEY"}
    assert caplog.text.count("reward.environment names NOT_SET_ANYWHERE, which is not set") == 1


@pytest.mark.parametrize("name", ["RLCORE_ENGINE_ADMIN_KEY", "RLCORE_X", "RAY_AUTH_TOKEN"])
def test_keys_of_the_run_are_never_passed_on(name: str) -> None:
    for ask in (
        lambda: allowed_environment([name], key="reward.environment"),
        lambda: check_options("agent", {"command": ["true"], "environment": [name]}),
        lambda: McpTools([{"command": ["cat"], "environment": [name]}]),
    ):
        with pytest.raises(ConfigError, match=rf"environment: got {name}, a key of the run itself"):
            ask()
    assert name not in allowed_environment(more=["*"])


def test_the_service_has_all_but_what_rank_0_alone_needs() -> None:
    assert os.environ.keys() - service_environment().keys() == {"WANDB_API_KEY", "RAY_AUTH_TOKEN"}
    assert os.environ.keys() - service_environment(on_ray=True).keys() == {"WANDB_API_KEY"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run": "math:pow", "environment": ["A"]}, "a function runs in our process"),
        ({"command": ["true"], "environment": "A"}, "got 'A', expected a list of names"),
        ({"command": ["true"], "environment": [1]}, r"got \[1\], expected a list of names"),
    ],
)
def test_an_environment_is_a_list_of_names_for_a_command(
    options: dict[str, object], said: str
) -> None:
    given = WorkflowConfig.model_validate({"name": "agent", **options}).options
    with pytest.raises(ConfigError, match=rf"rollout\.workflow\.environment: .*{said}"):
        check_options("agent", given)
