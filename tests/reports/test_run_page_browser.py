"""A run's page in a real browser; every number is recomputed here from predictions.csv."""

from __future__ import annotations

import io
import json
import math
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from lopsided.reports.report import write_report
from lopsided.reports.wording import DASH
from made_runs import Open, Row, colour_of, make_run, read_rows
from tiny import write_photos

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

ODD = (
    "</script><script>alert(1)</script>",
    'a "quoted" \\ name',
    "Ünïcödé 名前 \u2028 \u202eright to left",
    "<b>&amp;</b>",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty images of two classes, with groups."""
    return make_run(tmp_path_factory.mktemp("runs") / "run", test=(40, 20), groups=True, signal=0.5)


@pytest.fixture(scope="module")
def page_file(run: Path) -> Path:
    return write_report(run, kind="tsne").path


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five classes, one of them without test images."""
    counts = (30, 14, 9, 0, 6)
    folder = tmp_path_factory.mktemp("runs") / "many"
    write_report(make_run(folder, ("a", "b", "c", "d", "e"), counts, (9, 9, 9, 4, 4), signal=1.0))
    return folder


def figures_at(rows: list[Row], name: str, threshold: float) -> dict[str, Any]:
    """The same figures by another way: one image after the other, in float32 as the model gave them."""
    called = [bool(np.float32(row.p[name]) >= np.float32(threshold)) for row in rows]
    tp = sum(c and row.label == name for c, row in zip(called, rows, strict=True))
    fp = sum(c and row.label != name for c, row in zip(called, rows, strict=True))
    positives = sum(row.label == name for row in rows)
    others = len(rows) - positives
    recall = tp / positives if positives else math.nan
    specificity = (others - fp) / others if others else math.nan
    return {
        "tp": tp, "fn": positives - tp, "fp": fp, "tn": others - fp, "recall": recall, "specificity": specificity,
        "precision": tp / (tp + fp) if tp + fp and positives else math.nan,
        "uwa": np.nanmean([recall, specificity]) if positives else math.nan,
    }  # fmt: skip


def shown_figures(page: Page) -> dict[str, str]:
    keys = ("tp", "fn", "fp", "tn", "recall", "specificity", "precision", "uwa")
    return {key: page.text_content(f"#t-{key}") or "" for key in keys}


def written(figures: dict[str, Any]) -> dict[str, str]:
    return {
        key: f"{value:,}" if isinstance(value, int) else DASH if math.isnan(value) else f"{value:.3f}"
        for key, value in figures.items()
    }


def move(page: Page, threshold: float) -> None:
    page.evaluate(
        "t => { const r = document.getElementById('t-range'); r.value = t; r.dispatchEvent(new Event('input')); }",
        threshold,
    )


def tiles(page: Page, gallery: str) -> list[dict[str, str]]:
    return page.evaluate(
        """id => [...document.querySelectorAll(`#${id} .tile`)].map(tile => ({
            name: tile.querySelector('.name').textContent,
            sure: tile.querySelector('.says b').textContent,
            group: tile.querySelector('.group') ? tile.querySelector('.group').textContent : ''}))""",
        gallery,
    )  # type: ignore[no-any-return]


def test_a_cell_shows_its_images_the_surest_mistakes_first(run: Path, page_file: Path, show: Open) -> None:
    page, rows = show(page_file), read_rows(run)
    for true, predicted in (("common", "rare"), ("rare", "common")):
        inside = [row for row in rows if (row.label, row.predicted) == (true, predicted)]
        expected = sorted(inside, key=lambda row: -row.p[predicted])
        assert len(expected) > 1
        page.get_by_label(f"{true} predicted as {predicted}: {len(expected)} images", exact=True).click()
        assert tiles(page, "cell-gallery") == [
            {"name": row.name, "sure": f"{row.p[predicted]:.3f}", "group": f"group {row.group}"} for row in expected
        ]
    inside = [row for row in rows if row.label == row.predicted == "common"]
    page.get_by_label("common predicted correctly", exact=False).click()
    assert [tile["name"] for tile in tiles(page, "cell-gallery")] == [
        row.name for row in sorted(inside, key=lambda row: row.p["common"])
    ]


def test_all_mistakes_are_shown_at_first_and_again_on_demand(run: Path, page_file: Path, show: Open) -> None:
    page = show(page_file)
    wrong = sorted((r for r in read_rows(run) if r.label != r.predicted), key=lambda r: -r.p[r.predicted])
    assert [tile["name"] for tile in tiles(page, "cell-gallery")] == [row.name for row in wrong]
    page.get_by_label("rare predicted correctly", exact=False).click()
    assert [tile["name"] for tile in tiles(page, "cell-gallery")] != [row.name for row in wrong]
    page.click("#all-mistakes")
    assert [tile["name"] for tile in tiles(page, "cell-gallery")] == [row.name for row in wrong]


def test_the_matrix_can_be_walked_with_the_keyboard(page_file: Path, show: Open) -> None:
    page = show(page_file)
    label = "document.activeElement.getAttribute('aria-label')"
    assert page.locator("#matrix button[tabindex='0']").count() == 1
    page.focus("#matrix button[tabindex='0']")
    assert page.evaluate(label).startswith("common predicted correctly")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(label).startswith("common predicted as rare")
    page.keyboard.press("ArrowDown")
    assert page.evaluate(label).startswith("rare predicted correctly")
    page.keyboard.press("Enter")
    assert page.text_content("#cell-title") == "rare, predicted correctly"


def test_a_picture_is_that_of_its_image(run: Path, page_file: Path, show: Open) -> None:
    page = show(page_file)
    page.get_by_label("common predicted correctly", exact=False).click()
    for place in (0, 7):
        tile = page.locator("#cell-gallery .tile").nth(place)
        number = int(Path(tile.locator(".name").text_content() or "").stem)
        seen = Image.open(io.BytesIO(tile.locator(".thumb").screenshot())).convert("RGB")
        assert np.abs(np.subtract(seen.getpixel((seen.width // 2, seen.height // 2)), colour_of(number))).max() <= 4
        assert np.abs(np.subtract(seen.getpixel((3, seen.height // 2)), colour_of(number))).max() <= 4


def test_the_slider_shows_the_figures_of_its_threshold(run: Path, page_file: Path, show: Open) -> None:
    page, rows = show(page_file), read_rows(run)
    assert page.input_value("#t-class") == "1", "The rarest class comes first."
    assert page.is_hidden("#t-ends")
    for threshold in (0.0, 0.137, 0.5, 0.731, 0.999, 1.0):
        move(page, threshold)
        expected = figures_at(rows, "rare", threshold)
        assert shown_figures(page) == written(expected)
        assert page.text_content("#t-value") == f"{threshold:.3f}"
        assert_points(page, "now", expected)


def assert_points(page: Page, kind: str, figures: dict[str, Any]) -> None:
    """The points on both curves lie where the figures say, or are away where one is not defined."""
    for plot, x, y in (
        ("roc", 1 - figures["specificity"], figures["recall"]),
        ("pr", figures["recall"], figures["precision"]),
    ):
        found = page.evaluate(
            """([plot, kind]) => {
                const point = document.getElementById(`${plot}-${kind}`);
                const [left, right, top, bottom] = document.getElementById(plot).dataset.box.split(' ').map(Number);
                const place = point.tagName === 'circle' ? [point.cx.baseVal.value, point.cy.baseVal.value]
                    : point.getAttribute('transform').match(/[\\d.]+/g).map(Number);
                const [x, y] = [(place[0] - left) / (right - left), (bottom - place[1]) / (bottom - top)];
                return [point.classList.contains('away'), x, y];
            }""",
            [plot, kind],
        )
        assert found[0] == (math.isnan(x) or math.isnan(y))
        if not found[0]:
            assert found[1:] == pytest.approx([x, y], abs=1e-3)


def test_the_slider_moves_by_key_one_thousandth_at_a_time(run: Path, page_file: Path, show: Open) -> None:
    page = show(page_file)
    page.focus("#t-range")
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    assert page.text_content("#t-value") == "0.497"
    assert shown_figures(page) == written(figures_at(read_rows(run), "rare", 0.497))
    assert (page.get_attribute("#t-range", "aria-valuetext") or "").startswith("0.497: recall ")


def test_the_share_of_the_class_changes_the_alarms_and_not_the_counts(run: Path, page_file: Path, show: Open) -> None:
    page = show(page_file)
    at = figures_at(read_rows(run), "rare", 0.5)
    move(page, 0.5)
    assert page.text_content("#t-share-value") == "1 in 3", "The share of the test images: 20 of 60."
    counts = [page.text_content(f"#t-{key}") for key in ("tp", "fn", "fp", "tn")]
    page.evaluate(
        "() => { const r = document.getElementById('t-share'); r.value = Math.log10(1 / 200); "
        "r.dispatchEvent(new Event('input')); }"
    )
    recall, false = at["tp"] / 20, at["fp"] / 40
    alarms = recall / 200 + false * 199 / 200
    (r_low, r_high), (f_low, f_high) = (
        proportion_ci(at["tp"], 20),
        proportion_ci(at["fp"], 40),
    )
    below = math.hypot((recall - r_low) / 200, (false - f_low) * 199 / 200)
    above = math.hypot((r_high - recall) / 200, (f_high - false) * 199 / 200)
    told = page.text_content("#t-use") or ""
    match = re.fullmatch(
        r"At 1 in 200: ([\d.,]+) alarms per 1,000 images \(([\d.,]+) to ([\d.,]+)\), 1 real in ([\d.,]+)", told
    )
    assert match is not None, told
    values = [float(text.replace(",", "")) for text in match.groups()]
    expected = [1000 * alarms, 1000 * (alarms - below), 1000 * (alarms + above), 200 * alarms / recall]
    assert values == pytest.approx(expected, abs=0.51, rel=0.05)
    assert [page.text_content(f"#t-{key}") for key in ("tp", "fn", "fp", "tn")] == counts


def proportion_ci(hits: int, number: int) -> tuple[float, float]:
    from scipy.stats import binomtest

    interval = binomtest(hits, number).proportion_ci(method="wilson")
    return interval.low, interval.high


@pytest.mark.parametrize("width", [1200, 400])
def test_the_first_screen_shows_the_answer_and_mistakes(page_file: Path, show: Open, width: int) -> None:
    page = show(page_file, viewport={"width": width, "height": 800})
    for place in ("h1", ".headline", "#cell-gallery .tile .thumb"):
        box = page.locator(place).first.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 800, place
    assert page.locator("#warnings").bounding_box()["y"] > page.locator("#mistakes").bounding_box()["y"]


def test_the_threshold_that_validation_favours_is_marked_and_can_be_taken(
    run: Path, page_file: Path, show: Open
) -> None:
    page, val = show(page_file), read_rows(run, "val")
    best = max(figures_at(val, "rare", row.p["rare"])["uwa"] for row in val)
    page.click("#t-chosen")
    chosen = float(page.get_attribute("#t-range", "data-threshold") or "nan")
    assert figures_at(val, "rare", chosen)["uwa"] == pytest.approx(best)
    assert page.is_visible("#t-mark")
    on_test = figures_at(read_rows(run), "rare", chosen)
    assert shown_figures(page) == written(on_test)
    assert_points(page, "chosen", on_test)
    page.click("#t-half")
    assert page.text_content("#t-value") == "0.500"
    assert_points(page, "chosen", on_test)


def test_of_a_sure_model_the_slider_reaches_every_threshold_that_matters(tmp_path: Path, show: Open) -> None:
    folder = make_run(tmp_path / "run", signal=25.0)
    # All of the rare class lie below 0.001, and the validation images favour a threshold among them.
    lines = (folder / "predictions.csv").read_text().splitlines()
    for number, line in enumerate(lines[1:], start=1):
        *parts, _, _ = line.split(",")
        p = (1 + number % 7) * (1e-4 if parts[3] == "rare" else 1e-6)
        lines[number] = ",".join([*parts, f"{1 - p:.9g}", f"{p:.9g}"])
    (folder / "predictions.csv").write_text("\n".join(lines) + "\n")
    page = show(write_report(folder).path)
    val, rows = read_rows(folder, "val"), read_rows(folder)
    page.click("#t-chosen")
    chosen = float(page.get_attribute("#t-range", "data-threshold") or "nan")
    assert 7e-6 < chosen < 1e-4
    assert figures_at(val, "rare", chosen)["uwa"] == 1.0
    assert shown_figures(page) == written(figures_at(rows, "rare", chosen))
    assert page.text_content("#t-value") == f"{chosen:.6f}"
    assert page.is_visible("#t-ends")
    page.click("#t-half")
    assert (page.input_value("#t-range"), page.text_content("#t-value")) == ("0", "0.500")
    end = float(page.get_attribute("#t-range", "max") or "nan")
    assert end == 15, "The scale ends beyond the lowest probability, 1e-6."
    for logit in (-end, -12.5, -8.0, -7.3, end):
        move(page, logit)
        threshold = {-end: 0.0, end: 1.0}.get(logit, 1 / (1 + math.exp(-logit)))
        assert shown_figures(page) == written(figures_at(rows, "rare", threshold))
    mark = page.evaluate("getComputedStyle(document.getElementById('t-mark')).left")
    assert float(mark.removesuffix("px")) > 0


def test_each_class_can_be_set_against_the_rest(many: Path, show: Open) -> None:
    page, rows, val = show(many / "report.html"), read_rows(many), read_rows(many, "val")
    for value, name in enumerate("abcde"):
        page.select_option("#t-class", str(value))
        move(page, 0.3)
        expected = figures_at(rows, name, 0.3)
        assert shown_figures(page) == written(expected), name
        assert_points(page, "now", expected)
        page.click("#t-chosen")
        chosen = float(page.get_attribute("#t-range", "data-threshold") or "nan")
        best = max(figures_at(val, name, row.p[name])["uwa"] for row in val)
        assert figures_at(val, name, chosen)["uwa"] == pytest.approx(best)
        assert_points(page, "chosen", figures_at(rows, name, chosen))
        drawn = page.get_attribute("#roc-line", "d")
        assert bool(drawn) == (0 < expected["tp"] + expected["fn"] < len(rows))


def test_without_validation_no_threshold_is_favoured_and_the_page_says_so(tmp_path: Path, show: Open) -> None:
    page = show(write_report(make_run(tmp_path / "run", val=None)).path)
    assert page.is_hidden("#t-chosen")
    assert page.is_hidden("#t-mark")
    assert page.is_visible("#t-no-choice")
    assert "There is no validation split" in page.inner_text(".warnings")
    assert page.locator("#roc-chosen").get_attribute("class") == "chosen away"


def places(page: Page, kind: str = "tsne") -> list[tuple[float, float]]:
    """The places of the images on the map, in pixels of the window."""
    numbers = page.evaluate(
        """kind => { const d = JSON.parse(document.getElementById('data').textContent);
            return [...new Uint16Array(Uint8Array.from(atob(d.map.places[kind]), c => c.charCodeAt(0)).buffer)]; }""",
        kind,
    )
    box = page.locator("#map").bounding_box()
    assert box is not None
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return [(box["x"] + box["width"] * x / 10_000, box["y"] + box["height"] * y / 10_000) for x, y in pairs]


def page_names(page: Page) -> list[str]:
    return page.evaluate("JSON.parse(document.getElementById('data').textContent).names")  # type: ignore[no-any-return]


def test_resting_on_a_point_shows_its_image(run: Path, page_file: Path, show: Open) -> None:
    page = show(page_file)
    page.locator("#map").scroll_into_view_if_needed()
    by_name = {row.name: row for row in read_rows(run)}
    names, spots = page_names(page), places(page)
    alone = max(
        range(len(spots)), key=lambda i: min(math.dist(spots[i], spots[j]) for j in range(len(spots)) if j != i)
    )
    assert page.is_hidden("#map-tip")
    page.mouse.move(*spots[alone])
    row = by_name[names[alone]]
    assert row.name in page.inner_text("#map-tip")
    assert f"{row.p[row.predicted]:.3f} {row.predicted}" in page.inner_text("#map-tip")
    assert page.locator("#map-tip .thumb").count() == 1
    page.mouse.move(5, 5)
    assert page.is_hidden("#map-tip")


def test_dragging_over_the_map_lists_what_lies_within(page_file: Path, show: Open) -> None:
    page = show(page_file)
    page.locator("#map").scroll_into_view_if_needed()
    names, spots = page_names(page), places(page)
    xs, ys = (sorted(axis) for axis in zip(*spots, strict=True))
    left, right = (xs[5] + xs[6]) / 2, (xs[-6] + xs[-7]) / 2
    top, bottom = (ys[5] + ys[6]) / 2, (ys[-6] + ys[-7]) / 2
    page.mouse.move(right, top)
    page.mouse.down()
    page.mouse.move((left + right) / 2, bottom)
    assert page.is_visible("#map-brush")
    page.mouse.move(left, bottom)
    page.mouse.up()
    inside = {name for name, (x, y) in zip(names, spots, strict=True) if left <= x <= right and top <= y <= bottom}
    assert 0 < len(inside) < len(names)
    assert {tile["name"] for tile in tiles(page, "map-gallery")} == inside
    assert f"{len(inside)} images" in page.inner_text("#map-count")
    page.click("#map-clear")
    assert page.is_hidden("#map-panel")


def test_a_finger_scrolls_unless_it_is_to_select(page_file: Path, show: Open) -> None:
    page = show(page_file, has_touch=True)
    page.locator("#map").scroll_into_view_if_needed()
    names, touch = page_names(page), page.context.new_cdp_session(page)

    def drag(start: tuple[float, float], end: tuple[float, float]) -> None:
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        for kind, places in (("Start", [start]), ("Move", [middle]), ("Move", [end]), ("End", [])):
            points = [{"x": x, "y": y} for x, y in places]
            touch.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})

    def corners() -> tuple[float, float, float, float]:
        xs, ys = (sorted(axis) for axis in zip(*places(page), strict=True))
        return (xs[5] + xs[6]) / 2, (ys[5] + ys[6]) / 2, (xs[-6] + xs[-7]) / 2, (ys[-6] + ys[-7]) / 2

    left, top, right, bottom = corners()
    drag((right, top), (left, top + 1))
    assert page.is_hidden("#map-panel")
    page.tap("#map-select")
    page.wait_for_selector("#map-select[aria-pressed=true]")
    left, top, right, bottom = corners()
    spots = places(page)
    drag((right, top), (left, bottom))
    inside = {name for name, (x, y) in zip(names, spots, strict=True) if left <= x <= right and top <= y <= bottom}
    assert 0 < len(inside) < len(names)
    page.wait_for_selector("#map-panel", state="visible")
    assert {tile["name"] for tile in tiles(page, "map-gallery")} == inside
    page.click("#map-select")  # After so quick a drag, chromium takes a tap for the end of the movement.
    page.wait_for_selector("#map-select[aria-pressed=false]")


def test_who_has_no_touch_screen_is_not_offered_to_select_by_finger(page_file: Path, show: Open) -> None:
    assert show(page_file).is_hidden("#map-select")


def test_the_legend_of_the_map_is_that_of_its_colours(page_file: Path, show: Open) -> None:
    page = show(page_file)
    assert (page.is_visible("#legend-class"), page.is_visible("#legend-mistake")) == (True, False)
    page.check("input[name=map-by][value=mistake]")
    assert (page.is_visible("#legend-class"), page.is_visible("#legend-mistake")) == (False, True)
    assert page.locator("#legend-mistake li").all_inner_texts() == ["correct", "mistake"]
    stroke = "element => getComputedStyle(element).stroke"
    for kind in ("good", "bad"):
        drawn, told = page.locator(f"#map .{kind}").first, page.locator(f"#legend-mistake .{kind}")
        assert told.evaluate(stroke) == drawn.evaluate(stroke) != "none"
    page.check("input[name=map-by][value=class]")
    assert (page.is_visible("#legend-class"), page.is_visible("#legend-mistake")) == (True, False)


def test_the_map_can_be_used_with_the_keyboard(page_file: Path, show: Open) -> None:
    page = show(page_file)
    page.focus("#map")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#map-tip")
    page.keyboard.press("Enter")
    spots, box = places(page), page.locator("#map").bounding_box()
    assert box is not None
    centre = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    names = page_names(page)
    nearest = sorted(range(len(spots)), key=lambda i: math.dist(spots[i], centre))[:24]
    assert [tile["name"] for tile in tiles(page, "map-gallery")] == [names[i] for i in nearest]
    page.keyboard.press("Escape")
    assert page.is_hidden("#map-panel")
    assert page.is_hidden("#map-tip")


def test_the_map_is_coloured_by_class_or_by_mistake(page_file: Path, show: Open) -> None:
    page = show(page_file)
    colour = "([s]) => getComputedStyle(document.querySelector(`#map ${s}`)).stroke"
    assert page.evaluate(colour, [".k0.good"]) != page.evaluate(colour, [".k1.good"])
    assert page.evaluate(colour, [".k0.good"]) == page.evaluate(colour, [".k0.bad"])
    page.check("input[name=map-by][value=mistake]")
    assert page.evaluate(colour, [".k0.good"]) == page.evaluate(colour, [".k1.good"])
    assert page.evaluate(colour, [".k0.good"]) != page.evaluate(colour, [".k0.bad"])


def test_the_map_changes_from_one_method_to_another(run: Path, page_file: Path, show: Open) -> None:
    page = show(page_file)
    drawn = "document.querySelector('#map .k0.good').getAttribute('d')"
    count = sum(row.label == row.predicted == "common" for row in read_rows(run))
    before = page.evaluate(drawn)
    assert "t-SNE" in (page.text_content("#map-note") or "")
    page.check("input[name=map-kind][value=pca]")
    assert page.evaluate(drawn) != before
    box = page.locator("#map").bounding_box()
    assert box is not None
    pixels = {(x - box["x"]) / box["width"] * 720: (y - box["y"]) / box["height"] * 480 for x, y in places(page, "pca")}
    for x, y in re.findall(r"M([\d.]+) ([\d.]+)h0", page.evaluate(drawn)):
        nearest = min(pixels, key=lambda at: abs(at - float(x)))
        assert (nearest, pixels[nearest]) == pytest.approx((float(x), float(y)), abs=0.2)
    assert page.evaluate(drawn).count("h0") == before.count("h0") == count
    assert "of the variance" in (page.text_content("#map-note") or "")


def test_the_table_of_classes_is_sorted_by_its_headers(many: Path, show: Open) -> None:
    page = show(many / "report.html")
    header = page.locator("#classes .sortable thead th", has_text="recall")
    values = (
        """() => [...document.querySelectorAll('#classes .sortable tbody tr')].map(row => row.cells[4].dataset.value)"""
    )
    header.locator("button").click()
    found = page.evaluate(values)
    assert found[-1] == "", "The class without images comes last."
    assert [float(value) for value in found[:-1]] == sorted(map(float, found[:-1]), reverse=True)
    assert header.get_attribute("aria-sort") == "descending"
    header.locator("button").press("Enter")
    found = page.evaluate(values)
    assert found[-1] == ""
    assert [float(value) for value in found[:-1]] == sorted(map(float, found[:-1]))
    page.locator("#classes .sortable thead th button").first.click()
    names = "[...document.querySelectorAll('#classes .sortable tbody tr')].map(row => row.cells[0].textContent)"
    assert page.evaluate(names) == list("abcde")


def test_recipe_and_command_can_be_copied(run: Path, page_file: Path, show: Open) -> None:
    page = show(page_file, permissions=["clipboard-read", "clipboard-write"])
    for name, expected in (
        ("command", "lopsided fit --recipe recipe.toml --out again"),
        ("recipe-text", (run / "recipe.toml").read_text(encoding="utf-8")),
    ):
        button = page.locator(f"button[data-copy={name}]")
        button.click()
        page.wait_for_function(
            "name => document.querySelector(`button[data-copy=${name}]`).textContent === 'Copied'", arg=name
        )
        assert page.evaluate("navigator.clipboard.readText()") == expected


def test_the_theme_follows_the_system_and_the_button(page_file: Path, show: Open) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light, dark = (show(page_file, color_scheme=scheme) for scheme in ("light", "dark"))
    assert light.evaluate(colour) == "rgb(255, 255, 255)"
    before = dark.evaluate(colour)
    assert before != "rgb(255, 255, 255)"
    light.click("#theme")
    assert light.evaluate(colour) == before
    assert light.text_content("#theme") == "Light"
    dark.click("#theme")
    assert dark.evaluate(colour) == "rgb(255, 255, 255)"
    dark.click("#theme")
    dark.emulate_media(media="print")
    assert dark.evaluate(colour) == "rgb(255, 255, 255)", "Paper is white."
    assert dark.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light", "Its margins, too."
    assert dark.is_visible("#matrix button"), "The counts are printed."
    assert dark.is_hidden("#t-range")
    assert dark.is_hidden(".bar")


def test_without_a_script_everything_that_does_not_move_is_there(run: Path, page_file: Path, show: Open) -> None:
    page, rows = show(page_file, ready=False, java_script_enabled=False), read_rows(run)
    text = page.locator("#matrix").inner_text()
    for true, predicted in (("common", "common"), ("common", "rare"), ("rare", "common"), ("rare", "rare")):
        assert str(sum((row.label, row.predicted) == (true, predicted) for row in rows)) in text
    wrong = sorted((r for r in rows if r.label != r.predicted), key=lambda r: -r.p[r.predicted])
    assert page.locator("#cell-gallery .tile .name").all_text_contents() == [row.name for row in wrong[:24]]
    tile = page.locator("#cell-gallery .thumb").first
    seen = Image.open(io.BytesIO(tile.screenshot())).convert("RGB")
    number = int(Path(wrong[0].name).stem)
    assert np.abs(np.subtract(seen.getpixel((9, 9)), colour_of(number))).max() <= 4
    half = written(figures_at(rows, "rare", 0.5))
    row = page.locator("#threshold tbody tr").nth(0).locator("td").all_text_contents()
    assert row == [
        "0.500",
        *(half[key] for key in ("recall", "precision", "specificity", "uwa", "tp", "fn", "fp", "tn")),
    ]
    assert page.locator("#map path.k0.good").get_attribute("d")
    assert [page.is_visible(each) for each in ("#theme", "#t-range", "#all-mistakes", "button[data-copy]")] == [
        False
    ] * 4


def test_names_are_names_whatever_is_in_them(tmp_path: Path, show: Open) -> None:
    names = ('images/<img src=x onerror="alert(2)">.png', "images/'; alert(3); '.png", "images/\u2028\u2029 & &lt;.png")
    run = make_run(tmp_path / "run", ODD, (9, 6, 5, 4), (5, 5, 5, 5), names=names, signal=0.5, groups=True)
    page = show(write_report(run).path)
    rows = read_rows(run)
    shown = [name.replace("\u202e", "\ufffd") for name in ODD]  # A mark that would turn the page's own words around.
    assert shown != list(ODD)
    assert page.locator("#matrix thead th").all_text_contents() == shown
    assert page.locator("#t-class option").all_text_contents()[::-1] == shown
    found = []
    for button in page.locator("#matrix button").all():
        button.click()
        found += [tile["name"] for tile in tiles(page, "cell-gallery")]
    assert sorted(found) == sorted(row.name for row in rows)
    assert page.locator("#cell-gallery .thumb").count() > 0


def test_a_page_may_not_reach_out_even_if_something_in_it_tried(page_file: Path, browser: Any) -> None:
    tried = """async address => {
        const blocked = [];
        addEventListener('securitypolicyviolation', event => blocked.push(event.effectiveDirective));
        const soon = () => new Promise(done => setTimeout(done, 30000));  // The listener never answers.
        await fetch(address, {signal: AbortSignal.timeout(30000)}).catch(() => {});
        const image = new Image();
        image.src = address + 'x.png';
        await Promise.race([soon(), new Promise(done => { image.onerror = done; })]);
        const script = document.createElement('script');
        script.textContent = 'window.ran = true';
        document.body.append(script);
        document.body.insertAdjacentHTML('beforeend', '<p style="color: red">x</p>');
        await new Promise(done => setTimeout(done));
        return [window.ran === true, blocked.sort()];
    }"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        page = browser.new_page()
        page.goto(page_file.resolve().as_uri())
        ran, blocked = page.evaluate(tried, f"http://127.0.0.1:{listener.getsockname()[1]}/")
        page.close()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert not ran
    assert blocked == ["connect-src", "img-src", "script-src-elem", "style-src-attr"]


@pytest.mark.parametrize("kind", ["three", "absent", "fifty", "one-class", "bare", "perfect"])
def test_every_shape_of_a_run_renders(tmp_path: Path, show: Open, kind: str) -> None:
    folder = tmp_path / kind
    if kind == "three":
        make_run(folder, test=(2, 1), val=(2, 1))
    elif kind == "absent":
        make_run(folder, ("a", "b", "c"), (9, 5, 0), (4, 4, 4))
    elif kind == "fifty":
        make_run(folder, [f"class number {i} of fifty" for i in range(50)], [3 + i % 5 for i in range(50)], [2] * 50)
    elif kind == "one-class":
        make_run(folder, test=(6, 0), val=None)
    elif kind == "bare":
        make_run(folder, pictures=False, features=False)
        (folder / "log.jsonl").unlink()
    else:
        make_run(folder, test=(9, 4), signal=30.0)
    page, rows = show(write_report(folder).path), read_rows(folder)
    cells = page.locator("#matrix tbody td").all_text_contents()
    assert sum(int(cell) for cell in cells) == len(rows)
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == width, "Nothing sticks out."
    label = page.locator("#t-class option").first.text_content() or ""
    move(page, 0.25)
    assert shown_figures(page) == written(figures_at(rows, label, 0.25))
    if kind == "bare":
        assert page.locator(".thumb").count() == 0
        assert "There are no pictures" in page.inner_text("#mistakes")
        assert "There is no map" in page.inner_text("#features")
        assert "log of the run is missing" in page.inner_text("#training")
    if kind == "perfect":
        assert "No mistakes among 13 images." in page.inner_text("#mistakes")


def test_every_control_is_reached_by_the_tab_key_and_shows_it(page_file: Path, show: Open) -> None:
    page = show(page_file)
    reached, unmarked = set(), []
    for _ in range(80):
        page.keyboard.press("Tab")
        name, width = page.evaluate(
            "(() => { const e = document.activeElement; return [e.id || e.dataset.copy || e.name || e.tagName,"
            " getComputedStyle(e).outlineStyle === 'none' ? 0 : parseFloat(getComputedStyle(e).outlineWidth)]; })()"
        )
        if name == "BODY":
            break
        reached.add(name)
        if not width:
            unmarked.append(name)
    wanted = {
        "theme",
        "all-mistakes",
        "t-class",
        "t-range",
        "t-half",
        "t-chosen",
        "map-by",
        "map",
        "command",
        "recipe-text",
    }
    assert wanted <= reached
    assert unmarked == []


def test_many_images_of_a_cell_come_in_portions(tmp_path: Path, show: Open) -> None:
    run = make_run(tmp_path / "run", test=(150, 4), pictures=False, features=False)
    page = show(write_report(run).path)
    count = sum(row.label == row.predicted == "common" for row in read_rows(run))
    page.get_by_label("common predicted correctly", exact=False).click()
    assert page.locator("#cell-gallery .tile").count() == 60
    while page.is_visible("#cell-more"):
        page.click("#cell-more")
    assert page.locator("#cell-gallery .tile").count() == count
    top = "document.getElementById('cell-gallery').scrollTop"
    page.locator("#cell-gallery .tile").last.scroll_into_view_if_needed()
    assert page.evaluate(top) > 0
    page.get_by_label("common predicted correctly", exact=False).click()
    assert page.evaluate(top) == 0, "What was asked for anew begins at its top."


def test_the_data_of_the_page_are_those_of_the_run(run: Path, page_file: Path, show: Open) -> None:
    page = show(page_file)
    data = json.loads(page.text_content("#data") or "")
    assert sorted(data["names"]) == sorted(row.name for row in read_rows(run))


def test_an_image_exactly_at_the_threshold_is_called(tmp_path: Path, show: Open) -> None:
    run = make_run(tmp_path / "run", test=(3, 3), pictures=False)
    row = read_rows(run)[0]
    old = ",".join(f"{value:.9g}" for value in row.p.values())
    text = (run / "predictions.csv").read_text()
    assert text.count(old) == 1
    (run / "predictions.csv").write_text(text.replace(old, "0.3,0.7"))
    page = show(write_report(run).path)
    page.select_option("#t-class", "1")
    seen = []
    for threshold in (0.7, 0.701):
        move(page, threshold)
        seen.append(int(page.text_content("#t-fp") or ""))
    others = sum(r.p["rare"] >= 0.701 for r in read_rows(run)[1:3])
    assert seen == [others + 1, others]


def test_the_page_of_a_run_that_was_really_trained_shows_its_figures(tmp_path: Path, show: Open) -> None:
    from lopsided.recipe import Recipe
    from lopsided.runs.run import run_recipe

    photos = write_photos(tmp_path / "photos", {"cat": 30, "dog": 14})
    small = {
        "encoder.name": "mlp",
        "encoder_training.epochs": 2,
        "classifier.epochs": 1,
        "threads": 1,
        "data.test": 0.3,
    }
    run = run_recipe(Recipe().override(**small), tmp_path / "run", data=photos).folder
    page, rows = show(write_report(run).path), read_rows(run)
    cells = [int(cell) for cell in page.locator("#matrix tbody td").all_text_contents()]
    pairs = [(true, predicted) for true in ("cat", "dog") for predicted in ("cat", "dog")]
    assert cells == [sum((row.label, row.predicted) == pair for row in rows) for pair in pairs]
    move(page, 0.4)
    assert shown_figures(page) == written(figures_at(rows, "dog", 0.4))
    assert page.locator("#map path.point").count() == 26
    assert page.locator("#training svg.plot").count() == 5
    page.locator("#matrix button").first.click()
    assert page.locator("#cell-gallery .thumb").count() == len(tiles(page, "cell-gallery")) > 0


LONG = (
    "Blowhole", "Break_of_the_casting_edge", "Crack", "Fray-and-delamination", "Uneven_surface_of_the_magnetic_tile",
    "Free", "Severe_corrosion_of_the_flange", "Scratch", "Inclusion", "Rolled-in scale", "Patches", "Pitted_surface",
)  # fmt: skip


@pytest.mark.parametrize("number", [2, 3, 6, 10, 12])
def test_two_to_twelve_classes_with_long_names_fit_into_a_page_of_1300_pixels(
    number: int, tmp_path: Path, show: Open
) -> None:
    run = make_run(tmp_path / "run", LONG[:number], (9,) * number, (4,) * number, pictures=False)
    page = show(write_report(run).path, viewport={"width": 1300, "height": 900})
    seen = page.evaluate(
        """() => {
            const box = document.querySelector('.matrix-box'), lines = [];
            for (const name of document.querySelectorAll('#matrix tbody th bdi')) {
                const range = document.createRange();
                range.selectNodeContents(name);
                lines.push([name.textContent, new Set([...range.getClientRects()].map(r => Math.round(r.top))).size]);
            }
            const cut = [...document.querySelectorAll('#matrix thead span')].filter(
                span => span.scrollHeight > span.clientHeight + 1 || span.scrollWidth > span.clientWidth + 1);
            return {
                wide: box.scrollWidth - box.clientWidth,
                page: document.documentElement.scrollWidth - window.innerWidth,
                lines, cut: cut.map(span => span.textContent),
            };
        }"""
    )
    assert seen["wide"] <= 0
    assert seen["page"] <= 0
    assert seen["cut"] == []
    for name, lines in seen["lines"]:
        assert lines <= (1 if len(name) < 16 else 3), name
    if number < 4:
        for width in (1000, 700, 390):
            page.set_viewport_size({"width": width, "height": 900})
            wide = page.locator(".matrix-box").evaluate("box => box.scrollWidth - box.clientWidth")
            assert wide <= 0, width


def test_more_than_four_classes_have_shapes_and_two_of_one_colour_have_two_shapes(tmp_path: Path, show: Open) -> None:
    run = make_run(tmp_path / "run", LONG, (9,) * 12, (4,) * 12, pictures=False, signal=1.0)
    page = show(write_report(run, kind="tsne").path)
    legend = page.evaluate(
        """() => [...document.querySelectorAll('#legend-class li path')].slice(0, 12).map(
            path => [getComputedStyle(path).fill, path.getAttribute('d').replace(/^M6 6/, '')])"""
    )
    assert len({tuple(mark) for mark in legend}) == 12
    assert len({shape for _, shape in legend}) == 6
    drawn = "([k]) => document.querySelector(`#map .k${k}.good`).getAttribute('d')"
    rows = read_rows(run)
    for mark, (_, shape) in enumerate(legend):
        name = page.locator("#legend-class li bdi").nth(mark).text_content()
        count = sum(row.label == row.predicted == name for row in rows)
        assert page.evaluate(drawn, [mark]).count(shape) == count
    before = page.evaluate(drawn, [0])
    page.check("input[name=map-kind][value=pca]")
    assert page.evaluate(drawn, [0]) != before
    assert page.evaluate(drawn, [0]).count(legend[0][1]) == before.count(legend[0][1])
    page.check("input[name=map-by][value=mistake]")
    fill = "([s]) => getComputedStyle(document.querySelector(`#map ${s}`)).fill"
    assert page.evaluate(fill, [".k0.good"]) == page.evaluate(fill, [".k1.good"])
    assert page.evaluate(fill, [".k0.bad"]) == "none"
