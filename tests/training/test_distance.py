from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis

from lopsided.models.heads import DistanceHead, DistanceShape
from lopsided.training.averaged import fit_averaged
from lopsided.training.distance import (
    EXPECTED,
    EXPECTED_NEAR,
    LEAST_FACTOR,
    PULL,
    SHRINKAGE,
    Distance,
    Mixed,
    _calibrated,
    alignment,
    expected_strength,
    fit_distance,
    fit_distances,
    fit_mixed,
    reliance,
)
from lopsided.training.methods.distance import _state
from lopsided.training.regression import USUAL, Regression, fit_regression

ALL = np.arange(8)[None]


def images(num: int, seed: int = 0, shift: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((num, 8)) @ np.random.default_rng(9).standard_normal((8, 8))
    return (mixed + shift).astype(np.float32)


def test_the_distance_is_that_of_mahalanobis_with_a_shrunk_covariance() -> None:
    x = images(200)
    found = fit_distance(x, ALL)
    z = (x - x.mean(axis=0)) / x.std(axis=0)
    covariance = (1 - SHRINKAGE) * np.cov(z.T, bias=True) + SHRINKAGE * np.eye(8)
    inverse = np.linalg.inv(covariance)
    expected = np.array([mahalanobis(row, np.zeros(8), inverse) ** 2 for row in z])
    logs = found.column(x) * found.level[1] + found.level[0]
    np.testing.assert_allclose(np.exp(logs), expected, rtol=1e-4)


def test_the_distance_of_a_training_image_is_about_that_of_a_model_without_it() -> None:
    x = images(40)
    found = fit_distance(x, ALL)
    inside, without = np.exp(found.left_out * found.level[1] + found.level[0]), []
    for row in range(len(x)):
        other = fit_distance(np.delete(x, row, axis=0), ALL)
        without.append(np.exp(other.column(x[[row]])[0] * other.level[1] + other.level[0]))
    assert np.corrcoef(np.log(inside), np.log(without))[0, 1] > 0.95
    assert abs(np.log(inside).mean() - np.log(without).mean()) < 0.1


def test_the_classifier_computes_the_same_column_as_the_fit() -> None:
    x = images(60)
    found = fit_distances(x, [np.arange(5)[None], np.array([[0, 1], [6, 7], [2, 3]])])
    assert found.parts[0].column(x) == pytest.approx(found.parts[0].column(np.where(np.arange(8) < 5, x, 1e3)))
    found = replace(found, shares=np.array([0.5, 0.7]))
    mixed = fit_mixed(x, found.left_out, np.zeros(60, dtype=np.int64), 0, 2)
    shapes = [DistanceShape(positions=1, columns=5, axes=8), DistanceShape(positions=3, columns=2, axes=2)]
    head = DistanceHead(8, 2, shapes)
    head.load_state_dict(_state(found, mixed, shapes))
    with torch.no_grad():
        np.testing.assert_allclose(head.column(torch.from_numpy(x))[:, 0].numpy(), found.column(x), atol=1e-3)


def test_rare_images_among_the_normal_ones_do_little_harm() -> None:
    normal, far = images(300), images(50, seed=1, shift=6.0)
    clean = fit_distance(normal, ALL)
    mixed = fit_distance(np.concatenate([normal, far[:6]]), ALL)
    new = images(300, seed=2)
    for found in (clean, mixed):
        ranks = np.searchsorted(np.sort(found.column(new)), found.column(far[6:]))
        assert ranks.mean() / 300 > 0.98


@pytest.mark.parametrize("x", [np.zeros((1, 8), np.float32), np.ones((30, 8), np.float32)])
def test_one_image_or_equal_images_give_finite_numbers(x: np.ndarray) -> None:
    found = fit_distance(x, ALL)
    mixed = fit_mixed(x, found.left_out, np.zeros(len(x), dtype=np.int64), 0, 2)
    assert all(np.isfinite(part).all() for part in (found.column(images(5)), mixed.bias, mixed.pull))


def test_two_images_say_too_little_for_probabilities_that_no_longer_rank() -> None:
    found = fit_distance(images(2), ALL)
    new = PULL * found.column(images(50, seed=1))
    assert len(np.unique(1 / (1 + np.exp(-new)))) == 50


def test_the_rounding_of_equal_images_is_no_distance() -> None:
    x = np.ones((20, 8), np.float32)
    found = fit_distance(x, ALL)
    assert found.column(x * np.float32(1 + 1e-5)) == pytest.approx(found.left_out)
    assert (found.column(images(5)) > 10).all()


@pytest.mark.parametrize("num", [60, 400])
def test_training_images_are_as_far_as_new_ones_also_if_they_are_fewer_than_the_columns(num: int) -> None:
    rng, columns = np.random.default_rng(0), np.arange(200)[None]
    x = np.maximum(rng.standard_normal((num + 500, 200)) - 1, 0)  # Mostly 0, like activations.
    found = fit_distance(x[:num], columns)
    new = found.column(x[num:])
    assert abs(np.median(found.left_out) - np.median(new)) < 0.5


def test_one_rare_image_far_away_gets_a_strong_penalty_and_each_further_one_weakens_it() -> None:
    strengths, normal = [], images(200)
    for num in (1, 4, 40):
        x, labels = np.concatenate([normal, images(num, seed=1, shift=6.0)]), np.repeat([0, 1], [200, num])
        found = fit_distance(normal, ALL)
        mixed = fit_mixed(x, np.concatenate([found.left_out, found.column(x[200:])]), labels, 0, 2)
        assert mixed.regression is not None
        strengths.append(mixed.regression.strength)
    assert strengths[0] == EXPECTED < USUAL
    assert strengths == sorted(strengths)


def test_the_penalty_is_weaker_if_rare_images_are_not_far_away() -> None:
    column, normal = np.append(np.linspace(0, 1, 100), [0.0]), np.append(np.full(100, True), [False])

    def strength(rank: float, number: int) -> float:
        column[-1] = rank
        return expected_strength(reliance(column, normal, number), number)

    ranks = (0.99, 0.8, 0.6, 0.3)
    for number in (1, 5, 20):
        found = [strength(rank, number) for rank in ranks]
        assert found == sorted(found)
        assert found[-1] <= number * EXPECTED_NEAR
    assert strength(0.99, 1) == pytest.approx(EXPECTED)
    assert strength(0.99, 5) == pytest.approx(5 * EXPECTED)
    assert strength(0.0, 20) == pytest.approx(20 * EXPECTED_NEAR)
    assert strength(0.5, 1) < strength(0.5, 5) / 5, "One image is weak evidence that the distance says nothing."


def test_twenty_rare_images_choose_the_strength_near_the_expected_one() -> None:
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(220, 8)), np.repeat([0, 1], [200, 20])  # Noise: the strongest penalty is the best.
    free, near = (fit_regression(x, labels, 2, expected=expected) for expected in (None, 2e-3))
    assert free.strength <= 1e-4
    assert 2e-4 <= near.strength <= 2e-2


