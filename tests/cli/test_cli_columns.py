"""Columns of a table beside each image: every command takes them, or one sentence says what is missing."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import lopsided
from lopsided.cli import run
from lopsided.estimator import LopsidedClassifier
from lopsided.inference.engine import load_onnxruntime
from lopsided.models.blocks.columns import encode
from lopsided.models.machine import threads
from lopsided.models.model import load_card
from tiny_command import Call

ROWS = [("cat", 30, 4), ("dog", 14, 9)]
ONNX_PAGE = Path(__file__).parents[2] / "docs" / "onnx.md"
SMALL = ["--recipe", "quick", "image_size=32", "--device", "cpu", "--quiet"]


def write_table(path: Path, rows: list[dict[str, str]], columns: list[str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of noise, of which only the column age tells the class; sex says nothing, and some ages are missing."""
    folder = tmp_path_factory.mktemp("pets")
    random, rows = np.random.default_rng(0), []
    for label, number, age in ROWS:
        for i in range(number):
            name = f"{label}{i}.png"
            Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / name)
            years = "" if i % 10 == 9 else f"{age + random.normal():.2f}"
            rows.append({"path": name, "label": label, "age": years, "sex": "fm"[i % 2]})
    write_table(folder / "pets.csv", rows, ["path", "label", "age", "sex"])
    write_table(folder / "new.csv", rows, ["sex", "path", "age"])
    write_table(folder / "bare.csv", rows, ["path", "label", "sex"])
    with threads(1):
        fit = ["fit", str(folder / "pets.csv"), "--folds", "2", *SMALL]
        assert run([*fit, "--columns", "age, sex", "--out", str(folder / "run")]) == 0
        assert run([*fit, "--out", str(folder / "images")]) == 0
    return folder


def balanced(folder: Path) -> float:
    return float(json.loads((folder / "metrics.json").read_text())["test"]["figures"]["uwa"]["value"])


def probabilities(path: Path) -> np.ndarray:
    return pd.read_csv(path)[["p:cat", "p:dog"]].to_numpy()


def test_a_column_that_tells_the_classes_apart_is_used_in_every_fold(pets: Path) -> None:
    assert balanced(pets / "run") > balanced(pets / "images") + 0.2
    card = load_card(pets / "run")
    assert [(column.name, column.kind) for column in card.beside] == [("age", "number"), ("sex", "category")]
    assert card.width == card.features + 2 + 3


def test_the_run_says_what_the_classifier_gets(pets: Path) -> None:
    log = (pets / "run" / "log.jsonl").read_text()
    assert "age (numbers, missing for 4 of 44 training images), sex (2 categories)" in log


def test_predict_reads_the_columns_by_name_and_an_age_changes_the_answer(
    pets: Path, tmp_path: Path, call: Call
) -> None:
    for table in ("pets.csv", "new.csv"):
        assert call("predict", pets / "run", pets / table, "--out", tmp_path / table).code == 0
    assert np.array_equal(probabilities(tmp_path / "pets.csv"), probabilities(tmp_path / "new.csv"))
    rows = [{"path": str(pets / "cat0.png"), "age": age, "sex": "f"} for age in ("4", "9", "", "NA")]
    table = write_table(tmp_path / "ages.csv", rows, ["path", "age", "sex"])
    assert call("predict", pets / "run", table, "--allow-outside", "--out", tmp_path / "ages").code == 0
    young, old, unknown, missing = probabilities(tmp_path / "ages")[:, 1]
    assert old > young + 0.2
    assert unknown == pytest.approx(missing, abs=1e-6)  # The place in a batch changes last digits.
    assert young < unknown < old


NO_TABLE = "the columns age, sex must stand beside each image, in a table (CSV or Parquet) with the column path"
NO_COLUMN = "a table must have the columns age, sex beside each image, got path, label, sex in"


@pytest.mark.parametrize(
    ("verb", "images", "named"),
    [
        ("predict", ".", NO_TABLE),
        ("predict", "cat0.png", NO_TABLE),
        ("predict", "bare.csv", NO_COLUMN),
        ("find", ".", NO_TABLE),
        ("find", "bare.csv", NO_COLUMN),
        ("evaluate", "bare.csv", NO_COLUMN),
    ],
)
def test_images_without_the_columns_are_refused_with_one_sentence(
    pets: Path, tmp_path: Path, call: Call, verb: str, images: str, named: str
) -> None:
    more = ["--class", "dog", "--out", tmp_path / "found.csv"] if verb == "find" else []
    ended = call(verb, pets / "run", pets / images, *more)
    assert ended.code == 2
    assert named in " ".join(ended.err.split())


def test_evaluate_uses_the_columns_of_other_data(pets: Path, call: Call) -> None:
    ended = call("evaluate", pets / "run", pets / "pets.csv", "--json")
    assert ended.code == 0
    assert json.loads(ended.out)["figures"]["uwa"]["value"] > 0.9


