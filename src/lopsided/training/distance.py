"""The distance from normal: how far features are from those of one class, and regressions that it joins.

The distance is that of Mahalanobis. Columns are standardised by the images of the class, and their covariance is shrunk
towards equal variances, which makes it invertible however few images there are. Its largest principal axes are kept;
the variance along all others is their mean.

The distance of a training image is that from the others: it is measured by a fit to other images, as an image that
shaped the covariance lies closer to the rest than a new one, much closer if there are fewer images than columns. The
logarithm of the distance is the column: close to normal among images of the class, and not dominated by a few that are
far away.

A distance may have several positions, each with columns, centre and covariance of its own; the farthest one counts
(PaDiM, Defard et al., 2021). It is added to the distance of the whole image if the images are aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from lopsided.models.heads import LEAST_DISTANCE
from lopsided.training.averaged import calibrated_odds, fit_averaged
from lopsided.training.regression import STRENGTHS, Regression, fit_regression, rarest, standardisation

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

SHRINKAGE = 0.1
"""The share of equal variances in the covariance."""
MOST_AXES, MOST_ROWS = 512, 5_000
"""Principal axes that are kept, and images that they are computed from, evenly in their order."""
PARTS, MANY_PARTS = 10, 5
"""Training images are measured in so many parts, each by a fit to the others. With twice as many images as columns, a
fit to four fifths of them is as good, and less work."""
OUTLYING = 3.0
"""Images are left out of the covariance if their log distance is so many deviations above the median: they may be rare
ones among the others. The deviation is that of the middle half."""
LEAST_SPREAD = 0.1
"""The deviation of a column at one position is at least this share of the usual one: where all images show the same
background, a speck of dust must not count a thousand times."""
LEAST_LEVEL = 2.0
"""The deviation of the log distance is at least this, divided by the number of images. Two images or equal ones do not
tell it, and no image may be so many deviations away that probabilities of 1 no longer rank."""
LOOSE, ALIGNED = 0.3, 0.4
"""A distance by positions counts if positions explain more than this share of their variance, and as much as the other
distance from which share on: it is 0.22 for skin lesions, and 0.40 to 0.69 for solar cells, shirts and eggs."""
PULL = 1.5
"""The weight of the column before there are rare images: log odds per deviation of the log distance."""
FREEDOM = 10.0
"""How freely rare images move the weight of the column, as a multiple of the freedom of a feature."""
EXPECTED, EXPECTED_NEAR = 1e-4, 3e-3
"""The value of C that is expected per image of the rarest class: if rare images are far away, so that one image alone
hardly moves the ranking by the distance, and if they are not."""
USUAL_RANK, USUAL_IMAGES, NEAR, FAR_AWAY = 0.9, 2, 0.6, 0.9
"""The share of frequent images that are nearer than a rare one: what is assumed before there are rare images, as if by
so many of them; from which share on the distance counts more and more, and from which on it counts most."""
LEAST_FACTOR = 0.1
"""Calibration multiplies the log odds at least by this. Two rare images may by chance say that nothing is known, but
the ranking by the distance must not be lost."""
FAR = 0.99
"""Without rare images, an image is as likely rare as not, beside the prior, if it is farther than this share."""


@dataclass(frozen=True, eq=False)
class Distance:
    """A distance by some columns of the features: what ``lopsided.models.heads.Distance`` needs.

    The arrays have one row per position. ``left_out`` is the distance of the images that it was fitted to.
    """

    columns: Indices
    centre: Floats
    scale: Floats
    axes: Floats
    gains: Floats
    level: tuple[float, float]
    left_out: Floats

    def column(self, features: npt.NDArray[np.floating]) -> Floats:
        """Return the standardised log distance of features (n, f)."""
        parts = self.centre, self.scale, self.axes, self.gains
        return np.asarray((_log_distance(features, self.columns, parts) - self.level[0]) / self.level[1])


@dataclass(frozen=True, eq=False)
class Distances:
    """Distances by different columns, and the share of each in their sum. ``left_out`` is the sum for the images.

    ``aligned`` is the ``alignment`` of the images by each set of columns.
    """

    parts: tuple[Distance, ...]
    shares: Floats
    left_out: Floats
    aligned: tuple[float, ...]

    def column(self, features: npt.NDArray[np.floating]) -> Floats:
        """Return the sum of the distances of features (n, f), each times its share."""
        return np.asarray(self.shares @ np.stack([part.column(features) for part in self.parts]))


def fit_distances(
    features: npt.NDArray[np.floating],
    columns: Sequence[Indices],
    *,
    groups: npt.NDArray[np.str_] | None = None,
    seed: int = 0,
) -> Distances:
    """Fit a distance by each of several sets of columns. One by positions counts as far as the images are aligned.

    If all images show the same thing in the same place, a distance by positions finds what a mean over positions hides.
    If not, it is next to chance. ``alignment`` tells which, without an image of another class. The sum has the
    deviation of one distance.
    """
    parts = tuple(fit_distance(features, each, groups=groups, seed=seed) for each in columns)
    aligned = tuple(alignment(features, each) for each in columns)
    counted = np.array([_counted(share, len(each)) for share, each in zip(aligned, columns, strict=True)])
    usual = np.clip([part.left_out for part in parts], -OUTLYING, OUTLYING)
    together = usual @ usual.T / len(features)
    np.fill_diagonal(together, 1.0)
    shares = counted / np.sqrt(counted @ together @ counted)
    return Distances(parts, shares, shares @ np.stack([part.left_out for part in parts]), aligned)


def _counted(aligned: float, positions: int) -> float:
    return 1.0 if positions == 1 else float(np.clip((aligned - LOOSE) / (ALIGNED - LOOSE), 0, 1))


def alignment(features: npt.NDArray[np.floating], columns: Indices) -> float:
    """Return the share of the variance of ``columns`` (p, d) that the position explains, from 0 to 1.

    The variance of the mean of the images at a position is subtracted, so that few images are not aligned by chance.
    """
    num = len(features)
    means = np.stack([features[:, places].mean(axis=0, dtype=np.float64) for places in columns])
    inside = np.mean([features[:, places].var(axis=0, dtype=np.float64) for places in columns], axis=0)
    inside *= num / max(num - 1, 1)
    between = means.var(axis=0) - inside / num
    total = inside + between
    return float(np.mean(between[total > 0] / total[total > 0])) if num > 1 and (total > 0).any() else 0.0


def fit_distance(
    features: npt.NDArray[np.floating],
    columns: Indices,
    *,
    groups: npt.NDArray[np.str_] | None = None,
    seed: int = 0,
) -> Distance:
    """Fit the distance from images with these features (n, f), by the ``columns`` (p, d) of one or several positions.

    Images that lie far outside are left out of a second fit, so that a few rare images among them do no harm.
    """
    with threadpool_limits(1, "blas"):
        parts = _parts(len(features), PARTS if len(features) < 2 * columns.shape[1] else MANY_PARTS, groups, seed)
        logs = _left_out(features, columns, np.arange(len(features)), parts)
        low, middle, high = np.quantile(logs, [0.25, 0.5, 0.75])
        inside = np.flatnonzero(logs <= middle + OUTLYING * max(high - low, 1e-9) / 1.349)
        if len(inside) < len(features):
            logs = _left_out(features, columns, inside, parts)
        level = float(logs[inside].mean()), max(float(logs[inside].std()), LEAST_LEVEL / len(inside))
        return Distance(columns, *_fit(features, columns, inside), level, (logs - level[0]) / level[1])


def _parts(num: int, most: int, groups: npt.NDArray[np.str_] | None, seed: int) -> list[Indices]:
    """Return random parts of ``num`` rows, up to ``most`` of equal size, or of as many groups."""
    codes = np.arange(num) if groups is None else np.unique(groups, return_inverse=True)[1]
    order = np.random.default_rng(seed).permutation(codes.max() + 1)
    return [np.flatnonzero(np.isin(codes, part)) for part in np.array_split(order, min(most, len(order)))]


def _left_out(
    features: npt.NDArray[np.floating], columns: Indices, inside: Indices, parts: Sequence[Indices]
) -> Floats:
    """Return the log distance of each row by fits to the rows ``inside``, without those of its part."""
    logs = np.empty(len(features))
    for part in parts:
        others = np.setdiff1d(inside, part)
        logs[part] = _log_distance(features[part], columns, _fit(features, columns, others if len(others) else inside))
    return logs


def _log_distance(features: npt.NDArray[np.floating], columns: Indices, parts: Sequence[Floats]) -> Floats:
    """Return the logarithm of the squared distance of each row at its farthest position."""
    farthest = np.full(len(features), LEAST_DISTANCE)
    for places, centre, scale, axes, gains in zip(columns, *parts, strict=True):
        z = (features[:, places] - centre) * scale
        np.maximum(farthest, np.square(z).sum(axis=1) + np.square(z @ axes.T) @ gains, out=farthest)
    return np.asarray(np.log(farthest))


def _fit(features: npt.NDArray[np.floating], columns: Indices, rows: Indices) -> tuple[Floats, Floats, Floats, Floats]:
    """Return centre, scale, axes and gains of each position by some rows of the features."""
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), MOST_ROWS)).round().astype(np.int64)]
    variances = [features[np.ix_(rows, places)].var(axis=0, dtype=np.float64) for places in columns]
    least = LEAST_SPREAD * np.sqrt(np.mean(variances, axis=0))
    fitted = [_fit_one(features[np.ix_(rows, places)].astype(np.float64), least) for places in columns]
    most = max(len(axes) for _, _, axes, _ in fitted)
    # Axes that the images do not have at a position are 0, and have no effect.
    padded = [(centre, scale, np.pad(axes, ((0, most - len(axes)), (0, 0))), np.pad(gains, (0, most - len(gains))))
              for centre, scale, axes, gains in fitted]  # fmt: skip
    centre, scale, axes, gains = (np.stack(each) for each in zip(*padded, strict=True))
    return centre, scale, axes, gains


def _fit_one(x: Floats, least: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return centre, scale, axes and gains by the rows of ``x``, whose deviations count at least as ``least``."""
    centre, deviation = standardisation(x, least=least)
    z = (x - centre) / deviation
    num, width = z.shape
    axes, variances = _principal(z)
    total = float(np.square(z).sum()) / num
    others = max(total - float(variances.sum()), 0.0) / max(width - len(axes), 1)
    base = 1 / ((1 - SHRINKAGE) * others + SHRINKAGE)
    gains = 1 / (((1 - SHRINKAGE) * variances + SHRINKAGE) * base) - 1
    return centre, np.sqrt(base) / deviation, axes, gains


