from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from lopsided.data.decoding import decode_image
from lopsided.data.images import ordered_map
from lopsided.data.listed import Listed
from lopsided.data.sources import Source, check_splits, name_of, open_source, source_from_arrays
from lopsided.errors import DataError, InputError, MissingDependencyError
from lopsided.inference.pool import find_images
from lopsided.recipe.sections import Data
from tiny import write_photos

MakeFolder = Callable[..., Path]


def write_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def table_of(folder: Path, name: str = "table.csv", **columns: Sequence[str]) -> Path:
    """A table beside a folder that lists all its images with the folder as the label."""
    images = sorted(folder.rglob("*.png"))
    rows = [
        [path.relative_to(folder.parent).as_posix(), path.parent.name, *(values[i] for values in columns.values())]
        for i, path in enumerate(images)
    ]
    return write_table(folder.parent / name, ["path", "label", *columns], rows)


# Folders


def test_a_folder_of_class_folders_is_a_source(make_folder: MakeFolder) -> None:
    source = open_source(make_folder({"dog": 2, "cat": 3}))
    assert source.name == "photos"
    assert source.classes == ("cat", "dog")
    assert source.counts() == {"cat": 3, "dog": 2}
    assert source.labels.tolist() == [0, 0, 0, 1, 1]
    assert source.labels.dtype == np.int64
    assert source.names == ("cat/000.png", "cat/001.png", "cat/002.png", "dog/000.png", "dog/001.png")
    assert source.groups is None
    assert source.splits is None


def test_classes_that_are_numbers_are_sorted_as_numbers(make_folder: MakeFolder) -> None:
    assert open_source(make_folder({"10": 1, "9": 1, "1": 1})).classes == ("1", "9", "10")


def test_images_deeper_in_a_class_folder_count_and_other_files_do_not(make_folder: MakeFolder) -> None:
    folder = make_folder({"cat": 1, "dog": 1})
    (folder / "cat" / "more").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "cat" / "more" / "x.png")
    (folder / "cat" / "Thumbs.db").touch()
    (folder / ".cache").mkdir()
    for name in ("__MACOSX", "cat/__MACOSX", ".hidden"):  # The first is what an archive of macOS leaves.
        (folder / name).mkdir()
        Image.new("RGB", (8, 8)).save(folder / name / "x.png")
    (folder / "dog" / "__MACOSX").mkdir()
    assert open_source(folder).counts() == {"cat": 2, "dog": 1}


def test_folders_under_train_and_test_come_split(make_folder: MakeFolder) -> None:
    folder = make_folder(
        {"train/cat": 3, "train/dog": 2, "test/cat": 1, "test/dog": 1, "Validation/cat": 1, "Validation/dog": 1}
    )
    source = open_source(folder)
    assert source.classes == ("cat", "dog")
    assert source.splits is not None
    assert sorted(source.splits.tolist()) == ["test"] * 2 + ["train"] * 5 + ["val"] * 2
    assert {name.split("/")[0] for name, split in zip(source.names, source.splits, strict=True) if split == "val"} == {
        "Validation"
    }


def test_a_class_may_be_called_train(make_folder: MakeFolder) -> None:
    source = open_source(make_folder({"train": 2, "bus": 2}))
    assert source.classes == ("bus", "train")
    assert source.splits is None


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (
            {"train/a": 1, "test/a": 1, "spare/a": 1},
            r"photos holds both splits \(test, train\) and a class \('spare'\)\. Move one of them elsewhere\.",
        ),
        ({"train/a": 1, "val/a": 1, "valid/a": 1}, "each split must have only one folder, got train, val, valid in "),
        ({"cat": 2}, r"a source must hold at least 2 classes, got 1 \(cat\) in "),
        ({"cat": 2, "dog": 0}, "every class folder must hold at least one image, got none in .*dog"),
        ({}, r"DATA must be a folder, a CSV or Parquet table, .* or one of .*, got .*photos, which does not exist\."),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(make_folder: MakeFolder, counts: dict[str, int], message: str) -> None:
    folder = make_folder(counts)
    with pytest.raises(DataError, match=message) as caught:
        open_source(folder)
    assert str(folder) in str(caught.value)


