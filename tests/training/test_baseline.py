from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lopsided.data.inputs import MemoryInputs, Part, Prepared
from lopsided.data.sources import source_from_arrays
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
    text = found.words("test")
    assert text.startswith("On the test images, the unweighted accuracy of the model (0.333) is below that of a simple")
    assert "a linear classifier on images of 16 x 16 pixels" in text
    right = compare(prepared, prepared.test, prepared.test.labels, 0)
    assert right is not None
    assert right.words("test") == ""
    assert Compared(0.5, 0.5, 70).words("test") == ""


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


def test_a_run_below_the_baseline_keeps_the_warning_and_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = part((200, 100), 0, 8)
    assert isinstance(train.inputs, MemoryInputs)
    source = source_from_arrays(train.inputs.tensor, train.labels, classes=["many", "few"])
    recipe = tiny(encoder_training__lr=1e-12, classifier__lr=1e-12, data__test=0.3, data__val=0.1)
    found = fitting.fit(recipe, source, tmp_path / "with")
    assert any("is below that of a simple baseline" in text for text in found.warnings)
    monkeypatch.setattr(fitting, "compare", lambda *_: None)
    without = fitting.fit(recipe, source, tmp_path / "without")
    assert not any("baseline" in text for text in without.warnings)
    for name in ("model.safetensors",):
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()