def _principal(z: Floats) -> tuple[Floats, Floats]:
    """Return up to ``MOST_AXES`` principal axes (r, f) of centred rows, and the variances along them."""
    num, width = z.shape
    variances, vectors = np.linalg.eigh((z @ z.T if num < width else z.T @ z) / num)
    kept = np.flatnonzero(variances > 1e-9 * max(float(variances[-1]), 1e-300))[-MOST_AXES:]
    variances, vectors = variances[kept], vectors[:, kept]
    axes = (z.T @ vectors / np.sqrt(variances * num)).T if num < width else vectors.T
    return np.ascontiguousarray(axes), variances


@dataclass(frozen=True, eq=False)
class Mixed:
    """A linear classifier with the weight ``pull`` (K,) of the column of the distance.

    ``regression`` is the one that has the column, if there is any, and ``relied`` its share in the mean.
    """

    weight: Floats
    bias: Floats
    pull: Floats
    regression: Regression | None
    relied: float = 1.0


def fit_mixed(
    features: npt.NDArray[np.floating],
    column: Floats,
    labels: Indices,
    normal: int,
    num_classes: int,
    *,
    groups: npt.NDArray[np.str_] | None = None,
    weighted: bool = False,
    strength: float | None = None,
    folds: int = 5,
    seed: int = 0,
    importance: Floats | None = None,
    parts: Sequence[Indices] = (),
) -> Mixed:
    """Fit the distance alone, a regression that has it as a column, or the mean of that and regressions without it.

    Without rare images, it is the distance alone. The regression with the column (``_with_column``) is best if rare
    images are far away, and the mean of regressions without it (``averaged``) if not. So the log odds of both are
    averaged, by how much the distance can be relied on (``reliance``). One rare image has the first one only, because
    nothing calibrates the others, and so do regressions that are ``weighted`` or of a given ``strength``.
    """
    rare = np.arange(num_classes) != normal
    if len(np.unique(labels)) < 2:
        # Beside the prior of one image, the odds are even at the distance that few images of the class reach.
        bias = np.where(rare, -np.log(len(labels)) - PULL * np.quantile(column, FAR), 0.0)
        return Mixed(np.zeros((num_classes, features.shape[1])), bias - bias.mean(), _pull(rare), None)
    same: dict[str, Any] = {"groups": groups, "folds": folds, "seed": seed}
    base = np.ones(features.shape[1]) if importance is None else importance
    relied = reliance(column, labels == normal, rarest(labels, groups))
    mixed = _with_column(
        features, column, labels, rare, relied, importance=base, weighted=weighted, strength=strength, **same
    )
    assert mixed.regression is not None
    if mixed.regression.left_out is None or strength is not None or weighted:
        return mixed
    mixed = _calibrated(mixed, labels, groups)
    if relied == 1:
        return mixed
    other = fit_averaged(features, labels, num_classes, importance=importance, parts=parts, **same)
    weight, bias = ((1 - relied) * a + relied * b for a, b in ((other.weight, mixed.weight), (other.bias, mixed.bias)))
    return Mixed(weight, bias, relied * mixed.pull, mixed.regression, relied)


