"""What the pages tell a reader to write and to run is carried out: files, fragments, commands.

A YAML block whose first line is `# NAME.yaml` is that file, and a command of its page gives it to
rlcore. A block without a name is a second file behind the `grpo.yaml` of the README
(docs/configuration.md says so to readers). A new block or command is tried by itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from rlcore.arguments import parse
from rlcore.config.derived import world_size
from rlcore.config.load import Loaded, load_config, split_arguments
from rlcore.config.path_keys import given_paths
from rlcore.config.yaml_settings import plain, read_file
from rlcore.errors import UserError
from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.launch.input_checks import check_folders, check_plugins
from rollout.workflows import verifiers_env
from tests.certificates import Authority
from tests.pages import PAGES, ROOT, Block, blocks, commands

README = ROOT / "README.md"
CONFIGURED = ("train", "validate", "data", "doctor", "eval", "plan", "dryrun", "engine")
PLACEHOLDERS = {
    "CONFIG": "grpo.yaml", "CONFIG.yaml": "grpo.yaml", "SERVERS.yaml": "servers.yaml",
}  # fmt: skip
FRAGMENTS = [block for page in PAGES for block in blocks(page) if block.language == "yaml"]
COMMANDS = {
    # a command that several pages show is tried once
    " ".join(words): (block, words)
    for page in PAGES
    for block, words in commands(page)
    # neither a synopsis, `[KEY=VALUE ...]`, nor a run that there is not
    if words[1] in CONFIGURED
    and not any(word.startswith(("[", "runs/", "HOST:PORT")) for word in words)
}


@dataclass
class Reader:
    """Somebody who has followed the README, and now follows a page, in a folder of their own."""

    folder: Path
    model: Path
    page: Path

    def __post_init__(self) -> None:
        (self.folder / "examples").symlink_to(ROOT / "examples")
        # the arguments of servers, which stand in a file of their own beside CONFIG.yaml
        self.save("more.yaml", "{}\n")
        self.save("servers.yaml", "rollout: {engine: {kind: sglang}}\n")
        # what docs/planning.md has `rlcore plan` write
        self.save("keys.yaml", "{}\n")
        for page in (*PAGES, README, self.page):
            for block in blocks(page):
                if block.name and (block.language == "python" or page in (README, self.page)):
                    self.save(block.name, block.text)

    def save(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def validate(self, settings: list[str]) -> Loaded:
        """Make all checks of `rlcore validate`, once what the keys lead to is there."""
        files, overrides = split_arguments(settings)
        for key, leads_to, path in given_paths(load_config(files, overrides).config):
            if Path(path).is_absolute():
                # of the machines that the page speaks of, as /models/...
                path = f"{self.folder}{path}"
                overrides.append(f"{key}={path}")
            self.provide(Path(path), leads_to.kind)
        loaded = load_config(files, overrides)
        check_plugins(loaded)
        check_folders(loaded.config, world_size(loaded.config), here=False)
        return loaded

    def provide(self, path: Path, kind: str) -> None:
        if path.exists() or kind == "output" or (kind == "rows" and not path.suffix):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "folder":
            path.symlink_to(self.model)
        elif kind == "checkpoint":
            path.mkdir()
            (path / "shard").touch()
        elif path.suffix in (".pem", ".crt", ".key"):
            self.certify(path.parent)
        else:
            path.write_text('{"question": "7x42=", "digit": "7", "answer": "7"}\n')

    def certify(self, folder: Path) -> None:
        tls = Authority(folder, "ca").tls("127.0.0.1")
        for file in (tls.certificate_file, tls.key_file):
            assert file is not None
            Path(file).rename(folder / f"node{Path(file).suffix}")


@pytest.fixture(scope="session")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template and a context for the answers of any page."""
    folder = tmp_path_factory.mktemp("roomy") / "model"
    init_model(folder, ModelSpec.preset("ascii", chat=True, hidden=32, layers=2, intermediate=64,
                                        max_positions=1 << 17))  # fmt: skip
    return folder


@pytest.fixture
def reader(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    roomy_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Reader]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # the reader has installed the package where a page asks for it; tests of runs use the real one
    installed = tmp_path / "verifiers_python"
    installed.write_text("#!/bin/sh\necho 0.4.0\n")
    installed.chmod(0o700)
    monkeypatch.setattr(verifiers_env, "PYTHON", installed)
    before = set(sys.modules)
    yield Reader(tmp_path, roomy_model, request.param)
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith((str(tmp_path), str(ROOT / "examples"))):
            del sys.modules[name]


def settings_of(block: Block) -> list[str]:
    """The files and overrides that the reader of a block gives to rlcore."""
    if block.name is None:
        return ["grpo.yaml", "more.yaml"]
    for _, words in commands(block.page):
        if block.name in words:
            return parse(words[1:]).settings
    raise AssertionError(
        f"{block.where}: no command of the page uses {block.name}: write one below the block, as"
        f" `rlcore train grpo.yaml {block.name}`, or take its first line away if it is an excerpt"
        " that goes behind the README's grpo.yaml"
    )


