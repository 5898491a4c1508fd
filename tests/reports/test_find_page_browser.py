"""The page of a search in a real browser: marking by keyboard, and what it saves."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from lopsided.data.prepare import add_more
from lopsided.data.sources import open_source
from lopsided.inference.find import Journal, Result, Row
from lopsided.models.model import ModelCard
from lopsided.recipe.sections import Data
from lopsided.reports.find_page import write_find_page
from lopsided.runs.find import Found
from made_runs import Open, colour_of
from tiny import write_photos

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

NAMES = ["a.png", 'quo"te, comma.png', "</script><b>.png", "名前.png", "e.png"]


def make_page(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), near: float | None = 0.25) -> Path:
    """Five candidates of one colour each, in odd file names."""
    pool = folder / "pool"
    pool.mkdir()
    rows = []
    for place, name in enumerate(NAMES):
        Image.new("RGB", (80, 60), colour_of(place)).save(pool / name.replace("/", "-"))
        rows.append(Row(place, str(pool / name.replace("/", "-")), 0.9 - place / 10, near, str(place)))
    card = ModelCard(
        kind="image", encoder="mlp", channels=3, image_size=8, shape=(3, 8, 8), mean=(0,) * 3, std=(1,) * 3,
        classes=classes, features=4, prior=(1 / len(classes),) * len(classes),
    )  # fmt: skip
    result = Result(rows, 100, 2, 1, [], 0, Journal(folder / "found.csv", ""))
    assert write_find_page(Found(result, card, "dog", None, ()), folder / "found.html") == 5
    return folder / "found.html"


def place(page: Page) -> str:
    return page.inner_text("#place")


def saved(page: Page, *, by_key: bool = True) -> list[dict[str, str]]:
    with page.expect_download() as waiting:
        if by_key:
            page.keyboard.press("d")
        else:
            page.click("#save")
    assert waiting.value.suggested_filename == "marks.csv"
    with open(waiting.value.path(), newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_keyboard_marks_undoes_and_saves(tmp_path: Path, show: Open) -> None:
    page = show(make_page(tmp_path))
    assert page.inner_text("h1") == "Is this dog?"
    assert (place(page), page.inner_text("#p"), page.inner_text("#near")) == ("1", "0.900", "+0.250")
    page.keyboard.press("y")
    page.keyboard.press("n")
    page.keyboard.press("s")
    assert place(page) == "4"
    assert page.inner_text("#path").endswith("名前.png")
    assert page.inner_text("#status") == "3 of 5 marked: 1 yes, 1 no, 1 skipped."
    page.keyboard.press("u")
    assert (place(page), page.inner_text("#mark")) == ("3", "none yet")
    page.keyboard.press("ArrowLeft")
    assert (place(page), page.inner_text("#mark")) == ("2", "no")
    page.keyboard.press("Y")  # A second look: the mark changes, and can be undone.
    page.keyboard.press("u")
    assert (place(page), page.inner_text("#mark")) == ("2", "no")
    page.keyboard.press("End")
    page.keyboard.press("Control+s")  # The browser's own keys are not marks.
    assert page.inner_text("#status") == "2 of 5 marked: 1 yes, 1 no, 0 skipped."
    page.keyboard.press("s")
    rows = saved(page)
    full = [str(tmp_path / "pool" / name.replace("/", "-")) for name in NAMES]
    assert [(row["path"], row["label"], row["mark"]) for row in rows] == [
        (full[0], "dog", "yes"), (full[1], "cat", "no"), (full[4], "", "skip"),
    ]  # fmt: skip
    assert saved(page, by_key=False) == rows


def test_marks_survive_a_reload_and_become_training_images(tmp_path: Path, show: Open) -> None:
    page = show(make_page(tmp_path))
    for key in "ynnyn":
        page.keyboard.press(key)
    assert "All images are marked: save the marks." in page.inner_text("#status")
    page.reload()
    page.wait_for_selector("html[data-ready=true]", state="attached")
    assert page.inner_text("#status").startswith("5 of 5 marked: 2 yes, 3 no, 0 skipped.")
    page.keyboard.press("u")
    assert (place(page), page.inner_text("#mark")) == ("5", "none yet")
    with page.expect_download() as waiting:
        page.click("#save")
    waiting.value.save_as(tmp_path / "marks.csv")
    photos = write_photos(tmp_path / "photos", {"cat": 2, "dog": 2})
    source = add_more(open_source(photos), Data(more=[str(tmp_path / "marks.csv")], allow_outside=True))
    assert source.more is not None
    assert source.more.counts() == {"cat": 2, "dog": 2}


def test_with_more_than_two_classes_a_no_has_no_label(tmp_path: Path, show: Open) -> None:
    page = show(make_page(tmp_path, ("cat", "dog", "fox"), near=None))
    assert page.is_hidden("#near")
    assert "so training leaves these images out" in page.inner_text("#after")
    page.keyboard.press("n")
    assert [(row["label"], row["mark"]) for row in saved(page)] == [("", "no")]


def test_a_picture_is_that_of_its_image_and_can_be_chosen(tmp_path: Path, show: Open) -> None:
    page = show(make_page(tmp_path))
    for number in (0, 3):
        page.locator(".candidate").nth(number).click()
        assert place(page) == str(number + 1)
        page.wait_for_function("document.getElementById('picture').complete")
        seen = Image.open(io.BytesIO(page.locator("#picture").screenshot())).convert("RGB")
        middle = seen.getpixel((seen.width // 2, seen.height // 2))
        assert np.abs(np.subtract(middle, colour_of(number))).max() <= 6
    page.keyboard.press("n")
    assert page.locator(".candidate[data-mark=no]").count() == 1
