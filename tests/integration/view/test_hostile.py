"""What a run wrote is text, whatever it says: in every view, and in an exported page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Reader, browsing, reading
from view_runs import SCRIPT, hostile

from rlcore.launch.commands.view import view_runs

SAMPLE = "sample?run=hostile&step=1&draw=0&index=1"
VIEWS = (
    "runs", "curves", "samples", "evaluations", "untrained", "compare", SAMPLE,
    *(f"{SAMPLE}&tab={tab}" for tab in ("tokens", "group", "prompt", "history")),
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def reader(run: Path, chromium: Any) -> Iterator[Reader]:
    with browsing(chromium, run) as reader:
        reader.open("samples")
        reader.see("tr[data-filled]")  # once its samples are indexed
        yield reader


def harmless(reader: Reader) -> None:
    """Nothing of the run has become markup, and nothing that it hides is hidden."""
    page = reader.page
    assert page.title() == "rlcore view"
    assert page.locator("main script, main img, main a:not([href^='#'])").count() == 0
    content = str(page.evaluate("main.textContent"))
    assert not any(mark in content for mark in "\u202e\u202c\x1b\u200b")


@pytest.mark.everyday
def test_a_conversation_is_text_and_shows_what_it_hides(reader: Reader) -> None:
    reader.open(SAMPLE)
    harmless(reader)
    said = reader.text(".talk")
    assert SCRIPT in said
    assert "safe \\u202eevil\\u202c \\x1b[31mred\\x1b[0m \\u200bhidden" in said
    assert reader.page.locator(".thought pre").first.is_hidden()
    reader.see(".thought summary").click()
    assert SCRIPT in reader.text(".thought pre")
    assert reader.text(".call .result").endswith("is 4")  # the result stands with its call
    assert reader.page.locator(".turn.tool").count() == 0


@pytest.mark.parametrize("view", VIEWS)
def test_no_view_runs_or_hides_anything(reader: Reader, view: str) -> None:
    reader.open(view)
    harmless(reader)


def test_a_hostile_address_is_text_too(reader: Reader) -> None:
    reader.open(f"samples?run={SCRIPT}&steps={SCRIPT}&text={SCRIPT}", "error")
    harmless(reader)
    assert "newest, all, STEP" in reader.text("[role=alert].bad >> nth=-1")
    said = reader.complaints.pop()  # the console tells of every request that is refused
    assert "the server responded with a status of 400" in said


def test_an_exported_page_is_as_harmless(run: Path, chromium: Any, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    assert view_runs([run], port=0, follow=False, export=target, step=None) == 0
    content = target.read_bytes()
    assert SCRIPT.encode() not in content
    assert content.count(b"</script>") == 2
    with reading(chromium, target.as_uri()) as reader:
        for view in VIEWS:
            reader.open(view)
            harmless(reader)
        reader.open("samples")
        assert reader.page.locator("tr[data-row]").count() == 4
