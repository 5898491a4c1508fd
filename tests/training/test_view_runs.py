"""Runs whose model averages its features over views of each image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from lopsided.data.augment import Augment, to_float
from lopsided.data.inputs import MemoryInputs, Part, Prepared
from lopsided.data.sources import source_from_arrays
from lopsided.errors import InputError
from lopsided.estimator import LopsidedClassifier, TwoStageClassifier
from lopsided.facts import notes
from lopsided.facts.log import Log
from lopsided.inference import feature_cache
from lopsided.inference.engine import Engine
from lopsided.inference.scorer import Scorer
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ClassifierHead
from lopsided.models.model import Model, ModelCard, load_model, look
from lopsided.ranks import Ranks
from lopsided.recipe import Recipe, named_recipe
from lopsided.recipe.views import SETS, VIEWS
from lopsided.runs.run import run_recipe
from lopsided.training.fit import fit
from lopsided.training.methods.fine_tune import Kept
from lopsided.training.regression import fit_regression
from reporters import Listening
from training.conftest import stripes, tiny

SMALL, SIDE = "test_resnet", 16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    encoder, _ = build_encoder(SMALL, channels=3, image_size=SIDE, seed=7)
    save_file({key: value.contiguous() for key, value in encoder.state_dict().items()}, path)
    return path


def pixels(number: int = 11) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, 256, (number, 3, SIDE, SIDE), dtype=np.uint8))


def scorer(views: tuple[str, ...]) -> Scorer:
    encoder, features = build_encoder(SMALL, channels=3, image_size=SIDE, seed=7)
    card = ModelCard(
        kind="image", encoder=SMALL, channels=3, image_size=SIDE, shape=(3, SIDE, SIDE), mean=(0.5,) * 3,
        std=(0.2,) * 3, classes=("a", "b"), features=features, views=views, prior=(0.5, 0.5),
    )  # fmt: skip
    model = Model(encoder, ClassifierHead(features, 2), card.mean, card.std, views=views).eval()
    return Scorer(model, card)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of images that went through the encoder, call by call."""
    encode, calls = Engine.encode, []

    def count(engine: Engine, batch: torch.Tensor) -> Any:
        calls.append(len(batch))
        return encode(engine, batch)

    monkeypatch.setattr(Engine, "encode", count)
    return calls


