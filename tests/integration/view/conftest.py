"""The server of the page in this process, and Chromium, which is driven by playwright."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # environments are named by module

import view_runs
from workspace import Workspace

from rlcore.launch.commands.view import RunApi, named
from rlcore.view.run import RunView
from rlcore.view.server import ViewServer

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
WAIT_MS = 60_000  # for one thing, on a machine that others use too
WIDE = (1280, 800)


@dataclass
class Reader:
    """A person's browser: a page, and what went wrong in it."""

    page: Any
    url: str
    complaints: list[str] = field(default_factory=list)

    def open(self, fragment: str, view: str = "") -> None:
        """Go to a view and wait until it is shown."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}#{fragment}")
        self.shown(view or fragment.partition("?")[0])

    def shown(self, view: str) -> None:
        """Wait until a view is there."""
        self.page.locator(f"main[data-shown='{view}'] .view").wait_for()

    def see(self, selector: str) -> Any:
        """Wait for an element; return it."""
        found = self.page.locator(selector).first
        found.wait_for()
        return found

    def text(self, selector: str = "main") -> str:
        """The text of an element, as it is in the page."""
        return str(self.page.locator(selector).first.inner_text())

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)


@pytest.fixture(scope="module")  # while playwright is on, asyncio.run fails in its thread
def chromium() -> Iterator[Any]:
    """A browser. Without it the tests fail: scripts/install_chromium.sh brings it."""
    from playwright.sync_api import sync_playwright

    assert Path(CHROMIUM).is_file(), f"no {CHROMIUM}: run scripts/install_chromium.sh"
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def single(workspace: Workspace) -> Path:
    return view_runs.single_turn(workspace).folder


@pytest.fixture(scope="session")
def talks(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return view_runs.conversations(workspace, tmp_path_factory.mktemp("talks")).folder


@contextmanager
def serving(*paths: Path, follow: bool = False) -> Iterator[ViewServer]:
    """Serve runs in a thread."""
    runs = [RunView(name, path) for name, path in named(paths).items()]
    server = ViewServer(RunApi(runs, follow=follow))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


def _elsewhere(url: str, asked: str) -> list[str]:
    """A request to anything but the page's own server."""
    own = url.partition("#")[0]
    return [] if asked.startswith((own, "about:")) else [f"asked for {asked}"]


@contextmanager
def reading(browser: Any, url: str, **options: Any) -> Iterator[Reader]:
    """Open a page; whatever its console complains of is an error of the test."""
    width, height = options.pop("size", WIDE)
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    reader = Reader(page, url)
    page.on("console", lambda said: reader.complaints.append(f"{said.type}: {said.text}"))
    page.on("pageerror", lambda error: reader.complaints.append(f"error: {error}"))
    page.on("request", lambda asked: reader.complaints.extend(_elsewhere(url, asked.url)))
    page.on("dialog", lambda dialog: reader.complaints.append(f"dialog: {dialog.message}"))
    try:
        yield reader
    finally:
        context.close()
    assert reader.complaints == []


@contextmanager
def browsing(browser: Any, *runs: Path, follow: bool = False, **options: Any) -> Iterator[Reader]:
    """Serve runs and open their page."""
    with serving(*runs, follow=follow) as server, reading(browser, server.url, **options) as reader:
        yield reader
