"""The mean of logistic and ridge regressions on all columns and on parts of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy.special import log_softmax

from lopsided.training import regression
from lopsided.training.averaged import fit_averaged, fit_odds
from lopsided.training.regression import LOGISTIC, RIDGE, Regression, Rows, best_strength, fit_regression


def blobs(
    counts: Sequence[int], *, dim: int = 6, distance: float = 1.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    return generator.normal(size=(len(labels), dim)) + distance * np.eye(len(counts), dim)[labels] + 5.0, labels


def halves(x: np.ndarray) -> list[np.ndarray]:
    return np.split(np.arange(x.shape[1]), [x.shape[1] // 2])


def logits(fitted: Regression, x: np.ndarray) -> np.ndarray:
    found: np.ndarray = x @ fitted.weight.T + fitted.bias
    return found


def is_affine(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether differences of two logits are a factor above 0 times those of the other, plus a constant."""
    slope, shift = np.polyfit(other, one, 1)
    return bool(slope > 0 and np.allclose(one, slope * other + shift, atol=1e-6))


def test_the_layer_of_each_regression_is_what_its_rows_say() -> None:
    """Alone on two columns, logistic and ridge regression, each calibrated, have a mean that is affine in their sum."""
    x, labels = blobs([60, 15], dim=2)
    rows, margins = Rows(x, labels, None, 5, 0), []
    for kind in (LOGISTIC, RIDGE):
        layer = rows.layer(kind, best_strength(rows.path(kind, kind.strengths).losses))
        margins.append((x @ layer.weight.T + layer.bias) @ [-1.0, 1.0])
    found = logits(fit_averaged(x, labels, 2), x) @ [-1.0, 1.0]
    design = np.column_stack([*margins, np.ones(len(x))])
    factors, _, _, _ = np.linalg.lstsq(design, found, rcond=None)
    assert design @ factors == pytest.approx(found, abs=1e-6)
    assert (factors[:2] > 0).all()


@pytest.mark.parametrize("num_classes", [2, 3])
def test_scores_become_the_log_odds_by_which_labels_were_drawn(num_classes: int) -> None:
    generator = np.random.default_rng(0)
    odds = 1.5 * generator.normal(size=(20_000, num_classes))
    labels = (odds + generator.gumbel(size=odds.shape)).argmax(axis=1)
    bias = np.linspace(-0.5, 0.5, num_classes)
    factor, shift = fit_odds((odds - bias) / 40, labels, np.ones(len(labels)))
    assert factor == pytest.approx(40, rel=0.05)
    assert shift == pytest.approx(bias, abs=0.05)


def test_scores_that_are_noise_or_wrong_get_no_factor_and_scores_without_an_error_a_finite_one() -> None:
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1], [90, 10])
    truth = np.eye(2)[labels]
    assert fit_odds(-truth, labels, np.ones(100))[0] == 0
    assert fit_odds(1e-9 * generator.normal(size=(100, 2)), labels, np.ones(100))[0] < 0.5e9
    assert 2 < fit_odds(truth, labels, np.ones(100))[0] < 30


def test_the_probabilities_carry_the_class_shares() -> None:
    x, labels = blobs([300, 30], dim=3)
    p = np.exp(log_softmax(logits(fit_averaged(x, labels, 2, parts=halves(x)), x), axis=1))
    assert p[:, 1].mean() == pytest.approx(30 / 330, abs=0.03)


def test_with_few_rows_of_a_class_each_part_has_regressions_of_its_own() -> None:
    x, labels = blobs([60, 20])
    alone, parts = fit_averaged(x, labels, 2), fit_averaged(x, labels, 2, parts=halves(x))
    assert not is_affine(logits(parts, x) @ [-1.0, 1.0], logits(alone, x) @ [-1.0, 1.0])
    assert np.array_equal(fit_averaged(x, labels, 2, parts=halves(x)[:1]).weight, alone.weight)
    assert (parts.strength, parts.losses, parts.folds) == (alone.strength, alone.losses, 5)
    plain = fit_regression(x, labels, 2)
    assert (parts.strength, parts.losses) == (plain.strength, plain.losses)


