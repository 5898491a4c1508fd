"""The page of a sweep of methods in a real browser; every number is recomputed here from records.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lopsided.evaluation.intervals import mean_interval, paired_difference
from lopsided.reports.report import write_report
from lopsided.runs.records import Record
from made_comparison import runs
from made_runs import Open

pytestmark = pytest.mark.slow

METHODS = {"ce": (0.52, 0.61, 0.55), "cl": (0.64, 0.70, 0.69), "afcl gamma=7": (0.66, 0.75, 0.65)}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods in two scenarios, judged on test images and on held-out images that say 10 points less."""
    folder = tmp_path_factory.mktemp("sweeps") / "CMP"
    folder.mkdir()
    (folder / "sweep.json").write_text(
        json.dumps({"format": 1, "lopsided": "0", "methods": [*METHODS], "baseline": "ce"})
    )
    records: list[Record] = []
    for method, uwas in METHODS.items():
        for scenario in ("60:40", "90:10"):
            less = runs(method, *(value - 0.1 for value in uwas))
            for record, held_out in zip(runs(method, *uwas, scenario=scenario), less, strict=True):
                records.append(
                    Record(**{**vars(record), "held_out": held_out.test, "data": f"{scenario} {record.seed}"})
                )
    (folder / "records.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    return write_report(folder).path


def test_means_and_intervals_follow_the_choice_of_figure_and_images(page_file: Path, show: Open) -> None:
    page = show(page_file)
    for split, less in (("held_out", 0.1), ("test", 0.0)):
        page.check(f"input[name=show-split][value={split}]")
        tables = page.locator("#methods-1 .one-of:visible")
        assert tables.count() == 2, "One for each scenario."
        rows = [row.locator("td, th").all_inner_texts() for row in tables.nth(1).locator("tbody tr").all()]
        for row, (method, uwas) in zip(rows, METHODS.items(), strict=True):
            mean = mean_interval([100 * (value - less) for value in uwas])
            low, high = max(mean.low, 0), min(mean.high, 100)
            assert row[0] == method
            assert row[2:5] == [f"{mean.value:.1f}", f"[{low:.1f}, {high:.1f}]", "3"]
    page.check("input[name=show-figure][value=auroc]")
    assert page.locator("#methods-1 .one-of:visible").get_by_text("90.0").count() == 6


def test_differences_follow_the_choice_of_the_baseline(page_file: Path, show: Open) -> None:
    page = show(page_file)
    page.check("input[name=show-split][value=test]")
    names = list(METHODS)
    for number, base in enumerate(names, start=1):
        page.check(f"input[name=show-baseline-1][value='1-{number}']")
        tables = page.locator("#differences-1 .one-of:visible")
        assert tables.count() == 1
        rows = [row.locator("td, th").all_inner_texts() for row in tables.locator("tbody tr").all()]
        assert [row[0] for row in rows] == [method for method in names if method != base]
        for row in rows:
            one, other = ([100 * value for value in METHODS[method]] for method in (row[0], base))
            figure = paired_difference(one, other, 0.975)
            star = "*" if figure.leaves_out_0 else ""
            told = f"{figure.value:+.1f}{star} [{figure.low:+.1f}, {figure.high:+.1f}] 3 pairs"
            assert row[1] == row[2] == told.replace("-", "\N{MINUS SIGN}")


def test_recalls_follow_the_choice_of_images_and_not_that_of_the_figure(page_file: Path, show: Open) -> None:
    page = show(page_file)
    for figure in ("uwa", "accuracy"):
        page.check(f"input[name=show-figure][value={figure}]")
        assert page.locator("#recalls-1 .one-of:visible").count() == 2
    assert page.locator("#recalls-1 .one-of:visible").first.locator("thead th").all_inner_texts() == [
        "method",
        "cat",
        "dog",
    ]


def test_methods_can_be_sorted_by_their_mean(page_file: Path, show: Open) -> None:
    page = show(page_file)
    table = page.locator("#methods-1 .one-of:visible table").first
    table.locator("thead th", has_text="mean").get_by_role("button").click()
    assert table.locator("tbody th").all_inner_texts() == ["afcl gamma=7", "cl", "ce"]


def test_without_a_script_everything_is_there_and_nothing_sticks_out(page_file: Path, show: Open) -> None:
    page = show(page_file, ready=False, java_script_enabled=False)
    assert page.locator(".one-of").count() == page.locator(".one-of:visible").count() > 20
    assert page.is_hidden("#choices")
    narrow = show(page_file, viewport={"width": 390, "height": 800})
    assert narrow.evaluate("document.documentElement.scrollWidth") == 390
