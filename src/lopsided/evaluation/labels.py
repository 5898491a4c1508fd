"""Label check: labels that out-of-fold probabilities contradict, and images that are almost the same.

The label check is confident learning (Northcutt, Jiang and Chuang, 2021). The threshold of a class is the mean
probability of the class over the images that have it as their label. An image belongs confidently to a class if its
probability reaches the threshold of the class. An image is a suspect if it belongs confidently to another class than
its label. A model is less sure of a rare class, and the threshold of a rare class is lower by as much.

A suspect may be difficult and rightly labelled, so ``count_wrong`` estimates the number of wrong labels apart: how many
contradictions are there beyond those that the probabilities expect.

The images are sorted by the probability of their label, lowest first, whether they are suspects or not: a wrong label
reaches the mean probability of the true class only about every second time. ``studies/labels.py`` compares this
order with others on flipped labels; its record is ``studies/records/labels.json``.

The probabilities must come from models that did not see the image, and have the class shares of the training images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lopsided.errors import InputError, sentence
from lopsided.evaluation.calibration import TINY
from lopsided.evaluation.intervals import Estimate, Floats, quantile
from lopsided.files import csv_text

Codes = NDArray[np.int64]
NEAR = 0.86
"""Images with at least this cosine of their standardised features count as near-duplicates.

