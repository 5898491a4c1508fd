"""The page in a real browser: try, mark, correct, refit and compare, without a complaint or a request elsewhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from browser import browser  # noqa: F401  A fixture.
from serve.test_process import served
from tiny import write_photos

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow
MINUTE = 60_000


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Any]:  # noqa: F811
    contexts, complaints = [], []

    def open_page(port: int, tab: str, **options: Any) -> Page:
        context = browser.new_context(
            **{"viewport": {"width": 1200, "height": 900}, "reduced_motion": "reduce", **options}
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(MINUTE)
        page.on("console", lambda message: _check_words(message.text, complaints))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("request", lambda request: _check(request.url, complaints))
        page.goto(f"http://127.0.0.1:{port}/#{tab}")
        page.wait_for_selector("html[data-ready=true]", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def _check_words(text: str, complaints: list[str]) -> None:
    killed = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET")  # By a server that a test has killed.
    if not any(word in text for word in killed):
        complaints.append(f"console: {text}")


def _check(url: str, complaints: list[str]) -> None:
    if not url.startswith("data:") and urlsplit(url).hostname != "127.0.0.1":
        complaints.append(url)


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Sixty images to mark."""
    return write_photos(tmp_path / "many", {"cat": 40, "dog": 20}, start=500)


def test_from_a_dropped_image_to_a_better_run(
    open_page: Any, run: Path, photos: Path, many: Path, tmp_path: Path
) -> None:
    odd = tmp_path / "odd.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(odd)
    work = tmp_path / "work"
    with served(run, many, "--work", work) as (process, port, _):
        page = open_page(port, "try")
        # Three images, dropped.
        files = [photos / "cat" / "001.png", photos / "dog" / "002.png", odd]
        page.set_input_files("#pick-files", [str(path) for path in files])
        page.wait_for_selector('#try-status:has-text("3 of 3")')
        said = page.locator(".answer .said").all_text_contents()
        assert said[1:] == ["dog", "cat"]  # The last one comes first.
        assert page.locator('.answer[data-state="unfamiliar"]').count() == 1
        assert page.locator(".answer .near-images img").count() == 15
        assert page.locator(".answer .over-picture").count() == 3
        page.select_option("#rule", "threshold")
        page.locator("#rule-value").fill("1")
        page.wait_for_selector("#counts .changed")
        page.wait_for_selector('#changes:has-text("of 3 images")')
        # Marked by keyboard, and killed in the middle.
        page.click('.bar nav a[href="#mark"]')
        page.wait_for_selector('#nothing:has-text("Type your name and press Enter")')
        page.fill("#who", "Ana")
        page.press("#who", "Enter")
        for turn in range(20):
            _mark(page, turn)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        page.keyboard.press("y")
        page.wait_for_selector('#mark-error:has-text("does not answer")')
        page.context.close()
    lines = (work / "journal.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 20
    with served(run, many, "--work", work) as (process, port, _):
        page = open_page(port, "mark")
        page.fill("#who", "Ana")
        page.press("#who", "Enter")
        page.wait_for_selector('#pool-status:has-text("20 marks so far")')
        for turn in range(20, 40):
            _mark(page, turn)
        page.keyboard.press("u")
        page.wait_for_selector('#pool-status:has-text("39 marks")')
        _mark(page, 39)
        # A label is corrected.
        page.select_option("#order", "doubtful")
        page.wait_for_selector('#mark-facts:has-text("wrong.png")')
        page.keyboard.press("n")
        page.wait_for_selector('#pool-status:has-text("41 marks")')
        # Trained again, compared, used, and back.
        page.click('.bar nav a[href="#refit"]')
        page.click("#refit-start")
        page.wait_for_selector("#refit-progress:not([hidden])")
        page.wait_for_selector("#compared:not([hidden])", timeout=5 * MINUTE)
        assert page.text_content("#compared-words").startswith("dog: 12 → 33 training images; recall ")
        assert "1 label of them is corrected" in page.text_content("#compared-table caption")
        page.click("text=Use this run")
        page.wait_for_selector('#runs li:has-text("refit 1"):has-text("answers now")')
        page.click("text=Use this run")
        page.wait_for_selector('#runs li:has-text("run run"):has-text("answers now")')
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        page.context.close()


def _mark(page: Page, turn: int) -> None:
    page.wait_for_selector("#looker:not([hidden])")
    name = page.text_content("#mark-facts dd:nth-of-type(3)")
    page.keyboard.press("y" if name == "dog" else "n")
    marks = "1 mark " if turn == 0 else f"{turn + 1} marks "
    page.wait_for_selector(f'#pool-status:has-text("{marks}so far")')


def test_two_people_mark_different_images(open_page: Any, run: Path, many: Path, tmp_path: Path) -> None:
    with served(run, many, "--work", tmp_path / "work") as (_, port, _line):
        pages = [open_page(port, "mark") for _ in range(2)]
        seen = []
        for page, who in zip(pages, ("Ana", "Ben"), strict=True):
            page.fill("#who", who)
            page.press("#who", "Enter")
            page.wait_for_selector("#looker:not([hidden])")
        for _turn in range(5):
            for page in pages:
                seen.append(page.get_attribute("#mark-picture", "src"))
                page.keyboard.press("s")
                page.wait_for_selector(f'#mark-picture:not([src="{seen[-1]}"])')
        assert len(set(seen)) == 10
        pages[0].wait_for_selector('#pool-status:has-text("Ana 5"):has-text("Ben 4")')
        for page in pages:
            page.context.close()


def test_a_queue_that_comes_after_a_later_mark_changes_nothing(
    open_page: Any, run: Path, many: Path, tmp_path: Path
) -> None:
    with served(run, many, "--work", tmp_path / "work") as (_, port, _line):
        page = open_page(port, "mark")
        page.fill("#who", "Ana")
        page.press("#who", "Enter")
        page.wait_for_selector('#pool-status:has-text("0 marks so far; 60 images")')
        held: list[tuple[Any, Any]] = []
        page.route("**/v1/queue", lambda route: held.append((route, route.fetch())), times=1)
        page.fill("#who", "Ben")
        page.press("#who", "Enter")  # Asks for a queue, whose answer is kept back.
        while not held:
            page.wait_for_timeout(20)
        page.keyboard.press("s")
        page.wait_for_selector('#pool-status:has-text("1 mark so far")')
        (route, answer), next_one = held[0], page.get_attribute("#mark-picture", "src")
        assert answer.json()["counts"]["marks"] == 0
        with page.expect_response("**/v1/queue"):
            route.fulfill(response=answer)
        page.evaluate("() => fetch('/v1/marks').then((found) => found.text())")  # By now the page has read the queue.
        assert page.text_content("#pool-status").startswith("1 mark so far")
        assert page.get_attribute("#mark-picture", "src") == next_one
        page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_and_works_by_keyboard(open_page: Any, live: str, scheme: str) -> None:
    port = int(live.rpartition(":")[2])
    page = open_page(port, "try", viewport={"width": 400, "height": 800}, color_scheme=scheme)
    for tab in ("try", "mark", "refit", "api"):
        page.click(f'.bar nav a[href="#{tab}"]')
        page.wait_for_selector(f"#{tab}:not([hidden])")
        width = page.evaluate("() => document.documentElement.scrollWidth")
        assert width <= 400, tab
    page.click('.bar nav a[href="#try"]')
    page.wait_for_selector("#try:not([hidden])")
    page.focus("#rule")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("#rule-slider:not([hidden])")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Browser, live: str, photos: Path, scheme: str) -> None:  # noqa: F811
    """Accessibility, by axe-core of npm, which is not part of this repository.

    npm pack axe-core && tar xf axe-core-*.tgz && LOPSIDED_AXE=package/axe.min.js pytest tests/serve/test_browser.py
    """
    axe = os.environ.get("LOPSIDED_AXE", "")
    if not Path(axe).is_file():
        pytest.skip("LOPSIDED_AXE does not name axe.min.js")
    context = browser.new_context(bypass_csp=True, color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(MINUTE)
    page.goto(f"{live}/#try")
    page.wait_for_selector("html[data-ready=true]", state="attached")
    page.set_input_files("#pick-files", [str(photos / "cat" / "001.png"), __file__])
    page.wait_for_selector('#try-status:has-text("2 of 2")')
    page.select_option("#rule", "cost")
    page.add_script_tag(path=axe)
    for tab in ("try", "mark", "refit", "api"):
        page.click(f'.bar nav a[href="#{tab}"]')
        page.wait_for_selector(f"#{tab}:not([hidden])")
        if tab == "mark":
            page.select_option("#order", "doubtful")
            page.fill("#who", "Ana")
            page.press("#who", "Enter")
            page.wait_for_selector("#looker:not([hidden])")
        found = page.evaluate("() => axe.run()")
        assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == [], tab
    context.close()


def test_the_token_is_typed_into_the_page(browser: Browser, run: Path, tmp_path: Path) -> None:  # noqa: F811
    token = "a-token-of-the-test-0123456789"
    with served(run, "--work", tmp_path / "work", LOPSIDED_TOKEN=token) as (_, port, _):
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        page.fill("#token", token)
        page.keyboard.press("Enter")
        page.wait_for_selector("#pick-files", state="attached")
        assert page.locator("#token").count() == 0
        context.close()
