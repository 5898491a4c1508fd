from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lopsided.data import decoding
from lopsided.data.cues import measure_cues
from lopsided.data.decoding import read_header
from lopsided.data.images import FileImages
from lopsided.data.inputs import prepare
from lopsided.data.prepare import Sources, split_note, split_rule, split_source, usual_side
from lopsided.data.sources import Source, open_source
from lopsided.facts import notes
from lopsided.recipe import Recipe
from lopsided.runs.folds import fold_recipes
from tiny import write_photos


def write(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for i, size in enumerate(sizes):
            pixels = np.random.default_rng([i, len(label), ord(label[0])]).integers(0, 255, (*size[::-1], 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / label / f"{i}.jpg")
    return folder


@pytest.mark.parametrize(
    ("sizes", "side"),
    [
        ([(300, 400), (500, 260), (640, 480)], 224),
        ([(30, 40), (50, 26), (64, 48)], 30),
        ([(40, 30), (40, 30)], None),
        ([(40, 30), (30, 40)], 30),
    ],
)
def test_images_of_different_sizes_get_224_pixels_or_the_median_of_their_shorter_sides(
    tmp_path: Path, sizes: list[tuple[int, int]], side: int | None
) -> None:
    assert usual_side(open_source(write(tmp_path / "photos", sizes)).images) == side


def test_a_recipe_without_a_size_trains_on_images_of_different_sizes_and_says_the_size(tmp_path: Path) -> None:
    folder = write(tmp_path / "photos", [(30, 40), (50, 26), (64, 48), (33, 33), (30, 60)])
    recipe = Recipe().override(**{"data.source": str(folder), "data.val": 0.0, "data.test": 0.2})
    source, _ = Sources().open(recipe)
    prepared, facts = prepare(recipe, source, split_source(recipe, source))
    assert (prepared.shape, prepared.image_size) == ((3, 30, 30), 30)
    assert notes.resized(30) in facts
    own = recipe.override(**{"data.image_size": 16})
    source, _ = Sources().open(own)
    prepared, facts = prepare(own, source, split_source(own, source))
    assert prepared.shape == (3, 16, 16)
    assert "resized" not in [fact.kind for fact in facts]


def test_images_that_are_stored_on_their_side_have_the_size_that_is_seen(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 30)).save(tmp_path / "turned.jpg", exif=exif)
    assert read_header(tmp_path / "turned.jpg").size == (40, 30)


def test_the_split_rule_is_named_with_its_reason(tmp_path: Path) -> None:
    folder = write(tmp_path / "photos", [(8, 8)] * 3)
    rows = [f"{label}/{i}.jpg,{label},p{i}" for label in ("cat", "dog") for i in range(3)]
    (folder / "t.csv").write_text("path,label,group\n" + "\n".join(rows) + "\n")
    plain, grouped = open_source(folder), open_source(folder / "t.csv")
    assert [split_rule(Recipe(), source) for source in (plain, grouped)] == ["stratified", "group"]
    assert split_note(Recipe(), plain) == notes.split("stratified", auto=True)
    assert split_note(Recipe(), grouped) == notes.split("group", auto=True)
    asked = Recipe().override(**{"data.split": "random"})
    assert split_note(asked, grouped) == notes.split("random", auto=False)


def marked(folder: Path) -> Path:
    """Eight images of each class, of which the first three are test images and the next is a validation image."""
    write(folder / "photos", [(8, 8)] * 8)
    rows = [f"photos/{label}/{i}.jpg,{label},{'test' if i < 3 else 'val' if i == 3 else 'train'}"
            for label in ("cat", "dog") for i in range(8)]  # fmt: skip
    (folder / "table.csv").write_text("path,label,split\n" + "\n".join(rows))
    return folder / "table.csv"


def test_a_scenario_leaves_the_test_images_that_the_data_define_as_they_are(tmp_path: Path) -> None:
    data = {"data.source": str(marked(tmp_path)), "data.scenario": "80:20,total=5"}
    recipe = Recipe().override(**data)
    source, _ = Sources().open(recipe)
    splits = split_source(recipe, source)
    parts = [source.subset(rows).counts() for rows in (splits.train, splits.val, splits.test)]
    assert parts == [{"cat": 4, "dog": 1}, {"cat": 1, "dog": 1}, {"cat": 3, "dog": 3}]
    assert Sources().drawn(recipe).names == source.names
    assert split_note(recipe, source).values["scenario"]


def test_a_scenario_draws_from_all_images_if_their_own_split_is_not_used(tmp_path: Path) -> None:
    data = {"data.source": str(marked(tmp_path)), "data.scenario": "80:20,total=5", "data.split": "stratified"}
    recipe = Recipe().override(**data)
    source, _ = Sources().open(recipe)
    assert source.counts() == {"cat": 4, "dog": 1}
    assert not split_note(recipe, source).values["scenario"]


def test_all_folds_of_a_source_list_it_once_and_read_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in range(12):
        path = tmp_path / "photos" / ("common" if place < 8 else "rare") / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8 + place, 9), (20 * place, 0, 0)).save(path)
    data = {"data.source": str(tmp_path / "photos"), "data.folds": 4, "data.image_size": 8}
    recipe = Recipe().override(**data, **{"data.cache": "none", "augment.normalisation": "half"})
    opened, hashed, listed, listing = [], [], [], Source.open
    monkeypatch.setattr(decoding.Image, "open", _counting(opened, Image.open))
    monkeypatch.setattr(decoding.hashlib, "file_digest", _counting(hashed, hashlib.file_digest))
    monkeypatch.setattr(Source, "open", _counting(listed, listing))
    sources = Sources()
    assert len(sources.drawn(recipe)) == 12
    source, _ = sources.open(recipe)
    for part in fold_recipes(recipe):
        splits = split_source(part, source)
        prepare(part, source, splits, digests=source.images.digest(np.arange(12)))
        usual_side(source.images)
    assert (len(listed), len(hashed), len(opened)) == (1, 12, 12)


