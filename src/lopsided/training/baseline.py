"""Comparison of a model with a baseline on the same images, and the baseline of the recipe ``quick``.

The baseline of most recipes is the recipe ``quick`` (see ``quick_run``). The recipe ``quick`` itself is compared
with linear discriminant analysis of very small images. This takes about a second. It reads a bounded number of images
and uses its own random numbers, so it does not change the training or its results. The same run always gets the same
baseline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lopsided.data.inputs import Indices, Part, Prepared
from lopsided.evaluation.intervals import Figure, paired_shares_interval
from lopsided.evaluation.metrics import confusion_figures
from lopsided.facts import Fact, cautions
from lopsided.inference.scorer import SmallImages
from lopsided.seeds import derive_seed

MOST_TRAIN, MOST_JUDGED = 2_000, 2_000
"""Maximum numbers of training images and of evaluated images."""
MOST_CLASSES = 50
LEAST_TRAIN, LEAST_JUDGED, LEAST_PER_CLASS = 100, 60, 5
"""With fewer training images, evaluated images, or evaluated images of a class, the comparison would be noise."""
LEVEL = 0.95
"""Level of the interval of the difference. A difference that chance can explain is no reason for a warning."""
_TAKE_QUICK = "Use the recipe quick (--recipe quick), or change this recipe."
_SHRINKAGE = 0.1
"""Weight of a round covariance beside the covariance of the pixels, which few images determine badly."""


@dataclass(frozen=True)
class Compared:
    """The unweighted accuracy of the model and of the baseline on the same ``number`` images.

    ``difference`` is model - baseline with a paired interval. ``enough`` is False if there are too few images for a
    warning.
    """

    model: float
    baseline: float
    number: int
    difference: Figure
    enough: bool = True

    def cautions(self, split: str, baseline: str, advice: str = _TAKE_QUICK) -> list[Fact]:
        """Return a caution if the interval of the difference is below 0. See ``cautions.below_baseline``."""
        if not (self.enough and self.difference.high < 0):
            return []
        low, high = self.difference.low, self.difference.high
        return [cautions.below_baseline(split, baseline, self.model, self.baseline, low, high, LEVEL, advice)]


def compare_answers(labels: Indices, model: Indices, other: Indices, num_classes: int) -> Compared:
    """Compare the classifications of a model and of a baseline of the same images."""
    right, also = model == labels, other == labels
    won, lost, sizes = (
        np.bincount(labels[chosen], minlength=num_classes).astype(np.float64)
        for chosen in (right & ~also, also & ~right, np.ones_like(right))
    )
    held = sizes > 0
    return Compared(
        _uwa(labels, model, num_classes),
        _uwa(labels, other, num_classes),
        len(labels),
        paired_shares_interval(won[held], lost[held], sizes[held], LEVEL),
        enough=len(labels) >= LEAST_JUDGED and bool(sizes.min() >= LEAST_PER_CLASS),
    )


def compare(
    prepared: Prepared,
    judged: Part,
    predicted: npt.NDArray[np.int64],
    seed: int,
    small: SmallImages | None = None,
) -> Compared | None:
    """Compare the predictions of a model with the baseline. Return None if there are too few or unsuitable images.

    ``predicted`` holds one class per image of ``judged``. Large splits are sampled. ``small`` holds the small versions
    of images that are known already.
    """
    num_classes = len(prepared.classes)
    counts = np.bincount(judged.labels, minlength=num_classes)
    enough = len(prepared.train) >= LEAST_TRAIN and len(judged) >= LEAST_JUDGED and counts.min() >= LEAST_PER_CLASS
    if prepared.kind != "image" or num_classes > MOST_CLASSES or not enough:
        return None
    train = sample(prepared.train.labels, MOST_TRAIN, derive_seed(seed, "baseline", "train"))
    rows = sample(judged.labels, MOST_JUDGED, derive_seed(seed, "baseline", "judged"))
    small = small or SmallImages(prepared.shape, prepared.image_size)
    answers = _linear(_floats(small, prepared.train, train), prepared.train.labels[train], _floats(small, judged, rows))
    return compare_answers(judged.labels[rows], predicted[rows], answers, num_classes)


def sample(labels: npt.NDArray[np.int64], most: int, seed: int) -> Indices:
    """Return all rows, or at most about ``most`` rows with the same share of each class and at least five of each."""
    if len(labels) <= most:
        return np.arange(len(labels))
    generator = np.random.default_rng(seed)
    share = most / len(labels)
    drawn = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        drawn.append(generator.permutation(rows)[: max(round(share * len(rows)), LEAST_PER_CLASS)])
    return np.sort(np.concatenate(drawn))


def _floats(small: SmallImages, part: Part, rows: Indices) -> npt.NDArray[np.float64]:
    """Return small images as rows of numbers in [0, 1]."""
    return small.of(part, rows).astype(np.float64) / 255


def _linear(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.int64], queries: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Classify queries by linear discriminant analysis with equal priors and a shrunken covariance.

    It solves one linear system, however many classes there are. Logistic regression takes several times as long.
    """
    classes, codes = np.unique(y, return_inverse=True)
    means = np.stack([x[codes == code].mean(axis=0) for code in range(len(classes))])
    inner = x - means[codes]
    covariance = inner.T @ inner / len(x)
    scale = float(np.trace(covariance)) / len(covariance) or 1.0
    covariance = (1 - _SHRINKAGE) * covariance + _SHRINKAGE * scale * np.eye(len(covariance))
    weights = np.linalg.solve(covariance, means.T)
    scores = queries @ weights - 0.5 * (means.T * weights).sum(axis=0)
    answers: npt.NDArray[np.int64] = classes[scores.argmax(axis=1)]
    return answers


def _uwa(truth: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64], num_classes: int) -> float:
    codes = truth * num_classes + predicted
    confusion = np.bincount(codes, minlength=num_classes**2).reshape(num_classes, num_classes)
    return confusion_figures(confusion)["uwa"]
