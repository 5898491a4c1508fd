from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import trapezoid
from sklearn.metrics import balanced_accuracy_score, precision_recall_curve, precision_score, recall_score, roc_curve

from lopsided.evaluation.metrics import evaluate
from lopsided.reports.thresholds import Counts, counts_at, curves, favoured, is_sure, matching, mean_curves

# Few distinct values, so that many images share one; the grid's own points among them.
shares = st.sampled_from([0.0, 0.05, 0.2, 0.3, 0.5, 0.501, 0.7, 0.999, 1.0]) | st.floats(0, 1, width=32)
sure = st.sampled_from([1e-12, 1e-7, 3e-7, 1e-6, 1e-5, 1 - 1e-6, 1 - 2e-7, 1.0])
splits = st.lists(st.tuples(shares, st.booleans()), min_size=1, max_size=40)


def arrays(split: list[tuple[float, bool]]) -> tuple[np.ndarray, np.ndarray]:
    p, positive = zip(*split, strict=True)
    return np.array(p, dtype=np.float32), np.array(positive)


@pytest.mark.slow
@given(splits, shares)
@settings(deadline=None, max_examples=100)
def test_the_figures_at_a_threshold_are_those_of_scikit_learn(
    split: list[tuple[float, bool]], threshold: float
) -> None:
    p, positive = arrays(split)
    called = p >= np.float32(threshold)
    found = counts_at(p, positive, threshold)
    assert found.tp + found.fn + found.fp + found.tn == len(split)
    if positive.any():
        assert found.recall == pytest.approx(recall_score(positive, called))
    else:
        assert found.recall is None
    if called.any() and positive.any():
        assert found.precision == pytest.approx(precision_score(positive, called))
    else:
        assert found.precision is None
    if positive.any() and not positive.all():
        assert found.uwa == pytest.approx(balanced_accuracy_score(positive, called))


def test_figures_of_nothing_are_not_defined() -> None:
    assert Counts(0, 0, 0, 0).uwa is None
    without = Counts(tp=0, fn=0, fp=1, tn=3)
    assert (without.specificity, without.precision, without.uwa) == (0.75, None, None), "There is nothing to find."
    assert Counts(tp=3, fn=1, fp=0, tn=0).uwa == 0.75


@given(splits | st.lists(st.tuples(sure, st.booleans()), min_size=1, max_size=40))
@settings(deadline=None, max_examples=100)
def test_no_threshold_is_better_than_the_favoured_one(split: list[tuple[float, bool]]) -> None:
    p, positive = arrays(split)
    found = favoured(p, positive)
    if positive.all() or not positive.any():
        assert found is None
        return
    assert found is not None
    assert 0 <= found <= 1
    every = [0.0, *p.tolist(), *(step / 100 for step in range(101))]
    best = max(counts_at(p, positive, threshold).uwa or 0.0 for threshold in every)
    assert counts_at(p, positive, found).uwa == pytest.approx(best)


def test_the_favoured_threshold_is_the_middle_of_the_longest_best_stretch() -> None:
    positive = np.array([False, False, True, True])
    assert favoured(np.array([0.1, 0.2, 0.6, 0.7], dtype=np.float32), positive) == 0.4
    # From 0.1 to 0.3 and from 0.5 to 0.9 one of two others is left alone and one of two positives is found or more.
    two = favoured(np.array([0.1, 0.5, 0.3, 0.9], dtype=np.float32), positive)
    assert two == 0.7


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_a_model_that_is_very_sure_has_a_favoured_threshold_that_tells_its_classes_apart(shift: float) -> None:
    p = np.abs(shift - np.array([2e-7, 1e-6, 5e-6, 2e-5], dtype=np.float32))
    positive = np.array([False, False, True, True]) ^ bool(shift)
    found = favoured(p, positive)
    assert found is not None
    assert counts_at(p, positive, found).uwa == 1.0
    assert is_sure(p, None)
    assert is_sure(np.array([0.5], dtype=np.float32), found)
    assert not is_sure(np.array([0.5], dtype=np.float32), 0.4)


@given(splits)
@settings(deadline=None, max_examples=60)
def test_curves_are_those_of_scikit_learn(split: list[tuple[float, bool]]) -> None:
    p, positive = arrays(split)
    roc, precision_recall = curves(p, positive)
    if positive.all() or not positive.any():
        assert roc == precision_recall == []
        return
    fpr, tpr, _ = roc_curve(positive, p, drop_intermediate=False)
    assert np.array(roc) == pytest.approx(np.stack([fpr, tpr], axis=1))
    precision, recall, _ = precision_recall_curve(positive, p)
    # scikit-learn goes from the loosest threshold on and adds the point (0, 1).
    assert np.array(precision_recall) == pytest.approx(np.stack([recall, precision], axis=1)[:-1][::-1])


def test_curves_of_folds_have_the_areas_of_the_metrics() -> None:
    rng = np.random.default_rng(0)
    positive, folds = np.arange(400) % 10 == 0, rng.integers(0, 5, 400)
    p = (1 / (1 + np.exp(-(rng.normal(size=400) + 1.5 * positive + 3 * folds)))).astype(np.float32)
    figures = evaluate(positive.astype(int), np.stack([1 - p, p], axis=1), classes=[0, 1], folds=folds).per_class[1]
    roc, precision_recall = (np.array(curve).T for curve in mean_curves(p, positive, folds))
    assert trapezoid(roc[1], roc[0]) == pytest.approx(figures.auroc.value, abs=0.005)
    assert trapezoid(precision_recall[1], precision_recall[0]) == pytest.approx(
        figures.average_precision.value, abs=0.01
    )
    pooled = np.array(curves(p, positive)[0]).T
    assert trapezoid(pooled[1], pooled[0]) < figures.auroc.value - 0.1, "Scores of different models rank badly."


def test_a_threshold_of_two_per_cent_has_a_finer_scale() -> None:
    assert is_sure(np.full(9, 0.4, dtype=np.float32), 0.02)
    assert is_sure(np.array([0.01, 0.02, 0.4], dtype=np.float32), None)


def test_the_threshold_that_matches_a_rule_calls_as_many_images() -> None:
    rng = np.random.default_rng(0)
    p, called = rng.random(50).astype(np.float32), rng.random(50) < 0.3
    found = matching(p, called)
    assert found is not None
    assert np.count_nonzero(p >= np.float32(found)) == called.sum()
    assert matching(p, np.zeros(50, dtype=bool)) is None
    assert matching(np.full(4, 0.5, dtype=np.float32), np.array([True, False, False, False])) is None