def test_an_empty_folder_and_loose_images_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a folder of images must hold one sub-folder per class, got none in "):
        open_source(tmp_path)
    Image.new("L", (4, 4)).save(tmp_path / "loose.png")
    with pytest.raises(DataError, match="a source must hold at least 2 classes, got 1 "):
        open_source(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(
        DataError, match=r"images must be in one sub-folder per class, got 1 directly in .*, the first loose\.png"
    ):
        open_source(tmp_path)


def test_images_directly_in_a_folder_are_one_class(tmp_path: Path) -> None:
    folder = tmp_path / "good"
    folder.mkdir()
    Image.new("L", (4, 4)).save(folder / "a.png")
    source = Source.open(Data(source=str(folder)))
    assert source.classes == ("good", "unusual")
    assert source.counts() == {"good": 1, "unusual": 0}
    folder.rename(tmp_path / "unusual")
    with pytest.raises(DataError, match="The only class of unusual is called unusual"):
        Source.open(Data(source=str(tmp_path / "unusual")))


def test_a_file_that_is_no_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.zip").touch()
    with pytest.raises(DataError, match=r"a\.zip, which is none of these\."):
        open_source(tmp_path / "a.zip")


def test_a_source_name_wins_over_a_folder_and_a_path_reaches_the_folder(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder({"cat": 1, "dog": 1}, root="fashion-mnist-tops")
    monkeypatch.chdir(folder.parent)
    assert open_source("fashion-mnist-tops").classes == ("T-shirt/top", "Shirt")
    assert open_source("./fashion-mnist-tops").classes == ("cat", "dog")


def test_classes_are_chosen_in_the_asked_order_and_any_case(make_folder: MakeFolder) -> None:
    source = open_source(make_folder({"cat": 3, "dog": 2, "emu": 1}), classes=["Emu", "cat"])
    assert source.classes == ("emu", "cat")
    assert source.counts() == {"emu": 1, "cat": 3}
    assert [source.classes[i] for i in source.labels] == [name.split("/")[0] for name in source.names]


def test_class_names_that_differ_in_case_alone_need_exact_names(make_folder: MakeFolder) -> None:
    folder = make_folder({"a": 1, "A": 1, "b": 1})
    assert open_source(folder, classes=["A", "b"]).classes == ("A", "b")
    with pytest.raises(DataError, match="each class must be one of A, a, b, got 'B' for "):
        open_source(folder, classes=["A", "B"])


def test_unknown_and_repeated_class_names_are_errors(make_folder: MakeFolder) -> None:
    folder = make_folder({"cat": 1, "dog": 1})
    with pytest.raises(DataError, match="each class must be one of cat, dog, got 'cow' for "):
        open_source(folder, classes=["cat", "cow"])
    with pytest.raises(InputError, match="each class must be named only once, got cat, CAT"):
        open_source(folder, classes=["cat", "CAT"])


def test_one_class_is_enough_where_the_caller_says_so(make_folder: MakeFolder) -> None:
    assert open_source(make_folder({"cat": 2}), min_classes=1).classes == ("cat",)


# Tables


def test_a_csv_table_is_a_source(make_folder: MakeFolder) -> None:
    folder = make_folder({"cat": 2, "dog": 2})
    table = table_of(folder, group=["p", "q", "p", "q"], split=["train", "Test", "train", "test"])
    source = open_source(table)
    assert source.name == "table"
    assert source.counts() == {"cat": 2, "dog": 2}
    assert source.names[0] == "photos/cat/000.png"
    assert source.groups is not None
    assert source.groups.tolist() == ["p", "q", "p", "q"]
    assert source.splits is not None
    assert source.splits.tolist() == ["train", "test", "train", "test"]


def test_a_parquet_table_is_the_same_source(make_folder: MakeFolder) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = make_folder({"3": 2, "12": 1})
    table = open_source(table_of(folder))
    path = folder.parent / "table.parquet"
    columns = {"path": list(table.names), "label": [int(table.classes[i]) for i in table.labels]}
    parquet.write_table(pyarrow.table(columns), path)
    source = open_source(path)
    assert source.classes == table.classes == ("3", "12")
    assert source.names == table.names
    assert source.labels.tolist() == table.labels.tolist()


def test_a_parquet_table_that_is_none_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match=r"Cannot read the Parquet table .*t\.parquet \("):
        open_source(tmp_path / "t.parquet")


def odd_columns(pyarrow: Any) -> dict[str, Any]:
    """Columns of two values that pyarrow writes and reads, and cannot turn into those of Python."""
    offsets = pyarrow.py_buffer(np.array([0, 1, 2], dtype=np.int32).tobytes())
    text = pyarrow.StringArray.from_buffers(2, offsets, pyarrow.py_buffer(b"\xff\xfe"))
    times = pyarrow.array([2**62, 2**62], type=pyarrow.int64())
    return {
        "text": text,
        "date": times.cast(pyarrow.timestamp("us")),
        "zone": pyarrow.array([0, 1], type=pyarrow.timestamp("us", tz="Nowhere/At_all")),
    }


@pytest.mark.parametrize("kind", ["text", "date", "zone"])
def test_a_parquet_column_that_python_cannot_hold_matters_only_where_it_is_used(
    make_folder: MakeFolder, kind: str
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = make_folder({"a": 1, "b": 1}) / "t.parquet"
    columns = {"path": ["a/000.png", "b/000.png"], "label": ["a", "b"], "odd": odd_columns(pyarrow)[kind]}
    parquet.write_table(pyarrow.table(columns), path)
    assert open_source(path).counts() == {"a": 1, "b": 1}
    with pytest.raises(DataError, match=r"^Cannot read the Parquet table .*t\.parquet \(.+\)\.$"):
        open_source(path, group="odd")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").touch()
    with pytest.raises(MissingDependencyError, match="Run pip install pyarrow, or write the table as CSV"):
        open_source(tmp_path / "t.parquet")


def test_labels_stay_text(make_folder: MakeFolder) -> None:
    folder = make_folder({"NA": 1, "01": 1, "1": 1})
    assert open_source(table_of(folder)).classes == ("01", "1", "NA")


def test_semicolons_and_a_byte_order_mark_are_read(make_folder: MakeFolder) -> None:
    folder = make_folder({"cat": 1, "dog": 1})
    text = table_of(folder).read_text().replace(",", ";")
    (folder.parent / "excel.csv").write_text("\ufeff" + text, encoding="utf-8")
    assert open_source(folder.parent / "excel.csv").counts() == {"cat": 1, "dog": 1}


def test_the_group_column_may_have_any_name(make_folder: MakeFolder) -> None:
    table = table_of(make_folder({"cat": 1, "dog": 1}), patient=["p", "q"])
    source = open_source(table, group="patient")
    assert source.groups is not None
    assert source.groups.tolist() == ["p", "q"]
    with pytest.raises(
        DataError, match="a table must have the columns path and label and doctor, got path, label, patient in "
    ):
        open_source(table, group="doctor")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,class\na.png,x\n", r"a table must have the columns path and label, got file, class in .*t\.csv\."),
        ("path,label\n", r"a table must name at least one image, got no rows in .*t\.csv\."),
        ("", r"The CSV table .*t\.csv is empty\. Its first line must hold the column names\."),
        (
            "path,label\na.png,\n",
            r"the column label must be filled in every line, got an empty cell in line 2 of .*t\.csv\.",
        ),
        (
            "path,label,group\na.png,x,\n",
            r"the column group must be filled in every line, got an empty cell in line 2 of ",
        ),
        (
            "path,label\na.png,x,y\n",
            r"every line must have 2 cells, like the first line, got 3 cells in line 2 of .*t\.csv\.",
        ),
        ('path,label\n"a.png,x\n', r"The CSV table .*t\.csv is not well formed \("),
        (
            "path,label\na.png,x\n./a.png,x\n",
            r"each image must be listed only once, got a\.png in lines 2 and 3 of .*t\.csv\.",
        ),
        ("path,label,split\na.png,x,dev\n", r"the column split must hold train, val or test, got 'dev' in line 2 of "),
        (
            "path,label\na.png,x\nb.png,y\n",
            r"t\.csv lists missing images: 2 of 2, the first .*a\.png",
        ),
        (
            "path,label\n../a.png,x\n",
            r"paths must stay below the folder of the table, got \.\./a\.png in line 2 of .*t\.csv\.",
        ),
        (
            "path,label\nb/../../a.png,x\n",
            r"paths must stay below the folder of the table, got b/\.\./\.\./a\.png in line 2",
        ),
        ("path,label\n/etc/a.png,x\n", r"paths must stay below the folder of the table, got /etc/a\.png in line 2"),
    ],
)
def test_a_table_that_cannot_be_used_is_named_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        open_source(tmp_path / "t.csv")


