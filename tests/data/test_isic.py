from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lopsided.data.sources import name_of, open_source
from lopsided.data.sources.isic import GROUPINGS, INPUT, TRUTH, find_isic
from lopsided.errors import DataError

COLUMNS = "image,MEL,NV,BCC,AKIEC,BKL,DF,VASC"
HOT = {"MEL": 0, "NV": 1, "DF": 5}
IMAGES = {
    "ISIC_1": ("MEL", "HAM_a"),
    "ISIC_2": ("MEL", "HAM_a"),
    "ISIC_3": ("DF", "HAM_b"),
    "ISIC_4": ("NV", "HAM_c"),
}


def one_hot(name: str, label: str) -> str:
    return ",".join([name, *("1.0" if i == HOT[label] else "0.0" for i in range(7))])


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """The official folders with four images, and LOPSIDED_DATA's folder above them."""
    root = tmp_path / "ISIC2018"
    (root / INPUT).mkdir(parents=True)
    (root / TRUTH).mkdir()
    for i, name in enumerate(IMAGES):
        Image.new("RGB", (12, 9), (40 * i, 0, 0)).save(root / INPUT / f"{name}.jpg")
    truth = [COLUMNS, *(one_hot(name, label) for name, (label, _) in IMAGES.items())]
    (root / TRUTH / f"{TRUTH}.csv").write_text("\n".join(truth) + "\n")
    lesions = [
        "image,lesion_id,diagnosis_confirm_type",
        *(f"{n},{lesion},histo{n[-1]}" for n, (_, lesion) in IMAGES.items()),
    ]
    (root / GROUPINGS).write_text("\n".join(lesions) + "\n")
    return root


def through_variable(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LOPSIDED_DATA", str(root.parent))
    return "isic2018"


def by_parent(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return str(root.parent)


def by_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return str(root)


@pytest.mark.parametrize("way", [through_variable, by_parent, by_folder])
def test_the_official_folders_are_a_source_with_lesions_as_groups(
    official: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[[Path, pytest.MonkeyPatch], str]
) -> None:
    data = way(official, monkeypatch)
    source = open_source(data)
    assert source.name == name_of(data) == "isic2018"
    assert source.counts() == {"MEL": 2, "NV": 1, "DF": 1}
    assert source.names == tuple(IMAGES)
    assert source.groups is not None
    assert source.groups.tolist() == ["HAM_a", "HAM_a", "HAM_b", "HAM_c"]
    assert source.images.load(np.arange(4), 8, 3).shape == (4, 3, 8, 8)


@pytest.mark.parametrize("classes", [["DF", "MEL"], ["dermatofibroma", "Melanoma"], ["df", "mel"]])
def test_classes_are_chosen_by_code_or_by_name(official: Path, classes: list[str]) -> None:
    source = open_source(official, classes=classes)
    assert source.classes == ("DF", "MEL")
    assert source.counts() == {"DF": 1, "MEL": 2}


def test_images_of_classes_that_were_not_chosen_may_be_absent(official: Path) -> None:
    (official / INPUT / "ISIC_4.jpg").unlink()
    assert len(open_source(official, classes=["MEL", "DF"])) == 3
    with pytest.raises(DataError, match=r"GroundTruth\.csv lists missing images: 1 of 4, the first .*ISIC_4\.jpg"):
        open_source(official)


def test_a_class_that_does_not_occur_is_an_error_with_those_that_do(official: Path) -> None:
    with pytest.raises(DataError, match="classes must be among MEL, NV, DF, got 'VASC' for "):
        open_source(official, classes=["MEL", "VASC"])
    with pytest.raises(DataError, match="classes must be among MEL, NV, DF, got 'cat' for "):
        open_source(official, classes=["cat", "dog"])


def test_another_column_of_the_groupings_can_be_the_group(official: Path) -> None:
    source = open_source(official, group="diagnosis_confirm_type")
    assert source.groups is not None
    assert source.groups.tolist() == ["histo1", "histo2", "histo3", "histo4"]
    with pytest.raises(
        DataError, match="the lesion groupings must have the columns image and patient, got image, lesion_id"
    ):
        open_source(official, group="patient")


def test_without_groupings_there_are_no_groups_unless_they_are_asked_for(official: Path) -> None:
    (official / GROUPINGS).unlink()
    assert open_source(official).groups is None
    with pytest.raises(DataError, match=rf"isic2018 needs its lesion groupings: {GROUPINGS} is missing in "):
        open_source(official, group="lesion_id")


def test_an_image_without_a_lesion_is_named(official: Path) -> None:
    lines = (official / GROUPINGS).read_text().splitlines()
    (official / GROUPINGS).write_text("\n".join(lines[:-1]))
    with pytest.raises(
        DataError, match=r"every image must have a lesion_id, got 1 without lesion_id in .*, the first ISIC_4"
    ):
        open_source(official)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "image,MEL\nISIC_1,1\n",
            r"The ground truth must have the columns image, MEL, .*, but NV is missing in .*\.csv",
        ),
        (
            f"{COLUMNS}\n{one_hot('ISIC_1', 'MEL').replace('1.0', '0.0')}\n",
            "exactly one diagnosis, got none for ISIC_1 in ",
        ),
        (f"{COLUMNS}\nISIC_1,1,1,0,0,0,0,0\n", "exactly one diagnosis, got MEL and NV for ISIC_1 in "),
        (
            f"{COLUMNS}\n../../x,1,0,0,0,0,0,0\n",
            r"an image id must consist of letters, digits, _ and -, got '\.\./\.\./x' in ",
        ),
        (f"{COLUMNS}\n", "a table must name at least one image, got no rows in "),
    ],
)
def test_a_ground_truth_that_cannot_be_used_is_named(official: Path, text: str, message: str) -> None:
    (official / TRUTH / f"{TRUTH}.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        open_source(official)


def test_a_missing_ground_truth_is_named(official: Path) -> None:
    (official / TRUTH / f"{TRUTH}.csv").unlink()
    with pytest.raises(DataError, match=rf"isic2018 needs its ground truth: {TRUTH}/{TRUTH}\.csv is missing in "):
        open_source(official)


def test_where_isic_is_not_one_sentence_says_where_to_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOPSIDED_DATA", raising=False)
    with pytest.raises(
        DataError, match=r"isic2018 needs the environment variable LOPSIDED_DATA, which is not set\. Unpack the"
    ):
        open_source("isic2018")
    monkeypatch.setenv("LOPSIDED_DATA", str(tmp_path))
    with pytest.raises(DataError, match=f"isic2018 is missing: LOPSIDED_DATA is .*, which does not hold {INPUT}"):
        open_source("isic2018")


def real_isic() -> bool:
    try:
        return bool(os.environ.get("LOPSIDED_DATA")) and find_isic().is_dir()
    except DataError:
        return False


@pytest.mark.skipif(not real_isic(), reason="ISIC 2018 is not below LOPSIDED_DATA")
def test_the_real_isic_has_the_papers_counts_and_several_images_of_a_lesion() -> None:
    source = open_source("isic2018", classes=["melanoma", "dermatofibroma"])
    assert source.counts() == {"MEL": 1113, "DF": 115}
    assert source.groups is not None
    assert len(np.unique(source.groups[source.labels == 0])) == 614
    assert source.images.load(np.array([0, 1227]), 64, 3).shape == (2, 3, 64, 64)