def _pull(rare: npt.NDArray[np.bool_]) -> Floats:
    """Return the weight of the column for each class before there are rare images."""
    return np.asarray(PULL * (np.where(rare, 1.0, 0.0) - rare.mean()), dtype=np.float64)


def _with_column(
    features: npt.NDArray[np.floating],
    column: Floats,
    labels: Indices,
    rare: npt.NDArray[np.bool_],
    relied: float,
    *,
    importance: Floats,
    groups: npt.NDArray[np.str_] | None,
    **settings: Any,
) -> Mixed:
    """Fit a regression on features and the column of the distance, whose weight is ``PULL`` without rare images.

    The penalty draws the weights of the features to 0 and that of the column to ``PULL``, so that each rare image moves
    the model from the distance towards what the images say. How far depends on whether the rare images are far away
    (``expected_strength``). Inner folds alone would choose the penalty badly: by the log loss of 20 rare solar cells,
    the distance alone is often the best, and it ranks 1 point worse.
    """
    fitted = fit_regression(
        np.concatenate([features, column[:, None].astype(features.dtype)], axis=1),
        labels,
        len(rare),
        groups=groups,
        importance=np.append(importance, FREEDOM),
        offset=column[:, None] * _pull(rare),
        expected=expected_strength(relied, rarest(labels, groups)),
        **settings,
    )
    return Mixed(fitted.weight[:, :-1], fitted.bias, _pull(rare) + fitted.weight[:, -1], fitted)


