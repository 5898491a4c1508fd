"""The losses of the field in training: their heads, views and classes, and the decisions of their models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from lopsided.data.sources import Source
from lopsided.errors import InputError
from lopsided.evaluation.calibration import carried_prior
from lopsided.inference.scorer import Scorer
from lopsided.losses import Samples, catalogue
from lopsided.metrics import balanced_accuracy
from lopsided.models.heads import CosineHead
from lopsided.models.model import load_model
from lopsided.recipe import Recipe
from lopsided.training.fit import fit
from training.conftest import stripes, tiny

NEW = ["logit-adjusted", "class-balanced", "label-aware-smoothing", "ldam", "bcl", "supmin", "supproto"]


def changes_of(loss: str, **more: Any) -> dict[str, Any]:
    return {"encoder_training__loss": loss, "encoder_training__views": catalogue.find(loss).views, **more}


@pytest.mark.slow
@pytest.mark.parametrize("loss", NEW)
def test_every_method_learns_to_tell_stripes_apart(loss: str) -> None:
    source = stripes({"many": 140, "few": 30})
    more = {"encoder_training__epochs": 15, "classifier__epochs": 15, "classifier__lr": 0.05, "data__test": 0.25}
    fitted = fit(tiny(**changes_of(loss, **more)), source)
    assert fitted.test is not None
    assert balanced_accuracy(fitted.test.y_true, fitted.test.y_pred) > 0.9


@pytest.mark.parametrize("where", ["end-to-end", "classifier", "joint"])
def test_a_cosine_head_is_on_the_card_and_comes_back_with_the_model(source: Source, tmp_path: Path, where: str) -> None:
    changes = {
        "end-to-end": changes_of("ldam"),
        "classifier": {"encoder_training__loss": "cl", "classifier__loss": "ldam"},
        "joint": changes_of("bcl"),
    }[where]
    recipe = tiny(**changes, encoder_training__epochs=2, data__val=0.2)
    fitted = fit(recipe, source, tmp_path)
    assert fitted.card.head == "cosine"
    assert fitted.card.calibrated_on > 0
    model, card = load_model(tmp_path)
    assert isinstance(model.classifier, CosineHead)
    # Calibration divided the scale by its temperature.
    assert float(model.classifier.scale) == pytest.approx(30 / card.temperature, rel=1e-5)
    assert fitted.test is not None
    names = list(source.names)
    rows = [names.index(name) for name in fitted.test.names]
    np.testing.assert_allclose(Scorer(model, card).images(source.images)[rows], fitted.test.probabilities, atol=1e-6)


def test_the_first_of_two_stages_may_have_a_cosine_head_of_its_own(source: Source) -> None:
    fitted = fit(tiny(**changes_of("bcl", method="two-stage"), encoder_training__epochs=1), source)
    assert fitted.card.head == "linear"
    assert {entry["stage"] for entry in fitted.history} == {"encoder", "classifier"}


@pytest.mark.parametrize("loss", ["supmin", "supproto"])
def test_a_loss_for_two_classes_refuses_three_before_it_trains(loss: str, tmp_path: Path) -> None:
    source = stripes({"many": 30, "some": 12, "few": 12})
    with pytest.raises(InputError) as caught:
        fit(tiny(**changes_of(loss)), source, tmp_path / "run")
    assert str(caught.value) == (
        f"The loss {loss} is for 2 classes, but the data have 3. Choose another loss with encoder_training.loss; "
        "`lopsided losses` lists them."
    )
    with pytest.raises(ValueError, match=r"must have 2 classes, got 3\. Use bcl or afcl for more classes\."):
        catalogue.find(loss).load()(torch.tensor([30, 12, 12]), 4)


@pytest.mark.parametrize("loss", ["supmin", "supproto"])
def test_a_loss_that_needs_views_says_so(loss: str) -> None:
    with pytest.raises(InputError) as caught:
        Recipe().override(**{"encoder_training.loss": loss})
    assert str(caught.value) == (
        f"encoder_training.views must be >= 2 with the loss {loss}, got 1. Set encoder_training.views = 2."
    )


@pytest.mark.parametrize(
    ("loss", "parameter", "value", "text"),
    [
        ("logit-adjusted", "tau", -0.1, "must be a finite number >= 0 and <= 10, got -0.1."),
        ("class-balanced", "beta", 1.1, "must be a finite number >= 0 and <= 1, got 1.1."),
        ("label-aware-smoothing", "smooth_head", 1.0, "must be a finite number >= 0 and <= 0.999, got 1.0."),
        ("ldam", "max_margin", 2.0, "must be a finite number >= 0 and <= 1, got 2.0."),
        ("ldam", "scale", 0.0, "must be a finite number > 0 and <= 1000000.0, got 0.0."),
        ("ldam", "defer", 1.5, "must be a finite number >= 0 and <= 1, got 1.5."),
        ("bcl", "ce_weight", -1.0, "must be a finite number >= 0, got -1.0."),
        ("bcl", "contrast_weight", -1.0, "must be a finite number >= 0, got -1.0."),
        ("supmin", "temperature", 0.0, "must be a finite number >= 1e-06 and <= 1000000.0, got 0.0."),
        ("supproto", "margin", 2.5, "must be a finite number >= 0 and <= 2, got 2.5."),
    ],
)
def test_the_range_of_each_parameter_is_checked_in_a_recipe(loss: str, parameter: str, value: float, text: str) -> None:
    views = catalogue.find(loss).views
    with pytest.raises(InputError) as caught:
        Recipe().override(
            **{"encoder_training.loss": {"name": loss, parameter: value}, "encoder_training.views": views}
        )
    assert str(caught.value) == f"encoder_training.loss.{parameter} {text}"


def test_a_smoothing_of_the_tail_above_the_head_is_inconsistent() -> None:
    table = {"name": "label-aware-smoothing", "smooth_head": 0.1, "smooth_tail": 0.2}
    with pytest.raises(InputError, match=r"smooth_tail is 0\.2, but smooth_head is only 0\.1\."):
        Recipe().override(**{"encoder_training.loss": table})


def best_probabilities(name: str, joint: np.ndarray, **parameters: Any) -> np.ndarray:
    """The probabilities (x, K) of free logits that minimise a loss; joint[x, c] images have the input x and class c."""
    entry = catalogue.find(name)
    objective = entry.load()(torch.tensor(joint.sum(axis=0)), 4, **{**entry.defaults(), **parameters}).double()
    x = torch.from_numpy(np.repeat(np.arange(len(joint)), joint.sum(axis=1)))
    y = torch.from_numpy(np.concatenate([np.repeat(np.arange(joint.shape[1]), row) for row in joint]))

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        logits = torch.from_numpy(flat.reshape(joint.shape)).requires_grad_()
        total = objective(Samples(y, y, logits=logits[x], epoch=9, epochs=10)).sum()
        total.backward()
        assert logits.grad is not None
        return float(total.detach()), logits.grad.numpy().ravel()

    start = np.zeros(joint.size)
    flat = minimize(value, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-9}).x
    return torch.from_numpy(flat.reshape(joint.shape)).softmax(dim=1).numpy()


JOINT = np.array([[300, 4], [60, 20], [40, 36]])
POSTERIOR = JOINT / JOINT.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("ce", {}),
        ("weighted-ce", {}),
        ("logit-adjusted", {}),
        ("logit-adjusted", {"tau": 0.4}),
        ("class-balanced", {}),
        ("class-balanced", {"beta": 0.99}),
    ],
)
def test_the_probabilities_are_posteriors_under_the_prior_that_they_carry(
    name: str, parameters: dict[str, Any]
) -> None:
    counts = JOINT.sum(axis=0)
    entry = catalogue.find(name)
    factors = [1, 1] if entry.reweighs is None else entry.reweighs(counts.tolist(), {**entry.defaults(), **parameters})
    moved = POSTERIOR * np.array(factors)
    expected = moved / moved.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(best_probabilities(name, JOINT, **parameters), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("label-aware-smoothing", {"smooth_head": 0.4}),
        ("focal", {}),
        ("focal", {"gamma": 5.0}),
        ("ldam", {}),
        ("ldam", {"defer": 1.0}),
    ],
)
def test_the_balanced_rule_decides_as_for_the_posteriors(name: str, parameters: dict[str, Any]) -> None:
    """Their probabilities are no posteriors, but p / prior must still cross 1 where posterior / share does."""
    counts = JOINT.sum(axis=0)
    loss = {"name": name, **parameters}
    prior = np.array(carried_prior(Recipe().override(**{"encoder_training.loss": loss}), counts))
    found = best_probabilities(name, JOINT, **parameters)
    if name == "ldam" and parameters:  # Margins alone: the plain decision is that of the posterior.
        np.testing.assert_array_equal(found.argmax(axis=1), POSTERIOR.argmax(axis=1))
        return
    shares = counts / counts.sum()
    np.testing.assert_array_equal((found / prior).argmax(axis=1), (POSTERIOR / shares).argmax(axis=1))


@pytest.mark.parametrize(("gamma", "rare"), [(0.0, 0.02), (2.0, 0.02), (2.0, 0.3), (5.0, 0.1)])
def test_focal_loss_carries_the_probabilities_that_are_best_for_images_without_information(
    gamma: float, rare: float
) -> None:
    shares = np.array([1 - rare, rare])
    recipe = Recipe().override(**{"encoder_training.loss": {"name": "focal", "gamma": gamma}})
    prior = carried_prior(recipe, (1000 * shares).round().astype(int))
    grid = np.linspace(1e-4, 1 - 1e-4, 99_999)
    mean = sum(s * (1 - p) ** gamma * -np.log(p) for s, p in zip(shares, (1 - grid, grid), strict=True))
    assert prior[1] == pytest.approx(grid[mean.argmin()], abs=1e-4)
    assert prior[1] >= rare - 1e-6, "Focal loss is less sure of the frequent class."
