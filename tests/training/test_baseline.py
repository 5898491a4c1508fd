from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lopsided.data.inputs import MemoryInputs, Part, Prepared
from lopsided.data.sources import source_from_arrays
from lopsided.data.splits import Splits
from lopsided.errors import RunError
from lopsided.evaluation.intervals import Estimate, paired_shares_interval
from lopsided.facts import notes
from lopsided.facts.log import Log
from lopsided.inference.scorer import SmallImages
from lopsided.models.pretrained import Preprocessing, preprocessing_of
from lopsided.recipe import named_recipe
from lopsided.training import baseline
from lopsided.training import fit as fitting
from lopsided.training.baseline import Compared, classify_by_quick, compare, compare_answers, is_quick
from lopsided.training.methods import frozen
from training.conftest import tiny

ADVICE = named_recipe("from-scratch").spec.advice


@pytest.fixture(autouse=True)
def small_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe quick enlarges images to 224 pixels, which takes long. These tests need no good features."""

    def smaller(encoder: str, weights: str) -> Preprocessing:
        return replace(preprocessing_of(encoder, weights), image_size=64)

    monkeypatch.setattr(baseline, "preprocessing_of", smaller)


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
    (fact,) = found.cautions("validation", "small-images", ADVICE)
    assert fact.values["split"] == "validation"
    assert (fact.values["model_uwa"], fact.values["baseline_uwa"]) == (found.model, found.baseline)
    assert (fact.values["low"], fact.values["high"]) == (found.difference.low, found.difference.high)
    assert str(fact).endswith("Train for more epochs, use pretrained weights (weights), or try another loss.")
    right = compare(prepared, prepared.test, prepared.test.labels, 0)
    assert right is not None
    assert right.cautions("validation", "small-images", ADVICE) == []


def test_a_warning_of_test_images_gives_no_advice_to_tune_on_them() -> None:
    found = Compared(0.4, 0.9, 70, Estimate(-0.5, -0.6, -0.4))
    (fact,) = found.cautions("test", "small-images", ADVICE)
    assert str(fact).endswith(
        "Do not tune the model on test images: hold out validation images (val=0.15) to compare settings."
    )
    assert "another loss" not in str(fact)


def test_a_difference_that_chance_explains_is_no_warning() -> None:
    prepared = made((100, 30, 20), (40, 20, 10))
    assert prepared.test is not None
    almost = prepared.test.labels.copy()
    almost[-2:] = 0
    found = compare(prepared, prepared.test, almost, 0)
    assert found is not None
    assert found.model < found.baseline
    assert found.cautions("validation", "small-images", ADVICE) == []


@pytest.mark.parametrize("sizes", [(50, 10), (40, 20, 5), (5,) * 12])
def test_two_models_that_are_equally_good_are_rarely_told_apart(sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    number = np.array(sizes)
    found = []
    for _ in range(2000):
        won, lost, _ = rng.multinomial(number, (0.15, 0.15, 0.7)).T.astype(float)
        found.append(paired_shares_interval(won, lost, number.astype(float), 0.95).leaves_out_0)
    assert 0.005 < np.mean(found) < 0.055


def test_copies_in_a_group_do_not_make_a_difference_surer() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], [60, 20])
    model, other = (np.where(rng.random(80) < share, labels, 1 - labels) for share in (0.6, 0.8))
    alone = compare_answers(labels, model, other, 2).difference
    groups = np.repeat(np.arange(80).astype(str), 3)
    three = [np.repeat(part, 3) for part in (labels, model, other)]
    grouped = compare_answers(*three, 2, groups).difference
    assert (grouped.low, grouped.high) == pytest.approx((alone.low, alone.high))
    ignored = compare_answers(*three, 2).difference
    assert ignored.high - ignored.low < 0.7 * (alone.high - alone.low)


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
    small = SmallImages((2, 20, 10), None).of(Part(MemoryInputs(pixels), np.array([0])), np.array([0]))
    assert small.shape == (1, 2 * 16 * 10)
    assert small[0, 0] == pytest.approx(pixels[0, 0, :2, 0].double().mean())


@pytest.mark.slow
@pytest.mark.parametrize(("val", "split"), [(0.3, "validation"), (0.05, "test"), (0.0, "test")])
def test_a_run_below_the_recipe_quick_keeps_the_warning_the_figures_and_the_same_model(
    val: float, split: str, tmp_path: Path
) -> None:
    train = part((200, 100), 0, 8)
    assert isinstance(train.inputs, MemoryInputs)
    source = source_from_arrays(train.inputs.tensor, train.labels, classes=["many", "few"])
    recipe = tiny(encoder_training__lr=1e-12, classifier__lr=1e-12, data__test=0.3, data__val=val)
    found = fitting.fit(recipe, source, tmp_path / "with")
    (fact,) = [fact for fact in found.cautions if fact.kind == "below_baseline"]
    assert (fact.values["baseline"], fact.values["split"]) == ("quick", split)
    assert found.baseline is not None
    assert found.baseline["recipe"] == "quick"
    assert set(found.baseline["splits"]) == ({"val", "test"} if val == 0.3 else {"test"})
    figures = found.baseline["splits"]["test"]
    assert found.test is not None
    recalls = [np.mean(found.test.y_pred[found.test.y_true == c] == c) for c in (0, 1)]
    assert figures["num_images"] == 90
    assert figures["model_uwa"] == pytest.approx(np.mean(recalls))
    assert figures["uwa"]["value"] > 0.95, "The classes differ in brightness, which every encoder sees."
    assert figures["difference"]["value"] == pytest.approx(figures["model_uwa"] - figures["uwa"]["value"])
    assert figures["difference"]["high"] < 0
    without = fitting.fit(recipe.override(compare_quick=False), source, tmp_path / "without")
    assert without.baseline is None
    assert "below_baseline" not in [fact.kind for fact in without.cautions]
    model = "model.safetensors"
    assert (tmp_path / "with" / model).read_bytes() == (tmp_path / "without" / model).read_bytes()


def test_only_the_recipe_quick_itself_is_compared_with_small_images() -> None:
    default = named_recipe("quick")
    assert is_quick(default.override(seed=3, **{"decision.rule": "plain", "data.val": 0.1}))
    for change in (
        {"regression.strength": 1.0},
        {"classifier.loss": "weighted-ce"},
        {"data.image_size": 64},
        {"encoder.weights": "other.safetensors"},
    ):
        assert not is_quick(default.override(**change)), change
    assert not is_quick(tiny())


def test_the_recipe_quick_trains_on_the_training_images_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    images = part((150, 60), 0, 8)
    assert isinstance(images.inputs, MemoryInputs)
    source = source_from_arrays(images.inputs.tensor, images.labels, classes=["many", "few"])
    rows = np.random.default_rng(0).permutation(len(images))
    splits = Splits(np.sort(rows[:130]), np.sort(rows[130:150]), np.sort(rows[150:]))
    seen: list[int] = []
    original = frozen.fit_regression
    monkeypatch.setattr(
        frozen, "fit_regression", lambda x, y, *a, **k: seen.extend(y.tolist()) or original(x, y, *a, **k)
    )
    digests = source.images.digest(np.arange(len(source)))
    found = classify_by_quick(tiny(), source, splits, digests, torch.device("cpu"), Log(None, None))
    assert seen == source.labels[splits.train].tolist()
    assert list(found) == ["test"], "20 validation images are too few."
    assert found["test"].labels.tolist() == source.labels[splits.test].tolist()
    assert found["test"].probabilities.shape == (60, 2)
    by_threshold = tiny(decision__rule="threshold:few=0.9999")
    same = classify_by_quick(by_threshold, source, splits, digests, torch.device("cpu"), Log(None, None))
    expected = found["test"].probabilities[:, 1] >= 0.9999
    assert same["test"].predicted.tolist() == expected.astype(int).tolist(), "It decides by the rule of the model."


def test_a_problem_of_the_comparison_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    images = part((150, 60), 0, 8)
    assert isinstance(images.inputs, MemoryInputs)
    source = source_from_arrays(images.inputs.tensor, images.labels, classes=["many", "few"])

    def fail(*_: object, **__: object) -> None:
        raise RunError("no weights.")

    monkeypatch.setattr(baseline, "preprocessing_of", fail)
    rows = np.arange(len(images))
    log = Log(None, None)
    digests = source.images.digest(rows)
    splits = Splits(rows[::2], rows[:0], rows[1::2])
    assert classify_by_quick(tiny(), source, splits, digests, torch.device("cpu"), log) == {}
    assert log.facts == [notes.quick_not_compared("no weights.")]


def test_a_class_without_evaluated_images_leaves_a_comparison_but_no_warning() -> None:
    labels = np.repeat([0, 1], [60, 20])
    found = compare_answers(labels, np.zeros_like(labels), labels, 3)
    assert not found.enough
    assert found.difference.high < 0
    assert found.cautions("validation", "quick") == []
    (fact,) = compare_answers(labels, np.zeros_like(labels), labels, 2).cautions("validation", "quick")
    assert fact.values["advice"] == "Use the recipe quick (--recipe quick), or change this recipe."
