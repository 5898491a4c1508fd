"""Cheap cues: whether something simple, such as the brightness of images, separates the classes by itself.

If it does, the classes were perhaps photographed differently, and a model may know the camera instead of the object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lopsided.evaluation.calibration import Codes, Floats
from lopsided.evaluation.intervals import Figure, auroc_interval

TELLING = 0.75
"""A cue is named if its AUROC is above this, and the lower end of the interval above ``LEAST``."""
LEAST = 0.6
TOGETHER = "all of these together"
_FOLDS, _RIDGE = 5, 1.0


@dataclass(frozen=True)
class Cue:
    """A cue that separates a class from all others by itself."""

    label: int
    name: str
    auroc: Figure


def telling_cues(
    cues: Mapping[str, Floats], labels: Codes, num_classes: int, groups: NDArray[np.str_] | None = None
) -> list[Cue]:
    """Return the cues that separate some class from the others, the best first, one list of all classes.

    With two classes, only the rarer one is listed. The last cue of a class is that of all cues together, by a linear
    classifier whose folds did not see the image.
    """
    counts = np.bincount(labels, minlength=num_classes)
    targets = [int(counts.argmin())] if num_classes == 2 else [c for c in range(num_classes) if counts[c]]
    units = np.arange(len(labels)) if groups is None else np.unique(groups, return_inverse=True)[1]
    found: list[Cue] = []
    for label in targets:
        own = labels == label
        if own.sum() < 2 or (~own).sum() < 2:
            continue
        several = {name: values for name, values in cues.items() if np.ptp(values) > 0}
        both = {**several, TOGETHER: _together(np.stack(list(several.values()), axis=1), own, units)} if several else {}
        alone = [Cue(label, name, _auroc(values, own, two_sided=name != TOGETHER)) for name, values in both.items()]
        named = [cue for cue in alone if cue.auroc.value > TELLING and cue.auroc.low > LEAST]
        if any(cue.name != TOGETHER for cue in named):
            found += sorted(named, key=lambda cue: (cue.name == TOGETHER, -cue.auroc.value))
    return found


def _auroc(values: Floats, own: NDArray[np.bool_], *, two_sided: bool) -> Figure:
    """Return the AUROC of values, or of their negatives if that is higher. Equal values count half."""
    _, ranks, sizes = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(sizes) - (sizes - 1) / 2
    positives, negatives = int(own.sum()), int((~own).sum())
    area = (middle[ranks][own].sum() - positives * (positives + 1) / 2) / (positives * negatives)
    return auroc_interval(float(max(area, 1 - area) if two_sided else area), positives, negatives, 0.95)


def _together(values: Floats, own: NDArray[np.bool_], units: Codes) -> Floats:
    """Return the score of each image by a linear classifier of cues and their squares, fitted to other groups."""
    x = (values - values.mean(axis=0)) / values.std(axis=0)
    x = np.concatenate([np.ones((len(x), 1)), x, np.square(x)], axis=1)
    fold = np.random.default_rng(0).permutation(int(units.max()) + 1)[units] % _FOLDS
    scores = np.zeros(len(x))
    for number in range(_FOLDS):
        train, test = fold != number, fold == number
        shares = own[train].mean()
        if not 0 < shares < 1:
            continue
        weights = np.where(own[train], 0.5 / shares, 0.5 / (1 - shares))
        weighted = x[train] * weights[:, None]
        normal = weighted.T @ x[train] + _RIDGE * np.eye(x.shape[1])
        scores[test] = x[test] @ np.linalg.solve(normal, weighted.T @ (2.0 * own[train] - 1))
    return scores