def test_cues_and_pictures_are_of_the_bytes_that_the_check_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(5)
    for place in range(6):
        path = tmp_path / "photos" / ("common" if place < 4 else "rare") / f"{place}.{'png' if place % 2 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 255, (300, 400 + place, 3)).astype(np.uint8)).save(path)
    recipe = Recipe().override(**{"data.source": str(tmp_path / "photos")})
    opened: list[int] = []
    monkeypatch.setattr(decoding.Image, "open", _counting(opened, Image.open))
    source, _ = Sources().open(recipe, cues=True)
    assert isinstance(source.images, FileImages)
    kept = measure_cues(source.images, np.arange(6))
    pictures = [source.images.glance(row).picture.tobytes() for row in range(6)]
    assert len(opened) == 6
    fresh = FileImages(source.images.paths)
    again = measure_cues(fresh, np.arange(6))
    assert len(opened) > 6
    assert pictures == [fresh.glance(row).picture.tobytes() for row in range(6)]
    for values, others in ((kept.plain, again.plain), (kept.camera, again.camera), (kept.files, again.files)):
        assert list(values) == list(others)
        assert all((values[name] == others[name]).all() for name in values)
    assert (
        fresh.load(np.arange(6), decoding.GLANCE, 3).numpy() == [fresh.glance(row).pixels for row in range(6)]
    ).all()


@pytest.mark.parametrize("field", [{"data.scenario": "75:25"}, {"data.folds": 2, "data.fold": 1}])
def test_images_that_are_not_searched_for_cues_keep_no_glances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: dict[str, Any]
) -> None:
    photos = write_photos(tmp_path / "photos", {"cat": 8, "dog": 4})
    recipe = Recipe().override(**{"data.source": str(photos), **field})
    source, _ = Sources().open(recipe, cues=True)
    assert isinstance(source.images, FileImages)
    monkeypatch.setattr(decoding, "_opened", _refusing)
    with pytest.raises(AssertionError, match="opened again"):
        source.images.glance(0)


def _refusing(*_: object) -> None:
    raise AssertionError("opened again")


def _counting(calls: list[int], function: Any) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return function(*arguments, **named)

    return call
