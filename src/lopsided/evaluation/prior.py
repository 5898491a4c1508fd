"""The class shares that the probabilities of a trained model carry."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lopsided.evaluation.calibration import prior_of
from lopsided.recipe import Classifier, EncoderTraining, LossSettings, Recipe


def carried_prior(recipe: Recipe, counts: npt.ArrayLike, *, early: bool = False) -> tuple[float, ...]:
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


def _through_loss(
    loss: LossSettings, shares: npt.NDArray[np.float64], numbers: npt.NDArray[np.int64], *, early: bool = False
) -> tuple[float, ...]:
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


def regression_prior(recipe: Recipe, counts: npt.ArrayLike) -> tuple[float, ...]:
    """Return the prior that the probabilities of a logistic regression with ``classifier.loss`` carry.

    It uses each training image once.
    """
    numbers = np.asarray(recipe.spec.counted(np.asarray(counts).tolist()), dtype=np.int64)
    return _through_loss(recipe.classifier.loss, numbers.astype(np.float64), numbers)


def bias_between(carried: Sequence[float], prior: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the biases that move probabilities from one prior to another; 0 for a class without training images."""
    old, new = np.asarray(carried), np.asarray(prior)
    seen = (old > 0) & (new > 0)
    return np.where(seen, np.log(np.where(seen, new, 1.0)) - np.log(np.where(seen, old, 1.0)), 0.0)


def settled_prior(recipe: Recipe, counts: npt.ArrayLike, further: npt.ArrayLike = 0) -> tuple[float, ...]:
    """Return the prior that probabilities carry at the end of training, given the images of each class.

    Training moves probabilities to the shares of ``counts``, which has no images of further labels. With calibration
    none they stay where they are, so that the ``further`` images count, too.
    """
    if recipe.decision.calibration == "none":
        return carried_prior(recipe, np.asarray(counts) + np.asarray(further))
    return prior_of(recipe.spec.counted(np.asarray(counts).tolist()))