def mixture(normal: np.ndarray, rare: np.ndarray, **settings: Any) -> tuple[Mixed, np.ndarray, np.ndarray]:
    """Return the classifier of these images, and its log odds for new ones of both classes."""
    found = fit_distance(normal, ALL)
    x, labels = np.concatenate([normal, rare]), np.repeat([0, 1], [len(normal), len(rare)])
    mixed = fit_mixed(x, np.concatenate([found.left_out, found.column(rare)]), labels, 0, 2, **settings)

    def odds(new: np.ndarray) -> np.ndarray:
        linear = new @ (mixed.weight[1] - mixed.weight[0]) + mixed.bias[1] - mixed.bias[0]
        return linear + found.column(new) * (mixed.pull[1] - mixed.pull[0])

    return mixed, odds(images(500, seed=5)), odds(images(500, seed=6) + (rare.mean(axis=0) - normal.mean(axis=0)))


def test_regressions_without_the_distance_join_if_the_rare_images_are_no_farther_than_others() -> None:
    normal, rare = images(300), images(30, seed=1) * 0.3
    rare[:, 0] += 2.0  # Closer to the mean than most, and to one side.
    mixed, low, high = mixture(normal, rare)
    alone, *_ = mixture(normal, rare, strength=mixed.regression.strength)  # A given strength: the column alone.
    assert abs(mixed.pull[1] - mixed.pull[0]) < 0.1 * abs(alone.pull[1] - alone.pull[0])
    assert np.mean(high > np.median(low)) > 0.8
    averaged = fit_averaged(np.concatenate([normal, rare]), np.repeat([0, 1], [300, 30]), 2)
    np.testing.assert_allclose(mixed.weight, averaged.weight)
    np.testing.assert_allclose(mixed.bias, averaged.bias)


def test_calibration_keeps_the_ranking_if_left_out_images_say_nothing() -> None:
    labels, blank = np.repeat([0, 1], [20, 2]), np.zeros((22, 2))
    known = Regression(np.ones((2, 8)), np.zeros(2), 1e-3, 2, (), blank)
    found = _calibrated(Mixed(known.weight, known.bias, np.array([-1.0, 1.0]), known), labels, None)
    assert found.pull[1] - found.pull[0] == pytest.approx(2 * LEAST_FACTOR)


def test_calibration_leaves_a_class_without_images_far_below_the_others() -> None:
    labels, blank = np.repeat([0, 1], [200, 2]), np.zeros((202, 2))  # Nothing is known, so the factor is small.
    bias, pull = np.array([2.0, -2.0, -32.0]), np.array([-1.0, 0.5, 0.5])
    known = Regression(np.zeros((3, 8)), bias, 1e-3, 2, (), blank)
    found = _calibrated(Mixed(known.weight, known.bias, pull, known), labels, None)
    assert found.bias[:2].min() - found.bias[2] == pytest.approx(30)


