"""Several labels per image: the error says that they are not supported and counts the images, in every form."""

from __future__ import annotations

from pathlib import Path

import pytest

from lopsided.data.sources import open_source
from lopsided.errors import DataError

SENTENCE = r"{} of {} images in .* have several labels, the first {}: lopsided gives each image one label\."


def refused(table: Path, several: int, total: int, first: str) -> None:
    with pytest.raises(DataError, match=SENTENCE.format(several, total, first)):
        open_source(table, missing_ok=True)


@pytest.mark.parametrize("joint", ["|", "; ", " + "])
def test_labels_joined_in_a_cell_are_counted(tmp_path: Path, joint: str) -> None:
    table = tmp_path / "t.csv"
    table.write_text(f"path,label\n1.png,cat\n2.png,dog\n3.png,cat{joint}dog\n4.png,dog{joint}cat\n5.png,cat\n")
    refused(table, 2, 5, r"3\.png \(cat.*dog\)")


def test_a_class_whose_name_has_a_sign_is_no_list(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("path,label\n1.png,salt & pepper\n2.png,salt\n3.png,salt\n")
    assert open_source(table, missing_ok=True).classes == ("salt", "salt & pepper")


def test_a_row_per_label_is_counted_by_image(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("path,label\n1.png,cat\n1.png,dog\n2.png,dog\n./2.png,cat\n3.png,cat\n")
    refused(table, 2, 3, r"1\.png \(cat and dog\)")


def test_columns_of_flags_are_counted(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("path,cat,dog,age\n1.png,1,0,7\n2.png,1,1,8\n3.png,0,1,9\n")
    refused(table, 1, 3, r"2\.png \(cat and dog\)")
    table.write_text("path,cat,dog\n1.png,1,0\n2.png,0,1\n")
    with pytest.raises(DataError, match="a table must have the columns path and label, got path, cat, dog"):
        open_source(table)


def test_lists_in_parquet_are_counted_and_lists_of_one_are_labels(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table, paths = tmp_path / "t.parquet", ["1.png", "2.png", "3.png"]
    pyarrow.parquet.write_table(pyarrow.table({"path": paths, "label": [["cat"], ["cat", "dog"], ["dog"]]}), table)
    refused(table, 1, 3, r"2\.png \(cat and dog\)")
    pyarrow.parquet.write_table(pyarrow.table({"path": paths, "label": [["cat"], ["cat"], ["dog"]]}), table)
    assert open_source(table, missing_ok=True).counts() == {"cat": 2, "dog": 1}
