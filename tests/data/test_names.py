from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.conftest import MakeFolder
from lopsided.data.describe import describe
from lopsided.data.listed import Labelled
from lopsided.data.sources import open_source, source_from_arrays
from lopsided.data.sources.names import Patterns, Twins, name_cautions, nearest_name, suggest_names, twins, typos
from lopsided.data.splits import split
from lopsided.errors import DataError
from lopsided.facts import cautions


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("*.png", ["Crack/1.png", "Crack/masks/2.png", "3.png"]),
        ("masks/*", ["Crack/masks/2.png"]),
        ("Crack/*", ["Crack/1.png", "Crack/1.jpg", "Crack/masks/2.png"]),
        ("1.jpg", ["Crack/1.jpg"]),
        ("rack/*", []),
        ("[13].png", ["Crack/1.png", "3.png"]),
        ("crack/*", []),
    ],
)
def test_a_pattern_matches_a_whole_name_or_its_end_after_a_slash(pattern: str, matches: list[str]) -> None:
    names = ["Crack/1.png", "Crack/1.jpg", "Crack/masks/2.png", "3.png"]
    assert [name for name in names if Patterns(include=[pattern]).keep(name)] == matches
    assert [name for name in names if not Patterns(exclude=[pattern]).keep(name)] == matches


def test_an_excluded_image_stays_out_although_it_is_included() -> None:
    patterns = Patterns(include=["*.jpg", "*.png"], exclude=["*_mask.*"])
    assert [patterns.keep(name) for name in ("a.jpg", "a_mask.png", "a.png", "a.bmp")] == [True, False, True, False]


def masked(folder: Path) -> Path:
    """Add a mask beside each image of the first class."""
    for path in sorted((folder / "cat").iterdir()):
        Image.new("L", (8, 8), 255).save(path.with_suffix(".bmp"))
    return folder


def test_patterns_select_the_images_of_a_folder(make_folder: MakeFolder) -> None:
    folder = masked(make_folder({"cat": 3, "dog": 2}))
    assert open_source(folder).counts() == {"cat": 6, "dog": 2}
    source = open_source(folder, exclude=["*.bmp"])
    assert source.counts() == {"cat": 3, "dog": 2}
    assert source.left_out == 3
    assert open_source(folder, include=["*.bmp", "dog/*"]).names == (
        *(f"cat/{i:03d}.bmp" for i in range(3)),
        "dog/000.png",
        "dog/001.png",
    )


def test_patterns_that_leave_nothing_are_refused_with_a_name_to_compare(make_folder: MakeFolder) -> None:
    folder = make_folder({"cat": 3, "dog": 2})
    must = (
        r"^the patterns must leave at least one image, got none of 5 with include='\*\.jpg' in .*photos\. "
        r"A pattern is compared with names such as cat/000\.png\.$"
    )
    with pytest.raises(DataError, match=must):
        open_source(folder, include=["*.jpg"])


def test_a_missing_file_of_a_table_that_is_left_out_is_no_error(make_folder: MakeFolder) -> None:
    folder = make_folder({"cat": 1, "dog": 1})
    table = folder / "t.csv"
    table.write_text("path,label,group,split\ncat/000.png,cat,p,train\ngone.tif,cat,q,test\ndog/000.png,dog,r,test\n")
    source = open_source(table, exclude=["*.tif"])
    assert source.groups is not None
    assert source.splits is not None
    assert (source.names, source.groups.tolist(), source.splits.tolist()) == (
        ("cat/000.png", "dog/000.png"),
        ["p", "r"],
        ["train", "test"],
    )
    with pytest.raises(DataError, match=r"lists missing images: 1 of 1, the first .*gone\.tif"):
        open_source(table, include=["*.tif"], min_classes=1)


def test_images_that_differ_only_in_the_suffix_are_counted_in_each_folder() -> None:
    names = ["b/1.jpg", "a/1.jpg", "a/1.png", "a/sub/1.bmp", "a/2.jpg", "a/1.old.png", "a/2.png", "b/2.png"]
    found = twins(names)
    assert (found.number, found.first) == (2, ("a/1.jpg", "a/1.png"))
    assert found.cautions() == [cautions.same_stems(2, ["a/1.jpg", "a/1.png"], ".png")]
    assert Twins().cautions() == []


