from __future__ import annotations

from pathlib import Path

import pytest

from lopsided.data.prepare import Sources
from lopsided.errors import DataError
from lopsided.recipe import Recipe
from tiny import write_photos


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos", {"cat": 4, "dog": 3})


def counts(photos: Path, table: Path | str) -> dict[str, int]:
    recipe = Recipe().override(**{"data.source": str(photos), "data.corrections": [str(table)]})
    return Sources().listed(recipe).counts()


def test_corrections_replace_labels_by_name_or_by_file(photos: Path, tmp_path: Path) -> None:
    table = tmp_path / "corrections.csv"
    table.write_text(f"path,label\ncat/000.png,dog\n{photos}/cat/001.png,dog\nphotos/dog/000.png,cat\n")
    assert counts(photos, table) == {"cat": 3, "dog": 4}
    table.write_text("path,label,was\ncat/000.png,dog,cat\ncat/000.png,cat,dog\n")  # The last one counts.
    assert counts(photos, table) == {"cat": 4, "dog": 3}


def test_corrections_are_noted_and_the_list_is_not_reused_for_others(photos: Path, tmp_path: Path) -> None:
    table = tmp_path / "corrections.csv"
    table.write_text("path,label\ncat/000.png,dog\n")
    sources, recipe = Sources(), Recipe().override(**{"data.source": str(photos)})
    assert sources.listed(recipe).counts() == {"cat": 4, "dog": 3}
    changed = sources.listed(recipe.override(**{"data.corrections": [str(table)]}))
    assert changed.counts() == {"cat": 3, "dog": 4}
    assert "Corrections change 1 label of 7 images." in [str(fact) for fact in changed.facts]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("path,label\ncat/999.png,dog\n", "cat/999.png"),
        ("path,label\n/etc/passwd,dog\n", "/etc/passwd"),
        ("path,label\ncat/000.png,horse\n", "horse"),
        ("path,label\ncat/000.png,\n", "row 2"),
        ("name,label\ncat/000.png,dog\n", "columns path and label"),
    ],
)
def test_corrections_that_do_not_fit_are_refused(photos: Path, tmp_path: Path, text: str, told: str) -> None:
    table = tmp_path / "corrections.csv"
    table.write_text(text)
    with pytest.raises(DataError, match=told):
        counts(photos, table)


def test_a_missing_table_is_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        counts(photos, tmp_path / "none.csv")
