"""The class shares that the probabilities of a trained model carry."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lopsided.evaluation.decision import prior_of
from lopsided.recipe import Classifier, EncoderTraining, Recipe


def carried_prior(recipe: Recipe, counts: npt.ArrayLike) -> tuple[float, ...]:
    """Return the prior that the probabilities of a trained model carry.

    It is the class shares in the batches of the stage that trains the classifier, times the weights of its loss. So
    plain batches with cross-entropy give the class shares of the training images. Balanced batches and weighted losses
    give a uniform prior, and both together give the inverse of the shares.
    """
    stage: EncoderTraining | Classifier = recipe.encoder_training
    if recipe.method != "end-to-end":
        stage = recipe.classifier
    numbers = np.asarray(counts, dtype=np.int64)
    shares = numbers.astype(np.float64)
    if recipe.method == "frozen":
        pass  # The regression uses each training image once.
    elif stage.sampler in ("balanced", "m-per-class"):
        shares = (numbers > 0).astype(np.float64)
    elif stage.sampler == "sqrt":
        shares = np.sqrt(shares)
    reweighs = stage.loss.entry.reweighs
    weights = None if reweighs is None else reweighs(numbers.tolist(), stage.loss.parameters)
    return prior_of(shares, weights)


def settled_prior(recipe: Recipe, counts: npt.ArrayLike) -> tuple[float, ...]:
    """Return the prior that probabilities carry at the end of training, which moves them unless calibration is none."""
    return carried_prior(recipe, counts) if recipe.decision.calibration == "none" else prior_of(counts)
