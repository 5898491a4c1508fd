"""The tables of docs/which-recipe.md are those of their records."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("script", "arguments", "block"),
    [("study.py", ["short"], "short"), ("study.py", ["summary"], "study"), ("arms.py", [], "methods")],
)
def test_the_table_of_the_page_is_that_of_the_records(
    script: str, arguments: list[str], block: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
    shown = capsys.readouterr().out
    page = (ROOT / "docs" / "which-recipe.md").read_text(encoding="utf-8")
    table = page.partition(f"<!-- {block} -->\n")[2].partition(f"<!-- end {block} -->")[0]
    assert shown.count("\n") > 3
    assert table == shown
