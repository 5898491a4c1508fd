"""The pages about folds, leakage and calibration say what the records and the page about decisions say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
RECORDS = Path(__file__).parents[1] / "studies" / "records"
COVERAGE = json.loads((RECORDS / "coverage_folds.json").read_text(encoding="utf-8"))["settings"]


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def percent(figure: dict[str, float], kind: str) -> str:
    return f"{100 * figure[f'{kind}, coverage']:.1f}"


def test_the_coverage_with_folds_is_that_of_the_record() -> None:
    for name, figures in COVERAGE.items():
        kinds = ("ours", "cluster bootstrap", "without groups")
        cells = [percent(figures[figure], kind) for figure in ("uwa", "auroc") for kind in kinds]
        assert f"| {name} | {' | '.join(cells)} |" in page("folds.md")


@pytest.mark.parametrize(
    ("kind", "words"), [("without groups", "contained the true balanced accuracy in"), ("ours", "did so in")]
)
def test_the_page_on_leakage_has_the_coverage_of_the_record(kind: str, words: str) -> None:
    settings = [name for name in COVERAGE if name.startswith("115 rare of 515, groups")]
    found = " and ".join(percent(COVERAGE[name]["uwa"], kind) for name in settings)
    assert f"{words} {found} %" in " ".join(page("understand/leakage.md").split())


def test_what_folds_gain_is_that_of_the_record() -> None:
    record = json.loads((RECORDS / "folds.json").read_text(encoding="utf-8"))
    for run, words in zip(record["runs"], ("test split of 15 %", "five folds"), strict=True):
        cells = ["{:.1f} [{:.1f}, {:.1f}]".format(*run[figure]) for figure in ("uwa", "auroc", "recall")]
        assert f"| {words} | {run['rare']} | {' | '.join(cells)} |" in page("folds.md")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("`plain`", "most probable class"),
        ("`balanced`", "divided by the prior, not calibrated"),
        ("`balanced`, temperature", "the same with a temperature"),
        ("`balanced`, calibrated", "the same with temperature and biases"),
    ],
)
def test_the_page_on_calibration_repeats_the_means_of_the_page_on_decisions(rule: str, words: str) -> None:
    below = page("decisions.md").partition("Points of balanced accuracy below the ceiling")[2]
    row = next(line for line in below.splitlines() if line.startswith(f"| {rule} |"))
    means = re.findall(r"\| ([\d.]+) \(", row)
    assert len(means) == 3
    assert f"| {words} | {' | '.join(means)} |" in page("understand/calibration.md")


def test_the_coverage_of_decisions_is_that_of_the_record() -> None:
    record = json.loads((RECORDS / "threshold_coverage.json").read_text(encoding="utf-8"))["settings"]
    assert len(record) == 7
    for name, figures in record.items():
        cells = [
            f"{percent(figures[figure], 'ours')} ({percent(figures[figure], 'images alone')})"
            for figure in ("frequent recall", "rare recall", "rare precision", "accuracy", "uwa")
        ]
        assert f"| {name} | {' | '.join(cells)} |" in page("folds.md")
