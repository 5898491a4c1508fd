"""The page on pretrained encoders has the figures of the committed records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "first", "last"),
    [("frozen.py", "summary", "end"), ("adapters.py", "adapters", "end adapters")],
)
def test_the_table_of_the_page_is_the_summary_of_the_records(script: str, first: str, last: str) -> None:
    command = [sys.executable, ROOT / "benchmarks" / script, "summary"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    page = (ROOT / "docs" / "pretrained.md").read_text()
    table = page.partition(f"<!-- {first} -->\n")[2].partition(f"<!-- {last} -->")[0]
    assert shown.count("\n") > 3
    assert table == shown


@pytest.mark.slow
def test_the_tables_of_fine_tuning_are_the_summary_of_the_records() -> None:
    command = [sys.executable, ROOT / "benchmarks" / "fine_tune.py", "summary"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    page = (ROOT / "docs" / "pretrained.md").read_text()
    table = page.partition("<!-- fine-tune -->\n")[2].partition("<!-- end fine-tune -->")[0]
    assert shown.count("\n") > 3
    assert table == shown