@pytest.mark.parametrize(
    ("reader", "block"), [(b.page, b) for b in FRAGMENTS], ids=[b.where for b in FRAGMENTS],
    indirect=["reader"],
)  # fmt: skip
def test_a_configuration_of_a_page_is_valid_where_it_belongs(reader: Reader, block: Block) -> None:
    reader.save("more.yaml", block.text)
    settings = settings_of(block)
    try:
        loaded = reader.validate(settings)
    except UserError as error:
        given = " ".join(settings)
        pytest.fail(
            f"{block.where}, as `rlcore validate {given}` (more.yaml is the block): {error}"
        )
    if block.name is None or len(settings) == 1:
        return
    parts = plain(read_file(reader.folder / block.name)).get("reward", {}).get("parts", {})
    kept = {name for name, part in parts.items() if isinstance(part, dict)}
    assert not parts or set(loaded.config.reward.parts) == kept, (
        f"{block.where}: parts of the reward of {settings[0]} stay; take each away: `NAME: null`"
    )


@pytest.mark.parametrize(
    ("reader", "command"), [(b.page, (b, words)) for b, words in COMMANDS.values()],
    ids=[b.where for b, _ in COMMANDS.values()], indirect=["reader"],
)  # fmt: skip
def test_a_command_of_a_page_is_accepted(
    reader: Reader, command: tuple[Block, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    block, words = command
    shown = " ".join(words)
    for name, value in re.findall(r"^(?:export )?(\w+)=(\S+)", block.text, re.MULTILINE):
        words = [word.replace(f"${name}", value) for word in words]
        if name == "PYTHONPATH":
            for folder in value.replace("$PWD", str(reader.folder)).split(":"):
                monkeypatch.syspath_prepend(folder)
    words = [PLACEHOLDERS.get(word, word) for word in words]
    try:
        settings = parse(words[1:]).settings
        if settings:
            reader.validate(settings)
    except (UserError, SystemExit) as error:
        pytest.fail(f"{block.where}: `{shown}`: {error}")


def test_no_page_asks_to_add_to_a_file_what_a_second_file_can_say() -> None:
    """A key twice is an error of YAML, so what is added to a file has to be a file."""
    asks = re.compile(r"\b(?:[Aa]dd|[Pp]ut|[Ww]rite) (?:this|these|it) (?:to|into|in) [^.]*\.yaml")
    found = [
        f"{page.relative_to(ROOT)}: {match[0]!r}: begin the block with `# NAME.yaml` and show the"
        " command that gives it behind the other file"
        for page in PAGES
        for match in asks.finditer(page.read_text())
    ]
    assert found == []


def test_the_workflow_runs_the_commands_of_the_readme() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    jobs = workflow["jobs"].values()
    steps = {step["run"] for job in jobs for step in job["steps"] if "run" in step}
    for script in re.findall(r"\./scripts/\S+", "\n".join(steps)):
        assert os.access(ROOT / script, os.X_OK), script
    of_the_readme = {" ".join(words) for _, words in commands(README, "./scripts/")}
    assert len(of_the_readme) == 2
    assert of_the_readme | {"./scripts/test.sh --rest"} <= steps
    assert "--rest)" in (ROOT / "scripts" / "test.sh").read_text()
    # a job of a hosted runner ends after six hours
    assert all(0 < job["timeout-minutes"] <= 360 for job in jobs)


def test_the_citation_names_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    package = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'^version = "(.*)"$', package, re.MULTILINE) == [citation["version"]]


def test_the_form_for_bugs_asks_for_what_rlcore_prints() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    fields = {field["id"]: field for field in form["body"] if "id" in field}
    assert {"doctor", "versions", "configuration", "log"} <= set(fields)
    assert all(fields[name]["validations"]["required"] for name in ("doctor", "log"))
    label = fields["doctor"]["attributes"]["label"]
    [command] = re.findall(r"`rlcore (.*)`", label)
    assert parse(command.split()).command == "doctor"


PAGE = """
```yaml
# more-tools.yaml
rollout: {workflow: {name: env}}
```

    rlcore train grpo.yaml \\
        tools.yaml  # without it

Or:

    evaluation: {every: 5}
"""


def test_a_block_without_a_place_fails_by_saying_what_to_write(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    named, shell, excerpt = blocks(page)
    assert [named.where, shell.where, excerpt.where] == ["page.md:2", "page.md:7", "page.md:12"]
    assert [words for _, words in commands(page)] == [
        ["rlcore", "train", "grpo.yaml", "tools.yaml"]
    ]
    with pytest.raises(AssertionError, match=r"rlcore train grpo\.yaml more-tools\.yaml"):
        settings_of(named)
    assert settings_of(excerpt) == ["grpo.yaml", "more.yaml"]
    other = tmp_path / "other.md"
    other.write_text(PAGE.replace("tools.yaml  #", "more-tools.yaml  #"))
    assert settings_of(blocks(other)[0]) == ["grpo.yaml", "more-tools.yaml"]