Hardly any photographs of different lesions in ISIC 2018 reach it, and most copies of other size or quality do, with
the features of the recipe ``quick`` (``studies/labels.py near``).
"""
STEPS = 60
"""Shares of wrong labels that are tried."""
BLOCK = 1024
"""Rows of the similarity matrix that are held in memory at once."""


@dataclass(frozen=True, eq=False)
class LabelCheck:
    """The images in the order of the check, the most doubtful label first.

    The other arrays have the original order. ``suspect`` tells whether an image belongs confidently to another class
    than its label. ``suggested`` is this class; for other images it is the most probable class besides the label.
    ``joint[i, j]`` counts the images with label i that belong confidently to class j.
    """

    order: Codes
    label: Codes
    suggested: Codes
    suspect: NDArray[np.bool_]
    p_label: Floats
    p_suggested: Floats
    thresholds: Floats
    joint: Codes

    @property
    def num_suspects(self) -> int:
        """The number of suspects."""
        return int(self.suspect.sum())


def check_labels(labels: ArrayLike, probabilities: ArrayLike) -> LabelCheck:
    """Return the label check of out-of-fold probabilities, (images, classes). Labels are class numbers.

    >>> p = [[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.1, 0.9], [0.9, 0.1]]
    >>> check = check_labels([0, 0, 0, 1, 1], p)  # The last image looks like class 0.
    >>> check.order.tolist(), check.suggested.tolist(), check.num_suspects
    ([4, 2, 1, 0, 3], [1, 1, 1, 0, 0], 1)
    """
    y, p = _checked(labels, probabilities)
    rows, num_classes = np.arange(len(y)), p.shape[1]
    counts = np.bincount(y, minlength=num_classes)
    thresholds = np.full(num_classes, np.inf)
    np.divide(np.bincount(y, weights=p[rows, y], minlength=num_classes), counts, out=thresholds, where=counts > 0)
    reached = p >= thresholds
    confident = reached.any(axis=1)
    belongs = np.where(reached, p, -1.0).argmax(axis=1)  # Of several classes that it reaches, the most probable one.
    suspect = confident & (belongs != y)
    others = p.copy()
    others[rows, y] = -1.0
    suggested = np.where(suspect, belongs, others.argmax(axis=1))
    joint = np.zeros((num_classes, num_classes), dtype=np.int64)
    np.add.at(joint, (y[confident], belongs[confident]), 1)
    order = np.lexsort((rows, p[rows, y]))
    return LabelCheck(order, y, suggested, suspect, p[rows, y], p[rows, suggested], thresholds, joint)


def count_wrong(
    labels: ArrayLike, probabilities: ArrayLike, groups: Sequence[str] | None = None, level: float = 0.95
) -> Estimate:
    """Return how many labels are probably wrong, with the interval of the profile likelihood.

    A label has the probabilities q of the image, or with a small share e it is another class by mistake (Copas, 1988):
    P(y) = (1 - e) q_y + e (1 - q_y) / (K - 1). q are the given probabilities after an affine change of their logits,
    which is fitted together with e: a model that is too sure does not count as wrong labels. The difficult images lie
    where q says so, wrong labels also where q is sure. Images of one group count as copies of each other.

    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=600) + 4 * (np.arange(600) % 2)
    >>> p = 1 / (1 + np.exp(4 * (x - 2)))
    >>> labels = np.arange(600) % 2
    >>> labels[:12] = 1 - labels[:12]
    >>> found = count_wrong(labels, np.stack([p, 1 - p], axis=1))
    >>> 8 < found.value < 16 and found.low > 4
    True
    """
    y, p = _checked(labels, probabilities)
    number = len(y)
    _, sizes = np.unique(np.arange(number) if groups is None else np.asarray(groups), return_counts=True)
    alone = number / float(np.square(sizes).sum())
    shares = np.concatenate([[0.0], np.geomspace(0.25 / number, 0.4, STEPS)])
    costs, start = [], np.zeros(p.shape[1] + 1)
    for share in shares:
        cost, start = _mislabelled(y, p, share, alone, start)
        costs.append(cost)
    above = np.array(costs) - min(costs)
    inside = shares[above <= quantile(level) ** 2 / 2]
    return Estimate(*(float(number * share) for share in (shares[above.argmin()], inside.min(), inside.max())))


def _mislabelled(y: Codes, p: Floats, share: float, weight: float, start: Floats) -> tuple[float, Floats]:
    """Return the cost of labels of which a share is wrong, and the affine change (log scale, biases) with the least."""
    from scipy.optimize import minimize

    logs, rows, num_classes = np.log(np.maximum(p, TINY)), np.arange(len(y)), p.shape[1]
    other = share / (num_classes - 1)
    truth = np.zeros_like(logs)
    truth[rows, y] = 1

    def cost(x: Floats) -> tuple[float, Floats]:
        scale = np.exp(x[0])
        z = scale * logs + x[1:]
        q = np.exp(z - np.logaddexp.reduce(z, axis=1)[:, None])
        own = q[rows, y]
        chance = np.maximum(other + (1 - share - other) * own, TINY)
        slope = -weight * ((1 - share - other) * own / chance)[:, None] * (truth - q)
        gradient = np.concatenate([[scale * (slope * logs).sum()], slope.sum(axis=0)]) + x
        return float(-weight * np.log(chance).sum() + np.square(x).sum() / 2), gradient

    bounds = [(-3.0, 3.0), *[(-20.0, 20.0)] * num_classes]
    found = minimize(cost, start, jac=True, method="L-BFGS-B", bounds=bounds)
    return float(found.fun), found.x


def labels_table(
    check: LabelCheck, names: Sequence[str], classes: Sequence[str], groups: Sequence[str] | None = None
) -> bytes:
    """Return the check as CSV, all images, the most doubtful label first."""
    header = ["rank", "name", "group", "label", "suggested", "suspect", "p_label", "p_suggested"]
    rows = (
        [
            rank,
            names[i],
            "" if groups is None else groups[i],
            classes[check.label[i]],
            classes[check.suggested[i]],
            "yes" if check.suspect[i] else "no",
            f"{check.p_label[i]:.6g}",
            f"{check.p_suggested[i]:.6g}",
        ]
        for rank, i in enumerate(check.order.tolist(), start=1)
    )
    return csv_text([header, *rows]).encode(errors="surrogateescape")


@dataclass(frozen=True, order=True)
class NearPair:
    """Two images with nearly the same features. ``across`` is what differs: ``label``, ``group`` or ``image``."""

    similarity: float
    first: int
    second: int
    across: str


def near_duplicates(
    features: ArrayLike,
    labels: ArrayLike,
    groups: Sequence[str] | None = None,
    *,
    threshold: float = NEAR,
    block: int = BLOCK,
) -> list[NearPair]:
    """Return pairs of images with nearly the same features, the most similar first.

    The similarity is the cosine of standardised features. Each image is paired with its most similar image of another
    label, and with its most similar image of the same label and another group (without groups: any other image). So
    there are at most two pairs per image, and memory grows linearly with the images.
    """
    x = np.asarray(features, dtype=np.float32)
    y = np.asarray(labels)
    if x.ndim != 2 or y.shape != x.shape[:1] or (groups is not None and len(groups) != len(x)):
        got = f"shapes {x.shape} and {y.shape}"
        raise InputError(sentence("features must be one vector for each label, and groups one for each image", got))
    if not 0 < threshold <= 1:
        raise InputError(sentence("threshold must be above 0 and at most 1", threshold, f"{NEAR} is the usual choice."))
    if not np.isfinite(x).all():
        raise InputError("features must be finite numbers. Leave out images without features.")
    units = np.arange(len(x)) if groups is None else np.unique(np.asarray(groups, dtype=str), return_inverse=True)[1]
    z = standardised(x)
    found: dict[tuple[int, int], NearPair] = {}
    for start in range(0, len(z), block):
        rows = np.arange(start, min(start + block, len(z)))
        similar = z[rows] @ z.T
        other_label = y[rows, None] != y[None, :]
        other_unit = (units[rows, None] != units[None, :]) & ~other_label
        for across, allowed in (("label", other_label), ("image" if groups is None else "group", other_unit)):
            values = np.where(allowed, similar, -np.inf)
            best = values.argmax(axis=1)
            for row, column in zip(rows.tolist(), best.tolist(), strict=True):
                value = float(values[row - start, column])
                if value >= threshold:
                    pair = (min(row, column), max(row, column))
                    found[pair] = NearPair(min(value, 1.0), *pair, across)
    return sorted(found.values(), key=lambda pair: (-pair.similarity, pair.first, pair.second))


def duplicates_table(
    pairs: Sequence[NearPair],
    names: Sequence[str],
    labels: Sequence[int],
    classes: Sequence[str],
    groups: Sequence[str] | None = None,
) -> bytes:
    """Return pairs of near-duplicates as CSV."""
    header = ["similarity", "across", "name", "label", "group", "other_name", "other_label", "other_group"]

    def facts(i: int) -> list[str]:
        return [names[i], classes[labels[i]], "" if groups is None else groups[i]]

    rows = ([f"{pair.similarity:.4f}", pair.across, *facts(pair.first), *facts(pair.second)] for pair in pairs)
    return csv_text([header, *rows]).encode(errors="surrogateescape")


def standardised(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return features with mean 0 and deviation 1 in each dimension, scaled to length 1. Constant ones are dropped."""
    mean, deviation = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64)
    kept = deviation > 1e-12 * np.maximum(np.abs(mean), 1e-30)
    z = ((x[:, kept] - mean[kept]) / deviation[kept]).astype(np.float32)
    length = np.linalg.norm(z, axis=1, keepdims=True)
    return np.asarray(np.divide(z, length, out=np.zeros_like(z), where=length > 0))


def _checked(labels: ArrayLike, probabilities: ArrayLike) -> tuple[Codes, Floats]:
    y, p = np.asarray(labels), np.asarray(probabilities, dtype=np.float64)
    if p.ndim != 2 or y.shape != p.shape[:1] or not len(p) or p.shape[1] < 2:
        got = f"shapes {y.shape} and {p.shape}"
        raise InputError(sentence("labels must be (n,) and probabilities (n, classes) of at least two classes", got))
    if not (np.issubdtype(y.dtype, np.integer) and (y >= 0).all() and (y < p.shape[1]).all()):
        raise InputError(
            sentence(f"labels must be class numbers from 0 to {p.shape[1] - 1}", f"{y.min()} to {y.max()}")
        )
    if not (np.isfinite(p).all() and (p >= 0).all() and (p <= 1).all()):
        raise InputError("probabilities must be between 0 and 1. Leave out images without a prediction.")
    return y.astype(np.int64), p