def test_find_ranks_by_the_columns_and_a_changed_cell_is_noticed(pets: Path, tmp_path: Path, call: Call) -> None:
    pool = []
    for i in range(12):
        name = f"pool{i}.png"
        noise = np.random.default_rng([7, i]).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / name)
        pool.append({"path": name, "age": "9" if i in (2, 5) else "3", "sex": "f"})
    table, out = tmp_path / "pool.csv", tmp_path / "found.csv"
    find = ["find", pets / "run", table, "--class", "dog", "--unfamiliar", "mark", "--no-page", "--out", out]
    for old in ({2, 5}, {7}):
        for i, row in enumerate(pool):
            row["age"] = "9" if i in old else "3"
        write_table(table, pool, ["path", "age", "sex"])
        assert call(*find).code == 0
        rows = list(csv.DictReader(out.read_text().splitlines()))
        first = {Path(row["path"]).name for row in rows[: len(old)]}
        assert first == {f"pool{i}.png" for i in old}


def test_the_onnx_file_has_a_second_input_and_gives_the_same_probabilities(
    pets: Path, tmp_path: Path, call: Call
) -> None:
    assert call("export", pets / "run", "--to", "onnx", "--out", tmp_path / "m.onnx").code == 0
    assert call("predict", pets / "run", pets / "pets.csv", "--out", tmp_path / "p.csv").code == 0
    rows = list(csv.DictReader((pets / "pets.csv").read_text().splitlines()))
    session = load_onnxruntime().InferenceSession(str(tmp_path / "m.onnx"))
    assert [each.name for each in session.get_inputs()] == ["images", "columns"]
    assert json.loads(session.get_modelmeta().custom_metadata_map["columns"])[1]["values"] == ["f", "m"]
    images = np.stack([np.asarray(Image.open(pets / row["path"])) for row in rows]).transpose(0, 3, 1, 2)
    program = re.findall(r"```python\n(.*?)```", ONNX_PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)[1]
    names: dict = {"json": json, "np": np, "facts": session.get_modelmeta().custom_metadata_map}
    exec(program, names)
    columns = np.stack([names["encode"](row) for row in rows])
    assert np.array_equal(columns, encode(load_card(pets / "run").beside, [(row["age"], row["sex"]) for row in rows]))
    given = {"images": images.astype(np.float32) / 255, "columns": columns}
    (found,) = session.run(["probabilities"], given)
    assert np.abs(found - probabilities(tmp_path / "p.csv")).max() < 1e-4


def test_the_model_card_says_how_the_columns_become_numbers(pets: Path, tmp_path: Path, call: Call) -> None:
    assert call("export", pets / "run", "--to", "card", "--out", tmp_path / "card.md").code == 0
    text = (tmp_path / "card.md").read_text()
    assert "- `age`: a number, as (value - " in text
    assert "of `f`, `m`, or missing or unknown" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--columns", "age,size"], "a table must have the columns age, size beside each image"),
        (["--columns", "age,label"], "columns cannot hold label"),
        (["--columns", "age,age"], "columns must be different names"),
        (["--columns", "age", "--loss", "ce"], "needs an encoder that is not trained"),
        (["--columns", "age", "final=ensemble"], 'final cannot be "ensemble"'),
    ],
)
def test_columns_that_cannot_be_used_are_refused(
    pets: Path, tmp_path: Path, call: Call, arguments: list[str], named: str
) -> None:
    folds = ["--folds", "2"] if "final=ensemble" in arguments else []
    ended = call("fit", pets / "pets.csv", *arguments, *folds, "--out", tmp_path / "run")
    assert ended.code == 2
    assert named in " ".join(ended.err.split())


def test_a_folder_has_no_columns(photos: Path, tmp_path: Path, call: Call) -> None:
    ended = call("fit", photos, "--columns", "age", "--out", tmp_path / "run")
    assert ended.code == 2
    assert "photos, which is none" in " ".join(ended.err.split())


def test_python_takes_the_columns_from_a_data_frame(pets: Path, tmp_path: Path, call: Call) -> None:
    frame = pd.read_csv(pets / "pets.csv")
    frame["path"] = [str(pets / name) for name in frame["path"]]
    assert call("predict", pets / "run", pets / "pets.csv", "--out", tmp_path / "p.csv").code == 0
    opened = lopsided.open(pets / "run", device="cpu")
    assert np.allclose(opened.predict(frame).probabilities, probabilities(tmp_path / "p.csv"), atol=1e-6)
    with pytest.raises(lopsided.errors.InputError, match="Pass a data frame with the columns path, age, sex"):
        opened.predict(frame["path"].tolist())


def test_an_estimator_takes_the_columns_from_a_data_frame_and_is_saved_with_them(pets: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(pets / "pets.csv")
    frame["path"] = [str(pets / name) for name in frame["path"]]
    frame["adult"] = frame["age"] > 6
    model = LopsidedClassifier(recipe="quick", image_size=32, columns=["age", "adult"], random_state=0, num_threads=1)
    model.fit(frame[["path", "age", "adult"]], frame["label"])
    assert model.score(frame, frame["label"]) > 0.9
    assert model.card_.beside[1].name == "adult"
    model.save(tmp_path / "saved")
    again = LopsidedClassifier.load(tmp_path / "saved", device="cpu")
    assert np.array_equal(again.predict_proba(frame), model.predict_proba(frame))
    with pytest.raises(lopsided.errors.InputError, match="Pass a data frame with the columns path, age, adult"):
        model.predict(frame["path"].tolist())
