"""The distance from normal: how far features are from those of one class, and a regression that has it as a column.

The distance is that of Mahalanobis. Columns are standardised by the images of the class, and their covariance is shrunk
towards equal variances, which makes it invertible however few images there are. Its largest principal axes are kept;
the variance along all others is their mean.

The distance of a training image is that of the image left out, by the formula of Sherman and Morrison, because an image
that shaped the covariance lies closer to the others than a new one. The logarithm of the distance is the column: close
to normal among images of the class, and not dominated by a few that are far away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from lopsided.models.heads import LEAST_DISTANCE
from lopsided.training.regression import STRENGTHS, Regression, fit_regression, rarest, standardisation

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

SHRINKAGE = 0.1
"""The share of equal variances in the covariance."""
MOST_AXES, MOST_ROWS = 512, 5_000
"""Principal axes that are kept, and images that they are computed from, evenly in their order."""
OUTLYING = 3.0
"""Images are left out of the covariance if their log distance is so many deviations above the median: they may be rare
ones among the others. The deviation is that of the middle half."""
PULL = 1.5
"""The weight of the column before there are rare images: log odds per deviation of the log distance."""
FREEDOM = 10.0
"""How freely rare images move the weight of the column, as a multiple of the freedom of a feature."""
EXPECTED, EXPECTED_NEAR = 1e-4, 1e-3
"""The value of C that is expected per image of the rarest class: if rare images are far away, so that one image alone
hardly moves the ranking by the distance, and if they are not."""
USUAL_RANK, USUAL_IMAGES, NEAR, FAR_AWAY = 0.9, 2, 0.6, 0.9
"""The share of frequent images that are nearer than a rare one: what is assumed before there are rare images, as if by
so many of them; from which share on, and up to which, the distance counts more and more."""
FAR = 0.99
"""Without rare images, an image is as likely rare as not, beside the prior, if it is farther than this share."""


@dataclass(frozen=True, eq=False)
class Distance:
    """A distance by the features ``columns``: what ``lopsided.models.heads.DistanceHead`` needs, for these features.

    ``left_out`` is the column of the images that it was fitted to.
    """

    columns: npt.NDArray[np.bool_]
    centre: Floats
    scale: Floats
    axes: Floats
    gains: Floats
    level: tuple[float, float]
    left_out: Floats

    def column(self, features: npt.NDArray[np.floating]) -> Floats:
        """Return the standardised log distance of features (n, f)."""
        z = (features[:, self.columns] - self.centre) * self.scale
        distance = np.square(z).sum(axis=1) + np.square(z @ self.axes.T) @ self.gains
        return np.asarray((np.log(np.maximum(distance, LEAST_DISTANCE)) - self.level[0]) / self.level[1])


def fit_distance(features: npt.NDArray[np.floating], columns: npt.NDArray[np.bool_]) -> Distance:
    """Fit the distance from images with these features (n, f), by some of the columns.

    Images that lie far outside are left out of a second fit, so that a few rare images among them do no harm.
    """
    with threadpool_limits(1, "blas"):
        x = np.asarray(features[:, columns], dtype=np.float64)
        first = _fit(x, columns, np.arange(len(x)))
        low, middle, high = np.quantile(first.left_out, [0.25, 0.5, 0.75])
        inside = np.flatnonzero(first.left_out <= middle + OUTLYING * max(high - low, 1e-9) / 1.349)
        return first if len(inside) == len(x) else _fit(x, columns, inside)


def _fit(x: Floats, columns: npt.NDArray[np.bool_], inside: Indices) -> Distance:
    """Fit the distance to the rows ``inside`` of ``x``, which has these columns alone; ``left_out`` has all rows."""
    rows = inside[np.linspace(0, len(inside) - 1, min(len(inside), MOST_ROWS)).round().astype(np.int64)]
    centre, deviation = standardisation(x[rows])
    z = (x - centre) / deviation
    num, width = len(rows), x.shape[1]
    axes, variances = _principal(z[rows])
    total = float(np.square(z[rows]).sum()) / num
    others = max(total - float(variances.sum()), 0.0) / max(width - len(axes), 1)
    even = SHRINKAGE * max(total / width, 1e-12)
    base = 1 / ((1 - SHRINKAGE) * others + even)
    gains = 1 / (((1 - SHRINKAGE) * variances + even) * base) - 1
    z *= np.sqrt(base)
    distance = np.maximum(np.square(z).sum(axis=1) + np.square(z @ axes.T) @ gains, LEAST_DISTANCE)
    # Without the row itself: its mean moves away by n / (n - 1), and the covariance loses a part of rank 1.
    left_out = distance.copy()
    if num > 1:
        own = distance[rows]
        left_out[rows] = own * (num / (num - 1)) ** 2 / np.maximum(1 - (1 - SHRINKAGE) / num * own, 0.01)
    logs = np.log(left_out)
    level = float(logs[inside].mean()), max(float(logs[inside].std()), 1e-3)
    return Distance(columns, centre, np.sqrt(base) / deviation, axes, gains, level, (logs - level[0]) / level[1])


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
    """A linear classifier with the weight ``pull`` (K,) of the column of the distance."""

    weight: Floats
    bias: Floats
    pull: Floats
    regression: Regression | None


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
) -> Mixed:
    """Fit a regression on features and the column of the distance, whose weight is ``PULL`` without rare images.

    The penalty draws the weights of the features to 0 and that of the column to ``PULL``, so that each rare image moves
    the model from the distance towards what the images say. How far depends on whether the rare images are far away
    (``expected_strength``). Inner folds alone would choose the penalty badly: by the log loss of 20 rare solar cells,
    the distance alone is often the best, and it ranks 1 point worse.
    """
    rare = np.arange(num_classes) != normal
    pull = PULL * np.where(rare, 1.0, 0.0) - PULL * rare.mean()
    present = np.unique(labels)
    if len(present) < 2:
        # Beside the prior of one image, the odds are even at the distance that few images of the class reach.
        bias = np.where(rare, -np.log(len(labels)) - PULL * np.quantile(column, FAR), 0.0)
        return Mixed(np.zeros((num_classes, features.shape[1])), bias - bias.mean(), pull, None)
    joined = np.concatenate([features, column[:, None].astype(features.dtype)], axis=1)
    base = np.ones(features.shape[1]) if importance is None else importance
    fitted = fit_regression(
        joined,
        labels,
        num_classes,
        groups=groups,
        weighted=weighted,
        strength=strength,
        folds=folds,
        seed=seed,
        importance=np.append(base, FREEDOM),
        offset=column[:, None] * pull,
        expected=expected_strength(column, labels == normal, rarest(labels, groups)),
    )
    return Mixed(fitted.weight[:, :-1], fitted.bias, pull + fitted.weight[:, -1], fitted)


def expected_strength(column: Floats, normal: npt.NDArray[np.bool_], number: int) -> float:
    """Return the value of C to expect by the distances of all images, and the number of images of the rarest class.

    If most frequent images are nearer than the rare ones, as intact parts than broken ones, the distance is worth more
    than a regression on a few images. If not, as in two diseases on one camera, only the regression can tell. The mean
    rank of the rare images says which, already with one of them.
    """
    ranks = np.searchsorted(np.sort(column[normal]), column[~normal], side="left") / normal.sum()
    mean = (USUAL_IMAGES * USUAL_RANK + number * float(ranks.mean())) / (USUAL_IMAGES + number)
    share = float(np.clip((mean - NEAR) / (FAR_AWAY - NEAR), 0, 1))
    strength = EXPECTED**share * EXPECTED_NEAR ** (1 - share)
    return float(np.clip(number * strength, STRENGTHS[0], STRENGTHS[-1]))
