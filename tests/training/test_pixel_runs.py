"""Runs whose encoder has the colours of regions joined to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lopsided.cli.output import fold_words
from lopsided.data.sources import Source, open_source
from lopsided.errors import RunError
from lopsided.inference.scorer import Scorer
from lopsided.models.blocks.pixels import WIDTH
from lopsided.models.model import average, average_classifiers, load_model
from lopsided.recipe import Recipe, named_recipe
from lopsided.runs.run import run_recipe
from lopsided.training.fit import fit
from lopsided.training.methods.adapter import Rows, fit_plain
from lopsided.training.regression import fit_regression

PHOTOS = {"cat": 30, "dog": 12}
NAME = "tf_efficientnet_lite0+pixels"


@pytest.fixture(scope="module")
def source(photos: Path) -> Source:
    return open_source(str(photos))


def default(**changes: Any) -> Recipe:
    usual = {"encoder.name": NAME, "data.image_size": 32, "data.test": 0.0, "device": "cpu"}
    return named_recipe("quick").override(**usual | changes)


def features_of(model: Any, source: Source) -> np.ndarray:
    pixels = source.images.load(np.arange(len(source)), 32, 3)
    with torch.no_grad():
        found: np.ndarray = model.features(pixels.float() / 255).numpy()
    return found


@pytest.mark.slow
def test_the_classifier_is_the_regression_that_weighs_the_colours(source: Source) -> None:
    recipe = default()
    fitted = fit(recipe, source)
    features = features_of(fitted.model, source)
    rows = fitted.splits.train
    assert features.shape[1] == 1280 + WIDTH
    weighed, same = (
        fit_regression(
            features[rows], source.labels[rows], 2, seed=recipe.seed, strength=0.01, importance=weights,
        )
        for weights in (fitted.model.layout.importance(), None)
    )  # fmt: skip
    again = fit(default(**{"regression.strength": 0.01}), source)
    found = again.model.classifier.weight.detach().numpy()
    assert np.abs(found - weighed.weight).max() < 0.02 * np.abs(weighed.weight).max()
    assert np.abs(found - same.weight).max() > 0.2 * np.abs(same.weight).max()


def test_the_regression_beside_heads_weighs_the_colours_too() -> None:
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1], [40, 20])
    features = generator.normal(size=(60, 200 + WIDTH)).astype(np.float32) + 0.2 * labels[:, None].astype(np.float32)
    recipe = named_recipe("adapter").override(
        **{"encoder.name": NAME, "regression.strength": 0.01, "adapter.blend": 0.5}
    )
    weights = np.repeat([1.0, 0.8], [200, WIDTH])
    _, fitted = fit_plain(Rows(features, labels, None, 2, weights), recipe)
    own = fit_regression(features, labels, 2, strength=0.01, importance=weights)
    assert np.array_equal(fitted.weight, own.weight)
    assert not np.allclose(fitted.weight, fit_regression(features, labels, 2, strength=0.01).weight)


@pytest.mark.slow
def test_an_ensemble_of_folds_shares_the_frozen_encoder(source: Source, photos: Path, tmp_path: Path) -> None:
    recipe = default(**{"data.folds": 3, "final": "ensemble", "data.source": str(photos)})
    run = run_recipe(recipe, tmp_path / "run")
    model, card = load_model(run.folder)
    assert (card.members, card.features) == (1, 1280 + WIDTH)
    notes = " ".join(event["text"] for event in run.events() if event["event"] == "note")
    assert "The model is the ensemble of the 3 models of the folds" in notes
    assert "An image costs as much as with one of them, because they share the encoder." in notes
    assert Scorer(model, card).images(source.images).shape == (42, 2)
    assert run.metrics is not None
    assert (run.metrics["folds"]["folds"], run.metrics["folds"]["members"]) == (3, 1)
    told = fold_words(run.metrics["folds"])
    assert "The model is the ensemble of 3 models (" in told
    assert told.endswith("An image costs as much as with one of them.")


@pytest.mark.slow
def test_the_mean_of_linear_layers_has_the_mean_logits(source: Source, tmp_path: Path) -> None:
    models = []
    for seed in range(2):
        plain = default(**{"encoder.name": "tf_efficientnet_lite0", "seed": seed, "data.test": 0.4})
        fit(plain, source, tmp_path / str(seed))
        models.append(load_model(tmp_path / str(seed)))
    moves = [(0.1, -0.2), (0.3, 0.0)]
    whole, card = average(models, moves)
    x = source.images.load(np.arange(6), 32, 3).float() / 255
    with torch.no_grad():
        expected = whole(x)
        one, own = average_classifiers(models, moves)
        assert torch.allclose(one(x), expected, atol=1e-4)
    assert (card.members, own.members) == (2, 1)
    assert own.prior == card.prior == models[0][1].prior


@pytest.mark.parametrize("name", ["pixels", f"{NAME}+pixels", "pixels+tf_efficientnet_lite0"])
def test_a_card_with_pixels_in_another_place_is_one_sentence(name: str, source: Source, tmp_path: Path) -> None:
    fit(default(), source, tmp_path / "run")
    path = tmp_path / "run" / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "encoder": name}))
    with pytest.raises(RunError) as caught:
        load_model(tmp_path / "run")
    assert str(caught.value).startswith(str(tmp_path / "run"))
    assert "\n" not in str(caught.value)
