"""The tables of docs/pretrained.md are the summaries of their records."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("script", "first", "last"),
    [
        ("frozen.py", "summary", "end"),
        ("adapters.py", "adapters", "end adapters"),
        ("fine_tune.py", "fine-tune", "end fine-tune"),
    ],
)
def test_the_table_of_the_page_is_the_summary_of_the_records(
    script: str, first: str, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", [script, "summary"])
    runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
    shown = capsys.readouterr().out
    page = (ROOT / "docs" / "pretrained.md").read_text(encoding="utf-8")
    table = page.partition(f"<!-- {first} -->\n")[2].partition(f"<!-- {last} -->")[0]
    assert shown.count("\n") > 3
    assert table == shown
