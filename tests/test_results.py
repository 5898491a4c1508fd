"""The page of results says what the committed records say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scripts_results", ROOT / "scripts" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Where dataclasses look for the names in annotations.
    spec.loader.exec_module(module)
    return module


script = _script()
RECORDED = [part for part in script.PARTS if part.path.exists()]


@pytest.mark.parametrize(("name", "text"), [pytest.param(*pair, id=pair[0]) for pair in script.written()])
def test_the_page_shows_what_the_records_say(name, text):
    shown = script.parts_of(script.PAGE.read_text("utf-8"))

    assert shown[name] == text.strip("\n"), "renew it: python scripts/results.py"


def test_every_figure_that_the_page_shows_is_there():
    page = script.PAGE.read_text("utf-8")
    named = [f"{part.name}-{figure}.svg" for part in RECORDED for figure in part.figures]

    assert named
    assert [name for name in named if f"(figures/results/{name})" not in page] == []
    assert [name for name in named if not (script.DRAWN / name).is_file()] == []


def test_the_records_are_small_and_all_of_them_can_be_read():
    files = sorted((ROOT / "results").glob("*.jsonl"))
    assert files
    assert sum(path.stat().st_size for path in files) < 1_000_000
    for path in files:
        records, notes = script.read_records(path)
        assert notes == []
        assert len(records) == len(path.read_text("utf-8").splitlines())
