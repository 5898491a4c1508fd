"""Further labels for training: tables of marks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lopsided.data.prepare import Sources, add_more, training_source
from lopsided.data.sources import open_source, source_from_arrays
from lopsided.data.splits import Splits, split
from lopsided.errors import DataError
from lopsided.facts import notes
from lopsided.recipe import Recipe
from lopsided.recipe.sections import Data
from tiny import write_photos


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos", {"cat": 6, "dog": 4})


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "pool", {"cat": 3, "dog": 3}, start=50)


def write_marks(folder: Path, *rows: str, name: str = "marks.csv", header: str = "path,label,mark") -> Path:
    (folder / name).write_text("\n".join([header, *rows]) + "\n")
    return folder / name


def test_marked_images_are_trained_on_and_never_tested(photos: Path, pool: Path, tmp_path: Path) -> None:
    marks = write_marks(tmp_path, "pool/dog/050.png,dog,yes", "pool/cat/050.png,cat,no", "pool/cat/051.png,,skip")
    source = add_more(open_source(photos), Data(more=[str(marks)]))
    assert len(source) == 10
    assert source.more is not None
    joined, splits = training_source(source, split(source, how="stratified", val=0.2, test=0.2, seed=0))
    assert [joined.names[i] for i in splits.train[-2:]] == [
        str(pool / "dog" / "050.png"),
        str(pool / "cat" / "050.png"),
    ]
    assert [joined.classes[joined.labels[i]] for i in splits.train[-2:]] == ["dog", "cat"]
    assert max(*splits.val, *splits.test) < 10
    assert source.facts == (
        notes.unlabelled_rows("marks.csv", {"skip": 1}),
        notes.further_labels({"cat": 1, "dog": 1}),
    )


def test_a_no_among_several_classes_says_nothing_and_is_left_out(pool: Path, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "three", {"cat": 2, "dog": 2, "fox": 2})
    marks = write_marks(tmp_path, "pool/dog/050.png,dog,yes", "pool/dog/051.png,,no", "pool/cat/051.png,,no")
    source = add_more(open_source(photos), Data(more=[str(marks)]))
    assert source.more is not None
    assert source.more.counts() == {"cat": 0, "dog": 1, "fox": 0}
    assert source.facts[0] == notes.unlabelled_rows("marks.csv", {"no": 2})


def test_labels_that_contradict_what_is_known_are_refused(photos: Path, pool: Path, tmp_path: Path) -> None:
    (pool / "copy.png").write_bytes((photos / "cat" / "001.png").read_bytes())
    marks = write_marks(tmp_path, "pool/dog/050.png,dog,yes", "pool/copy.png,dog,yes")
    with pytest.raises(DataError) as caught:
        add_more(open_source(photos), Data(more=[str(marks)]))
    assert str(caught.value) == (
        f"One further label contradicts what is known of the same image: {pool / 'copy.png'} is dog in marks.csv:3, "
        f"but cat in {photos / 'cat' / '001.png'}. Correct or remove these rows."
    )
    write_marks(tmp_path, "pool/copy.png,cat,no", "pool/copy.png,cat,no", "pool/dog/050.png,dog,yes")
    source = add_more(open_source(photos), Data(more=[str(marks)]))
    assert source.more is not None
    assert source.more.counts() == {"cat": 0, "dog": 1}
    assert source.facts[0] == notes.repeated_labels(2)
    other = write_marks(tmp_path, "pool/dog/050.png,cat,no", name="other.csv")
    with pytest.raises(DataError, match=r"050\.png is cat in other\.csv:2, but dog in marks\.csv:4\."):
        add_more(open_source(photos), Data(more=[str(marks), str(other)]))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("pool/dog/050.png,Dog,yes", r"must be classes of photos \(cat, dog\), got 'Dog' in row 2 of .*mean dog\?$"),
        ("pool/dog/050.png,,yes", r"^path and label must be filled, got an empty cell in row 2 of "),
        ("pool/dog/050.png,dog,maybe", r"^the column mark must hold yes, no or skip, got 'maybe' in row 2 of "),
        (
            "pool/gone.png,dog,yes",
            r"^Further labels name missing images: 1 of 1, the first .*gone\.png \(marks\.csv:2\)",
        ),
        ("/etc/x.png,dog,yes", r"^paths must stay below the folder of the table, got /etc/x\.png in line 2 of "),
    ],
)
def test_a_row_that_cannot_be_used_is_named(photos: Path, pool: Path, tmp_path: Path, row: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        add_more(open_source(photos), Data(more=[str(write_marks(tmp_path, row))]))


def test_arrays_take_no_further_labels(tmp_path: Path) -> None:
    source = source_from_arrays(np.zeros((4, 2, 2), np.uint8), [0, 0, 1, 1])
    with pytest.raises(DataError, match=r"^Further labels \(--more\) need images in files, but those of arrays are "):
        add_more(source, Data(more=[str(write_marks(tmp_path, "a,b,yes"))]))


def test_an_image_of_a_group_that_is_tested_is_not_trained_on(photos: Path, pool: Path, tmp_path: Path) -> None:
    rows = [f"photos/{p.parent.name}/{p.name},{p.parent.name},{p.parent.name}{p.stem}" for p in photos.rglob("*.png")]
    table = write_marks(tmp_path, *rows, name="table.csv", header="path,label,group")
    marks = write_marks(
        tmp_path, "pool/dog/050.png,dog,dog001", "pool/dog/051.png,dog,", name="m.csv", header="path,label,group"
    )
    source = add_more(open_source(table), Data(more=[str(marks)]))
    assert notes.further_without_group(1, 2, "group") in source.facts
    assert source.groups is not None
    test = np.flatnonzero(source.groups == "dog001")
    joined, splits = training_source(source, Splits(np.setdiff1d(np.arange(10), test), test[:0], test))
    assert [Path(joined.names[i]).name for i in splits.train if i >= 10] == ["051.png"]


def test_the_recipe_names_the_tables_and_an_old_hash_stays(photos: Path, pool: Path, tmp_path: Path) -> None:
    marks = write_marks(tmp_path, "pool/dog/050.png,dog,yes")
    recipe = Recipe().override(**{"data.source": str(photos), "data.more": [str(marks)]})
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    assert recipe.content_hash() != recipe.override(**{"data.more": None}).content_hash()
    source, _ = Sources().open(recipe)
    assert source.more is not None
    assert source.more.counts() == {"cat": 0, "dog": 1}


def test_images_and_groups_that_are_held_out_are_not_trained_on(photos: Path, pool: Path, tmp_path: Path) -> None:
    rows = [f"photos/{p.parent.name}/{p.name},{p.parent.name},{p.parent.name}{p.stem}" for p in photos.rglob("*.png")]
    table = write_marks(tmp_path, *rows, name="table.csv", header="path,label,group")
    recipe = Recipe().override(**{"data.source": str(table), "data.scenario": "50:50,total=4", "data.held_out": True})
    _, held_out = Sources().open(recipe)
    assert held_out is not None
    assert held_out.groups is not None
    marks = write_marks(
        tmp_path,
        f"{held_out.names[0]},{held_out.classes[held_out.labels[0]]},new",
        f"pool/dog/050.png,dog,{held_out.groups[1]}",
        "pool/dog/051.png,dog,other",
        header="path,label,group",
    )
    source, _ = Sources().open(recipe.override(**{"data.more": [str(marks)]}))
    assert source.more is not None
    assert [Path(name).name for name in source.more.names] == ["051.png"]
    assert notes.held_out_labels(2) in source.facts


def test_further_images_of_another_size_are_resized_like_the_others(photos: Path, tmp_path: Path) -> None:
    Image.new("RGB", (50, 40)).save(tmp_path / "large.png")
    marks = write_marks(tmp_path, "large.png,dog,yes")
    recipe = Recipe().override(**{"data.source": str(photos)})
    assert Sources().open(recipe)[0].resized is None
    source, _ = Sources().open(recipe.override(**{"data.more": [str(marks)]}))
    assert source.resized == source.images.size(0)[0]
