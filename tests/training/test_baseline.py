from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lopsided.data.inputs import MemoryInputs, Part, Prepared
from lopsided.data.sources import source_from_arrays
from lopsided.evaluation.intervals import Figure, paired_shares_interval
from lopsided.training import baseline
from lopsided.training import fit as fitting
from lopsided.training.baseline import Compared, compare
from training.conftest import tiny


def part(counts: tuple[int, ...], seed: int, size: int = 20) -> Part:
    """Images of two classes that differ in the brightness of their upper half."""
    labels = np.repeat(np.arange(len(counts)), counts)
    pixels = np.random.default_rng(seed).integers(0, 60, (len(labels), 3, size, size), dtype=np.uint8)
    pixels[:, :, : size // 2] += (60 * labels).astype(np.uint8)[:, None, None, None]
    return Part(MemoryInputs(torch.from_numpy(pixels)), labels)


def made(train: tuple[int, ...], test: tuple[int, ...], kind: str = "image") -> Prepared:
    classes = tuple("abcdef"[: len(train)])
    return Prepared(kind, (3, 20, 20), 20, (0.0,) * 3, (1.0,) * 3, classes, part(train, 0), None, part(test, 1))


def test_a_model_below_the_baseline_is_told_so_and_a_better_one_is_not() -> None:
    prepared = made((100, 30, 20), (40, 20, 10))
    assert prepared.test is not None
    always = np.zeros(70, dtype=np.int64)
    found = compare(prepared, prepared.test, always, 0)
    assert found is not None
    assert found.model == pytest.approx(1 / 3)
    assert found.baseline > 0.95, "The classes differ in brightness, which any linear model sees."
    assert found.number == 70
    assert found.difference.value == pytest.approx(found.model - found.baseline)
    assert found.difference.high < 0
    text = found.words("validation", "two-stage")
    assert text.startswith(
        "On the validation images, the unweighted accuracy of the model (0.333) is below that of a simple baseline ("
    )
    assert "a linear classifier on images of 16 x 16 pixels" in text
    assert f"The 95 % interval of the difference is {str(found.difference).partition(' ')[2]}." in text
    assert text.endswith("Train for more epochs, use pretrained weights (--weights), or try another loss.")
    assert found.words("validation", "frozen").endswith("or train an encoder (--recipe from-scratch).")
    right = compare(prepared, prepared.test, prepared.test.labels, 0)
    assert right is not None
    assert right.words("validation", "two-stage") == ""


def test_a_warning_of_test_images_gives_no_advice_to_tune_on_them() -> None:
    found = Compared(0.4, 0.9, 70, Figure(-0.5, -0.6, -0.4))
    text = found.words("test", "two-stage")
    assert text.endswith(
        "Do not tune the model on test images: hold out validation images (--val) to compare settings."
    )
    assert "another loss" not in text


def test_a_difference_that_chance_explains_is_no_warning() -> None:
    prepared = made((100, 30, 20), (40, 20, 10))
    assert prepared.test is not None
    almost = prepared.test.labels.copy()
    almost[-2:] = 0
    found = compare(prepared, prepared.test, almost, 0)
    assert found is not None
    assert found.model < found.baseline
    assert found.words("validation", "two-stage") == ""


@pytest.mark.parametrize("sizes", [(50, 10), (40, 20, 5), (5,) * 12])
def test_two_models_that_are_equally_good_are_rarely_told_apart(sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    number = np.array(sizes)
    found = []
    for _ in range(2000):
        won, lost, _ = rng.multinomial(number, (0.15, 0.15, 0.7)).T.astype(float)
        found.append(paired_shares_interval(won, lost, number.astype(float), 0.95).leaves_out_0)
    assert 0.005 < np.mean(found) < 0.055


def test_the_paired_interval_of_one_class_adds_an_image_to_each_kind_of_disagreement() -> None:
    found = paired_shares_interval(np.array([3.0]), np.array([9.0]), np.array([20.0]), 0.95)
    share, other = 4 / 22, 10 / 22
    half = 1.959964 * math.sqrt((share + other - (share - other) ** 2) / 21)
    assert found.value == pytest.approx(-0.3)
    assert (found.low, found.high) == pytest.approx((share - other - half, share - other + half), abs=1e-6)


def test_the_same_run_has_the_same_baseline_and_the_global_states_are_left_alone() -> None:
    prepared = made((3000, 300), (2500, 100))
    assert prepared.test is not None
    answers = np.zeros(2600, dtype=np.int64)
    before = torch.random.get_rng_state(), json.dumps(np.random.get_state()[1].tolist())
    first, again = (compare(prepared, prepared.test, answers, 7) for _ in range(2))
    assert first == again
    assert first is not None
    assert first.number < 2100, "The cost is bounded."
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == json.dumps(np.random.get_state()[1].tolist())


@pytest.mark.parametrize(
    ("train", "test", "kind"),
    [
        ((60, 30), (40, 30), "image"),
        ((100, 30), (40, 10), "image"),
        ((100, 30), (70, 4), "image"),
        ((100, 30), (70, 30), "vector"),
    ],
)
def test_too_few_images_and_vectors_have_no_baseline(train: tuple[int, ...], test: tuple[int, ...], kind: str) -> None:
    prepared = made(train, test, kind)
    assert prepared.test is not None
    assert compare(prepared, prepared.test, prepared.test.labels, 0) is None


def test_small_images_that_are_no_multiple_of_the_side_are_shrunk_by_means() -> None:
    pixels = torch.arange(2 * 20 * 10, dtype=torch.uint8).reshape(1, 2, 20, 10)
    small = baseline._small(MemoryInputs(pixels), np.array([0]))
    assert small.shape == (1, 2 * 16 * 10)
    assert small[0, 0] == pytest.approx(pixels[0, 0, :2, 0].double().mean() / 255)


@pytest.mark.parametrize(("val", "split"), [(0.3, "validation"), (0.1, "test"), (0.0, "test")])
def test_a_run_below_the_baseline_keeps_the_warning_and_the_same_model(
    val: float, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = part((200, 100), 0, 8)
    assert isinstance(train.inputs, MemoryInputs)
    source = source_from_arrays(train.inputs.tensor, train.labels, classes=["many", "few"])
    recipe = tiny(encoder_training__lr=1e-12, classifier__lr=1e-12, data__test=0.3, data__val=val)
    found = fitting.fit(recipe, source, tmp_path / "with")
    (text,) = [text for text in found.warnings if "is below that of a simple baseline" in text]
    assert text.startswith(f"On the {split} images, ")
    monkeypatch.setattr(fitting, "compare", lambda *_: None)
    without = fitting.fit(recipe, source, tmp_path / "without")
    assert not any("baseline" in text for text in without.warnings)
    for name in ("model.safetensors",):
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()
