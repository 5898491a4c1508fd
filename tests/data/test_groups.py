"""Groups of plain folders: from the folder of an image, and from a pattern of its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image

from lopsided.data.prepare import Sources, split_rule
from lopsided.data.sources import open_source
from lopsided.errors import DataError, InputError
from lopsided.recipe import named_recipe
from lopsided.runs.run import settle

MakeFolder = Callable[..., Path]


def images_at(folder: Path, names: Sequence[str]) -> Path:
    for value, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), value).save(folder / name)
    return folder


NAMES = ("a/p1/0.png", "a/p1/1.png", "a/p2/0.png", "b/p1/0.png", "b/p3/deep/0.png")


def test_the_folder_of_an_image_is_its_group_in_any_class(tmp_path: Path) -> None:
    source = open_source(images_at(tmp_path / "photos", NAMES), group="parent")
    assert source.groups is not None
    assert source.groups.tolist() == ["p1", "p1", "p2", "p1", "deep"]
    split = open_source(images_at(tmp_path / "split", [f"train/{name}" for name in NAMES]), group="parent")
    assert split.groups is not None
    assert split.groups.tolist() == source.groups.tolist()


def test_images_without_a_folder_of_their_group_are_counted(tmp_path: Path) -> None:
    folder = images_at(tmp_path, ["train/a/0.png", "train/a/p1/0.png", "test/a/1.png"])
    with pytest.raises(DataError, match=r"2 of 3 directly in the folder of their class, the first test/a/1\.png"):
        open_source(folder, group="parent", min_classes=1)


@pytest.mark.parametrize(
    ("pattern", "groups"),
    [
        ("{group}_*", ["p1", "p1", "p2", "p1"]),
        ("*_{group}.png", ["left", "right", "x", "left"]),
        ("{group}/*", ["a", "a", "a", "b"]),
    ],
)
def test_a_pattern_takes_groups_from_names_of_a_folder_and_of_a_table(
    tmp_path: Path, pattern: str, groups: list[str]
) -> None:
    names = ["a/p1_left.png", "a/p1_right.png", "a/p2_3_x.png", "b/p1_left.png"]
    folder = images_at(tmp_path, names)
    table = tmp_path / "t.csv"
    table.write_text("path,label\n" + "".join(f"{name},{name[0]}\n" for name in names))
    for data in (folder, table):
        found = open_source(data, group_from=pattern).groups
        assert found is not None
        assert found.tolist() == groups


def test_a_pattern_that_misses_images_counts_them_after_exclude(tmp_path: Path) -> None:
    folder = images_at(tmp_path, ["a/p1_0.png", "a/x.png", "b/p2_0.png", "b/y.png"])
    with pytest.raises(DataError, match=r"'\{group\}_\*', got 2 of 4 without .*, the first a/x\.png"):
        open_source(folder, group_from="{group}_*")
    assert len(open_source(folder, group_from="{group}_*", exclude=["?.png"])) == 2


@pytest.mark.parametrize("pattern", ["p_*", "{group}_{group}"])
def test_a_pattern_names_the_group_once(make_folder: MakeFolder, pattern: str) -> None:
    with pytest.raises(InputError, match=r"--group-from must hold \{group\} once"):
        open_source(make_folder({"a": 1, "b": 1}), group_from=pattern)


def test_what_is_no_group_of_a_source_is_refused_with_what_is(make_folder: MakeFolder) -> None:
    folder = make_folder({"a": 1, "b": 1})
    with pytest.raises(InputError, match=r"must be parent.*'patient'.*--group-from"):
        open_source(folder, group="patient")
    with pytest.raises(InputError, match="Leave out one of the two"):
        open_source(folder, group="parent", group_from="{group}_*")
    with pytest.raises(InputError, match="fashion-mnist-tops has no group 'parent'"):
        open_source("fashion-mnist-tops", group="parent")


def test_a_recipe_with_a_pattern_splits_by_group_and_further_images_have_groups_too(tmp_path: Path) -> None:
    names = [f"{label}/{label}{i // 2}_{i}.png" for label in "ab" for i in range(8)]
    images_at(tmp_path / "photos", names)
    (tmp_path / "further").mkdir()
    Image.new("L", (5, 5), 200).save(tmp_path / "further" / "a0_left.png")
    (tmp_path / "more.csv").write_text("path,label\nfurther/a0_left.png,a\n")
    recipe = named_recipe("quick").override(
        **{"data.group_from": "{group}_*", "data.more": (str(tmp_path / "more.csv"),)}
    )
    source, _ = Sources().open(settle(recipe, tmp_path / "photos"))
    assert split_rule(recipe, source) == "group"
    assert source.more is not None
    assert source.more.groups is not None
    assert source.more.groups.tolist() == ["a0"]


def table_of(folder: Path, column: str, values: list[str]) -> Path:
    """A table of so many files, which nobody opens, with one more column."""
    rows = [f"{i}.png,{'ab'[i % 2]},{value}" for i, value in enumerate(values)]
    (folder / "lesions.csv").write_text("\n".join([f"path,label,{column}", *rows]) + "\n")
    return folder / "lesions.csv"


def test_a_column_that_repeats_like_groups_is_named(tmp_path: Path) -> None:
    values = [f"l{i // 2}" if i < 20 else f"l{i}" for i in range(40)]
    table = table_of(tmp_path, "lesion", values)
    (fact,) = open_source(table, missing_ok=True).facts
    assert fact.kind == "repeating_column"
    assert (fact.values["column"], fact.values["values"], fact.values["rows"]) == ("lesion", 30, 40)
    assert "use --group lesion" in str(fact)
    assert open_source(table, missing_ok=True, group="lesion").facts == ()


@pytest.mark.parametrize(
    "values", [[f"id{i}" for i in range(40)], ["left", "right"] * 20, [f"{i // 2}.5" for i in range(40)]], ids=range(3)
)
def test_identifiers_kinds_and_measurements_are_no_groups(values: list[str], tmp_path: Path) -> None:
    assert open_source(table_of(tmp_path, "other", values), missing_ok=True).facts == ()
