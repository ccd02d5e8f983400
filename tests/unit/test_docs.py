"""Pages that are made from code are current, and the code that pages show runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore import cli
from tests.pages import blocks

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    *sorted(DOCS.glob("*.md")),
    *(DOCS.parent / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
]


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that the headings of `page` get."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file) if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_names_every_page() -> None:
    linked = set(re.findall(r"\]\((\w[\w-]*)\.md", (DOCS / "index.md").read_text()))
    assert linked == {page.stem for page in DOCS.glob("*.md")} - {"index"}


def test_the_page_of_commands_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = re.findall(r"^    ([a-z-]+) ", capsys.readouterr().out, re.MULTILINE)
    assert {"train", "ledger"} <= set(commands)
    page = (DOCS / "commands.md").read_text()
    assert [name for name in commands if f"    rlcore {name}" not in page] == []


def test_the_page_of_errors_shows_both_trees() -> None:
    import rlcore.algorithms.errors
    import rlcore.errors

    page = (DOCS / "errors.md").read_text()
    for module in (rlcore.errors, rlcore.algorithms.errors):
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__:
                assert re.search(rf"\b{name}\b", page), name


@pytest.mark.parametrize(
    ("command", "page"), [("metrics", "metrics.md"), ("config", "configuration-reference.md")]
)
def test_a_page_made_from_code_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], command: str, page: str
) -> None:
    assert cli.main([command, "--markdown"]) == 0
    assert (DOCS / page).read_text() == capsys.readouterr().out, (
        f"run: rlcore {command} --markdown > docs/{page}"
    )


def test_every_key_of_the_configuration_has_a_meaning() -> None:
    from rlcore.config.reference import list_keys
    from rlcore.config.schema import known_keys

    listed = {line.split()[0]: line for line in list_keys()}
    assert listed.keys() <= set(known_keys())
    assert len(listed) <= 268, "a key enters with a recipe or example that uses it"
    assert all(re.search(r"\S{2}  +\S.{8,}\S \(.+; .+\)$", line) for line in listed.values())


def test_the_page_of_algorithms_names_every_one() -> None:
    from rlcore.algorithms import CORRECTIONS, estimator_names, policy_loss_names

    page = (DOCS / "algorithms.md").read_text() + (DOCS / "preferences.md").read_text()
    for name in (*estimator_names(), *policy_loss_names(), *CORRECTIONS):
        assert f"| `{name}` |" in page


def test_the_page_of_algorithms_shows_code_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from rlcore.algorithms import EstimatorInputs, GuardedEstimator

    plugin, alone = (
        block.text for block in blocks(DOCS / "algorithms.md") if block.language == "python"
    )
    exec(alone, {})
    assert capsys.readouterr().out.startswith("tensor([ 0.7071,")
    names: dict[str, Any] = {}
    exec(plugin, names)
    estimator = GuardedEstimator(
        "mine", names["MyCredit"](scale=2.0, kl_coef=0.5), names["MyCredit"].needs
    )
    one = torch.ones(1)
    inputs = EstimatorInputs(
        cu_seqlens=torch.tensor([0, 2]),
        rewards=one,
        group_ids=one.long(),
        kl=torch.tensor([0.0, 1.0]),
    )
    assert estimator(inputs).advantages.tolist() == [2.0, 1.5]
