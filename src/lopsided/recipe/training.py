"""Conflicts between fields of ``encoder_training``: deferred weights and samplers, mixing, averages of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lopsided.errors import sentence
from lopsided.losses import catalogue

if TYPE_CHECKING:
    from lopsided.recipe.schema import Recipe
    from lopsided.recipe.sections import EncoderTraining

USUAL_BETA = 0.9999
"""The beta of the class weights if a recipe does not set it."""


def training_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every field of the training that does not fit the loss, the sampler or the method."""
    training = recipe.encoder_training
    yield from _weight_conflicts(training)
    yield from _mixing_conflicts(recipe)
    if training.resample_from is not None and training.sampler in ("balanced", "m-per-class"):
        must = f'encoder_training.resample_from must be unset with the sampler "{training.sampler}"'
        do = 'That sampler already draws classes equally. Set encoder_training.sampler = "plain".'
        yield sentence(must, training.resample_from, do)
    yield from _average_conflicts(training)
    if recipe.method != "fine-tune":
        return
    if training.ema:
        do = "Set fine_tune.average instead."
        yield sentence('encoder_training.ema must be 0 with method "fine-tune"', training.ema, do)
    if training.swa_from is not None and recipe.fine_tune.average:
        do = "Set fine_tune.average = 0, or remove encoder_training.swa_from."
        yield sentence("fine_tune.average must be 0 with encoder_training.swa_from", recipe.fine_tune.average, do)


def _average_conflicts(training: EncoderTraining) -> Iterator[str]:
    """Yield a sentence if an average of the weights contradicts another field."""
    if training.swa_from is None:
        return
    if training.ema:
        yield "encoder_training.ema and encoder_training.swa_from cannot both be set. Use one average of the weights."
    defers = training.loss.entry.defers
    shares = {"reweight_from": training.reweight_from, "resample_from": training.resample_from}
    if defers is not None:
        shares[f"loss.{defers}"] = training.loss.parameters[defers]
    for name, share in shares.items():
        if share is not None and training.swa_from < share < 1:
            must = f"encoder_training.swa_from must be >= encoder_training.{name} ({share:g})"
            yield sentence(must, training.swa_from, "The average must not mix epochs with different class weights.")


def _weight_conflicts(training: EncoderTraining) -> Iterator[str]:
    """Yield a sentence if deferred re-weighting does not fit the loss."""
    entry, share = training.loss.entry, training.reweight_from
    if share is None:
        if training.reweight_beta != USUAL_BETA:
            must = f"encoder_training.reweight_beta must be {USUAL_BETA} when encoder_training.reweight_from is unset"
            yield sentence(must, training.reweight_beta, "Set encoder_training.reweight_from, such as 0.8.")
        return
    must = f"encoder_training.reweight_from must be unset with the loss {entry.name}"
    if entry.defers is not None:
        do = f"This loss defers weights itself. Set encoder_training.loss.{entry.defers}."
        yield sentence(must, share, do)
    elif not entry.class_weights:
        fit = ", ".join(loss.name for loss in catalogue.losses() if loss.class_weights)
        why = "It already treats classes differently, or cannot be weighted."
        yield sentence(must, share, f"{why} Use encoder_training.resample_from, or one of {fit}.")


def _mixing_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence if images cannot be mixed."""
    training = recipe.encoder_training
    for name in ("mixup", "cutmix"):
        got = getattr(training, name)
        if not got:
            continue
        if not training.loss.entry.soft_labels:
            fit = ", ".join(loss.name for loss in catalogue.losses() if loss.soft_labels)
            must = f"encoder_training.{name} must be 0 with the loss {training.loss.name}"
            yield sentence(must, got, f"That loss cannot take soft labels. Use one of {fit}.")
        elif recipe.method == "fine-tune" and recipe.fine_tune.blocks != "all":
            must = f"encoder_training.{name} must be 0 when fine_tune.blocks is a number"
            yield sentence(must, got, 'Activations are kept instead of images. Set fine_tune.blocks = "all".')