def test_a_table_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"path,label\n\xff\xfe,x\n")
    with pytest.raises(
        DataError, match=r"The CSV table .*t\.csv is not UTF-8: byte 11 is invalid\. Save it as UTF-8\."
    ):
        open_source(tmp_path / "t.csv")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_table_in_utf_16_says_how_to_save_it(tmp_path: Path, encoding: str) -> None:
    table = tmp_path / "t.csv"
    table.write_text("path,label\na.png,x\n", encoding=encoding)
    for read in (open_source, lambda path: find_images([path])):
        with pytest.raises(DataError) as caught:
            read(table)
        assert str(caught.value) == f"The CSV table {table} is UTF-16, not UTF-8. Save it as UTF-8."


def test_a_comma_in_the_name_of_a_column_does_not_hide_the_semicolons(make_folder: MakeFolder) -> None:
    folder = make_folder({"cat": 1, "dog": 1})
    table = folder / "t.csv"
    table.write_text("path;label;age, years\ncat/000.png;cat;3\ndog/000.png;dog;4\n")
    assert open_source(table).counts() == {"cat": 1, "dog": 1}
    table.write_text("path,label,a;b;c;d\ncat/000.png,cat,3\ndog/000.png,dog,4\n")
    assert open_source(table).counts() == {"cat": 1, "dog": 1}


