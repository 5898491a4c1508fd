"""One class against the rest at every threshold: counts, curves, and the threshold that a split favours.

An image is called positive where its probability is at or above the threshold. Probabilities and thresholds are
compared in float32, as the model gave them and as the page compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
STEPS = 1000
"""The slider goes from 0 to 1 in so many steps."""
END = 0.005
"""How near to 0 or 1 a probability is at an end, where the steps of the slider are too coarse."""


@dataclass(frozen=True)
class Counts:
    """What one threshold makes of a split."""

    tp: int
    fn: int
    fp: int
    tn: int

    @property
    def recall(self) -> float | None:
        """Positives that are found."""
        return _share(self.tp, self.fn)

    @property
    def specificity(self) -> float | None:
        """Others that are left alone."""
        return _share(self.tn, self.fp)

    @property
    def precision(self) -> float | None:
        """Those called positive that are."""
        return _share(self.tp, self.fp)

    @property
    def uwa(self) -> float | None:
        """The mean of recall and specificity; of the one that there is where the other is not defined."""
        known = [share for share in (self.recall, self.specificity) if share is not None]
        return sum(known) / len(known) if known else None


def _share(part: int, rest: int) -> float | None:
    return part / (part + rest) if part + rest else None


def counts_at(p: Floats, positive: Flags, threshold: float) -> Counts:
    """Count at one threshold."""
    called = p >= np.float32(threshold)
    tp, fp = int((called & positive).sum()), int((called & ~positive).sum())
    return Counts(tp=tp, fn=int(positive.sum()) - tp, fp=fp, tn=int((~positive).sum()) - fp)


def favoured(p: Floats, positive: Flags) -> float | None:
    """Return the threshold with the best UWA of all; None if a side has no image.

    Only where a threshold lies between the distinct probabilities matters. Of equals, the middle of the longest stretch
    is taken (the first of equally long ones), the farthest from where the next image would tip, written with as few
    digits as keep it near there.

    >>> favoured(np.float32([1e-6, 2e-6, 9e-5, 1e-4]), np.array([False, False, True, True]))
    5e-05
    """
    if not 0 < positive.sum() < len(positive):
        return None
    values = np.unique(p)
    # A threshold in (edges[i], edges[i + 1]] calls all from values[i] on; the last calls none, the first may be 0.
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


def is_sure(p: Floats, chosen: float | None) -> bool:
    """Whether a slider needs a scale that spreads the ends: most probabilities, or the threshold favoured, lie there.

    >>> is_sure(np.float32([1e-4, 0.2, 0.9999]), None), is_sure(np.float32([0.4]), 0.5)
    (True, False)
    """
    at_ends = float(np.mean((p < END) | (p > 1 - END))) > 0.5 if len(p) else False
    return at_ends or (chosen is not None and not END <= chosen <= 1 - END)


def curves(p: Floats, positive: Flags) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the ROC curve as (1 - specificity, recall) and the precision-recall curve as (recall, precision).

    Both go from the strictest threshold to the loosest, one point for each distinct probability; empty if a side has
    no image.
    """
    from sklearn.metrics import precision_recall_curve, roc_curve

    if not 0 < positive.sum() < len(positive):
        return [], []
    taken, found, _ = roc_curve(positive, p, drop_intermediate=False)
    precision, recall, _ = precision_recall_curve(positive, p)
    strictest_first = slice(-2, None, -1)  # Without the point that scikit-learn adds beyond the strictest.
    pairs = zip(recall[strictest_first].tolist(), precision[strictest_first].tolist(), strict=True)
    return list(zip(taken.tolist(), found.tolist(), strict=True)), list(pairs)
