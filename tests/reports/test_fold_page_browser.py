"""The page of a comparison over folds in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from lopsided.reports.report import write_report
from made_folds import make_comparison
from made_runs import Open

pytestmark = pytest.mark.slow

MISSES = {"ce": {0, 1, 24, 25, 26}, "weighted-ce": {1, 2, 26}, "focal": {24, 26, 30}}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folds") / "CMP"
    return write_report(make_comparison(folder, MISSES)).path


def test_the_choice_of_two_methods_shows_their_images(page_file: Path, show: Open) -> None:
    page = show(page_file)
    section = page.locator("#disagreements-1")
    for number, (first, second) in enumerate((("ce", "weighted-ce"), ("ce", "focal"), ("weighted-ce", "focal")), 1):
        page.check(f"input[name=show-pair][value=pair-{number}]")
        block = section.locator(".one-of:visible")
        assert block.count() == 1
        rows = [row.locator("td, th").all_inner_texts() for row in block.locator("tbody tr").all()]
        for row, (name, images) in zip(rows, (("common", range(24)), ("rare", range(24, 32))), strict=True):
            only = [sum(i in MISSES[b] - MISSES[a] for i in images) for a, b in ((first, second), (second, first))]
            assert row == [name, str(len(images)), *map(str, only)]
        tiles = block.locator(".tile")
        assert tiles.count() == len(MISSES[first] ^ MISSES[second])


def test_each_tile_has_a_picture_of_its_image(page_file: Path, show: Open) -> None:
    page = show(page_file)
    tile = page.locator("#disagreements-1 .one-of:visible .tile").first
    picture = tile.locator(".thumb").evaluate("each => getComputedStyle(each).backgroundImage")
    assert picture.startswith('url("data:image/webp')
    assert tile.locator(".says").inner_text() == "0.880 0.200"  # Image 2: ce recognises it, weighted-ce does not.
    assert tile.locator(".name").inner_text() == "common/002.png"


def test_curves_have_a_line_for_each_method_and_the_figures_follow_the_choice(page_file: Path, show: Open) -> None:
    page = show(page_file)
    assert page.locator("#curves-1 svg.plot").count() == 2
    for plot in page.locator("#curves-1 svg.plot").all():
        assert [plot.locator(f".line.c{i}").count() for i in range(4)] == [1, 1, 1, 0]
    assert page.locator("#curves-1 .legend li").all_inner_texts() == list(MISSES)
    page.check("input[name=show-figure][value=log_loss]")
    table = page.locator("#methods-1 .one-of:visible")
    assert table.count() == 1
    assert "log loss on out-of-fold images: mean over folds" in table.locator("caption").inner_text()
    assert page.locator("#disagreements-1 .one-of:visible").count() == 1


def test_nothing_is_wider_than_a_small_screen(page_file: Path, show: Open) -> None:
    page = show(page_file, viewport={"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