def test_repeated_and_missing_images_of_a_table_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("path,label\n" + "".join(f"{i}.png,x\n" for i in (1, 2, 3, 4, 5, 2, 3, 2, 4, 5)))
    with pytest.raises(DataError) as caught:
        open_source(table)
    assert str(caught.value) == (
        "each image must be listed only once, got 4 repeated, the first 2.png in lines 3 and 7 and 9, "
        f"3.png in lines 4 and 8, 4.png in lines 5 and 10 of {table}."
    )
    table.write_text("path,label\n" + "".join(f"{i}.png,x\n" for i in range(5)))
    with pytest.raises(DataError) as caught:
        open_source(table)
    three = ", ".join(str(tmp_path / f"{i}.png") for i in range(3))
    assert str(caught.value) == f"{table} lists missing images: 5 of 5, the first {three}."


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (
            {"train/cat": 1, "train/dog": 1, "test/cat": 1},
            "labels must be the same in train and test, got 'dog' only in train of ",
        ),
        (
            {"train/a": 1, "train/b": 1, "test/a": 1, "test/b": 1, "test/c": 1},
            "labels must be the same in train and test, got 'c' only in test of ",
        ),
        ({"test/a": 1, "test/b": 1}, "a source with splits must have a train split, got only test in "),
    ],
)
def test_splits_that_cannot_be_trained_on_open_but_do_not_pass_the_check(
    make_folder: MakeFolder, counts: dict[str, int], message: str
) -> None:
    folder = make_folder(counts)
    source = open_source(folder)
    assert source.splits is not None
    with pytest.raises(DataError, match=f"^{message}{folder}"):
        check_splits(source, str(folder))


def test_val_and_test_are_splits_without_train_unless_they_hold_images_themselves(make_folder: MakeFolder) -> None:
    split = open_source(make_folder({"val/a": 1, "val/b": 1, "test/a": 1, "test/b": 2}, root="split"))
    assert split.classes == ("a", "b")
    assert split.splits is not None
    assert split.splits.tolist() == ["test"] * 3 + ["val"] * 2
    plain = open_source(make_folder({"val": 1, "test": 1}, root="plain"))
    assert plain.classes == ("test", "val")
    assert plain.splits is None


def test_a_table_may_have_very_many_columns_of_different_names(make_folder: MakeFolder) -> None:
    folder = make_folder({"a": 1, "b": 1})
    names = ["path", "label", *(f"column-{i}" for i in range(20_000))]
    rows = [[f"{label}/{next((folder / label).iterdir()).name}", label, *["x"] * 20_000] for label in "ab"]
    (folder / "t.csv").write_text("\n".join(",".join(row) for row in (names, *rows)))
    assert open_source(folder / "t.csv").counts() == {"a": 1, "b": 1}
    (folder / "t.csv").write_text("path,label,x,x\n")
    with pytest.raises(DataError, match=r"^the columns of a table must have different names, got 'x' twice in "):
        open_source(folder / "t.csv")


@pytest.mark.parametrize("root", ["photos", "photos/train"])
def test_a_link_back_to_the_data_gives_no_image_another_label(make_folder: MakeFolder, root: str) -> None:
    counts = {"a": 2, "b": 2} if root == "photos" else {"train/a": 2, "train/b": 2}
    folder = make_folder(counts)
    (folder.parent / root / "b" / "loop").symlink_to("..")
    if root != "photos":
        (folder / "train" / "b" / "higher").symlink_to("../..")
    (folder.parent / root / "b" / "circle.png").symlink_to("circle.png")
    (folder.parent / root / "b" / "nowhere.png").symlink_to("nothing.png")
    assert open_source(folder).counts() == {"a": 2, "b": 2}


def test_a_class_whose_name_is_not_utf_8_is_an_error_that_shows_its_bytes(make_folder: MakeFolder) -> None:
    folder = make_folder({"a": 1, "b": 1})
    (folder / "b").rename(folder / b"b\xff".decode(errors="surrogateescape"))
    with pytest.raises(DataError) as caught:
        open_source(folder)
    assert str(caught.value) == f"the name of a class must be UTF-8, got b\\xff in {folder}. Rename its folder."
    (folder / b"b\xff".decode(errors="surrogateescape")).rename(folder / "größer")
    assert open_source(folder).classes == ("a", "größer")


