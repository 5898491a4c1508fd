"""A real browser for the tests of pages, which may not ask anyone for anything."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from made_runs import Open

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start chromium without a window, once for the tests of a file."""
    driver = pytest.importorskip("playwright.sync_api", reason="NO BROWSER TESTS: the package playwright is missing")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"NO BROWSER TESTS: none of {', '.join(NAMES)} is installed (`make programs` installs one)")
    with driver.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def show(browser: Browser) -> Iterator[Open]:
    """Open pages; in the end none of them may have complained, asked for anything, or said a word in a dialog."""
    contexts, complaints = [], []

    def show(path: Path, *, ready: bool = True, **options: Any) -> Page:
        usual = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"}
        context = browser.new_context(**{**usual, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: complaints.append(request.url) if _is_outside(request.url) else None)
        page.goto(path.resolve().as_uri())
        if ready:
            page.wait_for_selector("html[data-ready=true]", state="attached")
        return page

    yield show
    for context in contexts:
        context.close()
    assert complaints == []


def _is_outside(url: str) -> bool:
    return not url.startswith(("file:", "data:"))
