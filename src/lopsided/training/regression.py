"""Multinomial logistic regression on frozen features, with its strength chosen by inner folds.

Features are standardised by the training rows. The regression minimises C times the cross-entropy plus half the
squared weights. A path of values of C, from strong to weak, is fitted on all inner folds together, each fit starting
from the previous one. The folds are stratified, and by group if there are groups. If a class has few rows, the folds
are drawn ``REPEATS`` times, because the choice would be noisy.

The score of a value is the class-weighted log loss of the rows outside the fold. Before that, each probability is
divided by the share of its class in training, because the decision also divides by it. So a rare class counts as much
as a frequent one. The regression is then fitted again on all rows, and the standardisation is folded into its weights.

A ridge regression on the indicators of the classes is fitted in the same way, with the same weight for each class; its
score is the class-weighted squared error. ``averaged`` has what it is for.

With many rows times classes, the value of C is chosen from some of the rows and by fewer folds: C is the inverse of the
penalty on the sum over the rows, so that the best value hardly depends on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import threadpool_limits

from lopsided.seeds import derive_seed
from lopsided.training.logistic import Principal, Regressions, Ridges

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Fold = tuple[Indices, Indices]

STRENGTHS = tuple(float(value) for value in 10.0 ** np.arange(-5.0, 1.01, 0.5))
"""The path of values of C, from strong to weak."""
RIDGE_STRENGTHS = tuple(float(value) for value in 10.0 ** np.arange(-6.5, 1.01, 0.5))
"""The same for ridge regressions. The slope of their loss does not vanish, so that they need less."""
USUAL = 1e-3
"""The value if a class has too few images or groups for inner folds."""
FEW, REPEATS = 50, 3
"""If a class has fewer rows or groups than ``FEW``, the folds are drawn ``REPEATS`` times."""
PATIENCE = 3
"""The path of folds that are solved together ends after this many values that are worse than the best one so far."""
DECADES, NEAR = 0.7, 1.0
"""How far the value of C usually is from an expected one, and how far at most, in powers of ten."""
_ROUGH, _EXACT = 1e-5, 1e-10
"""Tolerances of the regressions of inner folds and of the final one, as shares of the objective."""
_TOGETHER, _PER_ROW, _PER_COLUMN = 2**26, 6, 25
"""How many numbers regressions may hold that are solved together, and how many each has per class and row or column."""
_MANY, _SCORED, _PER_CLASS = 2**18, 5, 20
"""The value of C is chosen from at most ``_MANY`` rows times classes, if each class keeps ``_PER_CLASS`` rows, and from
at most ``_SCORED`` times as many in all folds, but at least one."""
_ENOUGH = 1e-8
"""The tolerance of the final regression if there are more rows times classes than ``_MANY``."""
_ABSENT = 30.0
"""How far the logit of a class without training rows is below the lowest one of the mean row."""


@dataclass(frozen=True, eq=False)
class Regression:
    """A fitted linear layer: logits are ``features @ weight.T + bias``.

    ``losses`` holds the score of each value of C on the path; it is empty if the folds did not choose the value.
    ``left_out`` (n, present classes) is what inner folds say of the rows outside, without the class shares; None if
    there are no inner folds, or if only some of the rows chose the value.
    """

    weight: Floats
    bias: Floats
    strength: float
    folds: int
    losses: tuple[tuple[float, float], ...]
    left_out: Floats | None = None


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
    importance: Floats | None = None,
    weights: Floats | None = None,
    offset: Floats | None = None,
    expected: float | None = None,
) -> Regression:
    """Fit the regression. ``weighted`` gives each class the same weight instead of each row.

    ``offset`` (n, classes) is a known part of the logits, which the weights do not contain.
    ``importance`` multiplies each standardised column, so that the penalty bears less on some; None: all the same.
    ``strength`` is the value of C; None: inner folds choose it. With ``scored``, inner folds also score a given value.
    ``folds`` is reduced if a class has fewer rows or groups. ``weights`` are those of the rows, all above 0: a row of
    weight 2 is as if it were there twice; None: all 1.
    ``expected`` is a value of C near which the best one is looked for: few rows of a class cannot choose it alone.
    """
    # Threads of BLAS spin for minutes if other work keeps a core busy. Large problems have threads of their own.
    with threadpool_limits(1, "blas"):
        kind = replace(LOGISTIC, weighted=weighted)
        tried = kind.strengths if strength is None else (strength,) if scored else ()
        if expected is not None and strength is None:
            tried = tuple(value for value in STRENGTHS if abs(np.log10(value / expected)) <= NEAR)
        x = np.asarray(features, dtype=np.float64)
        rows = Rows(x, labels, groups, folds if tried else 0, seed, importance, weights, offset)
        losses: tuple[tuple[float, float], ...] = ()
        left_out = None
        if rows.folds:
            path = rows.path(kind, tried, PATIENCE if expected is None else len(tried))
            losses, strength = path.losses, best_strength(path.losses, rows.fewest, expected)
            left_out = path.left_out(strength) if len(path.numbers) == len(x) else None
        elif strength is None:
            strength = expected or USUAL
        layer = rows.layer(kind, strength).over(rows.present, num_classes)
        return Regression(layer.weight, layer.bias, strength, rows.num_folds if losses else 0, losses, left_out)


@dataclass(frozen=True)
class Kind:
    """A kind of linear regression: who solves it, whether classes count alike, and its error by class."""

    solver: type[Regressions]
    strengths: tuple[float, ...]
    weighted: bool
    errors: Callable[[Floats, Indices, int, Floats], tuple[Floats, Floats]]


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer: scores are ``features @ weight.T + bias``. ``lowest`` is the lowest score of the mean row."""

    weight: Floats
    bias: Floats
    lowest: float

    def over(self, present: Indices, num_classes: int) -> Layer:
        """Return the layer with all classes. Those that are not ``present`` have a logit far below the others."""
        weight = np.zeros((num_classes, self.weight.shape[1]))
        bias = np.full(num_classes, self.lowest - _ABSENT)
        weight[present], bias[present] = self.weight, self.bias
        return replace(self, weight=weight, bias=bias)


