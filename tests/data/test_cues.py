"""Cheap cues that separate classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import roc_auc_score

from lopsided.data.cues import TOGETHER, cue_rows, measure_cues, telling_cues
from lopsided.data.images import FileImages


def test_a_cue_that_separates_the_classes_is_named_with_its_auroc() -> None:
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1], [200, 40])
    bright = generator.normal(size=240) - 1.5 * labels
    found = telling_cues({"brightness": bright, "sharpness": generator.normal(size=240)}, labels, 2)
    assert [cue.name for cue in found] == ["brightness", TOGETHER]
    assert found[0].label == 1
    assert found[0].auroc.value == pytest.approx(roc_auc_score(labels == 0, bright))


def test_noise_constants_and_a_few_lucky_images_are_not_named() -> None:
    generator = np.random.default_rng(1)
    labels = np.repeat([0, 1], [200, 3])
    lucky = np.concatenate([generator.normal(size=200), [1.1, 0.9, 1.0]])
    assert telling_cues({"brightness": lucky, "the border": np.ones(203)}, labels, 2) == []
    assert telling_cues({"brightness": generator.normal(size=203)}, np.arange(203) % 3, 3) == []


def test_every_class_of_several_is_compared_with_the_others() -> None:
    labels = np.repeat([0, 1, 2], 50)
    values = np.random.default_rng(2).normal(size=150) + 3 * (labels == 1)
    found = telling_cues({"brightness": values}, labels, 3)
    assert found[0].label == 1


def test_cues_are_what_they_are_called(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    noise = generator.integers(0, 255, (90, 120, 3)).astype(np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    Image.new("RGB", (120, 90), (200, 20, 20)).save(tmp_path / "red.png")
    framed = Image.new("RGB", (60, 90), "black")
    framed.paste((255, 255, 255), (10, 10, 50, 80))
    framed.save(tmp_path / "framed.png")
    cues = measure_cues(
        FileImages([tmp_path / f"{name}.png" for name in ("noise", "red", "framed")]), np.arange(3)
    ).plain
    assert cues["sharpness"][0] > cues["sharpness"][1] == pytest.approx(0)
    assert cues["the share of red"][1] == pytest.approx(200 / 240)
    assert cues["the border"][2] < -200
    assert cues["the aspect ratio"].tolist() == [pytest.approx(4 / 3), pytest.approx(4 / 3), pytest.approx(2 / 3)]
    assert cues["the size of the file"][0] == (tmp_path / "noise.png").stat().st_size


def test_the_number_of_images_is_bounded() -> None:
    labels = np.repeat([0, 1], [10_000, 40])
    rows = cue_rows(labels, 0)
    assert np.bincount(labels[rows]).tolist() == [1460, 40]
    assert len(cue_rows(np.arange(100) % 50, 0)) == 100
