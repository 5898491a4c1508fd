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
    """Return the threshold of the slider's grid with the best UWA; None if a side has no image.

    Of equals, the middle of the longest stretch is taken (the first of equally long ones): the farthest from where the
    next image would tip.
    """
    if not 0 < positive.sum() < len(positive):
        return None
    grid = (np.arange(1, STEPS) / STEPS).astype(np.float32)
    found = [
        1 - np.searchsorted(np.sort(p[side]), grid, side="left") / np.count_nonzero(side)
        for side in (positive, ~positive)
    ]
    uwa = (found[0] + 1 - found[1]) / 2
    best = np.flatnonzero(uwa >= uwa.max() - 1e-12)
    stretches = np.split(best, np.flatnonzero(np.diff(best) > 1) + 1)
    longest = max(stretches, key=len)
    return int(longest[(len(longest) - 1) // 2] + 1) / STEPS


def curves(p: Floats, positive: Flags) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the ROC curve as (1 - specificity, recall) and the precision-recall curve as (recall, precision).

    Both go from the strictest threshold to the loosest, one point for each distinct probability; empty if a side has
    no image.
    """
    num_positive, num_other = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_other:
        return [], []
    order = np.argsort(-p, kind="stable")
    last = np.append(np.flatnonzero(np.diff(p[order])), len(p) - 1)
    tp = np.cumsum(positive[order])[last]
    fp = last + 1 - tp
    roc = [(0.0, 0.0), *zip((fp / num_other).tolist(), (tp / num_positive).tolist(), strict=True)]
    return roc, list(zip((tp / num_positive).tolist(), (tp / (tp + fp)).tolist(), strict=True))
