"""Multinomial logistic regression on frozen features, with its strength chosen by inner folds.

Features are standardised by the training rows. The regression minimises C times the cross-entropy plus half the
squared weights. A path of values of C, from strong to weak, is fitted on all inner folds together, each fit starting
from the previous one. The folds are stratified, and by group if there are groups. If a class has few rows, the folds
are drawn ``REPEATS`` times, because the choice would be noisy.

The score of a value is the class-weighted log loss of the rows outside the fold. Before that, each probability is
divided by the share of its class in training, because the decision also divides by it. So a rare class counts as much
as a frequent one. The regression is then fitted again on all rows, and the standardisation is folded into its weights.

If a class has fewer rows or groups than ``FEW`` and the columns have several parts (``parts``), such as the final layer
of an encoder, the stages before it and colours, the result is the mean of the regression on all columns and of one on
each part: too few rows tell which part matters, and the errors of the parts differ. The mean of linear layers is one.

With many rows times classes, the value of C is chosen from some of the rows and by fewer folds: C is the inverse of the
penalty on the sum over the rows, so that the best value hardly depends on their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import threadpool_limits

from lopsided.seeds import derive_seed
from lopsided.training.logistic import Principal, Regressions

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

STRENGTHS = tuple(float(value) for value in 10.0 ** np.arange(-5.0, 1.01, 0.5))
"""The path of values of C, from strong to weak."""
USUAL = 1e-3
"""The value if a class has too few images or groups for inner folds."""
FEW, REPEATS = 50, 3
"""If a class has fewer rows or groups than ``FEW``, the folds are drawn ``REPEATS`` times."""
PATIENCE = 3
"""The path of a fold ends after this many values that are worse than the best one so far."""
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
    importance: Floats | None = None,
    weights: Floats | None = None,
    offset: Floats | None = None,
    parts: Sequence[Indices] = (),
    expected: float | None = None,
) -> Regression:
    """Fit the regression. ``weighted`` gives each class the same weight instead of each row.

    ``offset`` (n, classes) is a known part of the logits, which the weights do not contain.
    ``importance`` multiplies each standardised column, so that the penalty bears less on some; None: all the same.
    ``strength`` is the value of C; None: inner folds choose it. With ``scored``, inner folds also score a given value.
    ``folds`` is reduced if a class has fewer rows or groups. ``weights`` are those of the rows, all above 0: a row of
    weight 2 is as if it were there twice; None: all 1. ``parts`` are the columns of parts that also get a regression of
    their own if a class has few rows. Strength and losses of the result are those of the regression on all columns.
    ``expected`` is a value of C near which the best one is looked for: few rows of a class cannot choose it alone.
    """
    # Threads of BLAS spin for minutes if other work keeps a core busy. Large problems have threads of their own.
    with threadpool_limits(1, "blas"):
        x = np.asarray(features, dtype=np.float64)
        tried = STRENGTHS if strength is None else (strength,) if scored else ()
        if expected is not None and strength is None:
            tried = tuple(value for value in STRENGTHS if abs(np.log10(value / expected)) <= NEAR)
        settings = labels, num_classes, groups, weighted, strength, tried, folds, seed
        known = weights, offset, expected
        fitted = _fit(x, *settings, importance, *known)
        if len(parts) < 2 or strength is not None or not fitted.losses or rarest(labels, groups) >= FEW:
            return fitted
        each = (
            (part, _fit(x[:, part], *settings, None if importance is None else importance[part], *known))
            for part in parts
        )
        return _averaged(fitted, list(each))


def _averaged(whole: Regression, each: Sequence[tuple[Indices, Regression]]) -> Regression:
    """Return the mean of the logits of a regression on all columns and of some on parts of them."""
    weight, bias = whole.weight.copy(), whole.bias.copy()
    for part, fitted in each:
        weight[:, part] += fitted.weight
        bias += fitted.bias
    number = 1 + len(each)
    return replace(whole, weight=weight / number, bias=bias / number)


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
    importance: Floats | None,
    weights: Floats | None,
    offset: Floats | None,
    expected: float | None,
) -> Regression:
    mean, scale = standardisation(x, weights)
    row_weights = np.ones(len(x)) if weights is None else weights
    if importance is not None:
        scale = scale / importance
    present, own = np.unique(labels, return_inverse=True)
    turned = Principal((x - mean) / scale)
    known = None if offset is None else offset[:, present]
    rows = _some_rows(own, seed)
    some = own[rows], None if groups is None else groups[rows]
    fewest = rarest(*some)
    folds = min(folds, fewest)
    losses: tuple[tuple[float, float], ...] = ()
    if tried and folds >= 2:
        seeds = [derive_seed(seed, "folds", draw) for draw in range(REPEATS if fewest < FEW else 1)]
        pairs = [pair for each in seeds for pair in inner_folds(*some, folds, each)]
        if len(present) * len(own) > _MANY:
            pairs = pairs[: max(_SCORED * _MANY // (len(present) * len(rows)), 1)]
        part = None if known is None else known[rows]
        patience = PATIENCE if expected is None else len(tried)
        losses = tuple(_scores(turned.x[rows], own[rows], pairs, weighted, tried, row_weights[rows], part, patience))
        strength = _best(losses, fewest, expected)
    elif strength is None:
        strength, folds = expected or USUAL, 0
    weight, bias = _solution(turned, own, weighted, strength, row_weights, known)
    biases = np.full(num_classes, bias.min() - _ABSENT)
    weights = np.zeros((num_classes, x.shape[1]))
    weights[present] = weight / scale
    biases[present] = bias
    return Regression(weights, biases - weights @ mean, strength, folds if losses else 0, losses)


def _best(losses: Sequence[tuple[float, float]], fewest: int, expected: float | None) -> float:
    """Return the value of C with the lowest loss.

    If a value is expected, its logarithm has a normal prior, and the loss is that of all ``fewest`` rows: the posterior
    decides, so that each row moves the value away from the expected one as far as it has evidence.

    >>> losses = (1e-4, 0.30), (1e-3, 0.28)
    >>> [_best(losses, fewest, 1e-4) for fewest in (5, 500)]
    [0.0001, 0.001]
    """

    def surprise(pair: tuple[float, float]) -> float:
        if expected is None:
            return pair[1]
        return fewest * pair[1] + float(np.log10(pair[0] / expected) / DECADES) ** 2 / 2

    return min(losses, key=surprise)[0]


def standardisation(x: Floats, weights: Floats | None = None) -> tuple[Floats, Floats]:
    """Return mean and deviation of each column. A column that is constant, but for rounding, has the deviation 1."""
    mean, scale = x.mean(axis=0), x.std(axis=0)
    if weights is not None:
        mean = np.average(x, axis=0, weights=weights)
        scale = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=weights))
    scale[scale <= 10 * np.finfo(np.float32).eps * np.maximum(np.abs(mean), 1e-30)] = 1.0
    return mean, scale


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
    folds: Sequence[tuple[Indices, Indices]],
    weighted: bool,
    tried: Sequence[float],
    weights: Floats,
    offset: Floats | None,
    patience: int,
) -> Iterator[tuple[float, float]]:
    """Yield each value of C that is tried with its loss over the rows of all folds.

    As many folds as fit into ``_TOGETHER`` numbers are solved together. The path ends where it ended in the shortest
    fold so far.
    """
    strengths, num_classes = list(tried), int(labels.max()) + 1
    number = max(_TOGETHER // (num_classes * (_PER_ROW * len(x) + _PER_COLUMN * x.shape[1])), 1)
    sums, counts = np.zeros((len(strengths), num_classes)), np.zeros((len(strengths), num_classes))
    for begin in range(0, len(folds), number):
        own = folds[begin : begin + number]
        rows = np.stack([_row_weights(labels, train, weighted, weights) for train, _ in own], axis=1)
        share = np.stack([_sums(labels, train, weights) / weights[train].sum() for train, _ in own])
        prior = np.zeros_like(share) if weighted else np.log(share)
        solved = Regressions(x, labels, rows, np.float32, threads=torch.get_num_threads(), offset=offset)
        best, worse = np.full(len(own), np.inf), np.zeros(len(own), dtype=np.int64)
        for place, strength in enumerate(strengths):
            solved.solve(_halved(strength, num_classes), _ROUGH)
            losses = []
            for fold, (_, rest) in enumerate(own):
                logits = solved.logits[rest, fold] - prior[fold]
                by_class, number_of = _loss_sums(logits, labels[rest], num_classes, weights[rest])
                sums[place] += by_class
                counts[place] += number_of
                losses.append(_mean_loss(by_class, number_of))
            worse = np.where(losses < best, 0, worse + 1)
            best = np.minimum(losses, best)
            if worse.max() >= patience:
                del strengths[place + 1 :]
                break
    for place, strength in enumerate(strengths):
        yield strength, _mean_loss(sums[place], counts[place])


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
    weights = np.ones(len(labels)) if weights is None else weights
    top = logits.max(axis=1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    losses = -log_p[np.arange(len(labels)), labels] * weights
    sums, totals = (np.bincount(labels, weights=each, minlength=num_classes) for each in (losses, weights))
    return sums.astype(np.float64), totals.astype(np.float64)


def _mean_loss(sums: Floats, counts: Floats) -> float:
    return float((sums[counts > 0] / counts[counts > 0]).mean())


def _solution(
    turned: Principal, labels: Indices, weighted: bool, strength: float, weights: Floats, offset: Floats | None
) -> tuple[Floats, Floats]:
    """Return weight (K, d) and bias (K,) of the regression on all rows. Both sum to zero over the classes."""
    num_classes = int(labels.max()) + 1
    rows = _row_weights(labels, np.arange(len(labels)), weighted, weights)
    halved, threads, start = _halved(strength, num_classes), torch.get_num_threads(), None
    is_large = num_classes * len(labels) > _MANY
    if is_large:  # Single precision leads most of the way, in half the time.
        rough = Regressions(turned.x, labels, rows[:, None], np.float32, threads=threads, offset=offset)
        rough.solve(halved, _ROUGH)
        start = rough.weights
    solved = Regressions(turned.x, labels, rows[:, None], start=start, threads=threads, offset=offset)
    solved.solve(halved, _ENOUGH if is_large else _EXACT)
    found = solved.weights[0] - solved.weights[0].mean(axis=0)
    return turned.back(found[:, :-1]).astype(np.float64), found[:, -1].astype(np.float64)