def test_paths_outside_are_read_when_allowed(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder({"cat": 1, "dog": 1})
    (tmp_path / "tables").mkdir()
    rows = [["../photos/cat/000.png", "cat"], [str(folder / "dog" / "000.png"), "dog"]]
    table = write_table(tmp_path / "tables" / "t.csv", ["path", "label"], rows)
    source = open_source(table, allow_outside=True)
    assert source.images.load(np.arange(2), 8, 3).shape == (2, 3, 8, 8)


@pytest.mark.parametrize("allowed", [False, True])
def test_absolute_paths_below_the_folder_of_the_table_are_the_relative_ones(
    make_folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    folder = make_folder({"cat": 1, "dog": 1, "fox": 1, "owl": 1})
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = [[str(folder / "cat/000.png"), "cat"], [str(tmp_path / "link/dog/000.png"), "dog"]]
    rows += [["~/photos/fox/000.png", "fox"], [f"{folder}/cat/../owl/000.png", "owl"]]
    table = write_table(folder / "t.csv", ["path", "label"], rows)
    names = ("cat/000.png", "dog/000.png", "fox/000.png", "owl/000.png")
    assert open_source(table, allow_outside=allowed).names == names
    assert open_source(tmp_path / "link" / "t.csv", allow_outside=allowed).names == names
    monkeypatch.chdir(folder)
    assert open_source("t.csv", allow_outside=allowed).names == names
    assert list(find_images([table], Listed(allow_outside=allowed))[1]) == [folder / name for name in names]


def test_paths_with_the_separators_of_windows_are_read(make_folder: MakeFolder) -> None:
    folder = make_folder({"cat": 2, "dog": 1})
    (folder / "cat" / "001.png").rename(folder / "cat\\001.png")  # Elsewhere this is a name like any other.
    rows = [["cat\\000.png", "cat"], ["cat\\001.png", "cat"], [".\\dog\\000.png", "dog"]]
    source = open_source(write_table(folder / "t.csv", ["path", "label"], rows))
    assert source.names == ("cat/000.png", "cat\\001.png", "dog/000.png")


@pytest.mark.parametrize(
    "path",
    ["~/secret.png", "~\\secret.png", "..\\secret.png", "{above}/secret.png", "{here}/../secret.png", "{here}s/a.png"],
)
def test_a_path_outside_is_refused_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tables").mkdir()
    (tmp_path / "secret.png").touch()
    path = path.format(above=tmp_path, here=tmp_path / "tables")
    table = write_table(tmp_path / "tables" / "t.csv", ["path", "label"], [[path, "x"]])
    with pytest.raises(DataError) as caught:
        open_source(table)
    assert str(caught.value).startswith(
        f"paths must stay below the folder of the table, got {path} in line 2 of {table}."
    )


def test_an_absolute_path_that_leaves_the_folder_through_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "link").symlink_to(tmp_path)
    (tmp_path / "secret.png").touch()
    path = str(tmp_path / "tables" / "link" / "secret.png")
    table = write_table(tmp_path / "tables" / "t.csv", ["path", "label"], [[path, "x"]])
    with pytest.raises(DataError, match=r"paths must stay below the folder of the table, got link/secret\.png, which "):
        open_source(table)


def test_home_is_read_where_outside_is_allowed_and_a_folder_of_that_name_wins(
    make_folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = make_folder({"cat": 1, "~": 1})
    rows = [["~/photos/cat/000.png", "cat"], ["~/000.png", "home"]]
    assert open_source(write_table(folder / "t.csv", ["path", "label"], rows)).names == ("cat/000.png", "~/000.png")
    (tmp_path / "tables").mkdir()
    table = write_table(tmp_path / "tables" / "t.csv", ["path", "label"], rows[:1])
    source = open_source(table, allow_outside=True, min_classes=1)
    assert source.names == (str(folder / "cat/000.png"),)


# Unreadable images


def test_a_broken_image_stops_verification_and_is_counted(make_folder: MakeFolder) -> None:
    folder = make_folder({"cat": 3, "dog": 3})
    for name in ("cat/001.png", "dog/002.png"):
        (folder / name).write_text("no picture")
    with pytest.raises(DataError, match=r"cat/001\.png \(not an image of a supported format, and 1 more\)"):
        open_source(folder).verify()


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_are_left_out_and_listed_when_skipped(make_folder: MakeFolder, workers: int) -> None:
    folder = make_folder({"cat": 3, "dog": 3})
    (folder / "cat" / "001.png").write_text("no picture")
    (folder / "dog" / "002.png").write_bytes(b"")
    steps: list[tuple[int, int]] = []
    source = open_source(folder).verify(
        skip_unreadable=True, workers=workers, progress=lambda done, of: steps.append((done, of))
    )
    assert steps == [(i, 6) for i in range(1, 7)]
    assert source.counts() == {"cat": 2, "dog": 2}
    assert source.unreadable == (
        ("cat/001.png", "not an image of a supported format"),
        ("dog/002.png", "the file is empty"),
    )
    assert open_source(folder, skip_unreadable=True).unreadable == source.unreadable


def test_a_missing_file_of_a_table_is_listed_when_skipped(make_folder: MakeFolder) -> None:
    folder = make_folder({"cat": 2, "dog": 2})
    table = table_of(folder)
    (folder / "dog" / "001.png").unlink()
    source = open_source(table, skip_unreadable=True)
    assert source.counts() == {"cat": 2, "dog": 1}
    assert source.unreadable == (("photos/dog/001.png", "no such file or directory"),)


def test_a_class_without_a_readable_image_is_an_error_even_when_skipping(make_folder: MakeFolder) -> None:
    folder = make_folder({"cat": 2, "dog": 1})
    (folder / "dog" / "000.png").write_text("no picture")
    with pytest.raises(
        DataError, match=r"every class must hold a readable image, got none in dog of photos \(for example .*000\.png"
    ):
        open_source(folder, skip_unreadable=True)


def test_verified_sources_that_are_whole_stay_themselves(make_folder: MakeFolder) -> None:
    source = open_source(make_folder({"cat": 2, "dog": 1})).verify(same_size=True)
    assert source.names == ("cat/000.png", "cat/001.png", "dog/000.png")
    assert source.unreadable == ()


# Loading


@pytest.mark.parametrize("workers", [0, 3])
def test_a_batch_is_the_decoded_images_in_order(make_folder: MakeFolder, workers: int) -> None:
    folder = make_folder({"cat": 3, "dog": 2})
    source = open_source(folder)
    rows = np.array([4, 0, 0, 2])
    batch = source.images.load(rows, 5, 3, workers=workers)
    assert batch.dtype == torch.uint8
    expected = [decode_image(folder / source.names[i], 5, 3) for i in rows]
    assert np.array_equal(batch.numpy(), np.stack(expected))


def test_images_of_different_sizes_need_an_image_size(make_folder: MakeFolder) -> None:
    folder = make_folder({"cat": 1, "dog": 1})
    Image.new("RGB", (8, 6)).save(folder / "dog" / "000.png")
    source = open_source(folder)
    message = (
        r"images must have the same size when no image size is set, "
        r"got 8 x 8 in .*cat/000\.png and 8 x 6 in .*dog/000\.png\. Set image_size\."
    )
    with pytest.raises(DataError, match=message):
        source.images.load(np.arange(2), None, 3)
    with pytest.raises(DataError, match=message):
        source.verify(same_size=True)
    assert source.images.load(np.arange(2), 4, 3).shape == (2, 3, 4, 4)


def test_a_source_is_grey_only_when_all_its_images_are(make_folder: MakeFolder) -> None:
    folder = make_folder({"cat": 2, "dog": 1}, mode="L")
    assert open_source(folder).images.channels == 1
    Image.new("RGB", (8, 8)).save(folder / "dog" / "colour.png")
    source = open_source(folder)
    assert source.images.channels == 3
    assert source.subset([0, 1]).images.channels == 3


def test_an_unreadable_image_does_not_decide_the_channels(make_folder: MakeFolder) -> None:
    folder = make_folder({"cat": 2, "dog": 1}, mode="L")
    (folder / "cat" / "000.png").write_text("no picture")
    assert open_source(folder).images.channels == 1


def test_an_empty_batch_has_the_shape_of_a_batch(make_folder: MakeFolder) -> None:
    source = open_source(make_folder({"cat": 1, "dog": 1}))
    assert source.images.load(np.array([], dtype=np.int64), 8, 3).shape == (0, 3, 8, 8)


@pytest.mark.parametrize(
    ("size", "channels", "message"),
    [(8, 2, "channels must be 1 or 3, got 2"), (0, 3, "image_size must be >= 1, got 0")],
)
def test_a_batch_that_cannot_be_made_is_refused(size: int, channels: int, message: str) -> None:
    source = source_from_arrays(np.zeros((2, 8, 8), dtype=np.uint8))
    with pytest.raises(InputError, match=message):
        source.images.load(np.arange(2), size, channels)


def test_digests_are_equal_for_equal_bytes_alone(make_folder: MakeFolder) -> None:
    folder = make_folder({"cat": 2, "dog": 1})
    (folder / "dog" / "copy.png").write_bytes((folder / "cat" / "000.png").read_bytes())
    source = open_source(folder)
    digests = dict(zip(source.names, source.images.digest(np.arange(4)), strict=True))
    assert digests["cat/000.png"] == digests["dog/copy.png"]
    assert len(set(digests.values())) == 3


def test_threads_keep_the_order_beyond_one_window() -> None:
    assert list(ordered_map(lambda i: i * i, range(1000), workers=3)) == [i * i for i in range(1000)]


# Subsets and labels


def test_a_subset_keeps_rows_together(make_folder: MakeFolder) -> None:
    folder = make_folder({"cat": 2, "dog": 2})
    source = open_source(table_of(folder, group=["p", "q", "r", "s"], split=["train", "test", "train", "test"]))
    part = source.subset([3, 0])
    assert part.names == ("photos/dog/001.png", "photos/cat/000.png")
    assert part.labels.tolist() == [1, 0]
    assert part.groups is not None
    assert part.groups.tolist() == ["s", "p"]
    assert part.splits is not None
    assert part.splits.tolist() == ["test", "train"]
    assert np.array_equal(part.images.load(np.arange(2), 8, 3), source.images.load(np.array([3, 0]), 8, 3))


def test_relabelling_counts_in_the_classes_of_a_model(make_folder: MakeFolder) -> None:
    source = open_source(make_folder({"cat": 1, "dog": 2})).relabel(["emu", "dog", "cat"])
    assert source.classes == ("emu", "dog", "cat")
    assert source.counts() == {"emu": 0, "dog": 2, "cat": 1}


def test_relabelling_to_classes_that_lack_one_is_an_error(make_folder: MakeFolder) -> None:
    source = open_source(make_folder({"cat": 1, "dog": 2}))
    with pytest.raises(DataError, match=r"labels must be classes of the model \(cat, cow\), got dog in photos"):
        source.relabel(["cat", "cow"])


# Arrays


def pixels_of(source: Source, channels: int) -> np.ndarray:
    return source.images.load(np.arange(len(source)), None, channels).numpy()


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_and_tensors_are_read_in_either_layout(tensor: bool, channels: int) -> None:
    first = np.random.default_rng(0).integers(0, 256, (4, channels, 6, 5), dtype=np.uint8)
    last = np.ascontiguousarray(first.transpose(0, 2, 3, 1))
    for x in (first, last):
        source = source_from_arrays(torch.from_numpy(x) if tensor else x)
        assert source.images.channels == channels
        assert np.array_equal(pixels_of(source, channels), first)


def test_where_both_axes_could_be_channels_tensors_have_them_first_and_arrays_last() -> None:
    x = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 3), dtype=np.uint8)
    assert np.array_equal(pixels_of(source_from_arrays(torch.from_numpy(x)), 3), x)
    assert np.array_equal(pixels_of(source_from_arrays(x), 3), x.transpose(0, 3, 1, 2))