def test_pairs_are_counted_while_walking_with_the_names_of_open_folders_only() -> None:
    found = Twins()
    for name in ("a/1.jpg", "a/in/1.png", "a/x.jpg", "a/x.png", "b/1.png", "c/y.jpg", "c/y.png"):
        found.add(name)
    assert found.number == 2
    assert set(found._seen) == {"c"}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Brake", "Break"),
        ("crack", "Crack"),
        ("Fray ", "Fray"),
        ("zebra", None),
        ("grade 2", None),
    ],
)
def test_the_nearest_name_ignores_case_and_punctuation_and_never_differs_only_in_digits(
    name: str, near: str | None
) -> None:
    assert nearest_name(name, ["Break", "Crack", "Fray", "grade 1"]) == near


def test_a_small_class_with_a_similar_name_is_a_typo_and_a_large_one_is_a_class() -> None:
    assert typos({"Break": 70, "Brake": 1, "Fray": 60}) == [("Brake", "Break")]
    assert typos({"Break": 70, "Brake": 9, "Fray": 60}) == []
    assert typos({"Break": 700, "Brake": 10, "Fray": 60}) == []
    assert typos({"Crack": 50, "crack": 48}) == [("crack", "Crack")]
    assert typos({"stage 1": 500, "stage 2": 2}) == []
    assert name_cautions({"Break": 70, "Brake": 1, "cat": 9}, []) == [
        cautions.similar_names([["Brake", "Break"]], {"Brake": 1, "Break": 70})
    ]
    assert name_cautions({"cat": 70, "dog": 1}, []) == []


def test_all_classes_that_cannot_be_split_are_named_with_the_names_they_resemble() -> None:
    labels = np.array(["Break"] * 8 + ["Brake"] + ["Crack"] * 8 + ["crack"] + ["zebra"])
    source = source_from_arrays(np.zeros((len(labels), 4, 4), dtype=np.uint8), labels)
    must = (
        r"^a class must hold at least 2 images to be split, got 1 in 'Brake' and in 'crack' and in 'zebra' of arrays\. "
        r"Did you mean Break, Crack\? Otherwise add images or drop the class\.$"
    )
    with pytest.raises(DataError, match=must):
        split(source, how="stratified", val=0.2, test=0.2, seed=0)


def test_a_label_that_is_no_class_of_the_model_gets_the_nearest_class(make_folder: MakeFolder) -> None:
    source = open_source(make_folder({"Brake": 2, "Crack": 2}))
    with pytest.raises(DataError, match=r"got Brake in photos\. Did you mean Break\?$"):
        source.relabel(["Break", "Crack"])
    with pytest.raises(DataError, match=r"got 'Crock' for .*photos\. Did you mean Crack\?$"):
        open_source(make_folder({"Crack": 2, "Fray": 2}, root="more/photos"), classes=["Crock", "Fray"])
    assert suggest_names(["zebra"], ["Break"]) == ""


def test_describe_names_typos_small_classes_and_pairs(make_folder: MakeFolder) -> None:
    folder = masked(make_folder({"cat": 12, "Cat": 1, "cow": 1, "dog": 2}))
    facts = describe(folder)
    assert "Cat and cow each have only one image and cannot be tested." in facts["notes"]
    assert any(note.startswith("Classes with similar names: Cat (1 image) and cat (24).") for note in facts["notes"])
    assert any(note.startswith("12 pairs of images differ only in the suffix") for note in facts["notes"])
    facts = describe(folder, Labelled(exclude=["*.bmp", "Cat/*"]))
    assert facts["left_out"] == 13
    assert facts["classes"] == {"cat": 12, "cow": 1, "dog": 2}
    assert facts["notes"][1:] == ["cow has only one image and cannot be tested."]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("melanom", "melanoma"), [("melanom", "melanoma")]),
        (("typical", "atypical"), []),
        (("stage I", "stage II"), []),
        (("grade a", "grade b"), []),
        (("type1", "type12"), []),
    ],
)
def test_a_name_that_lacks_a_letter_is_noticed_whatever_the_number_of_its_images(
    names: tuple[str, str], expected: list[tuple[str, str]]
) -> None:
    assert typos({names[0]: 300, names[1]: 400}) == expected
