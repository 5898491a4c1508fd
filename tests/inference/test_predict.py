from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from lopsided.data.images import FileImages
from lopsided.data.listed import Listed
from lopsided.errors import DataError
from lopsided.inference.pool import find_images
from lopsided.inference.predict import (
    answers_of,
    check_any,
    stream_predictions,
    write_predictions,
)
from lopsided.inference.scorer import Scorer
from lopsided.runs.reopen import open_model
from tiny import CLASSES, SIZE, write_model, write_photos


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    return open_model(write_model(tmp_path_factory.mktemp("model")), "cpu")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos", {"cat": 5, "dog": 4})


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_files_and_folders_are_found_once_each_in_the_order_they_are_named(photos: Path) -> None:
    loose = photos / "dog" / "002.png"
    number, images = find_images([loose, photos / "cat", loose, photos / "cat" / "000.png"])
    found = list(images)
    assert number == len(found) == 6
    assert found[0] == loose
    assert found[1:] == sorted((photos / "cat").iterdir())


def test_a_folder_to_which_two_paths_lead_is_predicted_once(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(photos / "cat")
    once = find_images([photos])[0]
    number, images = find_images([photos, tmp_path / "link", tmp_path])
    assert number == len(list(images)) == once


def test_patterns_see_the_path_below_the_given_folder_and_a_given_file_as_it_is_named(tmp_path: Path) -> None:
    inner = write_photos(tmp_path / "masks", {"cat": 2, "dog": 1})
    (inner / "dog").rename(inner / "masks")
    number, images = find_images([inner], Listed(exclude=("masks/*",)))
    assert [path.relative_to(inner).as_posix() for path in images] == ["cat/000.png", "cat/001.png"]
    assert number == 2
    assert find_images([inner], Listed(include=("masks/*",)))[0] == 1
    both = [inner / "cat", inner / "masks" / "000.png"]
    assert list(find_images(both, Listed(exclude=("masks/*",)))[1]) == sorted((inner / "cat").iterdir())
    assert find_images([inner / "masks"], Listed(include=("000.*",)))[0] == 1


def test_a_path_that_does_not_exist_and_a_folder_without_images_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"^each path must be an image or a folder, got .*gone, which does not exist\.$"
    ):
        find_images([tmp_path / "gone"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"^a folder of images must hold at least one, got none below .*empty\.$"):
        find_images([tmp_path / "empty"])


def test_a_stream_in_small_batches_gives_what_one_batch_gives(model: tuple, photos: Path) -> None:
    _, images = find_images([photos])
    paths = list(images)
    expected = Scorer(*model, batch_size=100).images(FileImages(paths))
    answers = list(answers_of(Scorer(*model, batch_size=2, workers=3).stream(paths)))
    assert [path for path, _, _ in answers] == paths
    np.testing.assert_allclose(np.stack([p for _, p, _ in answers]), expected, atol=1e-6)
    assert len(np.unique(expected, axis=0)) == len(paths)


def test_the_images_are_taken_from_the_stream_as_they_are_needed(model: tuple, photos: Path) -> None:
    image = next(photos.rglob("*.png"))
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield image

    answers = answers_of(Scorer(*model, batch_size=4, workers=2).stream(endless()))
    for _ in range(10):
        next(answers)
    assert taken < 1000


def test_unreadable_images_are_listed_beside_and_the_rest_is_written(model: tuple, photos: Path) -> None:
    broken, text = photos / "cat" / "001.png", photos / "dog" / "note.jpg"
    broken.write_bytes(broken.read_bytes()[:60])
    text.write_text("not an image")
    number, images = find_images([photos])
    out = photos.parent / "answers.csv"
    summary = write_predictions(answers_of(Scorer(*model, batch_size=3).stream(images)), CLASSES, out, total=number)
    rows = rows_of(out)
    assert list(rows[0]) == ["path", "predicted", "p:cat", "p:dog"]
    assert {row["path"] for row in rows} == {str(p) for p in photos.rglob("*.png")} - {str(broken)}
    for row in rows:
        probabilities = {name: float(row[f"p:{name}"]) for name in CLASSES}
        assert sum(probabilities.values()) == pytest.approx(1)
        assert row["predicted"] == max(probabilities, key=probabilities.__getitem__)
    listed = rows_of(out.with_name("answers.unreadable.csv"))
    assert [row["path"] for row in listed] == [str(broken), str(text)]
    assert listed[1]["reason"] == "not an image of a supported format"
    assert (summary.num_predicted, summary.num_unreadable) == (8, 2)


def test_the_list_of_unreadable_images_of_an_earlier_call_does_not_stay(model: tuple, photos: Path) -> None:
    out = photos.parent / "answers.csv"
    old = out.with_name("answers.unreadable.csv")
    old.write_text("path,reason\nsomething,else\n")
    write_predictions(answers_of(Scorer(*model).stream(find_images([photos])[1])), CLASSES, out)
    assert not old.exists()


def test_nothing_is_written_when_no_image_is_readable(model: tuple, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    must = r"^No image is readable: 1 failed, the first .*bad\.png \(the file is empty\)\.$"
    with pytest.raises(DataError, match=must):
        write_predictions(answers_of(Scorer(*model).stream([bad])), CLASSES, tmp_path / "answers.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.png"]


def test_an_error_in_the_middle_leaves_the_old_file_as_it_was(model: tuple, photos: Path) -> None:
    out = photos.parent / "answers.csv"
    out.write_text("old")

    def answers():
        yield from answers_of(Scorer(*model).stream(find_images([photos])[1]))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_predictions(answers(), CLASSES, out)
    assert out.read_text() == "old"
    assert sorted(path.name for path in photos.parent.iterdir()) == ["answers.csv", "photos"]


def test_a_stream_of_json_has_one_object_a_line_for_readable_and_unreadable_images(model: tuple, photos: Path) -> None:
    bad = photos / "cat" / "bad.png"
    bad.write_bytes(b"")
    stream = io.StringIO()
    summary = stream_predictions(
        answers_of(Scorer(*model).stream(find_images([photos])[1])), CLASSES, stream, as_json=True
    )
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == 10
    assert [line for line in lines if "unreadable" in line] == [{"path": str(bad), "unreadable": "the file is empty"}]
    assert all(set(line["probabilities"]) == set(CLASSES) for line in lines if "predicted" in line)
    check_any(summary)


def test_an_image_of_another_size_is_refused_where_the_model_does_not_resize(model: tuple, photos: Path) -> None:
    network, card = model
    fixed = card.model_copy(update={"image_size": None})
    large = photos / "cat" / "large.png"
    from PIL import Image

    Image.new("RGB", (20, 10)).save(large)
    scores = Scorer(network, fixed).stream(find_images([photos])[1])
    answers = {path: answer for path, answer, _ in answers_of(scores)}
    assert answers[large].reason == f"20 x 10 pixels, but the model takes {SIZE} x {SIZE}"
    assert sum(not isinstance(answer, DataError) for answer in answers.values()) == 9


def test_a_class_whose_name_needs_quoting_keeps_its_column(model: tuple, photos: Path) -> None:
    out = photos.parent / "answers.csv"
    write_predictions(answers_of(Scorer(*model).stream(find_images([photos])[1])), ('path", x', "a\nb"), out)
    assert list(rows_of(out)[0]) == ["path", "predicted", 'p:path", x', "p:a\nb"]
