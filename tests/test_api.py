"""``lopsided.fit``, ``lopsided.open`` and what a run does from Python: the same as the command."""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import lopsided
from lopsided.data import decoding
from lopsided.errors import InputError, RunError
from lopsided.models.machine import threads
from lopsided.reports.thumbnails import PICTURES
from tiny import write_photos
from tiny_command import SMALL, command_here

FIELDS = {"encoder": "mlp", "epochs": 2, "classifier_epochs": 2, "batch_size": 8, "device": "cpu", "seed": 3}
"""The fields of ``SMALL``."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("data") / "photos", {"cat": 40, "dog": 16})


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> lopsided.Run:
    with threads(1):
        return lopsided.fit(photos, out=tmp_path_factory.mktemp("runs") / "run", quiet=True, **FIELDS)


def test_fit_writes_what_the_command_writes(run: lopsided.Run, photos: Path, tmp_path: Path) -> None:
    assert command_here("fit", photos, "--out", tmp_path / "run", "--seed", "3", *SMALL).code == 0
    for name in ("recipe.toml", "predictions.csv", "model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (run.folder / name).read_bytes()
    assert run.metrics is not None
    assert run.metrics["test"]["figures"] == lopsided.open(tmp_path / "run").metrics["test"]["figures"]  # type: ignore[index]


def test_a_first_fit_opens_each_image_twice_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path / "cache"))
    photos = write_photos(tmp_path / "photos", {"cat": 56})
    (photos / "dog").mkdir()
    for path in sorted((photos / "cat").iterdir())[::4]:
        path.rename(photos / "dog" / path.name)
    names: Counter[str] = Counter()
    check = decoding._check_pixels

    def remember(path: Path, size: tuple[int, int], most: int) -> None:
        names[str(path)] += 1
        check(path, size, most)

    monkeypatch.setattr(decoding, "_check_pixels", remember)
    with threads(1):
        found = lopsided.fit(photos, out=tmp_path / "run", quiet=True, **{**FIELDS, "epochs": 1})
    assert (len(names), max(names.values())) == (56, 2)
    assert (found.folder / PICTURES).is_file()  # Nothing tells these classes apart, so there are mistakes.


def test_predictions_of_paths_pictures_arrays_and_frames_are_those_of_the_command(
    run: lopsided.Run, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "answers.csv"
    assert command_here("predict", run.folder, photos / "dog", "--out", out).code == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    paths = [row["path"] for row in rows]
    pictures = [Image.open(path) for path in paths]
    arrays = np.stack([np.asarray(picture) for picture in pictures])
    for given in (photos / "dog", paths, pictures, arrays, pd.DataFrame({"path": paths})):
        predictions = run.predict(given)
        assert list(predictions.labels) == [row["predicted"] for row in rows]
        expected = [[float(row["p:cat"]), float(row["p:dog"])] for row in rows]
        assert predictions.probabilities == pytest.approx(np.array(expected), abs=1e-6)
        assert predictions.classes == ("cat", "dog")
    assert list(run.predict(paths).to_frame().columns) == list(rows[0])
    assert "<td>dog</td>" in predictions._repr_html_()
    counts = Counter(row["predicted"] for row in rows).most_common()
    told = ", ".join(f"{number} {label}" for label, number in counts)
    assert repr(predictions) == f"<{len(rows)} predictions: {told}>"


def test_predictions_keep_order_and_number_of_the_images(run: lopsided.Run, photos: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    cat = photos / "cat" / "000.png"
    with pytest.warns(UserWarning, match=r"1 of 3 images are unreadable, the first .*broken\.png \(not an image"):
        predictions = run.predict([cat, broken, cat])
    assert len(predictions) == 3
    assert predictions.labels[1] is None
    assert predictions.labels[0] == predictions.labels[2] is not None
    assert np.isnan(predictions.probabilities[1]).all()
    assert predictions.unreadable == {str(broken): "not an image of a supported format"}


def test_images_behind_an_address_are_predicted(run: lopsided.Run, photos: Path) -> None:
    import fsspec

    with fsspec.open("memory://inbox/a.png", "wb") as file:
        file.write((photos / "dog" / "000.png").read_bytes())
    predictions = run.predict("memory://inbox")
    assert predictions.labels == run.predict(photos / "dog" / "000.png").labels


def test_pictures_of_other_sizes_and_modes_are_predicted(run: lopsided.Run) -> None:
    pictures = [Image.new("L", (30, 20), 190), Image.new("RGBA", (5, 9), (60, 60, 60, 255)), Image.new("P", (12, 12))]
    assert len(run.predict(pictures).labels) == 3
    sizes = [np.full((9, 7, 3), 190, dtype=np.uint8), np.full((20, 12, 3), 60, dtype=np.uint8)]
    assert len(run.predict(sizes).labels) == 2


@pytest.mark.parametrize("given", [3, np.zeros((4, 5)), pd.DataFrame({"file": ["a.png"]}), []])
def test_what_is_no_image_is_one_sentence(run: lopsided.Run, given: object) -> None:
    with pytest.raises(InputError, match="The images must be paths, Pillow images, arrays, or a data frame"):
        run.predict(given)


def test_a_batch_has_at_least_one_image(run: lopsided.Run, photos: Path) -> None:
    for ask in (run.predict, run.evaluate):
        with pytest.raises(InputError, match=r"^batch_size must be >= 1, got 0\.$"):
            ask(photos, batch_size=0)  # type: ignore[operator]


def test_evaluate_gives_the_metrics_of_the_test_split(run: lopsided.Run) -> None:
    assert run.metrics is not None
    assert run.evaluate()["figures"] == run.metrics["test"]["figures"]


def test_evaluate_on_the_training_data_warns(run: lopsided.Run, photos: Path) -> None:
    with pytest.warns(UserWarning, match="the model was trained on 40 of these 56 images"):
        assert run.evaluate(photos)["num_images"] == 56


def test_find_lists_what_the_command_lists(run: lopsided.Run, photos: Path, tmp_path: Path) -> None:
    pool = write_photos(tmp_path / "pool", {"cat": 6, "dog": 3}, start=200)
    rows = run.find(pool, "dog", top=3)
    assert len(rows) == 3
    assert rows[0].probability >= rows[1].probability >= rows[2].probability
    assert run.find([pool], "dog", top=3, out=tmp_path / "found.csv") == rows
    assert (tmp_path / "found.html").is_file()
    assert len((tmp_path / "found.csv").read_text().splitlines()) == 4


def test_report_and_card_are_written(run: lopsided.Run, tmp_path: Path) -> None:
    assert run.report(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert run.export("card", tmp_path / "card.md").read_text().startswith("---")


def test_a_notebook_and_a_terminal_show_the_headline_numbers(run: lopsided.Run) -> None:
    assert run.metrics is not None
    dogs = run.metrics["test"]["per_class"][1]
    for text in (run._repr_html_(), repr(run)):
        assert str(run.folder) in text
        assert f"{run.metrics['test']['confusion'][1][1]} of {dogs['support']}" in text
        assert "false alarms" in text
        assert "balanced accuracy" in text
    assert len(repr(run)) < 300 + len(str(run.folder))
    assert repr(dataclasses.replace(run, metrics=None)).endswith("; not finished>")


def test_runs_without_a_name_are_numbered_and_the_newest_is_opened(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="There is no finished run in the folder runs"):
        lopsided.open()
    assert lopsided.fit(photos, quiet=True, **FIELDS).folder == Path("runs/1")
    assert lopsided.fit(photos, quiet=True, **(FIELDS | {"seed": 4})).folder == Path("runs/2")
    assert lopsided.open().recipe.seed == 4
    with pytest.raises(InputError, match="epoks"):
        lopsided.fit(photos, epoks=3)
    with pytest.raises(InputError, match="There is no loss"):
        lopsided.fit(photos, loss="nothing")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["1", "2"]


def test_fields_have_the_names_of_the_command(photos: Path, tmp_path: Path) -> None:
    fields = {**FIELDS, "encoder_training__views": 2, "loss": {"name": "afcl", "eta": 0.5, "gamma": 2.0}}
    run = lopsided.fit(photos, out=tmp_path / "run", quiet=True, val=0.2, **fields)
    assert run.recipe.data.val == 0.2
    assert run.recipe.encoder_training.views == 2
    assert run.recipe.loss.name == "afcl"
    again = lopsided.fit(photos, out=tmp_path / "run", quiet=True, resume=True, val=0.2, **fields)
    assert again.metrics == run.metrics
