from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from example_methods import write_package
from lopsided.models.encoders import build_encoder
from lopsided.recipe import Recipe, entries, methods
from tiny_command import Call

PHOTOS = {"cat": 20, "dog": 9}
FIELDS = ("--recipe", "quick", "method=nearest-mean", "encoder.views=none", "image_size=32", "device=cpu", "--quiet")


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of docs/add-a-method.md, as if it were installed."""
    monkeypatch.syspath_prepend(write_package(tmp_path / "site"))
    monkeypatch.setattr(methods.METHODS, "_loaded", {})
    for name in ("nearest", "nearest_trainer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    entries._points.cache_clear()
    yield
    entries._points.cache_clear()


@pytest.mark.slow
def test_a_method_of_another_package_goes_through_every_verb(call: Call, photos: Path, tmp_path: Path) -> None:
    run, onnx = tmp_path / "run", tmp_path / "model.onnx"
    encoder, _ = build_encoder("test_resnet", image_size=32)
    save_file(encoder.state_dict(), tmp_path / "own.safetensors")
    network = ("--encoder", "test_resnet", f"weights={tmp_path / 'own.safetensors'}")
    assert call("fit", photos, "--out", run, "--folds", "2", *FIELDS, *network).code == 0
    metrics = json.loads((run / "metrics.json").read_text())
    assert (metrics["method"], metrics["folds"]["final"]) == ("nearest-mean", "refit")
    assert metrics["test"]["figures"]["uwa"]["value"] > 0.9, "The classes differ in brightness."
    assert call("report", run).code == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Nearest class mean on photos" in page
    assert "the nearest class mean of its features, which were not trained" in page
    predicted = call("predict", run, photos)
    assert (predicted.code, predicted.out.count("\n")) == (0, 30)
    assert call("export", run, "--out", onnx).code == 0
    assert onnx.exists()
    method = tmp_path / "mine.toml"
    changes = {"data.folds": None, "data.source": None}
    method.write_text(Recipe.load(run / "recipe.toml").override(**changes).to_toml())
    plain = tmp_path / "plain.toml"
    plain.write_text(Recipe.load(method).override(method="frozen").to_toml())
    compared = call(
        "compare", photos, "--methods", f"{plain},{method}", "--folds", "2", "--out", tmp_path / "c", "--quiet"
    )
    assert compared.code == 0, compared.err
    assert "mine" in compared.out


def test_fields_that_the_method_does_not_have_are_refused(call: Call, photos: Path, tmp_path: Path) -> None:
    ended = call("fit", photos, "--out", tmp_path / "run", *FIELDS, "regression.folds=3")
    assert ended.code == 2
    assert 'regression.folds has no effect with method "nearest-mean"' in ended.err


def test_a_name_that_no_package_has_is_refused_with_the_nearest_one(call: Call, photos: Path, tmp_path: Path) -> None:
    ended = call("fit", photos, "--out", tmp_path / "run", *(field.replace("-mean", "-men") for field in FIELDS))
    assert ended.code == 2
    assert "Did you mean nearest-mean?" in ended.err


def test_an_object_that_is_no_spec_is_refused(call: Call, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "site" / "nearest.py").write_text("NEAREST_MEAN = 3\n")
    ended = call("fit", photos, "--out", tmp_path / "run", *FIELDS)
    assert ended.code == 2
    assert "must be an object of the class lopsided.recipe.methods.spec.MethodSpec, got 3" in ended.err
