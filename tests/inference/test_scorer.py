"""One way from images to features and probabilities, which finds in the cache what an earlier run computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lopsided.data import decoding
from lopsided.data.images import FileImages
from lopsided.inference.engine import Engine
from lopsided.inference.predict import answers_of
from lopsided.inference.scorer import Scorer
from lopsided.runs.reopen import open_model
from tiny import write_model, write_photos


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    return open_model(write_model(tmp_path_factory.mktemp("model")), "cpu")


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path / "cache"))
    return sorted(write_photos(tmp_path / "photos", {"cat": 5, "dog": 4}).rglob("*.png"))


def no_encoding(*_: object) -> None:
    raise AssertionError("The features of this image are cached.")


def test_features_that_an_earlier_run_cached_are_not_computed_again(
    model: tuple, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = Scorer(*model).images(FileImages(paths))
    monkeypatch.setattr(Engine, "encode", no_encoding)
    opened: list[int] = []
    monkeypatch.setattr(decoding.Image, "open", lambda *_, **__: opened.append(1))
    again = Scorer(*model, cached="begun")
    np.testing.assert_array_equal(again.images(FileImages(paths)), p)
    answers = {path: answer for path, answer, _ in answers_of(again.stream(paths))}
    np.testing.assert_allclose(np.array([answers[path] for path in paths]), p, rtol=1e-6)
    assert not opened


def test_what_no_run_cached_is_not_cached_by_its_use(model: tuple, paths: list[Path], tmp_path: Path) -> None:
    scorer = Scorer(*model, cached="begun")
    assert len(list(scorer.stream(paths))) == 1
    scorer.images(FileImages(paths))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    Scorer(*model).images(FileImages(paths[:4]))
    list(Scorer(*model, cached="begun").stream(paths))
    assert Scorer(*model).shelves[0].fetch(FileImages(paths).digest(np.arange(9)))[1].all()


def test_a_file_is_opened_once_for_its_digest_and_its_features(
    model: tuple, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, plain = [], open

    def count(path: Path, mode: str) -> Any:
        opened.append(path)
        return plain(path, mode)

    monkeypatch.setattr(decoding, "open", count, raising=False)
    list(Scorer(*model, batch_size=2).stream(paths))
    assert sorted(opened) == paths


def test_an_image_that_was_exchanged_gets_no_features_of_another(model: tuple, paths: list[Path]) -> None:
    images = FileImages(paths)
    digests = images.digest(np.arange(len(paths)))
    paths[0].write_bytes(paths[-1].read_bytes())
    with pytest.raises(decoding.UnreadableImageError, match="its content has changed since it was first read"):
        Scorer(*model).images(images)
    assert not Scorer(*model).shelves[0].fetch(digests[:1])[1].any()
