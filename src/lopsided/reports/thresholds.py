"""One class against all others at every threshold: counts, curves, and the best threshold of a split.

An image is predicted as positive if its probability is at least the threshold. Probabilities and thresholds are
compared in float32, like the output of the model and like the script of the page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lopsided.seeds import derive_seed

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
STEPS = 1000
"""Number of steps of the slider from 0 to 1."""
GRID = 401
"""Number of points of a curve that is a mean over folds."""
END = 0.1
"""Within this distance of 0 or 1, the slider needs a finer scale: a threshold of 2 % is six pixels from its end."""


@dataclass(frozen=True)
class Counts:
    """True and false positives and negatives of a split at one threshold."""

    tp: int
    fn: int
    fp: int
    tn: int

    @property
    def recall(self) -> float | None:
        """The share of positive images that are found."""
        return _share(self.tp, self.fn)

    @property
    def specificity(self) -> float | None:
        """The share of other images that are correctly rejected."""
        return _share(self.tn, self.fp)

    @property
    def precision(self) -> float | None:
        """The share of positive predictions that are correct. Without positive images, it says nothing."""
        return _share(self.tp, self.fp) if self.tp + self.fn else None

    @property
    def uwa(self) -> float | None:
        """The mean of recall and specificity. Without positive images None, without others the recall."""
        if self.recall is None or self.specificity is None:
            return self.recall
        return (self.recall + self.specificity) / 2


def _share(part: int, rest: int) -> float | None:
    return part / (part + rest) if part + rest else None


def counts_at(p: Floats, positive: Flags, threshold: float) -> Counts:
    """Return the counts at one threshold."""
    return counts_of(p >= np.float32(threshold), positive)


def counts_of(called: Flags, positive: Flags) -> Counts:
    """Return the counts of images that are decided to be positive."""
    tp, fp = int((called & positive).sum()), int((called & ~positive).sum())
    return Counts(tp=tp, fn=int(positive.sum()) - tp, fp=fp, tn=int((~positive).sum()) - fp)


def favoured_interval(p: Floats, positive: Flags, seed: int, resamples: int = 200) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of ``favoured``; None if there are fewer than two images of a side.

    The resamples keep the numbers of positive and of other images.
    """
    sides = [np.flatnonzero(positive), np.flatnonzero(~positive)]
    if min(map(len, sides)) < 2:
        return None
    rng = np.random.default_rng(derive_seed(seed, "report", "threshold"))
    found = []
    for _ in range(resamples):
        rows = np.concatenate([rng.choice(side, len(side)) for side in sides])
        found.append(favoured(p[rows], positive[rows]) or 0.0)
    low, high = np.quantile(found, [0.025, 0.975]).tolist()
    return low, high


def favoured(p: Floats, positive: Flags) -> float | None:
    """Return the threshold with the best UWA, or None if there are no positive or no other images.

    All thresholds between two neighbouring probabilities are equivalent. If several intervals tie, the result is the
    middle of the longest interval (the first one if lengths tie), because it is farthest from a change. The result is
    rounded to few digits.

    >>> favoured(np.float32([1e-6, 2e-6, 9e-5, 1e-4]), np.array([False, False, True, True]))
    5e-05
    """
    if not 0 < positive.sum() < len(positive):
        return None
    values = np.unique(p)
    # Thresholds in (edges[i], edges[i + 1]] select all values >= values[i]. The last interval selects nothing.
    found = [
        1 - np.searchsorted(np.sort(p[side]), np.append(values, np.inf), side="left") / np.count_nonzero(side)
        for side in (positive, ~positive)
    ]
    uwa = (found[0] + 1 - found[1]) / 2
    edges = np.concatenate([[0.0], values.astype(np.float64), [1.0]])
    best = np.flatnonzero(uwa >= uwa.max() - 1e-12)
    stretches = [
        (float(edges[part[0]]), float(edges[part[-1] + 1]))
        for part in np.split(best, np.flatnonzero(np.diff(best) > 1) + 1)
        if part[0] == 0 or edges[part[-1] + 1] > edges[part[0]]
    ]
    low, high = max(stretches, key=lambda stretch: stretch[1] - stretch[0])
    middle = (low + high) / 2
    near = (t for t in (round(middle, digits) for digits in range(3, 17)) if abs(t - middle) <= (high - low) / 10)
    return next((t for t in near if low < np.float32(t) <= high), high)


