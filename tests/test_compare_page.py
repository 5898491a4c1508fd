"""The page about comparisons says what the records say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
RECORDS = Path(__file__).parents[1] / "studies" / "records"
PAGE = (DOCS / "compare.md").read_text(encoding="utf-8")
KINDS = ("naive", "corrected", "images", "bootstrap")


def record(name: str) -> dict:
    return json.loads((RECORDS / name).read_text(encoding="utf-8"))


def test_the_coverage_of_uwa_is_that_of_the_record() -> None:
    for name, rows in record("fold_coverage.json")["settings"].items():
        cells = [f"{100 * rows['uwa'][kind]:.1f}" for kind in KINDS]
        widths = [f"{100 * rows['uwa'][f'{kind}_width']:.1f}" for kind in ("corrected", "images")]
        assert f"| {name} | {' | '.join([*cells, *widths])} |" in PAGE


@pytest.mark.parametrize(
    ("figure", "words"),
    [("rare_recall", "the recall of the rarest class"), ("auroc", "AUROC"), ("log_loss", "log loss")],
)
def test_the_range_of_the_other_figures_is_that_of_the_record(figure: str, words: str) -> None:
    found = [100 * rows[figure]["corrected"] for rows in record("fold_coverage.json")["settings"].values()]
    assert f"{min(found):.1f} to {max(found):.1f} % for {words}" in " ".join(PAGE.split())


def test_the_similarities_of_changed_copies_are_those_of_the_record() -> None:
    near = record("labels.json")["near"]
    text, found = " ".join(PAGE.split()), near["similarity"]
    pairs = found["pairs of other lesions at the threshold"]
    largest = found["most similar image of another lesion"]["largest"]
    number = f"{pairs} pair{'' if pairs == 1 else 's'}"
    assert f"({number} of {near['images']:,} images; the most similar have a cosine of {largest:g})" in text
    words = {"jpeg": "reach it at JPEG", "half": "at half the size", "brighter": "if they are brighter"}
    words |= {"mirror": "if they are mirrored", "crop": "if 5 % of each side are cut off"}
    for name, what in words.items():
        assert f"{100 * found[name]['at the threshold']:.3g} % {what}" in text


def test_the_flipped_labels_that_were_found_are_those_of_the_record() -> None:
    flips = record("labels.json")["flips"]
    found = [run["found"]["ours"] for run in flips["runs"]]
    text = " ".join(PAGE.split())
    assert f"{flips['flipped']} of {flips['images']:,} labels" in text
    listed = ", ".join(map(str, found))
    assert f"Among the first {flips['first']} images were {listed} of the {flips['flipped']}" in text
