"""Probabilities of held-back images: their calibration, and the prior that they carry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Codes = NDArray[np.int64]
Floats = NDArray[np.float64]
TINY = 1e-300
"""The smallest probability of which a logarithm is taken."""
TEMPERATURE_SPREAD, BIAS_SPREAD = 1.0, 1.0
"""Standard deviations of the penalty of a calibration: of the logarithm of its temperature, and of each bias."""


@dataclass(frozen=True, eq=False)
class HeldBack:
    """Probabilities (n, K) of labelled images that the model was not trained on."""

    probabilities: Floats
    labels: Codes
    groups: NDArray[Any] | None = None
    """The group of each image, such as its lesion; images of one group are not independent."""
    kind: str = "validation"
    """What notes call the images: validation or out-of-fold."""

    def moved(self, probabilities: Floats) -> HeldBack:
        """Return the same images with other probabilities."""
        return replace(self, probabilities=probabilities)

    def rows(self, rows: NDArray[Any]) -> HeldBack:
        """Return some of the images."""
        groups = None if self.groups is None else self.groups[rows]
        return replace(self, probabilities=self.probabilities[rows], labels=self.labels[rows], groups=groups)

    def counts(self) -> Codes:
        """Return the number of images of each class."""
        return np.bincount(self.labels, minlength=self.probabilities.shape[1])


def prior_of(shares: ArrayLike, weights: ArrayLike | None = None) -> tuple[float, ...]:
    """Return the prior that probabilities carry after training on batches with class ``shares`` and class ``weights``.

    >>> prior_of([0.9, 0.1]), prior_of([0.9, 0.1], [1 / 0.9, 1 / 0.1])
    ((0.9, 0.1), (0.5, 0.5))
    """
    mass = np.asarray(shares, dtype=np.float64)
    if weights is not None:
        mass = mass * np.asarray(weights, dtype=np.float64)
    return tuple((mass / mass.sum()).round(15).tolist())


@dataclass(frozen=True)
class Calibration:
    """An affine change of logits: divided by ``temperature``, then ``bias`` added per class."""

    temperature: float
    bias: tuple[float, ...]

    def __call__(self, probabilities: ArrayLike) -> Floats:
        """Return calibrated probabilities (n, K)."""
        z = np.log(np.maximum(np.asarray(probabilities, dtype=np.float64), TINY)) / self.temperature + self.bias
        p = np.exp(z - z.max(axis=-1, keepdims=True))
        calibrated: Floats = p / p.sum(axis=-1, keepdims=True)
        return calibrated


def fit_calibration(held: HeldBack, prior: Sequence[float], *, biases: bool = True) -> Calibration:
    """Return the temperature, and with ``biases`` one bias per class, that calibrate held-back images.

    The images are weighted as if their classes had the shares ``prior``, because the probabilities carry it. A penalty
    keeps both finite if all images are classified correctly, and keeps the bias of a class without images at 0.
    """
    num_classes = held.probabilities.shape[1]
    if np.count_nonzero(held.counts()) < 2:  # Nothing says how far to go.
        return Calibration(1.0, (0.0,) * num_classes)
    weights = class_weights(held, np.asarray(prior, dtype=np.float64))
    free = held.counts() > 0 if biases else np.zeros(num_classes, dtype=bool)
    spreads = np.where(free, BIAS_SPREAD, 0.0)
    log_scale, shift = fit_affine(held, weights, np.zeros(num_classes), TEMPERATURE_SPREAD, spreads)
    shift = np.where(free, shift - shift[free].mean(), 0.0) if free.any() else np.zeros(num_classes)
    return Calibration(float(math.exp(-log_scale)), tuple(shift.tolist()))


def at_prevalence(probabilities: ArrayLike, prior: Sequence[float], shares: Sequence[float]) -> Floats:
    """Return probabilities that carry the prior ``shares`` instead of ``prior``.

    >>> at_prevalence([[0.5, 0.5]], prior=[0.5, 0.5], shares=[0.9, 0.1])
    array([[0.9, 0.1]])
    """
    old, new = np.asarray(prior, dtype=np.float64), np.asarray(shares, dtype=np.float64)
    p = np.asarray(probabilities, dtype=np.float64) * np.divide(new, old, out=np.zeros_like(new), where=old > 0)
    moved: Floats = p / np.maximum(p.sum(axis=-1, keepdims=True), TINY)
    return moved


def class_weights(held: HeldBack, shares: Floats) -> Floats:
    """Return weights with which the classes have these shares. They sum to the effective number of images.

    Images of one group count as copies of each other, as in the intervals of metrics.
    """
    return balanced_weights(held.labels, shares, held.groups)


def balanced_weights(
    labels: Codes, shares: Floats, groups: NDArray[Any] | None = None, weights: Floats | None = None
) -> Floats:
    """Return weights of rows with which the classes have these shares, in proportion to ``weights`` within a class.

    They sum to the effective number of rows. Rows of one group count as copies of each other.
    """
    own = np.ones(len(labels)) if weights is None else weights
    counts = np.bincount(labels, weights=own, minlength=len(shares))
    found: Floats = np.divide(shares, counts, out=np.zeros(len(counts)), where=counts > 0)[labels] * own
    total = found.sum()
    if not total > 0:
        return found
    sums = found if groups is None else np.bincount(np.unique(groups, return_inverse=True)[1], weights=found)
    scaled: Floats = found * total / np.square(sums).sum()
    return scaled


def fit_affine(
    held: HeldBack, weights: Floats, start: Floats, scale_spread: float, spreads: Floats
) -> tuple[float, Floats]:
    """Fit log a and shifts d of the logits a log p + start + d by weighted log-likelihood less two penalties.

    A shift whose penalty has the spread 0 stays 0.
    """
    from scipy.optimize import minimize

    logs = np.log(np.maximum(held.probabilities, TINY))
    num_classes = logs.shape[1]
    rows = np.arange(len(held.labels))
    truth = np.zeros_like(logs)
    truth[rows, held.labels] = 1
    widths = np.concatenate([[scale_spread], np.where(spreads > 0, spreads, 1.0)])

    def cost(x: Floats) -> tuple[float, Floats]:
        scale = math.exp(x[0])
        z = scale * logs + start + x[1:]
        total = np.logaddexp.reduce(z, axis=1)
        slope = weights[:, None] * (np.exp(z - total[:, None]) - truth)
        gradient = np.concatenate([[scale * (slope * logs).sum()], slope.sum(axis=0)]) + x / np.square(widths)
        return float(weights @ (total - z[rows, held.labels]) + np.square(x / widths).sum() / 2), gradient

    bounds = [(-3.0, 3.0), *((-20.0, 20.0) if spread > 0 else (0.0, 0.0) for spread in spreads)]
    found = minimize(cost, np.zeros(num_classes + 1), jac=True, method="L-BFGS-B", bounds=bounds)
    return float(found.x[0]), found.x[1:]
