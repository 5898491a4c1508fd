from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, precision_recall_curve, precision_score, recall_score, roc_curve

from lopsided.reports.thresholds import Counts, counts_at, curves, favoured

# Few distinct values, so that many images share one; the grid's own points among them.
shares = st.sampled_from([0.0, 0.05, 0.2, 0.3, 0.5, 0.501, 0.7, 0.999, 1.0]) | st.floats(0, 1, width=32)
splits = st.lists(st.tuples(shares, st.booleans()), min_size=1, max_size=40)


def arrays(split: list[tuple[float, bool]]) -> tuple[np.ndarray, np.ndarray]:
    p, positive = zip(*split, strict=True)
    return np.array(p, dtype=np.float32), np.array(positive)


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
    if called.any():
        assert found.precision == pytest.approx(precision_score(positive, called))
    else:
        assert found.precision is None
    if positive.any() and not positive.all():
        assert found.uwa == pytest.approx(balanced_accuracy_score(positive, called))


def test_figures_of_nothing_are_not_defined() -> None:
    assert Counts(0, 0, 0, 0).uwa is None
    assert Counts(tp=0, fn=0, fp=1, tn=3).uwa == 0.75


@given(splits)
@settings(deadline=None, max_examples=60)
def test_the_favoured_threshold_is_the_middle_of_the_longest_best_stretch(split: list[tuple[float, bool]]) -> None:
    p, positive = arrays(split)
    found = favoured(p, positive)
    if positive.all() or not positive.any():
        assert found is None
        return
    uwa = [counts_at(p, positive, step / 1000).uwa or 0.0 for step in range(1, 1000)]
    is_best = [value >= max(uwa) - 1e-12 for value in uwa]
    runs, start = [], None
    for step, best in enumerate([*is_best, False], start=1):
        if best and start is None:
            start = step
        elif not best and start is not None:
            runs.append((start, step - 1))
            start = None
    first, last = max(runs, key=lambda run: run[1] - run[0])
    assert found == (first + last) // 2 / 1000


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
