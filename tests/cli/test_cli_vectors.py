"""Vectors from elsewhere as the data of every command: they work, or one sentence says why not."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from lopsided.cli import run
from lopsided.data.images import Vectors
from lopsided.data.sources import open_source
from lopsided.data.sources.vectors import is_vectors
from lopsided.errors import DataError
from lopsided.models.machine import threads
from tiny_command import Call

LABELS = np.array(["common"] * 60 + ["rare"] * 20)
GROUPS = np.array([f"p{i // 2}" for i in range(80)])


def matrix(seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(80, 6)) * 10 + 5
    values[LABELS == "rare", 0] += 40
    return values.astype(np.float32)


def named(seed: int = 0, **columns: object) -> pyarrow.Table:
    features = {f"f{i}": column for i, column in enumerate(matrix(seed).T)}
    return pyarrow.table({"id": [f"row-{i}" for i in range(80)], "label": LABELS, **features, **columns})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    np.savez(folder / "v.npz", features=matrix(), y=LABELS, patient=GROUPS)
    np.savez(folder / "new.npz", features=matrix(1))
    pyarrow.parquet.write_table(named(patient=GROUPS), folder / "v.parquet")
    pyarrow.parquet.write_table(named(1).select(["f3", "f1", "f0", "f5", "f4", "f2", "id"]), folder / "new.parquet")
    with threads(1):
        fit = ["fit", str(folder / "v.npz"), "--group", "patient", "--folds", "2", "--out", str(folder / "folds")]
        assert run([*fit, "--quiet"]) == 0
        assert run(["fit", str(folder / "v.parquet"), "--folds", "1", "--out", str(folder / "run"), "--quiet"]) == 0
    return folder


def test_an_npz_file_and_a_parquet_table_hold_the_same_vectors(folder: Path) -> None:
    arrays, table = open_source(folder / "v.npz", group="patient"), open_source(folder / "v.parquet", group="patient")
    assert isinstance(arrays.images, Vectors)
    assert isinstance(table.images, Vectors)
    assert np.array_equal(arrays.images.values, table.images.values)
    assert table.images.columns == ("f0", "f1", "f2", "f3", "f4", "f5")
    assert arrays.counts() == table.counts() == {"common": 60, "rare": 20}
    assert arrays.groups is not None
    assert arrays.groups.tolist() == GROUPS.tolist()
    assert (arrays.names[0], table.names[0]) == ("1", "row-0")


def test_lists_of_numbers_in_parquet_are_vectors_whatever_else_the_table_has(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    content = {"path": ["a.jpg", "b.jpg"], "label": ["x", "y"], "age": [3, 4], "embedding": [[1.0, 2.0], [3.0, 4.0]]}
    pyarrow.parquet.write_table(pyarrow.table(content), path)
    source = open_source(path)
    assert isinstance(source.images, Vectors)
    assert source.images.values.tolist() == [[1, 2], [3, 4]]
    assert source.names == ("a.jpg", "b.jpg")


def test_a_table_of_images_is_none_of_vectors(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"path": ["a.jpg"], "label": ["x"], "age": [3]}), tmp_path / "t.parquet")
    assert not is_vectors(tmp_path / "t.parquet")


def test_fit_tests_every_vector_and_says_what_it_did(folder: Path) -> None:
    metrics = json.loads((folder / "folds" / "metrics.json").read_text())
    assert metrics["folds"]["folds"] == 2
    assert metrics["test"]["num_images"] == 80
    assert metrics["test"]["figures"]["uwa"]["value"] > 0.9
    card = json.loads((folder / "run" / "model.json").read_text())
    assert (card["kind"], card["encoder"], card["shape"]) == ("vector", "identity", [6])
    assert card["columns"] == ["f0", "f1", "f2", "f3", "f4", "f5"]
    recipe = (folder / "run" / "recipe.toml").read_text()
    assert 'name = "identity"' in recipe
    log = (folder / "run" / "log.jsonl").read_text()
    assert "80 vectors of 6 numbers" in log
    assert "Recipe: quick, because no recipe was named: a regression on vectors of 6 numbers" in log


def test_predict_finds_columns_by_their_names(folder: Path, call: Call, tmp_path: Path) -> None:
    ended = call("predict", folder / "run", folder / "new.parquet", "--out", tmp_path / "p.csv", "--quiet")
    assert (ended.code, ended.err) == (0, "")
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [row["path"] for row in rows] == [f"row-{i}" for i in range(80)]
    right = [row["predicted"] == label for row, label in zip(rows, LABELS, strict=True)]
    assert np.mean(right) > 0.9
    ended = call("predict", folder / "run", folder / "new.npz", "--out", tmp_path / "q.csv")
    assert ended.code == 0
    again = list(csv.DictReader((tmp_path / "q.csv").read_text().splitlines()))
    assert [row["predicted"] for row in again] == [row["predicted"] for row in rows]


def test_vectors_have_typicality_and_sets_and_groups(folder: Path, call: Call, tmp_path: Path) -> None:
    out = tmp_path / "run"
    fitted = call(
        "fit", folder / "v.npz", "--group", "patient", "--folds", "3", "--decide", "sets:0.8", "--out", out, "-v"
    )
    assert "by comparison with 80 of them, which are 40 groups. With so few, the share of false" in fitted.err
    assert "recipe quick could not" not in fitted.err
    far = matrix(1)
    far[:6] += 500
    np.savez(tmp_path / "new.npz", features=far, patient=GROUPS)
    ended = call("predict", out, tmp_path / "new.npz", "--group", "patient")
    rows = list(csv.DictReader(ended.out.splitlines()))
    assert all(row["unfamiliar"] == "true" for row in rows[:6])
    assert sum(row["unfamiliar"] == "true" for row in rows) < 12
    assert {row["set"] for row in rows} <= {"", "common", "rare", "common|rare"}
    assert "With 40 known groups, this is an estimate." in ended.err
    assert call("predict", out, tmp_path / "new.npz", "--group", "nobody").code == 2
    assert call("predict", out, tmp_path / "new.npz", "--group-from", "{group}").code == 0
    assert call("export", out, "--to", "card", "--out", tmp_path / "card.md").code == 0
    assert "Images whose set holds their class: common " in (tmp_path / "card.md").read_text(encoding="utf-8")


def test_evaluate_reads_other_tables_and_the_own_test_split(folder: Path, call: Call) -> None:
    ended = call("evaluate", folder / "folds", folder / "v.parquet", "--group", "patient", "--json")
    assert ended.code == 0
    assert json.loads(ended.out)["num_images"] == 80
    ended = call("evaluate", folder / "run", "--json")
    assert ended.code == 0
    expected = json.loads((folder / "run" / "metrics.json").read_text())["test"]["figures"]["uwa"]["value"]
    assert json.loads(ended.out)["figures"]["uwa"]["value"] == expected


@pytest.mark.slow
def test_export_writes_an_onnx_file_that_takes_vectors(folder: Path, call: Call, tmp_path: Path) -> None:
    import onnxruntime

    assert call("export", folder / "run", "--out", tmp_path / "m.onnx").code == 0
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (given,) = session.get_inputs()
    assert (given.name, given.shape[1]) == ("vectors", 6)
    label = session.run(["label"], {"vectors": matrix()})[0]
    assert np.mean((label == 1) == (LABELS == "rare")) > 0.9
    assert json.loads(session.get_modelmeta().custom_metadata_map["columns"])[0] == "f0"


def test_report_data_and_card_tell_of_vectors(folder: Path, call: Call, tmp_path: Path) -> None:
    ended = call("data", folder / "v.npz", "--group", "patient")
    assert ended.code == 0
    assert "80 vectors, 2 classes, vectors of 6 numbers" in ended.out
    for name in ("run", "folds"):
        assert call("report", folder / name, "--out", tmp_path / f"{name}.html").code == 0
        assert "There are no pictures: the data are vectors." in (tmp_path / f"{name}.html").read_text()
    assert call("export", folder / "run", "--to", "card", "--out", tmp_path / "README.md").code == 0
    card = (tmp_path / "README.md").read_text()
    assert "Inputs are vectors of 6 columns `f0`, `f1`" in card
    assert "pipeline_tag: tabular-classification" in card


def test_compare_trains_layers_on_vectors(folder: Path, call: Call, tmp_path: Path) -> None:
    compare = ["compare", folder / "v.npz", "--methods", "quick, ce", "--folds", "2", "epochs=2", "--workers", "1"]
    ended = call(*compare, "--out", tmp_path / "cmp", "--json")
    assert ended.code == 0, ended.err
    names = {"quick": "identity", "ce": "mlp"}
    found = [path.read_text() for path in (tmp_path / "cmp" / "cells").glob("*/recipe.toml")]
    assert len(found) == 4
    assert all(any(f'name = "{encoder}"' in text for text in found) for encoder in names.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["find", "{run}", "{folder}/new.parquet", "--class", "rare", "--out", "{out}"], "find looks through images"),
        (["predict", "{run}", "{photos}"], "takes vectors, not images"),
        (["predict", "{photo_run}", "{folder}/new.npz"], "takes images, not vectors"),
        (["evaluate", "{run}", "{photos}"], "images in"),
        (["predict", "{run}", "{folder}/new.npz", "{photos}"], "which cannot be used with image files"),
        (["fit", "{folder}/v.npz", "--encoder", "resnet18", "--out", "{out}"], "--encoder is a setting for images"),
        (["fit", "{folder}/v.npz", "image_size=64", "--out", "{out}"], "image_size is a setting for images"),
        (["fit", "{folder}/v.npz", "--recipe", "fine-tune", "--out", "{out}"], "trains an encoder of images"),
        (["export", "{run}", "--to", "hub-folder", "--out", "{out}"], "timm cannot represent the encoder identity"),
    ],
)
def test_what_vectors_cannot_is_one_sentence(
    folder: Path, model: Path, photos: Path, call: Call, tmp_path: Path, arguments: list[str], message: str
) -> None:
    places = {"run": folder / "run", "folder": folder, "out": tmp_path / "x", "photos": photos, "photo_run": model}
    ended = call(*(argument.format(**places) for argument in arguments))
    assert ended.code == 2
    assert message in ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_wrong_tables_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "v.npz"
    values = matrix()

    def refused(message: str, **arrays: object) -> None:
        np.savez(path, **arrays)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=message):
            open_source(path)

    refused("a table of vectors must have label, got features in ", features=values)
    refused("must have one matrix, got a, b in ", a=values, b=values, y=LABELS)
    refused("one entry for each vector, got 3 in y for 80 vectors", a=values, y=LABELS[:3])
    refused("must have columns of numbers, got text in", text=LABELS, y=LABELS)
    refused(r"must hold vectors, got a matrix of the shape \(80, 0\)", a=values[:, :0], y=LABELS)
    values[[3, 5], 1] = np.nan
    refused("finite numbers, got 2 of 80 with a missing or infinite value, the first in row 4", a=values, y=LABELS)
    refused("it holds Python objects, which could run code", a=matrix(), y=LABELS.astype(object))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match="Cannot read the vectors of"):
        open_source(path)
