"""Which confinement is chosen, its command line, and sandboxes that do not come up."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from rlcore.config.sections.sandbox import SandboxConfig
from rlcore.errors import ConfigError
from rollout.sandbox import Program, local
from rollout.sandbox.confinement import Bubblewrap, Confinement, Unshare, interpreter, minimal
from rollout.sandbox.local import build_sandbox


@pytest.mark.parametrize("root", [True, False])
def test_command_lines(monkeypatch: pytest.MonkeyPatch, root: bool) -> None:
    """Those of both tools, whichever is installed."""
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    python = interpreter(None)
    bubblewrap = Bubblewrap(python, options=("--size", "--disable-userns")).command(9)
    assert bubblewrap[-1] == "9"
    assert {"--unshare-net", "--unshare-pid", "--unshare-ipc", "--die-with-parent"} <= {*bubblewrap}
    assert {"--bind", "--dev-bind", "--share-net"}.isdisjoint(bubblewrap)
    assert ("--unshare-user" in bubblewrap) == ("--disable-userns" in bubblewrap) == (not root)
    assert (bubblewrap.count("--cap-add") == 2) == root
    unshare = Unshare(python).command(9)
    assert {"--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child"} <= {*unshare}
    assert ("--user" in unshare) == (not root)
    plan = Unshare(python).task(0)
    assert (plan["uid"] is not None) == root
    # root has no user namespace of its own, and the limit in /proc/sys is the machine's
    assert plan["mount"]["own_users"] == (not root)


def test_folders_that_others_hold_are_not_shown_twice() -> None:
    found = minimal(["/opt/env", "/opt/env/lib", "/usr/lib/python", "/opt/environment", "/opt/env"])
    assert found == ("/opt/env", "/opt/environment")


def script(folder: Path) -> str:
    """An interpreter that is a script, as people have them in a bin of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "python3"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_script_in_a_home_folder_shows_its_own_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = script(tmp_path / "bin")
    seen = interpreter(path).folders
    assert str(tmp_path / "bin") in seen
    for hidden in (tmp_path, tmp_path / ".ssh" / "id_ed25519"):
        assert not any(hidden.is_relative_to(folder) for folder in seen)


@pytest.mark.parametrize("place", [".", "a/b"])
def test_an_interpreter_that_would_show_a_home_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """By the folder that it is in, or by what it says its installation is."""
    monkeypatch.setenv("HOME", str(tmp_path / place))
    path = script(tmp_path)
    with pytest.raises(ConfigError, match=r"reward.sandbox.python: .* could read your home folder"):
        interpreter(path)
    # an installation in the home folder itself: python built with --prefix=$HOME
    (tmp_path / "lib" / "python3.11").mkdir(parents=True)
    (tmp_path / "lib" / "python3.11" / "os.py").touch()
    with pytest.raises(ConfigError, match="could read your home folder"):
        interpreter(script(tmp_path / "bin"))


def test_an_interpreter_that_would_show_the_current_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="your current folder"):
        interpreter(script(tmp_path))


def test_wrong_configurations() -> None:
    with pytest.raises(ValueError, match="needs url: http"):
        SandboxConfig(kind="fusion")
    with pytest.raises(ValueError, match="needs url: http"):
        SandboxConfig(kind="fusion", url="host:8080")
    assert SandboxConfig(kind="fusion", url="http://host:8080").url == "http://host:8080"
    with pytest.raises(ValueError, match="kind is namespaces"):
        SandboxConfig(url="http://host:8080")


def test_the_unsafe_kind_warns(caplog: pytest.LogCaptureFixture) -> None:
    build_sandbox(SandboxConfig(kind="rlimits"))
    assert "can read your files" in caplog.text


def test_the_place_of_the_root_folder_hides_nothing() -> None:
    class Elsewhere(Unshare):
        @property
        def readable(self) -> tuple[str, ...]:
            return ("/usr", "/mnt/env", "/media/data")

    assert Elsewhere(interpreter(None)).mounts()["at"] not in ("/mnt", "/media")
    assert isinstance(Elsewhere(interpreter(None)), Confinement)


def test_a_sandbox_that_starts_too_slowly_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        sandbox = build_sandbox(SandboxConfig(kind="rlimits"))
        await sandbox.start()
        monkeypatch.setattr(local, "SANDBOX_START_S", 0.0)
        found = await sandbox.run(Program("print(1)", timeout_s=20))
        await sandbox.close()
        assert (found.status, found.stdout) == ("error", "")
        assert found.reason == "the sandbox has not started in 0 s"

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_without_any_sandbox_the_reasons_of_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SANDBOX_START_S", 0.0)
    sandbox = build_sandbox(SandboxConfig(kind="rlimits"))
    with pytest.raises(ConfigError, match="rlimits: the sandbox has not started in 0 s"):
        asyncio.run(asyncio.wait_for(sandbox.start(), 60))
