"""The page of a sweep of methods as text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from lopsided.errors import RunError
from lopsided.reports.comparison_page import comparison_page
from lopsided.reports.report import write_report
from lopsided.runs.comparison import compare, name_methods
from lopsided.runs.keys import LossTable
from lopsided.runs.records import Failure, Record
from made_comparison import folds, runs


def write(folder: Path, records: Sequence[Record], **about: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "sweep.json").write_text(json.dumps({"format": 1, "lopsided": "0", **about}))
    (folder / "records.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    return folder


def words(page: str) -> str:
    return " ".join(re.sub(r"<(?!/?bdi)[^>]*>", " ", page).split())


def test_methods_are_in_the_order_in_which_they_were_asked_for_and_any_is_the_baseline(tmp_path: Path) -> None:
    records = [*runs("cl", 0.6, 0.7), *runs("ce", 0.5, 0.6), *runs("afcl", 0.7, 0.7)]
    page = comparison_page(write(tmp_path / "CMP", records, kind="compare", methods=["ce", "cl"], baseline="cl"))
    choice = page[page.index("choose-baseline") : page.index("</fieldset>", page.index("choose-baseline"))]
    assert re.findall(r"<bdi>(.*?)</bdi>", choice) == ["ce", "cl", "afcl"]
    assert re.search(r'value="1-2" checked', choice)
    captions = re.findall(r"<caption>(balanced accuracy on test images, points above .*?)</caption>", page)
    assert captions == [f"balanced accuracy on test images, points above {method}" for method in ("ce", "cl", "afcl")]


def test_a_page_needs_no_script_to_show_the_sentence_figures_and_minutes(tmp_path: Path) -> None:
    page = comparison_page(write(tmp_path / "CMP", [*runs("ce", 0.5, 0.6), *runs("cl", 0.6, 0.7)]))
    text = words(page)
    assert (
        "At 90:10, cl has the highest balanced accuracy on test images, 65.0 per cent (2 runs); ce is not reliably "
        "lower" in text
    )
    assert "4 runs on photos: 2 methods, 1 scenario, 2 seeds." in text
    assert "90:10: recall on test images" in text
    assert "Bonferroni" in text
    assert "60 s" in text
    assert "Comparison CMP" in text
    assert not re.search(r"\b(eta|gamma)\b", text.partition("Skip to the content")[2].partition('{"kind"')[0])


def test_a_page_of_folds_speaks_of_folds_and_not_of_splits(tmp_path: Path) -> None:
    records = [*folds("ce", 0.5, 0.6, 0.7, seconds=0.44), *folds("cl", 0.6, 0.7, 0.8, seconds=90.0)]
    page = comparison_page(write(tmp_path / "comparison", records))
    text = words(page)
    images = compare(records, methods=name_methods(records)).tested
    assert f"<title>Use cl: nothing is reliably better on your {images} images</title>" in page
    assert text.count("Use cl: ") == 2, "in the title and in the heading"
    assert "Only 24 images of the rare class. All folds together test no more than these" in text
    assert "Each out-of-fold image is tested by a model that was trained without it." in text
    assert "held-out images, where there are" not in text
    assert "Test images belong to the split of the run" not in text
    assert re.search(r"\b0\.4 s\b", text)
    seeds = words(comparison_page(write(tmp_path / "CMP", runs("ce", 0.5, 0.6))))
    assert "2 runs with fewer than 30 test images of the rare class" in seeds
    assert "Test images belong to the split of the run" in seeds


def test_failed_cells_are_listed_by_their_methods_and_runs_lead_to_their_pages(tmp_path: Path) -> None:
    records = runs("ce", 0.5, 0.6)
    folder = write(tmp_path / "CMP", records)
    failure = Failure("feed", "90:10", LossTable("cl"), 1, "it <broke>.", "mine")
    (folder / "failures.jsonl").write_text(failure.to_json() + "\n")
    cell = folder / "cells" / "ce-90-0"
    cell.mkdir(parents=True)
    (cell / "report.html").write_text("a page")
    records[0] = Record(**{**vars(records[0]), "cell": "ce-90-0"})
    page = comparison_page(write(folder, records))
    assert "90:10 mine seed 1" in page
    assert "it &lt;broke&gt;." in page
    assert '<a href="cells/ce-90-0/report.html">open</a>' in page


def test_names_of_methods_sources_and_classes_are_escaped(tmp_path: Path) -> None:
    odd = runs("<i>&", 0.5, 0.6, source="<b>", classes=("<u>", "dog"))
    page = comparison_page(write(tmp_path / "CMP", odd, methods=["<i>&"], baseline="<i>&"))
    assert not re.search("<i>&|<b></|<u>", page)
    assert "&lt;i&gt;&amp;" in page


def test_several_sources_have_a_group_each(tmp_path: Path) -> None:
    page = comparison_page(write(tmp_path / "CMP", [*runs("ce", 0.5), *runs("ce", 0.6, source="others", cell="x")]))
    assert 'id="methods-1"' in page
    assert 'id="methods-2"' in page
    assert "2 cells with one run only" in page


@pytest.mark.parametrize("content", ['{"format": 1}', '{"format": 1, "methods": 3, "baseline": [1]}'])
def test_a_sweep_whose_mark_says_nothing_has_a_page(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path / "CMP", runs("ce", 0.5, 0.6))
    (folder / "sweep.json").write_text(content)
    assert "ce has the highest balanced accuracy" in comparison_page(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 9}'])
def test_a_sweep_whose_mark_cannot_be_read_has_no_page(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path / "CMP", runs("ce", 0.5, 0.6))
    (folder / "sweep.json").write_text(content)
    with pytest.raises(RunError, match=r"sweep\.json cannot be read \(|^a sweep must have format 1, got format 9 in "):
        comparison_page(folder)


def test_scenarios_of_one_method_with_other_totals_stay_one_method(tmp_path: Path) -> None:
    records = [*runs("cl", 0.5, scenario="90:10"), *runs("cl", 0.6, scenario="50:50", family="fedcba9876543210")]
    page = comparison_page(write(tmp_path / "CMP", records))
    assert "1 method, 2 scenarios" in page


def test_a_sweep_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    folder = write(tmp_path / "CMP", [])
    (folder / "records.jsonl").unlink()
    written = write_report(folder)
    assert written.about == "sweep"
    assert "No run has come to its end yet." in written.path.read_text()


def test_records_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "CMP", [])
    (folder / "records.jsonl").write_text("{}\n{}\n")
    with pytest.raises(RunError, match=r"records\.jsonl, line 1: a line must be a record"):
        comparison_page(folder)