def test_each_view_is_encoded_once_and_cached_on_its_own(
    encoded: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, digests = MemoryInputs(pixels()), [f"{i:064x}" for i in range(11)]
    plain = scorer(SETS["none"]).features(inputs, digests)
    assert sum(encoded) == 11
    flips = scorer(SETS["flips"]).features(inputs, digests)
    assert sum(encoded) == 11 + 3 * 11  # The image as it is comes from the cache.
    expected = np.mean([scorer((view,)).features(inputs, None) for view in SETS["flips"]], axis=0)
    np.testing.assert_allclose(flips, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(flips - plain).max() > 1e-3
    encoded.clear()
    assert np.array_equal(scorer(SETS["flips"]).features(inputs, digests), flips)
    assert np.array_equal(scorer(SETS["none"]).features(inputs, digests), plain)
    assert encoded == []
    listed = feature_cache.list_cache(cache)
    assert sorted(space.get("view", "identity") for space in listed) == sorted(SETS["flips"])
    assert [space["images"] for space in listed] == [11] * 4
    monkeypatch.setattr("lopsided.inference.scorer.BLOCK", 4)  # Blocks bound the memory and change no bit.
    counts: list[tuple[int, int]] = []
    fresh = scorer(SETS["flips"]).features(inputs, None, lambda done, total: counts.append((done, total)))
    assert np.array_equal(fresh, flips)
    assert counts == [(4, 11), (8, 11), (11, 11)]


def frozen(weights: Path, **changes: Any) -> Recipe:
    fields = {"encoder.name": SMALL, "encoder.weights": str(weights), "augment.normalisation": "half",
              "data.image_size": SIDE, "data.channels": 3, "threads": 1, "compare_quick": False,
              "regression.strength": 0.1, "decision.calibration": "none", "encoder.scaling": "none"}  # fmt: skip
    return named_recipe("quick").override(**fields | changes)


def test_the_regression_of_a_frozen_run_is_fitted_on_mean_features(weights: Path) -> None:
    source = stripes({"many": 40, "few": 14}, size=SIDE)
    fitted = fit(frozen(weights, **{"encoder.views": "flips", "data.test": 0.3}), source)
    plain = fit(frozen(weights, **{"data.test": 0.3}), source)
    assert fitted.card.views == SETS["flips"]
    assert fitted.test is not None
    assert plain.test is not None
    encoder = plain.model
    encoder.eval()

    def mean_features(rows: np.ndarray) -> np.ndarray:
        x = to_float(source.images.load(rows, SIDE, 3))
        with torch.no_grad():
            return np.mean([encoder.encode(look(x, view)).numpy() for view in SETS["flips"]], axis=0)

    train = fitted.splits.train
    expected = fit_regression(mean_features(train), source.labels[train], 2, strength=0.1)
    np.testing.assert_allclose(fitted.model.classifier.weight.detach().numpy(), expected.weight, atol=2e-3)
    logits = mean_features(fitted.splits.test) @ expected.weight.T + expected.bias
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(fitted.test.probabilities, p, atol=1e-3)
    assert np.abs(fitted.test.probabilities - plain.test.probabilities).max() > 1e-3


def test_a_trained_run_is_selected_calibrated_and_tested_with_its_views_and_trained_without(tmp_path: Path) -> None:
    """With a stripe per class that a vertical flip moves, only the second run confuses the classes."""
    source = stripes({"many": 60, "few": 20})
    settings = {"encoder_training__loss": "ce", "data__test": 0.3, "data__val": 0.3}
    plain = fit(tiny(**settings), source)
    views = fit(tiny(encoder__views="flips", selection__metric="last", **settings), source, tmp_path / "run")
    last = fit(tiny(selection__metric="last", **settings), source)
    state, other = (fitted.model.encoder.state_dict() for fitted in (views, last))
    assert all(torch.equal(state[key], other[key]) for key in state)
    assert views.test is not None
    assert last.test is not None
    first, second = ([row["val_log_loss"] for row in fitted.history] for fitted in (views, last))
    assert first != second
    assert plain.card.views == SETS["none"]
    symmetric = views.model(look(to_float(source.images.load(np.arange(9), None, 1)), "vflip"))
    torch.testing.assert_close(symmetric, views.model(to_float(source.images.load(np.arange(9), None, 1))))
    # The calibration was fitted to the mean logits: temperature and bias undo to the averaged raw logits.
    assert views.card.calibrated_on == last.card.calibrated_on
    assert views.card.temperature != last.card.temperature


@pytest.mark.slow
def test_the_second_of_two_stages_is_trained_on_mean_features_unless_it_augments() -> None:
    source = stripes({"many": 40, "few": 12})
    runs = {
        (views, augment): fit(
            tiny(encoder__views=views, classifier__augment=augment, data__val=0.0, decision__calibration="none"), source
        )
        for views in ("none", "dihedral")
        for augment in (False, True)
    }
    weight = {key: run.model.classifier.weight.detach() for key, run in runs.items()}
    assert not torch.equal(weight["none", False], weight["dihedral", False])
    assert torch.equal(weight["none", True], weight["dihedral", True])


def test_the_last_blocks_are_judged_by_mean_features_of_the_views(weights: Path) -> None:
    encoder, features = build_encoder(SMALL, channels=3, image_size=SIDE, seed=7)
    model = Model(encoder, ClassifierHead(features, 2), (0.5,) * 3, (0.2,) * 3, views=VIEWS).eval()
    recipe = named_recipe("fine-tune").override(
        **{"encoder.name": SMALL, "encoder.weights": str(weights), "augment.normalisation": "half",
           "fine_tune.blocks": 1, "fine_tune.views": 1}
    )  # fmt: skip
    train = Part(MemoryInputs(pixels(6)), np.array([0, 0, 0, 0, 1, 1]))
    val = Part(MemoryInputs(pixels(5)), np.array([0, 0, 0, 1, 1]))
    prepared = Prepared(
        kind="image", shape=(3, SIDE, SIDE), image_size=SIDE, mean=(0.5,) * 3, std=(0.2,) * 3, classes=("a", "b"),
        train=train, val=val,
    )  # fmt: skip
    kept = Kept(model, prepared, recipe, Augment(), Ranks(), Log(None, None))
    with torch.no_grad():
        expected = model.features(to_float(pixels(5)))
    torch.testing.assert_close(kept.features(val.inputs), expected, rtol=2e-2, atol=2e-2)  # Kept in float16.
    model.views = SETS["none"]
    with torch.no_grad():
        assert not torch.allclose(model.features(to_float(pixels(5))), expected, rtol=2e-2, atol=2e-2)


def test_the_estimator_takes_views_and_refuses_them_for_vectors() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 256, (24, 8, 8), dtype=np.uint8), np.arange(24) % 3 // 2
    model = TwoStageClassifier(loss="ce", encoder="mlp-8", epochs=1, classifier_epochs=1, tta="flip", random_state=0)
    p = model.fit(x, y).predict_proba(x)
    assert model.card_.views == SETS["flip"]
    np.testing.assert_allclose(model.predict_proba(x[:, :, ::-1].copy()), p, atol=1e-6)
    x = generator.normal(size=(20, 3))
    assert LopsidedClassifier(tta="auto").fit(x, np.arange(20) % 2).card_.views == SETS["none"]
    with pytest.raises(InputError, match=r"^views must be none for vectors, got flip\. Only images have views\.$"):
        LopsidedClassifier(tta="flip").fit(x, np.arange(20) % 2)


@pytest.mark.slow
@pytest.mark.parametrize("gib", ["4", "0"])
@pytest.mark.parametrize(("views", "warned"), [("identity,vflip", True), ("flip", False), ("none", False)])
def test_classes_that_a_view_exchanges_are_warned_about(
    views: str, warned: bool, gib: str, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOPSIDED_CACHE_GIB", gib)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 100, (40, SIDE, SIDE, 3), dtype=np.uint8)
    labels = np.arange(40) % 4 // 3
    for image, label in zip(images, labels, strict=True):
        half = image[: SIDE // 2] if label else image[SIDE // 2 :]  # One class is bright at the top.
        half += 100
    recipe = named_recipe("quick").override(
        **{"encoder.name": SMALL, "encoder.weights": str(weights), "encoder.views": views, "data.image_size": SIDE}
    )
    found = fit(recipe, source_from_arrays(images, labels))
    told = [fact for fact in found.cautions if fact.kind == "directed_classes"]
    assert len(told) == warned
    assert all(fact.values["advice"] == "tta=auto" for fact in told)


def test_a_fine_tuned_encoder_is_not_advised_to_choose_views(weights: Path) -> None:
    recipe = named_recipe("fine-tune").override(
        **{"encoder.name": SMALL, "encoder.weights": str(weights), "encoder.views": "identity,vflip",
           "data.image_size": SIDE, "fine_tune.blocks": 1, "fine_tune.views": 1, "fine_tune.steps": 1,
           "compare_quick": False}
    )  # fmt: skip
    (fact,) = [fact for fact in fit(recipe, halves(side=False)).cautions if fact.kind == "directed_classes"]
    assert fact.values["advice"] == "tta=none"


def halves(*, side: bool, both: bool = False) -> Any:
    """Images of which one class is bright at the top or, with ``side``, on the left; with ``both``, in a corner."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 100, (60, SIDE, SIDE, 3), dtype=np.uint8)
    labels = np.arange(60) % 4 // 3
    for image, label in zip(images, labels, strict=True):
        turned = image.swapaxes(0, 1) if side else image
        half = turned[: SIDE // 2] if label else turned[SIDE // 2 :]
        half += 100
    if both:  # Classes that no view exchanges.
        images[labels == 1] //= 2
    return source_from_arrays(images, labels)


def chosen(weights: Path, source: Any, folder: Path | None = None, **changes: Any) -> Any:
    unset = {"regression.strength": None, "encoder.views": "auto"}
    return fit(frozen(weights, **unset | changes), source, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "both", "views"), [(False, False, "flip"), (True, False, "none"), (False, True, "flips")]
)
def test_inner_folds_take_the_views_that_do_not_exchange_classes(
    weights: Path, tmp_path: Path, side: bool, both: bool, views: str
) -> None:
    source = halves(side=side, both=both)
    found = chosen(weights, source, tmp_path / "run")
    assert found.card.views == found.model.views == SETS[views]
    named = fit(frozen(weights, **{"regression.strength": None, "encoder.views": views}), source)
    assert torch.equal(found.model.classifier.weight, named.model.classifier.weight)
    log = (tmp_path / "run" / "log.jsonl").read_text()
    assert f'"chosen": "{views}"' in log
    assert ("which way round" in log) == (views != "flips")
    assert "directed_classes" not in [fact.kind for fact in found.cautions]
    model, card = load_model(tmp_path / "run", torch.device("cpu"))
    assert card.views == model.views == SETS[views]


@pytest.mark.slow
def test_the_chosen_views_do_not_depend_on_the_cache_or_on_blocks(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = halves(side=False)
    first = chosen(weights, source)
    monkeypatch.setenv("LOPSIDED_CACHE_GIB", "0")
    monkeypatch.setattr("lopsided.inference.scorer.BLOCK", 7)
    again = chosen(weights, source)
    assert first.card.views == again.card.views == SETS["flip"]
    assert torch.equal(first.model.classifier.weight, again.model.classifier.weight)


def test_a_fixed_strength_does_not_keep_inner_folds_from_choosing_views(weights: Path) -> None:
    found = chosen(weights, halves(side=False), **{"regression.strength": 0.1})
    assert found.card.views == SETS["flip"]
    named = fit(frozen(weights, **{"encoder.views": "flip"}), halves(side=False))
    assert torch.equal(found.model.classifier.weight, named.model.classifier.weight)


def test_with_one_image_of_a_class_all_views_are_taken_and_a_note_says_so(weights: Path, tmp_path: Path) -> None:
    source = halves(side=False)
    few = np.flatnonzero(source.labels == 0).tolist() + np.flatnonzero(source.labels == 1)[:1].tolist()
    found = chosen(weights, source.subset(np.array(few)), tmp_path / "run", **{"data.test": 0.0})
    assert found.card.views == SETS["flips"]
    log = (tmp_path / "run" / "log.jsonl").read_text()
    assert "A class has too few images for inner folds to choose the views of an image" in log


@pytest.mark.slow
def test_with_folds_the_note_is_that_of_the_model_and_tells_of_folds_that_chose_otherwise(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = halves(side=False)
    folder = tmp_path / "photos"
    for label in (0, 1):
        (folder / str(label)).mkdir(parents=True)
    for i, label in enumerate(source.labels):
        pixels = source.images.load(np.array([i]), SIDE, 3)[0].permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / str(label) / f"{i:02d}.png")
    recipe = frozen(weights, **{"regression.strength": None, "encoder.views": "auto", "data.folds": 3})
    told = Listening()
    run_recipe(recipe, tmp_path / "first", data=folder, reporter=told)
    assert [fact.values["views"] for fact in told.facts if fact.kind == "chosen_views"] == ["flip"]
    assert json.loads((tmp_path / "first" / "metrics.json").read_text())["views"] == ["identity", "hflip"]
    assert "other_views" not in [fact.kind for fact in told.facts]
    told = Listening()
    choices = iter([0, 1, 0, 1])  # Three folds, and then all images.
    monkeypatch.setattr("lopsided.training.methods.frozen.choose_views", lambda losses: next(choices))
    run_recipe(recipe, tmp_path / "second", data=folder, reporter=told)
    assert notes.other_views(2, 3) in told.facts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "two-stage", "encoder.views": "auto"},
         'encoder.views must name views with method "two-stage", got auto. Name the views, such as flip.'),
        ({"method": "frozen", "encoder.weights": "embedded", "augment.normalisation": "weights",
          "encoder.views": "auto", "data.folds": 3, "final": "ensemble"},
         'final cannot be "ensemble" if encoder.views is auto: each fold may choose other views.'),
        ({"encoder.views": "AUTO"}, "With a frozen encoder, auto lets inner folds choose."),
    ],
)  # fmt: skip
def test_views_that_cannot_be_chosen_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Recipe().override(**changes)
    assert message in str(caught.value)
