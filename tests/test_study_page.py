"""The tables of docs/recipe-tables.md are those of their records."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recipe-tables.md"


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "studies")
    return importlib.import_module("evidence")


@pytest.mark.slow
def test_the_tables_of_the_page_are_those_of_the_records(evidence: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = re.findall(r"<!-- (\w+) -->\n(?=\|)", page)
    assert sorted(names) == sorted(evidence.blocks())
    assert all(table.count("\n") > 3 for table in evidence.blocks().values())
    assert evidence.with_blocks(page) == page


def test_what_to_expect_is_the_same_table_wherever_it_stands() -> None:
    pages = [ROOT / "README.md", ROOT / "docs" / "which-recipe.md", ROOT / "docs" / "peers.md"]
    block = r"<!-- peers-short -->.*?<!-- end peers-short -->"
    tables = [re.findall(block, page.read_text(encoding="utf-8"), flags=re.DOTALL) for page in pages]
    assert [len(found) for found in tables] == [1, 1, 1]
    assert len({found[0] for found in tables}) == 1


def test_a_table_that_is_not_that_of_the_records_is_replaced(evidence: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert evidence.with_blocks(page.replace("| quick |", "| other |", 1)) == page


def test_an_interval_against_losses_from_scratch_is_adjusted_for_the_number_of_rows(evidence: ModuleType) -> None:
    rows = [row.split(" | ") for row in evidence.against().splitlines()[2:]]
    first = next(row for row in rows if row[:3] == ["| T-shirts 90:10", "thorough", "cl"])
    lines = [line for line in evidence.gather() if line.setting == "tops 90:10"]
    uwa = {method: {line.draw: line.uwa for line in lines if line.method == method} for method in ("thorough", "cl")}
    gains = [uwa["thorough"][draw] - value for draw, value in uwa["cl"].items()]
    from scipy.stats import t, tstd

    half = t.ppf(1 - 0.025 / len(rows), len(gains) - 1) * tstd(gains) / len(gains) ** 0.5
    assert first[4] == f"{sum(gains) / len(gains):+.1f} ± {half:.1f}"
