"""Calibration of probabilities by held-back images, and the class shares that probabilities carry: their prior."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lopsided.recipe import Classifier, EncoderTraining, LossSettings, Recipe

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


def carried_prior(recipe: Recipe, counts: ArrayLike, *, early: bool = False) -> tuple[float, ...]:
    """Return the prior that the probabilities of a trained model carry.

    It is the class shares in the batches of the stage that trains the classifier, times the weights of its loss. So
    plain batches with cross-entropy give the class shares of the training images. Balanced batches and weighted losses
    give a uniform prior, and both together give the inverse of the shares. A loss with a function ``carries`` computes
    the prior from the shares itself.

    Weights and samplers that are deferred to the last epochs count, because the model is one of these epochs. With
    ``early``, the prior is that of the first epochs.

    Tau-normalisation takes the shares out of the logits: their highest one decides, so they carry a uniform prior.
    """
    if recipe.finisher.evens:
        return prior_of(np.asarray(counts) > 0)
    by = recipe.spec.scored_by(recipe)
    if by == "regression":
        return regression_prior(recipe, counts)
    stage: EncoderTraining | Classifier = getattr(recipe, by)
    numbers = np.asarray(counts, dtype=np.int64)
    shares = numbers.astype(np.float64)
    if stage.sampler in ("balanced", "m-per-class") or _deferred(stage, "resample_from", early):
        shares = (numbers > 0).astype(np.float64)
    elif stage.sampler == "sqrt":
        shares = np.sqrt(shares)
    if isinstance(stage, EncoderTraining) and _deferred(stage, "reweight_from", early):
        from lopsided.losses.class_balanced import class_balanced_weights  # It needs torch, which takes seconds.

        shares = shares * class_balanced_weights(numbers.tolist(), stage.reweight_beta).numpy()
    return _through_loss(stage.loss, shares, numbers, early=early)


def _through_loss(loss: LossSettings, shares: Floats, numbers: Codes, *, early: bool = False) -> tuple[float, ...]:
    """Return the prior that a loss makes of the shares of the classes in its batches."""
    entry, parameters = loss.entry, loss.parameters
    if early and entry.defers is not None and parameters[entry.defers] > 0:
        parameters[entry.defers] = 1.0
    if entry.carries is not None:
        return prior_of(entry.carries((shares / shares.sum()).tolist(), numbers.tolist(), parameters))
    weights = None if entry.reweighs is None else entry.reweighs(numbers.tolist(), parameters)
    return prior_of(shares, weights)


def _deferred(stage: EncoderTraining | Classifier, name: str, early: bool) -> bool:
    """Return whether the change of this name has begun, in the last or in the first epochs."""
    share = getattr(stage, name, None)
    return share is not None and not (early and share > 0)


def regression_prior(recipe: Recipe, counts: ArrayLike) -> tuple[float, ...]:
    """Return the prior that the probabilities of a logistic regression with ``classifier.loss`` carry.

    It uses each training image once.
    """
    numbers = np.asarray(recipe.spec.counted(np.asarray(counts).tolist()), dtype=np.int64)
    return _through_loss(recipe.classifier.loss, numbers.astype(np.float64), numbers)


def bias_between(carried: Sequence[float], prior: Sequence[float]) -> Floats:
    """Return the biases that move probabilities from one prior to another; 0 for a class without training images."""
    old, new = np.asarray(carried), np.asarray(prior)
    seen = (old > 0) & (new > 0)
    return np.where(seen, np.log(np.where(seen, new, 1.0)) - np.log(np.where(seen, old, 1.0)), 0.0)


def settled_prior(recipe: Recipe, counts: ArrayLike, further: ArrayLike = 0) -> tuple[float, ...]:
    """Return the prior that probabilities carry at the end of training, given the images of each class.

    Training moves probabilities to the shares of ``counts``, which has no images of further labels. With calibration
    none they stay where they are, so that the ``further`` images count, too.
    """
    if recipe.decision.calibration == "none":
        return carried_prior(recipe, np.asarray(counts) + np.asarray(further))
    return prior_of(recipe.spec.counted(np.asarray(counts).tolist()))