def test_floats_become_the_bytes_that_they_came_from() -> None:
    x = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    assert np.array_equal(pixels_of(source_from_arrays(x / 255.0), 1)[:, 0], x)
    assert np.array_equal(pixels_of(source_from_arrays((x / 255.0).astype(np.float32)), 1)[:, 0], x)


def test_floats_between_bytes_are_rounded() -> None:
    assert pixels_of(source_from_arrays(np.full((1, 2, 2), 0.999)), 1).tolist() == [[[[255, 255], [255, 255]]]]


def test_images_in_memory_resize_as_files_do(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (1, 20, 30, 3), dtype=np.uint8)
    Image.fromarray(x[0]).save(tmp_path / "a.png")
    source = source_from_arrays(x)
    for channels in (1, 3):
        batch = source.images.load(np.array([0]), 8, channels)
        assert np.array_equal(batch[0], decode_image(tmp_path / "a.png", 8, channels))


def test_loading_from_memory_does_not_hand_out_the_memory() -> None:
    x = np.zeros((2, 4, 4), dtype=np.uint8)
    source = source_from_arrays(x)
    source.images.load(np.arange(2), 4, 1).fill_(7)
    assert not pixels_of(source, 1).any()


def test_labels_become_indices_into_sorted_classes() -> None:
    source = source_from_arrays(np.zeros((3, 4, 4), dtype=np.uint8), ["b", "a", "b"])
    assert source.classes == ("a", "b")
    assert source.labels.tolist() == [1, 0, 1]
    assert source.names == ("0", "1", "2")


