"""From no rare image on: one class, one rare image, and classes of one image each."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tiny import write_photos
from tiny_command import Call


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that make a run of the recipe few, with a small encoder."""
    from lopsided.models.encoders import build_encoder
    from lopsided.models.pretrained import Preprocessing

    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    encoder, _ = build_encoder("test_resnet", channels=3, image_size=32, seed=7)
    state = {key: value.contiguous() for key, value in encoder.state_dict().items()}
    save_file(state, path, {"lopsided": Preprocessing(32, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)).to_json()})
    return ["--recipe", "few", "--device", "cpu", "encoder.name=test_resnet+stages+positions+pixels", f"weights={path}"]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as table:
        return list(csv.DictReader(table))


def test_one_class_goes_the_whole_way(call: Call, few: list[str], tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", {"cat": 40})
    pool = write_photos(tmp_path / "pool", {"cat": 12, "dog": 6}, start=100)
    run = tmp_path / "run"
    ended = call("fit", photos, "--out", run, *few)
    assert ended.code == 0, ended.err
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["classes"] == ["cat", "unusual"]
    assert metrics["decision"]["decision"]["rule"] == "false-alarms:unusual=0.05"
    recall = metrics["test"]["per_class"][0]["recall"]
    assert recall["value"] >= 0.9
    assert "lopsided find" in ended.out
    assert "Balanced accuracy" not in ended.out  # It needs two classes.
    assert "among 40 other images (" in ended.out
    assert "images of unusual (0)" not in ended.err

    assert call("predict", run, pool, "--out", tmp_path / "p.csv").code == 0
    called = {Path(row["path"]).parent.name: row["predicted"] for row in rows_of(tmp_path / "p.csv")}
    assert called["dog"] == "unusual"
    ended = call("evaluate", run, pool, "--json")
    assert json.loads(ended.out)["figures"]["auroc"]["value"] > 0.95, ended.err
    ended = call("evaluate", run, pool, "--exclude", "dog/*")
    assert re.search("false alarms? among 12 other images", ended.out), ended.err
    assert "Matthews" not in ended.out  # It compares classes, and there is one.
    ended = call("find", run, pool, "--class", "unusual", "--out", tmp_path / "f.csv")
    assert ended.code == 0, ended.err
    found = rows_of(tmp_path / "f.csv")
    assert all("dog" in row["path"] for row in found[:6])
    for words in (["report", run], ["export", run, "--to", "card", "--out", tmp_path / "card.md"]):
        assert call(*words).code == 0, words
    page = next(run.glob("*.html")).read_text()
    assert "The 24 most unusual of 40 images" in page
    assert "; no image of “unusual” was tested</h1>" in page
    assert re.findall(r'<p class="figure-name">(.*?)</p>', page) == ["share of false alarms"]
    assert page.count('class="tile hot"') == 24
    assert page.count('class="heat"') >= 24  # Where each of them is unlike the others.
    assert '<table class="narrowing">' in page
    for section in ("doubt", "calibration", "figures"):  # They compare classes, of which one is tested.
        assert f'id="{section}"' not in page
        assert f'href="#{section}"' not in page
    assert '<div id="t-curves" hidden>' in page

    marks = tmp_path / "marks.csv"
    lines = ["path,label,mark", *(f"{row['path']},unusual,yes" for row in found[:3])]
    marks.write_text("\n".join(lines) + "\n")
    ended = call("fit", photos, "--out", tmp_path / "more", "--more", marks, "allow_outside=true", *few)
    assert ended.code == 0, ended.err
    assert f"--more {marks} --more marks-2.csv" in ended.out  # Without the first table, its images would be lost.
    ended = call("evaluate", tmp_path / "more", pool, "--json")
    assert json.loads(ended.out)["figures"]["auroc"]["value"] > 0.95


def test_the_first_rare_image_is_tested_by_the_distance(call: Call, few: list[str], tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", {"cat": 30, "dog": 1})
    ended = call("fit", photos, "--out", tmp_path / "run", *few)
    assert ended.code == 0, ended.err
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["test"]["figures"]["auroc"]["value"] == 1.0


def test_normal_names_the_one_class_to_train_with(call: Call, few: list[str], tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", {"cat": 25, "dog": 3})
    ended = call("fit", photos, "--out", tmp_path / "run", "--normal", "cat", *few)
    assert ended.code == 0, ended.err
    counts = json.loads((tmp_path / "run" / "metrics.json").read_text())["counts"]
    assert counts["test"] == {"cat": 25, "unusual": 0}


def test_classes_of_one_image_do_not_stop_a_regression(call: Call, few: list[str], tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", {"cat": 20, "dog": 12, "fox": 1})
    quick = ["--recipe", "quick", *(word.replace("+positions", "") for word in few[2:])]
    ended = call("fit", photos, "--out", tmp_path / "run", *quick)
    assert ended.code == 0, ended.err
    assert "fox has one image" in ended.err
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["test"]["per_class"][2]["recall"]["value"] is None
    ended = call("fit", photos, "--out", tmp_path / "two", *quick, "exclude=dog/*")
    assert ended.code == 2
    assert "Use --recipe few" in ended.err


@pytest.mark.parametrize("counts", [{"cat": 1}, {"cat": 1, "dog": 1, "fox": 1}])
def test_classes_of_which_each_has_one_image_are_refused(
    call: Call, few: list[str], tmp_path: Path, counts: dict[str, int]
) -> None:
    ended = call("fit", write_photos(tmp_path / "photos", counts), "--out", tmp_path / "run", *few)
    assert ended.code == 2
    assert ended.err.endswith("of photos. Add images.\n")  # Without the class, there would be none.


def test_methods_are_not_compared_without_a_second_class(call: Call, few: list[str], tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", {"cat": 20})
    ended = call("compare", photos, "--methods", "quick, few", "--folds", "2", "--out", tmp_path / "compared")
    assert ended.code == 2
    assert "are of one class, cat" in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.slow
def test_a_distance_is_exported_to_onnx(call: Call, few: list[str], tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", {"cat": 30, "dog": 2})
    assert call("fit", photos, "--out", tmp_path / "run", *few).code == 0
    ended = call("export", tmp_path / "run", "--json")  # It compares the probabilities with those of torch.
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["difference"] < 1e-4


def test_the_estimator_takes_one_class() -> None:
    import numpy as np

    from lopsided import LopsidedClassifier

    rng = np.random.default_rng(0)
    x, far = rng.normal(size=(60, 8)), rng.normal(size=(20, 8)) + 5
    model = LopsidedClassifier(recipe="few", folds=5, decide="false-alarms:unusual=0.1", random_state=0)
    model.fit(x, ["good"] * 60)
    assert model.classes_.tolist() == ["good", "unusual"]
    assert set(model.predict(far)) == {"unusual"}
    assert np.mean(model.oof_pred_ == "unusual") < 0.25