def _calibrated(mixed: Mixed, labels: Indices, groups: npt.NDArray[np.str_] | None) -> Mixed:
    """Return the classifier with the log odds that the rows left out speak for, beside the class shares."""
    assert mixed.regression is not None
    assert mixed.regression.left_out is not None
    present, places = np.unique(labels, return_inverse=True)
    factor, shift = calibrated_odds(mixed.regression.left_out, places, groups)
    factor = max(factor, LEAST_FACTOR)
    shares, before = np.log(np.bincount(places) / len(places)), mixed.bias[present]
    after = factor * (before - shares) + shares + shift
    bias = mixed.bias + after.min() - before.min()  # Classes without images stay as far below the others.
    bias[present] = after
    return Mixed(factor * mixed.weight, bias, factor * mixed.pull, mixed.regression)


def reliance(column: Floats, normal: npt.NDArray[np.bool_], number: int) -> float:
    """Return how much the distance counts, from 0 to 1, by the distances of all images.

    If most frequent images are nearer than the rare ones, as intact parts than broken ones, the distance is worth more
    than a regression on a few images. If not, as in two diseases on one camera, only the regression can tell. The mean
    rank of the rare images says which, already with one of them. ``number`` is that of the images of the rarest class.
    """
    ranks = np.searchsorted(np.sort(column[normal]), column[~normal], side="left") / normal.sum()
    mean = (USUAL_IMAGES * USUAL_RANK + number * float(ranks.mean())) / (USUAL_IMAGES + number)
    return float(np.clip((mean - NEAR) / (FAR_AWAY - NEAR), 0, 1))


def expected_strength(relied: float, number: int) -> float:
    """Return the value of C to expect by how much the distance counts, and the images of the rarest class."""
    strength = EXPECTED**relied * EXPECTED_NEAR ** (1 - relied)
    return float(np.clip(number * strength, STRENGTHS[0], STRENGTHS[-1]))