def test_log_odds_are_calibrated_beside_the_class_shares() -> None:
    normal, rare = images(300), images(30, seed=1, shift=2.0)
    _, low, high = mixture(normal, rare)
    shares = np.log(30 / 300)
    assert np.mean(low < shares) == pytest.approx(np.mean(high > shares), abs=0.1)


def test_each_rare_image_moves_the_model_from_the_distance_to_what_images_say() -> None:
    normal = images(200)
    found = fit_distance(normal, ALL)
    pulls = []
    for num in (0, 1, 40):  # The rare images are as close as the normal ones: the distance says nothing.
        rare = images(num, seed=3)
        rare[:, 0] += 3.0
        x = np.concatenate([normal, rare])
        labels = np.repeat([0, 1], [200, num])
        column = np.concatenate([found.left_out, found.column(rare) * 0])
        mixed = fit_mixed(x, column, labels, 0, 2)
        pulls.append(mixed.pull[1] - mixed.pull[0])
    assert pulls[0] == PULL
    assert pulls[0] >= pulls[1] > pulls[2]


PLACES = np.arange(4 * 6).reshape(4, 6)


def placed(num: int, aligned: float, seed: int = 0) -> np.ndarray:
    """Return images with six numbers at each of four positions, whose means differ as far as they are aligned."""
    usual = 3 * np.random.default_rng(8).standard_normal((4, 6))
    here = np.random.default_rng(seed)
    noise = here.standard_normal((num, 4, 6))
    order = np.argsort(here.random((num, 4)), axis=1)  # Where each thing is, if the images are not aligned.
    return (aligned * usual + (1 - aligned) * usual[order] + noise).reshape(num, 24).astype(np.float32)


def test_alignment_is_the_share_of_the_variance_that_positions_explain_also_with_few_images() -> None:
    for num in (5, 300):
        found = np.mean([alignment(placed(num, 1.0, seed), PLACES) for seed in range(20)])
        usual = 3 * np.random.default_rng(8).standard_normal((4, 6))
        variance = usual.var(axis=0)
        assert found == pytest.approx(np.mean(variance / (variance + 1)), abs=0.03)
        assert np.mean([alignment(placed(num, 0.0, seed), PLACES) for seed in range(20)]) == pytest.approx(0, abs=0.03)


def test_a_thing_in_the_wrong_place_is_far_by_positions_and_counts_if_images_are_aligned() -> None:
    whole = np.array([[0]])
    for aligned, counts in ((1.0, True), (0.0, False)):
        found = fit_distances(placed(300, aligned), [whole, PLACES])
        assert (found.shares[1] > 0) == counts
        new, swapped = placed(200, aligned, seed=1), placed(200, aligned, seed=2)
        swapped[:, 6:12], swapped[:, 12:18] = swapped[:, 12:18].copy(), swapped[:, 6:12].copy()
        rank = np.searchsorted(np.sort(found.parts[1].column(new)), found.parts[1].column(swapped)).mean() / 200
        assert rank > 0.99 if aligned else abs(rank - 0.5) < 0.1
        assert abs(found.left_out.std() - 1) < 0.15


def test_the_sum_of_distances_is_the_only_distance_if_there_is_one() -> None:
    x = images(80)
    alone, found = fit_distance(x, ALL, seed=3), fit_distances(x, [ALL], seed=3)
    np.testing.assert_array_equal(found.column(x), alone.column(x))
    np.testing.assert_array_equal(found.left_out, alone.left_out)


def test_a_position_where_all_images_are_the_same_does_not_outweigh_the_others() -> None:
    x = placed(200, 1.0)
    x[:, :6] = 1e-4 * images(200)[:, :6]  # The same background, but for noise.
    found, dusty = fit_distance(x, PLACES), x.copy()
    dusty[:, 0] += 0.02
    assert np.median(found.column(dusty) - found.column(x)) < 0.5


def test_groups_stay_together_when_images_are_left_out() -> None:
    x = np.repeat(images(40), 5, axis=0)  # Each image five times: a copy in the fit would be no distance away.
    groups = np.repeat(np.arange(40), 5).astype(str)
    apart, joint = fit_distance(x, ALL), fit_distance(x, ALL, groups=groups)

    def logs(found: Distance) -> float:
        return float((found.left_out * found.level[1] + found.level[0]).mean())

    assert logs(joint) > logs(apart) + 0.05
    assert logs(joint) != logs(fit_distance(x, ALL, groups=groups, seed=1))


@pytest.mark.parametrize("x", [np.zeros((1, 24), np.float32), np.ones((30, 24), np.float32), placed(2, 1.0)])
def test_one_image_or_equal_images_have_finite_distances_by_positions(x: np.ndarray) -> None:
    found = fit_distances(x, [np.arange(3)[None], PLACES])
    assert np.isfinite(found.column(placed(9, 1.0))).all()
    assert np.isfinite(found.left_out).all()