def matching(p: Floats, called: Flags) -> float | None:
    """Return the threshold that as many images reach as a rule calls the class; None if it calls none or ties forbid.

    A rule of several classes is no threshold of one of them. This one is the nearest to it.

    >>> matching(np.float64([0.125, 0.5, 0.375, 0.125]), np.array([False, True, True, False]))
    0.25
    """
    number = int(called.sum())
    ranked = np.sort(p)[::-1].astype(np.float64)
    if not number > 0:
        return None
    below = ranked[number] if number < len(ranked) else 0.0
    return None if below == ranked[number - 1] else round(float((ranked[number - 1] + below) / 2), 9)


def is_sure(p: Floats, chosen: float | None) -> bool:
    """Return whether the slider needs a finer scale near 0 and 1, where most values or the threshold lie.

    >>> is_sure(np.float32([1e-4, 0.2, 0.9999]), None), is_sure(np.float32([0.4]), 0.5)
    (True, False)
    """
    at_ends = float(np.mean((p < END) | (p > 1 - END))) > 0.5 if len(p) else False
    return at_ends or (chosen is not None and not END <= chosen <= 1 - END)


def curves(p: Floats, positive: Flags) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the ROC curve as (1 - specificity, recall) and the precision-recall curve as (recall, precision).

    Both start at the highest threshold and have one point per distinct probability. They are empty if there are no
    positive or no other images.
    """
    from sklearn.metrics import precision_recall_curve, roc_curve

    if not 0 < positive.sum() < len(positive):
        return [], []
    taken, found, _ = roc_curve(positive, p, drop_intermediate=False)
    precision, recall, _ = precision_recall_curve(positive, p)
    strictest_first = slice(
        -2, None, -1
    )  # Without the extra point that scikit-learn adds beyond the highest threshold.
    pairs = zip(recall[strictest_first].tolist(), precision[strictest_first].tolist(), strict=True)
    return list(zip(taken.tolist(), found.tolist(), strict=True)), list(pairs)


def mean_curves(
    p: Floats, positive: Flags, folds: npt.NDArray[np.int64]
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return ROC and precision-recall curve as means over folds, so that their areas are those of the metrics.

    At each of ``GRID`` false positive rates the recalls of the folds are averaged, weighted by their pairs of an image
    of the class and another one, and at each recall the precisions, weighted by their images of the class. A fold
    without one of the two kinds of images does not count.
    """
    grid = np.linspace(0, 1, GRID)
    recalls, precisions, pairs, positives = [], [], [], []
    for fold in np.unique(folds):
        rows = folds == fold
        roc, precision_recall = curves(p[rows], positive[rows])
        if not roc:
            continue
        taken, found = np.array(roc).T
        reached, precise = np.array(precision_recall).T
        recalls.append(found[np.searchsorted(taken, grid + 1e-12, side="right") - 1])
        precisions.append(precise[np.searchsorted(reached, grid - 1e-12).clip(max=len(reached) - 1)])
        positives.append(int(positive[rows].sum()))
        pairs.append(positives[-1] * (int(rows.sum()) - positives[-1]))
    if not pairs:
        return curves(p, positive)
    recall, precision = np.average(recalls, axis=0, weights=pairs), np.average(precisions, axis=0, weights=positives)
    first = [(0.0, 0.0), *zip(grid.tolist(), recall.tolist(), strict=True)]
    return first, list(zip(grid.tolist(), precision.tolist(), strict=True))
