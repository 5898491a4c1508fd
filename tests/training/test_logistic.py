from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge

from lopsided.training import regression
from lopsided.training.logistic import Principal, Regressions, Ridges
from lopsided.training.regression import STRENGTHS, balanced_log_loss, fit_regression, inner_folds

SHAPES = [(40, 12), (40, 90)]
"""More rows than columns, and fewer."""


def rows(shape: tuple[int, int], counts: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose columns differ in scale and depend on each other, in classes of very different sizes."""
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    spread = generator.normal(size=(shape[1], shape[1])) * np.geomspace(3, 0.03, shape[1])
    x = (generator.normal(size=shape) + np.eye(len(counts), shape[1])[labels]) @ spread
    return x - x.mean(axis=0), labels


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_turned_rows_have_the_same_products_and_orthogonal_columns(shape: tuple[int, int]) -> None:
    x, _ = rows(shape, [30, 10])
    turned = Principal(x)
    assert turned.x.shape[1] <= min(shape)
    assert np.allclose(turned.x @ turned.x.T, x @ x.T)
    squares = turned.x.T @ turned.x
    assert np.abs(squares - np.diag(np.diag(squares))).max() < 1e-9 * squares.max()
    weight = np.random.default_rng(1).normal(size=(3, turned.x.shape[1]))
    assert np.allclose(x @ turned.back(weight).T, turned.x @ weight.T)


@pytest.mark.parametrize("counts", [[36, 4], [25, 12, 3], [14, 9, 7, 5, 3, 2]])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("strength", [1e-5, 1e-2, 10.0])
def test_the_solution_is_that_of_scikit_learn_at_a_tight_tolerance(
    counts: list[int], shape: tuple[int, int], weighted: bool, strength: float
) -> None:
    x, labels = rows(shape, counts)
    standard = x / x.std(axis=0)
    peer = LogisticRegression(
        C=strength, class_weight="balanced" if weighted else None, tol=1e-9, max_iter=20_000, solver="newton-cg"
    ).fit(standard, labels)
    fitted = fit_regression(x, labels, len(counts), strength=strength, weighted=weighted)
    assert np.abs(softmax(x @ fitted.weight.T + fitted.bias) - peer.predict_proba(standard)).max() < 2e-5


@pytest.mark.parametrize("counts", [[36, 4], [25, 12, 3]])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strength", [1e-4, 1.0])
def test_a_ridge_regression_is_that_of_scikit_learn(counts: list[int], shape: tuple[int, int], strength: float) -> None:
    x, labels = rows(shape, counts)
    c = np.random.default_rng(3).uniform(0.5, 2.0, size=len(x))
    solved = Ridges(x, labels, c[:, None])
    solved.solve(strength, 1e-12)
    indicators = np.eye(len(counts))[labels]
    peer = Ridge(alpha=1 / strength).fit(x, indicators, sample_weight=c).predict(x)
    assert solved.logits[:, 0] == pytest.approx(peer, abs=1e-4)


def test_regressions_that_are_solved_together_have_the_solutions_that_they_have_alone() -> None:
    x, labels = rows((60, 20), [40, 14, 6])
    c = np.random.default_rng(2).integers(0, 3, size=(60, 4)) + 0.5
    together = Regressions(x, labels, c)
    together.solve(0.1, 1e-12)
    for number in range(4):
        alone = Regressions(x, labels, c[:, [number]])
        alone.solve(0.1, 1e-12)
        assert np.abs(softmax(alone.logits[:, 0]) - softmax(together.logits[:, number])).max() < 1e-5


def test_a_path_of_strengths_ends_where_a_start_from_nothing_ends() -> None:
    x, labels = rows((60, 20), [40, 14, 6])
    path, fresh = (Regressions(x, labels, np.ones((60, 1))) for _ in range(2))
    for strength in (1e-4, 1e-2, 1.0):
        path.solve(strength, 1e-12)
    fresh.solve(1.0, 1e-12)
    assert np.abs(softmax(path.logits[:, 0]) - softmax(fresh.logits[:, 0])).max() < 1e-5
    assert np.allclose(path.logits[:, 0], x @ path.weights[0, :, :-1].T + path.weights[0, :, -1])


def test_rows_without_weight_change_nothing() -> None:
    x, labels = rows((60, 20), [40, 14, 6])
    c = np.ones((60, 1))
    c[::3] = 0
    some = Regressions(x, labels, c)
    kept = np.flatnonzero(c[:, 0])
    only = Regressions(x[kept], labels[kept], np.ones((len(kept), 1)))
    for one in (some, only):
        one.solve(0.3, 1e-12)
    assert np.abs(softmax(some.logits[kept, 0]) - softmax(only.logits[:, 0])).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("counts", [[48, 12], [30, 18, 12]])
def test_the_score_of_a_strength_is_the_log_loss_of_the_rows_outside_each_fold(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, labels = rows((60, 15), counts)
    fitted = fit_regression(x, labels, len(counts), folds=3, seed=5)
    standard = (x - x.mean(axis=0)) / x.std(axis=0)
    draws = [regression.derive_seed(5, "folds", draw) for draw in range(regression.REPEATS)]
    pairs = [pair for draw in draws for pair in inner_folds(labels, None, 3, draw)]
    for strength, loss in fitted.losses:
        parts = []
        for train, rest in pairs:
            peer = LogisticRegression(C=strength, tol=1e-8, max_iter=5000).fit(standard[train], labels[train])
            share = np.bincount(labels[train]) / len(train)
            parts.append(np.log(peer.predict_proba(standard[rest])) - np.log(share))
        tested = np.concatenate([rest for _, rest in pairs])
        assert loss == pytest.approx(balanced_log_loss(np.concatenate(parts), labels[tested]), abs=0.003)
    # Folds that are solved one after the other have the same scores, but their paths may end elsewhere.
    monkeypatch.setattr(regression, "_TOGETHER", 1)
    alone = fit_regression(x, labels, len(counts), folds=3, seed=5)
    assert alone.strength == fitted.strength
    both = list(zip(alone.losses, fitted.losses, strict=False))
    assert len(both) >= 8
    assert [one[1] for one, _ in both] == pytest.approx([other[1] for _, other in both], abs=0.002)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_separable_classes_with_hardly_any_penalty_are_solved_without_a_long_search(
    dtype: type[np.floating], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding then hides what a step gains, above all in single precision."""
    x, labels = rows((46, 200), [20, 16, 10])
    solved = Regressions(x, labels, np.ones((46, 2)), dtype)
    calls = 0
    probabilities = Regressions._probabilities

    def counted(self: Regressions, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        nonlocal calls
        calls += 1
        return probabilities(self, logits)

    monkeypatch.setattr(Regressions, "_probabilities", counted)
    for strength in (*STRENGTHS, 1e4, 1e6):
        solved.solve(strength, 1e-5)
    assert calls < 1000
    assert (solved.logits[:, 0].argmax(axis=1) == labels).all()
    assert np.allclose(
        solved.logits[:, 0], x @ solved.weights[0, :, :-1].T + solved.weights[0, :, -1], rtol=1e-3, atol=0.01
    )


def test_a_step_that_cannot_be_taken_leaves_weights_and_logits_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = rows((40, 12), [25, 15])
    solved = Regressions(x, labels, np.ones((40, 1)))
    before = solved.weights.copy()
    probabilities = Regressions._probabilities
    values = iter(range(10_000))

    def rising(self: Regressions, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, loss = probabilities(self, logits)
        return p, loss + next(values)

    monkeypatch.setattr(Regressions, "_probabilities", rising)
    solved.solve(0.1, 1e-8)
    assert np.array_equal(solved.weights, before)
    assert np.array_equal(solved.logits[:, 0], np.broadcast_to(before[0, :, -1], (40, 2)))


def test_many_classes_with_one_or_two_rows_each_are_fitted() -> None:
    x, labels = rows((40, 12), [2] * 20)
    fitted = fit_regression(x, labels, 20, seed=1)
    assert fitted.folds == 2
    assert np.isfinite(fitted.weight).all()
    again = fit_regression(x, labels, 20, seed=1)
    assert np.array_equal(fitted.weight, again.weight)
    assert fitted.losses == again.losses
    alone = fit_regression(x[::2], labels[::2], 20)
    assert (alone.folds, alone.losses) == (0, ())
    assert np.isfinite(alone.weight).all()


def test_equal_rows_and_a_column_of_nothing_are_harmless() -> None:
    x = np.zeros((12, 5))
    x[:, 1] = np.repeat([0.0, 1.0], 6)
    fitted = fit_regression(x, np.repeat([0, 1], 6), 2)
    assert np.isfinite(fitted.weight).all()
    assert ((x @ fitted.weight.T + fitted.bias).argmax(axis=1) == np.repeat([0, 1], 6)).all()
    nothing = fit_regression(np.zeros((12, 5)), np.repeat([0, 1], [9, 3]), 2, strength=1.0)
    assert np.allclose(nothing.weight, 0)
    assert softmax(nothing.bias[None])[0] == pytest.approx([0.75, 0.25])
    assert len(STRENGTHS) >= len(fitted.losses) > 0
