from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from lopsided.training import logistic, regression
from lopsided.training.regression import STRENGTHS, USUAL, balanced_log_loss, fit_regression


def blobs(counts: list[int], *, dim: int = 5, distance: float = 2.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian classes, with columns of very different scales."""
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    x = generator.normal(size=(len(labels), dim)) + distance * np.eye(len(counts), dim)[labels]
    return x * 10.0 ** np.arange(dim) + 100, labels


@pytest.mark.parametrize("counts", [[60, 20], [40, 20, 15]])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_layer_is_the_regression_on_standardised_features(counts: list[int], weighted: bool) -> None:
    x, labels = blobs(counts)
    fitted = fit_regression(x, labels, len(counts), strength=0.1, weighted=weighted)
    standard = (x - x.mean(axis=0)) / x.std(axis=0)
    expected = LogisticRegression(C=0.1, class_weight="balanced" if weighted else None, tol=1e-4, max_iter=1000)
    logits = x @ fitted.weight.T + fitted.bias
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    assert np.abs(p - expected.fit(standard, labels).predict_proba(standard)).max() < 1e-3
    assert (fitted.strength, fitted.folds, fitted.losses) == (0.1, 0, ())


def test_noise_gets_a_strong_penalty_and_a_clear_signal_a_weak_one() -> None:
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1], [80, 20])
    noise = fit_regression(generator.normal(size=(100, 50)), labels, 2)
    clear = fit_regression(generator.normal(size=(100, 2)) + 3 * labels[:, None], labels, 2)
    assert noise.strength <= 1e-3
    assert clear.strength >= 0.1
    assert clear.folds == 5
    assert [strength for strength, _ in clear.losses] == list(STRENGTHS[: len(clear.losses)])
    assert min(clear.losses, key=lambda pair: pair[1])[0] == clear.strength


def test_groups_stay_together_in_the_inner_folds() -> None:
    """Each group has a code of its own. Across groups it is of no use, so that folds by group penalise strongly."""
    generator = np.random.default_rng(1)
    groups = np.repeat(np.arange(40), 5)
    labels = groups % 2
    x = np.repeat(generator.normal(size=(40, 30)), 5, axis=0) + 0.01 * generator.normal(size=(200, 30))
    apart = fit_regression(x, labels, 2)
    together = fit_regression(x, labels, 2, groups=groups.astype(str))
    assert together.strength < apart.strength
    assert together.strength <= 1e-3


def test_a_class_with_few_images_or_groups_has_fewer_folds() -> None:
    x, labels = blobs([50, 3])
    assert fit_regression(x, labels, 2).folds == 3
    groups = np.array([f"{i}" for i in range(50)] + ["a", "a", "b"])
    assert fit_regression(x, labels, 2, groups=groups).folds == 2
    x, labels = blobs([50, 1])
    alone = fit_regression(x, labels, 2)
    assert (alone.strength, alone.folds) == (USUAL, 0)


@pytest.mark.slow
def test_the_result_depends_on_the_seed_of_the_folds_only() -> None:
    x, labels = blobs([60, 20], distance=1.0)
    one, other = (fit_regression(x, labels, 2, seed=3) for _ in range(2))
    assert np.array_equal(one.weight, other.weight)
    assert one.losses == other.losses
    assert fit_regression(x, labels, 2, seed=4).losses != one.losses


def test_a_class_without_training_rows_is_never_predicted_and_constant_features_are_harmless() -> None:
    x, labels = blobs([40, 20])
    x[:, 3] = 7.0
    fitted = fit_regression(np.where(labels[:, None] == 1, x, x), np.where(labels == 1, 2, 0), 3)
    logits = x @ fitted.weight.T + fitted.bias
    assert np.isfinite(logits).all()
    assert set(logits.argmax(axis=1)) == {0, 2}
    assert (logits[:, 1] < logits.max(axis=1) - 10).all()


def test_each_class_counts_the_same_in_the_loss() -> None:
    logits = np.log(np.array([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.8, 0.2]]))
    expected = (np.log(2) - np.log(0.2)) / 2
    assert balanced_log_loss(logits, np.array([0, 0, 0, 1])) == pytest.approx(expected)


@pytest.mark.parametrize("function", ["regression.fit_regression", "averaged.fit_averaged"])
def test_one_thread_computes_the_regression(function: str) -> None:
    script = """
import sys
import numpy as np
from threadpoolctl import threadpool_info
from lopsided.training import averaged, regression

def threads(*_):
    print(*{one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"})
    sys.exit()

regression.Rows = averaged.Rows = threads
MODULE.FUNCTION(np.ones((2, 2)), np.array([0, 1]), 2)
"""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    ran = subprocess.run(
        [sys.executable, "-c", script.replace("MODULE.FUNCTION", function)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("1\n", "")


def test_many_rows_and_classes_are_worked_on_in_parts_and_the_threads_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, labels = blobs([40, 30, 20], distance=1.0)
    whole = fit_regression(x, labels, 3, strength=0.1)
    monkeypatch.setattr(logistic, "_MANY", 100)
    monkeypatch.setattr(logistic, "_PART", 60)
    fits = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        fits.append(fit_regression(x, labels, 3, strength=0.1))
    assert np.array_equal(fits[0].weight, fits[1].weight)
    assert fits[0].weight == pytest.approx(whole.weight, rel=1e-6)


def test_the_strength_is_chosen_from_some_rows_if_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = blobs([400, 300, 25], distance=1.0)
    whole = fit_regression(x, labels, 3)
    seen: list[tuple[int, ...]] = []
    path = regression.Rows.path

    def watched(rows: regression.Rows, *more: Any) -> Any:
        seen.append((*np.bincount(rows.labels[rows._some]), len(rows.folds)))
        return path(rows, *more)

    monkeypatch.setattr(regression.Rows, "path", watched)
    monkeypatch.setattr(regression, "_MANY", 3 * 145)
    some = fit_regression(x, labels, 3)
    # A fifth of each class, but at least 20 rows, and no more folds than fit: there are three draws of five.
    assert seen == [(80, 60, 20, 4)]
    assert 0.1 <= some.strength / whole.strength <= 10
    chosen = fit_regression(x, labels, 3, strength=whole.strength)
    assert chosen.weight == pytest.approx(whole.weight, rel=1e-3)
