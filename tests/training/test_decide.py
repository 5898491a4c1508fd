"""The prior that a trained model carries, its calibration and its decision rule."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from lopsided.data.prepare import Sources
from lopsided.data.samplers import BatchSampler
from lopsided.data.sources import Source
from lopsided.errors import InputError
from lopsided.evaluation.calibration import HeldBack, carried_prior, fit_calibration
from lopsided.losses import catalogue
from lopsided.losses.objective import Samples
from lopsided.models.model import CARD_NAME, load_model
from lopsided.recipe import Recipe, named_recipe
from lopsided.training.fit import fit
from tiny import write_photos
from training.conftest import stripes, tiny

COUNTS = (240, 48, 12)
CALIBRATED = {
    name: {"encoder_training.loss": name, **changes}
    for name, changes in {
        **{entry.name: {} for entry in catalogue.losses(["classification"]) if entry.name != "ldam"},
        "logit-adjusted ": {"encoder_training.loss": {"name": "logit-adjusted", "tau": 0.5}},
        "class-balanced ": {"encoder_training.loss": {"name": "class-balanced", "beta": 0.98}},
        "label-aware-smoothing ": {
            "encoder_training.loss": {"name": "label-aware-smoothing", "smooth_head": 0.5, "smooth_tail": 0.1}
        },
    }.items()
}
"""Focal loss and LDAM are no proper scores: their best constant probabilities are not the shares."""


@pytest.mark.parametrize("sampler", ["plain", "balanced", "sqrt", "m-per-class"])
@pytest.mark.parametrize("loss", CALIBRATED)
def test_images_without_information_get_the_prior_as_probabilities(loss: str, sampler: str) -> None:
    """So that ``balanced``, which divides by the prior, corrects each loss and sampler exactly once."""
    recipe = Recipe().override(**CALIBRATED[loss]).override(**{"encoder_training.sampler": sampler})
    labels = np.repeat(np.arange(3), COUNTS)
    drawn = labels[np.concatenate(list(BatchSampler(labels, 30, kind=sampler, m_per_class=10, seed=0)))]
    settings = recipe.encoder_training.loss
    objective = settings.entry.load()(torch.tensor(COUNTS), 4, **settings.parameters).double()
    y = torch.from_numpy(drawn)

    def total(bias: np.ndarray) -> float:
        logits = torch.from_numpy(bias).expand(len(y), 3)
        parts = objective(Samples(y=y, whole=y, logits=logits, epoch=0, epochs=10))
        return float((parts[0] if isinstance(parts, tuple) else parts).sum())

    bias = minimize(total, np.zeros(3), method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-12}).x
    p = np.exp(bias - bias.max()) / np.exp(bias - bias.max()).sum()
    np.testing.assert_allclose(p, carried_prior(recipe, COUNTS), atol=0.02)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"encoder_training.loss": "ce"}, (0.8, 0.16, 0.04)),
        ({"encoder_training.loss": "weighted-ce"}, (1 / 3, 1 / 3, 1 / 3)),
        ({"encoder_training.loss": "logit-adjusted"}, (1 / 3, 1 / 3, 1 / 3)),
        ({"encoder_training.loss": {"name": "class-balanced", "beta": 0.0}}, (0.8, 0.16, 0.04)),
        ({"encoder_training.loss": {"name": "class-balanced", "beta": 1.0}}, (1 / 3, 1 / 3, 1 / 3)),
        ({"encoder_training.loss": {"name": "ldam", "defer": 1.0}}, (0.8, 0.16, 0.04)),
        ({"encoder_training.loss": {"name": "ldam", "beta": 1.0}}, (1 / 3, 1 / 3, 1 / 3)),
        ({"encoder_training.loss": "bcl", "method": "end-to-end"}, (1 / 3, 1 / 3, 1 / 3)),
        (
            {"encoder_training.loss": "bcl", "method": "two-stage", "classifier.sampler": "plain"},
            (0.8, 0.16, 0.04),
        ),
        ({"encoder_training.loss": "cl", "classifier.sampler": "balanced"}, (1 / 3, 1 / 3, 1 / 3)),
        ({"encoder_training.loss": "cl", "classifier.sampler": "plain"}, (0.8, 0.16, 0.04)),
        (
            {"encoder_training.loss": "cl", "classifier.sampler": "balanced", "classifier.loss": "weighted-ce"},
            tuple(np.array([1 / 240, 1 / 48, 1 / 12]) / sum([1 / 240, 1 / 48, 1 / 12])),
        ),
    ],
)
def test_the_stage_that_trains_the_classifier_sets_the_prior(changes: dict, expected: tuple[float, ...]) -> None:
    assert carried_prior(Recipe().override(**changes), COUNTS) == pytest.approx(expected)


def test_a_class_without_training_images_has_no_share() -> None:
    recipe = Recipe().override(**{"encoder_training.loss": "weighted-ce"})
    assert carried_prior(recipe, (8, 2, 0)) == (0.5, 0.5, 0.0)


def test_calibration_becomes_part_of_the_weights_and_the_card_says_so(tmp_path: Path) -> None:
    source = stripes({"many": 120, "few": 40})
    recipe = tiny(encoder_training__loss="ce", encoder_training__epochs=6, data__val=0.3)
    raw = fit(recipe.override(**{"decision.calibration": "none", "decision.rule": "plain"}), source)
    found = fit(recipe, source, tmp_path / "run")
    assert raw.val is not None
    assert found.val is not None
    assert raw.card.temperature == 1
    assert raw.card.calibrated_on == 0
    change = fit_calibration(HeldBack(raw.val.probabilities, raw.val.y_true), found.card.prior)
    assert found.card.temperature == pytest.approx(change.temperature, rel=1e-6)
    assert found.card.bias == pytest.approx(change.bias, rel=1e-6)
    assert abs(found.card.temperature - 1) > 0.01
    assert found.card.calibrated_on == len(found.val.names)
    np.testing.assert_allclose(found.val.probabilities, change(raw.val.probabilities), atol=1e-6)
    model, card = load_model(tmp_path / "run")
    assert card == found.card
    torch.testing.assert_close(model.classifier.weight, found.model.classifier.weight)


def test_the_rule_of_the_recipe_decides() -> None:
    source = stripes({"many": 160, "few": 16})
    changes = {"encoder_training__loss": "ce", "encoder_training__epochs": 1, "encoder_training__lr": 1e-4}
    changes["data__val"] = 0.0
    plain = fit(tiny(**changes, decision__rule="plain"), source)
    balanced = fit(tiny(**changes), source)
    assert plain.test is not None
    assert balanced.test is not None
    np.testing.assert_array_equal(plain.test.probabilities, balanced.test.probabilities)
    np.testing.assert_array_equal(plain.test.y_pred, plain.test.probabilities.argmax(axis=1))
    divided = balanced.test.probabilities / np.array(balanced.card.prior)
    np.testing.assert_array_equal(balanced.test.y_pred, divided.argmax(axis=1))
    assert (plain.test.y_pred != balanced.test.y_pred).any()


def test_a_rule_that_is_fitted_needs_validation_images(source: Source) -> None:
    with pytest.raises(InputError, match="there are no validation images"):
        fit(tiny(encoder_training__loss="ce", data__val=0.0, decision__rule="tuned"), source)


def test_a_rule_that_cannot_be_used_is_refused_before_training(source: Source) -> None:
    with pytest.raises(InputError, match="no class 'fish'"):
        fit(tiny(encoder_training__epochs=10**6, decision__rule="cost:fish=2,many=1"), source)
    with pytest.raises(InputError, match="no validation images"):
        fit(tiny(encoder_training__epochs=10**6, data__val=0.0, decision__rule="tuned"), source)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prior", [0.5, 0.6], "add up to 1"),
        ("prior", [1.0], "add up to 1"),
        ("decision", {"rule": "balanced", "offsets": [0.0, 1.0, 2.0]}, "another number of classes"),
        ("decision", {"rule": "recall:few>=0.9", "target": 1, "threshold": 1.5}, "not a valid model card"),
        ("temperature", -1.0, "not a valid model card"),
    ],
)
def test_a_card_with_an_impossible_decision_is_refused(
    tmp_path: Path, source: Source, field: str, value: object, words: str
) -> None:
    fit(tiny(encoder_training__epochs=1), source, tmp_path / "run")
    path = tmp_path / "run" / CARD_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(Exception, match=words):
        load_model(tmp_path / "run")


@pytest.mark.parametrize("val", [0.0, 0.3])
def test_probabilities_carry_the_class_shares_whatever_trained_them(val: float) -> None:
    source = stripes({"many": 120, "few": 40})
    changes = {"encoder_training__loss": "weighted-ce", "encoder_training__epochs": 4, "data__val": val}
    raw = fit(tiny(**changes, decision__calibration="none"), source)
    found = fit(tiny(**changes), source)
    assert raw.card.prior == (0.5, 0.5)
    counts = np.bincount(source.labels[found.splits.train])
    assert found.card.prior == pytest.approx(counts / counts.sum())
    assert raw.test is not None
    assert found.test is not None
    if val == 0:
        moved = raw.test.probabilities * found.card.prior / 0.5
        np.testing.assert_allclose(found.test.probabilities, moved / moved.sum(axis=1, keepdims=True), atol=1e-6)
        np.testing.assert_array_equal(found.test.y_pred, raw.test.y_pred)  # balanced does not depend on the prior.


def test_further_images_do_not_move_the_prior_of_the_model(tmp_path: Path) -> None:
    """A model chose them, so their class shares are not those of images to come."""
    photos = write_photos(tmp_path / "photos", {"cat": 12, "dog": 4})
    write_photos(tmp_path / "pool", {"dog": 9}, start=50)
    marks = tmp_path / "marks.csv"
    marks.write_text("path,label\n" + "".join(f"pool/dog/{i:03d}.png,dog\n" for i in range(50, 59)))
    changes = {"data.source": str(photos), "data.val": 0.0, "data.test": 0.0, "data.more": [str(marks)]}
    recipe = named_recipe("quick").override(**changes, device="cpu")
    source, _ = Sources().open(recipe)
    fitted = fit(recipe, source)
    assert len(fitted.splits.train) == 25
    assert fitted.card.prior == (0.75, 0.25)