@dataclass(frozen=True, eq=False)
class RegressionPath:
    """The score of each value of C, and what regressions of inner folds say of the rows outside.

    ``sums`` (values, n, K) are their scores of each row without the class shares, added over the draws of the folds,
    and ``numbers`` (n,) is how many there are.
    """

    losses: tuple[tuple[float, float], ...]
    sums: npt.NDArray[np.float32]
    numbers: Indices

    def left_out(self, strength: float) -> Floats:
        """Return the mean scores (n, K) with this value of C. A row that no fold leaves out has no numbers (nan)."""
        sums = self.sums[[value for value, _ in self.losses].index(strength)].astype(np.float64)
        numbers = self.numbers[:, None]
        scores: Floats = np.divide(sums, numbers, out=np.full_like(sums, np.nan), where=numbers > 0)
        return scores


class Rows:
    """Standardised rows in their principal axes, and the inner folds that choose the strength of a regression on them.

    ``labels`` are the places of the classes that are ``present``. ``folds`` are those of all draws; there are none if a
    class has too few rows or groups, or if ``number`` is 0.
    """

    def __init__(
        self,
        x: Floats,
        labels: Indices,
        groups: npt.NDArray[np.str_] | None,
        number: int,
        seed: int,
        importance: Floats | None = None,
        weights: Floats | None = None,
        offset: Floats | None = None,
    ) -> None:
        self._mean, self._scale = standardisation(x, weights)
        if importance is not None:
            self._scale = self._scale / importance
        self.weights = np.ones(len(x)) if weights is None else weights
        self.present, self.labels = np.unique(labels, return_inverse=True)
        self._turned = Principal((x - self._mean) / self._scale)
        self._offset = None if offset is None else offset[:, self.present]
        self._is_large, self._some = is_large(self.labels), _some_rows(self.labels, seed)
        some = self.labels[self._some], None if groups is None else groups[self._some]
        self.fewest = rarest(*some)
        self.num_folds, self.folds = min(number, self.fewest), list[Fold]()
        if self.num_folds >= 2:
            seeds = [derive_seed(seed, "folds", draw) for draw in range(REPEATS if self.fewest < FEW else 1)]
            self.folds = [fold for each in seeds for fold in inner_folds(*some, self.num_folds, each)]
        if self._is_large:
            self.folds = self.folds[: max(_SCORED * _MANY // (len(self.present) * len(self._some)), 1)]

    def path(self, kind: Kind, tried: Sequence[float], patience: int = PATIENCE) -> RegressionPath:
        """Score values of C on the rows outside the inner folds, from strong to weak.

        The path ends after ``patience`` values that are worse than the best one, in the folds that are solved together.
        """
        labels, weights = self.labels[self._some], self.weights[self._some]
        strengths, num_classes = list(tried), len(self.present)
        sums, counts = np.zeros((len(strengths), num_classes)), np.zeros((len(strengths), num_classes))
        outside = np.zeros((len(strengths), len(labels), num_classes), dtype=np.float32)
        numbers = np.bincount(np.concatenate([rest for _, rest in self.folds]), minlength=len(labels))
        for folds, solved, prior in self._solvers(kind):
            best, worse = np.inf, 0
            for place, strength in enumerate(strengths):
                solved.solve(_halved(strength, num_classes), _ROUGH)
                by_class, number_of = np.zeros(num_classes), np.zeros(num_classes)
                for fold, (_, rest) in enumerate(folds):
                    scores = solved.logits[rest, fold] - prior[fold]
                    outside[place, rest] += scores
                    errors, own = kind.errors(scores, labels[rest], num_classes, weights[rest])
                    by_class, number_of = by_class + errors, number_of + own
                sums[place] += by_class
                counts[place] += number_of
                loss = _mean_loss(by_class, number_of)
                best, worse = (loss, 0) if loss < best else (best, worse + 1)
                if worse >= patience:
                    del strengths[place + 1 :]
                    break
        losses = tuple((value, _mean_loss(sums[place], counts[place])) for place, value in enumerate(strengths))
        return RegressionPath(losses, outside, numbers)

    def layer(self, kind: Kind, strength: float) -> Layer:
        """Return the regression on all rows as a layer for their features. It sums to a constant over the classes."""
        num_classes, x = len(self.present), self._turned.x
        rows = _row_weights(self.labels, np.arange(len(self.labels)), kind.weighted, self.weights)
        halved, threads, start = _halved(strength, num_classes), torch.get_num_threads(), None
        if self._is_large:  # Single precision leads most of the way, in half the time.
            rough = kind.solver(x, self.labels, rows[:, None], np.float32, threads=threads, offset=self._offset)
            rough.solve(halved, _ROUGH)
            start = rough.weights
        solved = kind.solver(x, self.labels, rows[:, None], start=start, threads=threads, offset=self._offset)
        solved.solve(halved, _ENOUGH if self._is_large else _EXACT)
        found = solved.weights[0] - solved.weights[0].mean(axis=0)
        weight = self._turned.back(found[:, :-1]).astype(np.float64) / self._scale
        bias = found[:, -1].astype(np.float64)
        return Layer(weight, bias - weight @ self._mean, float(bias.min()))

    def _solvers(self, kind: Kind) -> Iterator[tuple[Sequence[Fold], Regressions, Floats]]:
        """Yield inner folds whose regressions are solved together, with the log shares that their logits carry.

        They are as many as fit into ``_TOGETHER`` numbers.
        """
        x, labels, weights = self._turned.x[self._some], self.labels[self._some], self.weights[self._some]
        offset = None if self._offset is None else self._offset[self._some]
        number = max(_TOGETHER // (len(self.present) * (_PER_ROW * len(x) + _PER_COLUMN * x.shape[1])), 1)
        for begin in range(0, len(self.folds), number):
            own = self.folds[begin : begin + number]
            rows = np.stack([_row_weights(labels, train, kind.weighted, weights) for train, _ in own], axis=1)
            share = np.stack([_sums(labels, train, weights) / weights[train].sum() for train, _ in own])
            solver = kind.solver(x, labels, rows, np.float32, threads=torch.get_num_threads(), offset=offset)
            yield own, solver, np.zeros_like(share) if kind.weighted else np.log(share)


def best_strength(losses: Sequence[tuple[float, float]], fewest: int = 1, expected: float | None = None) -> float:
    """Return the value of C with the lowest loss.

    If a value is expected, its logarithm has a normal prior, and the loss is that of all ``fewest`` rows: the posterior
    decides, so that each row moves the value away from the expected one as far as it has evidence.

    >>> losses = (1e-4, 0.30), (1e-3, 0.28)
    >>> [best_strength(losses, fewest, 1e-4) for fewest in (5, 500)]
    [0.0001, 0.001]
    """

    def surprise(pair: tuple[float, float]) -> float:
        if expected is None:
            return pair[1]
        return fewest * pair[1] + float(np.log10(pair[0] / expected) / DECADES) ** 2 / 2

    return min(losses, key=surprise)[0]


def standardisation(x: Floats, weights: Floats | None = None, least: Floats | float = 0.0) -> tuple[Floats, Floats]:
    """Return mean and deviation of each column. A column that is constant, but for rounding, has the deviation 1.

    A deviation is at least ``least``.
    """
    mean, scale = x.mean(axis=0), x.std(axis=0)
    if weights is not None:
        mean = np.average(x, axis=0, weights=weights)
        scale = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=weights))
    scale = np.maximum(scale, least)
    scale[scale <= 10 * np.finfo(np.float32).eps * np.maximum(np.abs(mean), 1e-30)] = 1.0
    return mean, scale


def is_large(labels: Indices) -> bool:
    """Return whether there are so many rows and classes that some of the rows choose the strength."""
    return len(np.unique(labels)) * len(labels) > _MANY


def _some_rows(labels: Indices, seed: int) -> Indices:
    """Return the rows that choose the value of C: all, or a random part of each class if there are many."""
    counts = np.bincount(labels)
    share = _MANY / (len(counts) * len(labels))
    if share >= 1:
        return np.arange(len(labels))
    order = np.random.default_rng(derive_seed(seed, "rows")).permutation(len(labels))
    wanted = np.maximum(np.ceil(share * counts), _PER_CLASS)
    parts = [order[labels[order] == label][: int(number)] for label, number in enumerate(wanted)]
    return np.sort(np.concatenate(parts))


def rarest(labels: Indices, groups: npt.NDArray[np.str_] | None) -> int:
    """Return the number of rows, or of groups, of the class with the fewest."""
    return min(
        int((labels == label).sum()) if groups is None else len(np.unique(groups[labels == label]))
        for label in np.unique(labels)
    )


def inner_folds(labels: Indices, groups: npt.NDArray[np.str_] | None, number: int, seed: int) -> Iterator[Fold]:
    """Yield the rows inside and outside of each of ``number`` stratified folds, by group if there are groups."""
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    kind = StratifiedKFold if groups is None else StratifiedGroupKFold
    random = seed % 2**32
    blank = np.zeros((len(labels), 1))
    for train, rest in kind(number, shuffle=True, random_state=random).split(blank, labels, groups):
        # A fold by group may by chance hold no row of a class.
        if len(np.unique(labels[train])) == len(np.unique(labels)) and len(rest):
            yield train, rest


def _row_weights(labels: Indices, train: Indices, weighted: bool, weights: Floats) -> Floats:
    """Return the weight of each row in a regression on the rows ``train``. Those of a class may sum to the same."""
    sums = _sums(labels, train, weights)
    found = np.zeros(len(labels))
    found[train] = weights[train]
    if weighted:
        found[train] *= (weights[train].sum() / (len(sums) * sums))[labels[train]]
    return found


def _sums(labels: Indices, rows: Indices, weights: Floats) -> Floats:
    """Return the sum of the weights of some rows by class."""
    return np.bincount(labels[rows], weights=weights[rows]).astype(np.float64)


def _halved(strength: float, num_classes: int) -> float:
    """Return the strength for ``Regressions``, which has a weight vector for each class also if there are two classes.

    The usual regression of two classes has one vector w. With the vectors w / 2 and -w / 2, the penalty is half as
    large, so that half the strength gives the same solution.
    """
    return strength / 2 if num_classes == 2 else strength


def balanced_log_loss(logits: Floats, labels: Indices) -> float:
    """Return the mean over the classes of the mean log loss of the rows of a class."""
    return _mean_loss(*_loss_sums(logits, labels, logits.shape[1]))


def _loss_sums(
    logits: Floats, labels: Indices, num_classes: int, weights: Floats | None = None
) -> tuple[Floats, Floats]:
    """Return the sum of the log losses of the rows of each class, and their number, or the sum of their weights."""
    from scipy.special import log_softmax

    weights = np.ones(len(labels)) if weights is None else weights
    losses = -log_softmax(logits, axis=1)[np.arange(len(labels)), labels] * weights
    sums, totals = (np.bincount(labels, weights=each, minlength=num_classes) for each in (losses, weights))
    return sums.astype(np.float64), totals.astype(np.float64)


def _mean_loss(sums: Floats, counts: Floats) -> float:
    return float((sums[counts > 0] / counts[counts > 0]).mean())


def _error_sums(scores: Floats, labels: Indices, num_classes: int, weights: Floats) -> tuple[Floats, Floats]:
    """Return the sum of the squared errors of the rows of each class, and the sum of their weights."""
    errors = np.square(scores - np.eye(num_classes)[labels]).sum(axis=1) * weights
    sums, totals = (np.bincount(labels, weights=each, minlength=num_classes) for each in (errors, weights))
    return sums.astype(np.float64), totals.astype(np.float64)


LOGISTIC = Kind(Regressions, STRENGTHS, False, _loss_sums)
RIDGE = Kind(Ridges, RIDGE_STRENGTHS, True, _error_sums)