def test_labels_with_classes_are_indices_or_names() -> None:
    x = np.zeros((2, 4, 4), dtype=np.uint8)
    assert source_from_arrays(x, [1, 0], classes=["b", "a"]).labels.tolist() == [1, 0]
    assert source_from_arrays(x, ["a", "b"], classes=["b", "a"]).labels.tolist() == [1, 0]


def test_without_labels_there_are_none() -> None:
    source = source_from_arrays(np.zeros((2, 4, 4), dtype=np.uint8), groups=[7, 8])
    assert source.labels.tolist() == [-1, -1]
    assert source.counts() == {}
    assert source.groups is not None
    assert source.groups.tolist() == ["7", "8"]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((2, 4), dtype=np.uint8), r"with c = 1 or 3, got shape \(2, 4\)"),
        (np.zeros((2, 4, 4, 4), dtype=np.uint8), r"with c = 1 or 3, got shape \(2, 4, 4, 4\)"),
        (np.zeros((0, 4, 4), dtype=np.uint8), "images must not be empty, got shape"),
        (np.zeros((2, 4, 4), dtype=np.int64), "images must be uint8 or float, got int64"),
        (np.full((2, 4, 4), 2.0), r"float images must be in \[0, 1\], got values from 2 to 2"),
        (np.full((2, 4, 4), np.nan), r"float images must be in \[0, 1\], got NaN in 2 of 2 images"),
    ],
)
def test_arrays_that_are_no_images_are_refused(x: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        source_from_arrays(x)


@pytest.mark.parametrize(
    ("y", "classes", "message"),
    [
        ([0], None, r"labels must have the shape \(2,\), one per image, got \(1,\)"),
        ([0, 2], ["a", "b"], "integer labels must be indices into 2 classes, got 0 to 2"),
        (["a", "c"], ["a", "b"], "each label must be one of a, b, got c"),
    ],
)
def test_labels_that_do_not_fit_are_refused(y: list[object], classes: list[str] | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        source_from_arrays(np.zeros((2, 4, 4), dtype=np.uint8), y, classes=classes)


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match=r"groups must hold one entry per image \(2\), got 1"):
        source_from_arrays(np.zeros((2, 4, 4), dtype=np.uint8), groups=["a"])


def test_an_error_in_a_table_names_the_line_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('path,label,note\n\na.png,x,"two\nlines"\n\nb.png,,\n')
    with pytest.raises(DataError, match=r"the column label must be filled in every line, got an empty cell in line 6 "):
        open_source(tmp_path / "t.csv")


def test_two_columns_of_one_name_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("path,label, label\na.png,x,y\n")
    with pytest.raises(DataError, match=r"columns of a table must have different names, got 'label' twice in .*t\.csv"):
        open_source(tmp_path / "t.csv")


def test_a_path_outside_says_how_fit_is_to_allow_it(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("path,label\n../a.png,x\n")
    with pytest.raises(DataError, match="allow outside paths with --allow-outside"):
        open_source(tmp_path / "t.csv")


def test_the_name_of_a_folder_or_table_is_known_before_it_is_opened(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "pictures.of.2020", {"cat": 2, "dog": 2})
    table = tmp_path / "list.csv"
    table.write_text(
        "path,label\n" + "".join(f"{p.relative_to(tmp_path)},{p.parent.name}\n" for p in photos.glob("*/*"))
    )
    for data in (photos, table, "fashion-mnist-tops"):
        assert name_of(data) == open_source(data).name
    assert name_of(tmp_path / "gone") == "gone"


def test_the_columns_of_a_table_may_have_other_names(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", {"cat": 3, "dog": 2})
    rows = [f"{path.relative_to(photos)};{path.parent.name}" for path in sorted(photos.glob("*/*"))]
    (photos / "table.csv").write_text("file;diagnosis\n" + "\n".join(rows))
    text = r"columns path and label, got .* If they have other names, use --path-column and --label-column\."
    with pytest.raises(DataError, match=text):
        open_source(photos / "table.csv")
    cells = [row.split(";") for row in rows]
    content = {name: [row[place] for row in cells] for place, name in enumerate(("file", "diagnosis"))}
    parquet.write_table(pyarrow.table(content), photos / "table.parquet")
    for name in ("table.csv", "table.parquet"):
        source = open_source(photos / name, path_column="file", label_column="diagnosis")
        assert source.counts() == {"cat": 3, "dog": 2}
