"""Multinomial logistic regression on frozen features, with its strength chosen by inner folds.

Features are standardised by the training rows. The regression minimises C times the cross-entropy plus half the
squared weights. A path of values of C, from strong to weak, is fitted on each inner fold, each fit starting from the
previous one. The folds are stratified, and by group if there are groups. If a class has few rows, the folds are drawn
``REPEATS`` times, because the choice would be noisy.

The score of a value is the class-weighted log loss of the rows outside the fold. Before that, each probability is
divided by the share of its class in training, because the decision also divides by it. So a rare class counts as much
as a frequent one. The regression is then fitted again on all rows, and the standardisation is folded into its weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from lopsided.seeds import derive_seed

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

STRENGTHS = tuple(float(value) for value in 10.0 ** np.arange(-5.0, 1.01, 0.5))
"""The path of values of C, from strong to weak."""
USUAL = 1e-3
"""The value if a class has too few images or groups for inner folds."""
FEW, REPEATS = 50, 3
"""If a class has fewer rows or groups than ``FEW``, the folds are drawn ``REPEATS`` times."""
_PATIENCE = 3
"""The path of a fold ends after this many values that are worse than the best one so far."""
_STEPS = 1000
_ABSENT = 30.0
"""How far the logit of a class without training rows is below the lowest bias."""


@dataclass(frozen=True, eq=False)
class Regression:
    """A fitted linear layer: logits are ``features @ weight.T + bias``.

    ``losses`` holds the score of each value of C on the path; it is empty if the folds did not choose the value.
    """

    weight: Floats
    bias: Floats
    strength: float
    folds: int
    losses: tuple[tuple[float, float], ...]


def fit_regression(
    features: npt.NDArray[np.floating],
    labels: Indices,
    num_classes: int,
    *,
    groups: npt.NDArray[np.str_] | None = None,
    weighted: bool = False,
    strength: float | None = None,
    scored: bool = False,
    folds: int = 5,
    seed: int = 0,
) -> Regression:
    """Fit the regression. ``weighted`` gives each class the same weight instead of each row.

    ``strength`` is the value of C; None: inner folds choose it. With ``scored``, inner folds also score a given value.
    ``folds`` is reduced if a class has fewer rows or groups.
    """
    # The limit holds only for libraries that are loaded, and scipy brings a BLAS of its own.
    import sklearn.linear_model  # noqa: F401

    # The matrices are small. Several threads of BLAS gain little, and spin for minutes if other work keeps a core busy.
    with threadpool_limits(1, "blas"):
        x = np.asarray(features, dtype=np.float64)
        tried = STRENGTHS if strength is None else (strength,) if scored else ()
        return _fit(x, labels, num_classes, groups, weighted, strength, tried, folds, seed)


def _fit(
    x: Floats,
    labels: Indices,
    num_classes: int,
    groups: npt.NDArray[np.str_] | None,
    weighted: bool,
    strength: float | None,
    tried: Sequence[float],
    folds: int,
    seed: int,
) -> Regression:
    mean, scale = standardisation(x)
    x, basis = _reduced((x - mean) / scale)
    fewest = rarest(labels, groups)
    folds = min(folds, fewest)
    losses: tuple[tuple[float, float], ...] = ()
    if tried and folds >= 2:
        seeds = [derive_seed(seed, "folds", draw) for draw in range(REPEATS if fewest < FEW else 1)]
        pairs = [pair for each in seeds for pair in inner_folds(labels, groups, folds, each)]
        losses = tuple(_scores(x, labels, num_classes, pairs, weighted, tried))
        strength = min(losses, key=lambda pair: pair[1])[0]
    elif strength is None:
        strength, folds = USUAL, 0
    weight, bias = next(_path(x, labels, num_classes, [strength], weighted))
    weight = (weight if basis is None else weight @ basis.T) / scale
    return Regression(weight, bias - weight @ mean, strength, folds if losses else 0, losses)


def standardisation(x: Floats) -> tuple[Floats, Floats]:
    """Return mean and deviation of each column. A column that is constant, but for rounding, has the deviation 1."""
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale[scale <= 10 * np.finfo(np.float32).eps * np.maximum(np.abs(mean), 1e-30)] = 1.0
    return mean, scale


def _reduced(x: Floats) -> tuple[Floats, Floats | None]:
    """Return rows of fewer columns and the basis (d, n) that they refer to, if there are fewer rows than columns.

    The weights of a regression with an L2 penalty are in the span of the rows. So the solution is the same, and each
    step is cheaper.
    """
    if len(x) >= x.shape[1]:
        return x, None
    basis, triangle = np.linalg.qr(x.T)
    return np.ascontiguousarray(triangle.T), basis


def rarest(labels: Indices, groups: npt.NDArray[np.str_] | None) -> int:
    """Return the number of rows, or of groups, of the class with the fewest."""
    return min(
        int((labels == label).sum()) if groups is None else len(np.unique(groups[labels == label]))
        for label in np.unique(labels)
    )


def inner_folds(
    labels: Indices, groups: npt.NDArray[np.str_] | None, number: int, seed: int
) -> Iterator[tuple[Indices, Indices]]:
    """Yield the rows inside and outside of each of ``number`` stratified folds, by group if there are groups."""
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    kind = StratifiedKFold if groups is None else StratifiedGroupKFold
    random = seed % 2**32
    blank = np.zeros((len(labels), 1))
    for train, rest in kind(number, shuffle=True, random_state=random).split(blank, labels, groups):
        # A fold by group may by chance hold no row of a class.
        if len(np.unique(labels[train])) == len(np.unique(labels)) and len(rest):
            yield train, rest


def _scores(
    x: Floats,
    labels: Indices,
    num_classes: int,
    folds: Sequence[tuple[Indices, Indices]],
    weighted: bool,
    tried: Sequence[float],
) -> Iterator[tuple[float, float]]:
    """Yield each value of C that is tried with its loss over the rows of all folds.

    One fold is in memory at a time. The path ends where it ended in the shortest fold so far.
    """
    strengths = list(tried)
    rows = np.concatenate([rest for _, rest in folds])
    logits = np.zeros((len(strengths), len(rows), num_classes))
    ends = np.cumsum([len(rest) for _, rest in folds])
    for (train, rest), end in zip(folds, ends, strict=True):
        here = slice(end - len(rest), end)
        share = np.bincount(labels[train], minlength=num_classes) / len(train)
        prior = np.zeros(num_classes) if weighted else np.log(np.where(share > 0, share, 1.0))
        best, worse = np.inf, 0
        for place, (weight, bias) in enumerate(_path(x[train], labels[train], num_classes, strengths, weighted)):
            logits[place, here] = x[rest] @ weight.T + bias - prior
            loss = balanced_log_loss(logits[place, here], labels[rest])
            best, worse = (loss, 0) if loss < best else (best, worse + 1)
            if worse >= _PATIENCE:
                del strengths[place + 1 :]
                break
    for place, strength in enumerate(strengths):
        yield strength, balanced_log_loss(logits[place], labels[rows])


def balanced_log_loss(logits: Floats, labels: Indices) -> float:
    """Return the mean over the classes of the mean log loss of the rows of a class."""
    top = logits.max(axis=1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    losses = -log_p[np.arange(len(labels)), labels]
    counts = np.bincount(labels)
    sums = np.bincount(labels, weights=losses)
    return float((sums[counts > 0] / counts[counts > 0]).mean())


def _path(
    x: Floats, labels: Indices, num_classes: int, strengths: Sequence[float], weighted: bool
) -> Iterator[tuple[Floats, Floats]]:
    """Yield weight (K, d) and bias (K,) for each value of C, in turn. Each fit starts from the previous one."""
    from sklearn import config_context
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    present = np.unique(labels)
    model = LogisticRegression(
        class_weight="balanced" if weighted else None, max_iter=_STEPS, tol=1e-4, warm_start=True
    )
    for strength in strengths:
        model.set_params(C=strength)
        # Hundreds of small fits would each check the same parameters again.
        with config_context(skip_parameter_validation=True), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # The path then ends a little early, which is fine.
            model.fit(x, labels)
        coefficients, intercept = model.coef_, model.intercept_
        if len(present) == 2:  # scikit-learn then holds the difference of two logits.
            coefficients = np.concatenate([-coefficients, coefficients]) / 2
            intercept = np.concatenate([-intercept, intercept]) / 2
        weight = np.zeros((num_classes, x.shape[1]))
        bias = np.full(num_classes, intercept.min() - _ABSENT)
        weight[present], bias[present] = coefficients, intercept
        yield weight, bias
