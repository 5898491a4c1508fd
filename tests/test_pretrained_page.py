"""The tables of docs/pretrained.md and docs/views.md are the summaries of their records."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("script", "page", "first", "last"),
    [
        ("pixels.py", "pretrained.md", "gains", "end gains"),
        ("frozen.py", "pretrained.md", "summary", "end summary"),
        ("adapters.py", "pretrained.md", "adapters", "end adapters"),
        ("fine_tune.py", "pretrained.md", "fine-tune", "end fine-tune"),
        ("views.py", "views.md", "views", "end views"),
        ("regression.py", "pretrained.md", "regression", "end regression"),
        ("pixels.py", "pretrained.md", "pixels", "end pixels"),
    ],
)
def test_the_table_of_the_page_is_the_summary_of_the_records(
    script: str, page: str, first: str, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "studies")
    monkeypatch.setattr(sys, "argv", [script, "gains" if first == "gains" else "summary"])
    runpy.run_path(str(ROOT / "studies" / script), run_name="__main__")
    shown = capsys.readouterr().out
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = text.partition(f"<!-- {first} -->\n")[2].partition(f"<!-- {last} -->")[0]
    assert shown.count("\n") > 3
    assert table == shown
