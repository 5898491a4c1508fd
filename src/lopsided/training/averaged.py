"""The classifier of frozen features: the mean of logistic and ridge regressions, calibrated, as one linear layer.

A logistic and a ridge regression are fitted, and inner folds choose the strength of each: their errors differ. If a
class has fewer rows or groups than ``FEW``, so are a pair on each part of the columns, such as the final layer of an
encoder, the stages before it and colours: so few rows do not tell which part matters.

The rows that inner folds leave out calibrate each regression, by a factor and a bias per class, so that all speak of
log odds, and then their mean. Classes count alike in this, because the decision weighs them so; the class shares are
added afterwards. The mean of linear layers is one, and so is a calibrated one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from lopsided.evaluation.calibration import BIAS_SPREAD, balanced_weights
from lopsided.training.regression import (
    FEW,
    LOGISTIC,
    RIDGE,
    Floats,
    Indices,
    Kind,
    Layer,
    Regression,
    Rows,
    best_strength,
    fit_regression,
    is_large,
    rarest,
)

_FACTOR_SPREAD = 4.0
"""Standard deviation of the penalty on the root mean square of log odds, which is 1 to 3 for most classes."""


def fit_averaged(
    features: npt.NDArray[np.floating],
    labels: Indices,
    num_classes: int,
    *,
    groups: npt.NDArray[np.str_] | None = None,
    folds: int = 5,
    seed: int = 0,
    importance: Floats | None = None,
    weights: Floats | None = None,
    parts: Sequence[Indices] = (),
) -> Regression:
    """Fit the mean of regressions. The arguments are those of ``fit_regression``; ``parts`` are columns.

    Strength and losses of the result are those of the logistic regression on all columns. It is the result if a class
    has too few rows for inner folds, or if there are so many rows and classes that only some of them choose.
    """
    if not is_large(labels):
        with threadpool_limits(1, "blas"):
            x = np.asarray(features, dtype=np.float64)
            found = _averaged(x, labels, num_classes, groups, folds, seed, importance, weights, parts)
        if found is not None:
            return found
    return fit_regression(
        features, labels, num_classes, groups=groups, folds=folds, seed=seed, importance=importance, weights=weights
    )


def _averaged(
    x: Floats,
    labels: Indices,
    num_classes: int,
    groups: npt.NDArray[np.str_] | None,
    folds: int,
    seed: int,
    importance: Floats | None,
    weights: Floats | None,
    parts: Sequence[Indices],
) -> Regression | None:
    """Return the mean of regressions; None if there are no inner folds."""
    total = np.zeros((len(np.unique(labels)), x.shape[1]))
    members: list[tuple[Floats, Layer]] = []
    first: tuple[float, tuple[tuple[float, float], ...]] | None = None
    several = len(parts) > 1 and rarest(labels, groups) < FEW
    for columns in (np.arange(x.shape[1]), *(parts if several else ())):
        own = None if importance is None else importance[columns]
        rows = Rows(x[:, columns], labels, groups, folds, seed, own, weights)
        if not rows.folds:
            return None
        for kind in (LOGISTIC, RIDGE):
            losses, scores, layer = _member(rows, kind, groups)
            first = first or (best_strength(losses), losses)
            total[:, columns] += layer.weight
            members.append((scores, layer))
    number = len(members)
    layers = [layer for _, layer in members]
    lowest = sum(layer.lowest for layer in layers) / number
    mean = Layer(total / number, np.mean([layer.bias for layer in layers], axis=0), lowest)
    _, mean = _calibrated(np.mean([scores for scores, _ in members], axis=0), mean, rows, groups)
    shares = np.log(np.bincount(rows.labels, weights=rows.weights) / rows.weights.sum())
    whole = replace(mean, bias=mean.bias + shares - shares.mean(), lowest=mean.lowest + float(shares.min()))
    layer = whole.over(rows.present, num_classes)
    assert first is not None
    return Regression(layer.weight, layer.bias, first[0], rows.num_folds, first[1])


def _member(
    rows: Rows, kind: Kind, groups: npt.NDArray[np.str_] | None
) -> tuple[tuple[tuple[float, float], ...], Floats, Layer]:
    """Return the losses of a regression, its calibrated scores of rows left out, and the layer without class shares."""
    path = rows.path(kind, kind.strengths)
    strength = best_strength(path.losses)
    layer = rows.layer(kind, strength)
    if not kind.weighted:
        shares = np.log(np.bincount(rows.labels, weights=rows.weights) / rows.weights.sum())
        layer = replace(layer, bias=layer.bias - shares + shares.mean())
    return path.losses, *_calibrated(path.left_out(strength), layer, rows, groups)


def _calibrated(scores: Floats, layer: Layer, rows: Rows, groups: npt.NDArray[np.str_] | None) -> tuple[Floats, Layer]:
    """Return scores of rows left out as logits without class shares, and the layer changed alike."""
    factor, shift = calibrated_odds(scores, rows.labels, groups, rows.weights)
    lowest = factor * layer.lowest + float(shift.min())
    return factor * scores + shift, Layer(factor * layer.weight, factor * layer.bias + shift, lowest)


def calibrated_odds(
    scores: Floats, labels: Indices, groups: npt.NDArray[np.str_] | None, weights: Floats | None = None
) -> tuple[float, Floats]:
    """Return the factor and the biases that make log odds of scores of rows left out. Classes count alike.

    A row without a score does not count.
    """
    seen = np.flatnonzero(np.isfinite(scores[:, 0]))
    shares, own = np.full(scores.shape[1], 1 / scores.shape[1]), None if groups is None else groups[seen]
    weights = None if weights is None else weights[seen]
    return fit_odds(scores[seen], labels[seen], balanced_weights(labels[seen], shares, own, weights))


def fit_odds(scores: Floats, labels: Indices, weights: Floats) -> tuple[float, Floats]:
    """Return the factor, at least 0, and the biases that turn scores (n, K) into log odds of the classes.

    They minimise the log loss with these weights of the rows and a penalty, without which rows that are all told apart
    would give an endless factor. Scores that say nothing of the classes get a factor near 0.
    """
    from scipy.optimize import minimize

    centred = scores - scores.mean(axis=1, keepdims=True)
    size = max(float(np.sqrt(np.average(np.square(centred).mean(axis=1), weights=weights))), 1e-30)
    centred = centred / size
    truth = np.eye(scores.shape[1])[labels]
    widths = np.concatenate([[_FACTOR_SPREAD], np.full(scores.shape[1], BIAS_SPREAD)])

    def cost(x: Floats) -> tuple[float, Floats]:
        logits = x[0] * centred + x[1:]
        total = np.logaddexp.reduce(logits, axis=1)
        slope = weights[:, None] * (np.exp(logits - total[:, None]) - truth)
        gradient = np.concatenate([[(slope * centred).sum()], slope.sum(axis=0)]) + x / np.square(widths)
        return float(weights @ (total - (logits * truth).sum(axis=1)) + np.square(x / widths).sum() / 2), gradient

    bounds = [(0.0, None)] + [(None, None)] * scores.shape[1]
    found = minimize(
        cost, np.concatenate([[1.0], np.zeros(scores.shape[1])]), jac=True, method="L-BFGS-B", bounds=bounds
    )
    return float(found.x[0]) / size, found.x[1:] - found.x[1:].mean()
