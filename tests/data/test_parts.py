"""Parts of a class that another camera took."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lopsided.data.cues import cue_cautions, measure_cues
from lopsided.data.images import FileImages
from lopsided.data.parts import odd_parts
from lopsided.data.sources import Source
from lopsided.recipe import named_recipe
from lopsided.recipe.sections import Data

LABELS = np.repeat([0, 1], [400, 80])


def _cues(seed: int, shift: float) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Cues of 480 images, and which of them another camera took: 24 of the rare class and 8 of the others."""
    values = np.random.default_rng(seed).normal(size=(480, 4))
    camera = np.zeros(480, dtype=bool)
    camera[:8] = camera[400:424] = True
    values[camera, :3] += shift
    return {name: values[:, i] for i, name in enumerate(("red", "blue", "corners", "sharpness"))}, camera


def test_a_camera_that_took_a_part_of_a_class_is_found_and_what_it_changed_is_named() -> None:
    cues, camera = _cues(0, 3.0)
    (part,) = odd_parts(cues, {}, LABELS, 2)
    assert part.label == 1
    assert camera[part.rows].mean() > 0.8
    assert camera[part.rows].sum() >= 20
    assert set(part.higher) == {"red", "blue", "corners"}
    assert part.lower == ()
    assert part.inside == (int(LABELS[part.rows].sum()), int((1 - LABELS[part.rows]).sum()))
    assert part.total == (80, 400)


def test_a_camera_that_took_as_much_of_every_class_is_no_part() -> None:
    cues, _ = _cues(0, 3.0)
    order = np.random.default_rng(1).permutation(480)
    assert odd_parts({name: values[order] for name, values in cues.items()}, {}, LABELS, 2) == []


def test_images_of_one_group_are_not_many_witnesses() -> None:
    cues, camera = _cues(0, 3.0)
    names = np.array([f"own {i}" for i in range(480)])
    assert odd_parts(cues, {}, LABELS, 2, names)
    names[camera & (LABELS == 1)] = "one patient"
    assert odd_parts(cues, {}, LABELS, 2, names) == []


def test_constant_cues_and_small_classes_have_no_parts() -> None:
    constant = {"red": np.zeros(480), "blue": np.ones(480)}
    assert odd_parts(constant, {}, LABELS, 2) == []
    assert odd_parts({}, {}, LABELS, 2) == []
    cues, _ = _cues(0, 3.0)
    assert odd_parts({name: values[:409] for name, values in cues.items()}, {}, LABELS[:409], 2) == []
    assert odd_parts(cues, {}, np.zeros(480, dtype=np.int64), 1) == []


def test_false_alarms_are_as_rare_as_promised() -> None:
    generator = np.random.default_rng(0)
    alarms = 0
    for _ in range(200):
        cues = {str(i): generator.standard_t(3, size=240) for i in range(5)}
        alarms += bool(odd_parts(cues, {}, np.repeat([0, 1], [200, 40]), 2))
    assert alarms <= 6  # At most 2 are expected of 200; seven or more have a probability below 0.5 %.


def _photograph(folder: Path, number: int, generator: np.random.Generator, **how: object) -> Path:
    pixels = generator.normal((150, 150, 150), 12, (48, 48, 3))
    size = how.pop("size", (48, 48))
    if how.pop("red", False):
        pixels[..., 0] += 50
    path = folder / f"{number:03d}.jpg"
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).resize(size).save(path, **how)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"size": (64, 48)}, "have the same size in pixels (64 x 48)"),
        ({"quality": 30}, "have the same compression (JPEG with the tables"),
        ({"red": True}, "look as if another camera took them (a redder background"),
    ],
)
def test_fit_warns_of_a_part_by_files_or_by_looks(tmp_path: Path, how: dict[str, object], words: str) -> None:
    generator = np.random.default_rng(0)
    for label, number, odd in (("common", 120, 3), ("rare", 40, 14)):
        folder = tmp_path / label
        folder.mkdir()
        for i in range(number):
            _photograph(folder, i, generator, **(how if i < odd else {}))
    source = Source.open(Data(source=str(tmp_path)))
    facts = [fact for fact in cue_cautions(source, np.arange(160), named_recipe("quick")) if fact.kind == "odd_part"]
    assert [fact.values["label"] for fact in facts] == ["rare"]
    assert words in str(facts[0])
    assert facts[0].values["inside"][0] == 14
    assert 3 <= facts[0].values["inside"][1] <= 6  # A ranking has a few more than the camera took.


def test_the_camera_that_a_file_names_is_a_fact(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x010F], exif[0x0110] = "Make", "Model 3"
    paths = [tmp_path / "a.jpg", tmp_path / "b.png", tmp_path / "c.jpg"]
    Image.new("RGB", (20, 20)).save(paths[0], exif=exif)
    Image.new("RGB", (20, 20)).save(paths[1])
    Image.new("RGB", (20, 20)).save(paths[2])
    found = measure_cues(FileImages(paths), np.arange(3)).files
    assert found["camera or program in the file"].tolist() == ["Make Model 3", "", ""]
    assert found["compression"][1] == "PNG"
    assert found["compression"][0] == found["compression"][2] != "PNG"