@pytest.mark.parametrize("groups", [None, 20])
def test_parts_have_no_effect_with_many_rows_of_each_class_unless_their_groups_are_few(groups: int | None) -> None:
    x, labels = blobs([60, 50])
    names = None if groups is None else np.array([f"{label} {row % groups}" for row, label in enumerate(labels)])
    with_parts, alone = (fit_averaged(x, labels, 2, groups=names, parts=parts) for parts in (halves(x), ()))
    assert np.array_equal(with_parts.weight, alone.weight) == (groups is None)


def test_a_part_of_noise_does_little_harm() -> None:
    x, labels = blobs([100, 40], dim=2, distance=2.0)
    noise = np.random.default_rng(1).normal(size=(len(x), 20))
    fitted = fit_averaged(np.concatenate([x, noise], axis=1), labels, 2, parts=[np.arange(2), np.arange(2, 22)])
    margin = logits(fitted, np.concatenate([x, noise], axis=1)) @ [-1.0, 1.0]
    alone = logits(fit_averaged(x, labels, 2), x) @ [-1.0, 1.0]
    assert np.corrcoef(margin, alone)[0, 1] > 0.9


def test_importance_is_that_of_the_columns_of_a_part() -> None:
    x, labels = blobs([60, 20])
    importance = np.ones(6)
    importance[0] = 1e-6
    fitted = fit_averaged(x, labels, 2, parts=halves(x), importance=importance)
    assert np.abs(fitted.weight[:, 0]).max() < 1e-6 < np.abs(fitted.weight[:, 1]).max()


@pytest.mark.parametrize("counts", [[60, 1], [60, 20]])
def test_one_regression_is_fitted_without_inner_folds_or_if_rows_are_very_many(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, labels = blobs(counts)
    if counts[1] > 1:
        monkeypatch.setattr(regression, "_MANY", 100)
    assert np.array_equal(fit_averaged(x, labels, 2, parts=halves(x)).weight, fit_regression(x, labels, 2).weight)


def test_a_class_without_rows_is_never_predicted() -> None:
    x, labels = blobs([40, 20])
    found = logits(fit_averaged(x, 2 * labels, 3, parts=halves(x)), x)
    assert set(found.argmax(axis=1)) == {0, 2}
    assert (found[:, 1] < found.max(axis=1) - 10).all()


def test_groups_stay_together_in_the_rows_that_calibrate() -> None:
    """Each group has a code of its own. Rows of the same group know it, and rows of another group do not."""
    generator = np.random.default_rng(1)
    groups = np.repeat(np.arange(40), 5)
    x = np.repeat(generator.normal(size=(40, 30)), 5, axis=0) + 0.01 * generator.normal(size=(200, 30))
    together, apart = (
        np.abs(logits(fit_averaged(x, groups % 2, 2, groups=names), x) @ [-1.0, 1.0]).mean()
        for names in (groups.astype(str), None)
    )
    assert together < 0.5 * apart


def test_a_row_of_weight_two_is_there_twice() -> None:
    """Inner folds of rows that are there twice tear some apart, so that only the shares are compared."""
    x, labels = blobs([60, 30], dim=3)
    weights = np.where(labels == 1, 2.0, 1.0)
    p = np.exp(log_softmax(logits(fit_averaged(x, labels, 2, weights=weights), x), axis=1))
    assert np.average(p[:, 1], weights=weights) == pytest.approx(0.5, abs=0.05)


def test_rows_left_out_are_scored_like_new_ones_also_with_far_more_columns_than_rows_and_a_weak_penalty() -> None:
    """One column decides among thousands of noise. The factor of the rows left out must fit the layer of all rows."""
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1], [15, 7])
    noise, importance = generator.normal(size=(22, 2000)), np.ones(2001)
    importance[-1] = 30.0
    x = np.column_stack([noise, 5.0 * labels + generator.normal(size=22)])
    rows = Rows(x, labels, None, 5, 0, importance)
    outside = rows.path(RIDGE, RIDGE.strengths, 99).left_out(RIDGE.strengths[-1]) @ [-1.0, 1.0]
    layer = rows.layer(RIDGE, RIDGE.strengths[-1])
    inside = (x @ layer.weight.T + layer.bias) @ [-1.0, 1.0]
    assert 0.3 < outside.std() / inside.std() < 1.0
