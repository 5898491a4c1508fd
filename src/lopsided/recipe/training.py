"""Conflicts between fields of ``encoder_training``: batches, deferred weights and samplers, mixing, averages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lopsided.errors import sentence
from lopsided.losses import catalogue

if TYPE_CHECKING:
    from lopsided.recipe.sections import EncoderTraining

USUAL_BETA = 0.9999
"""The beta of the class weights if a recipe does not set it."""


def training_conflicts(training: EncoderTraining) -> Iterator[str]:
    """Yield a sentence for every field of the training that does not fit the loss or the sampler."""
    yield from _weight_conflicts(training)
    yield from _mixing_conflicts(training)
    if training.resample_from is not None and training.sampler in ("balanced", "m-per-class"):
        must = f'encoder_training.resample_from must be unset with the sampler "{training.sampler}"'
        do = 'That sampler already draws classes equally. Set encoder_training.sampler = "plain".'
        yield sentence(must, training.resample_from, do)
    yield from _average_conflicts(training)


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


def _mixing_conflicts(training: EncoderTraining) -> Iterator[str]:
    """Yield a sentence if images cannot be mixed."""
    for name in ("mixup", "cutmix"):
        if getattr(training, name) and not training.loss.entry.soft_labels:
            losses = ", ".join(loss.name for loss in catalogue.losses() if loss.soft_labels)
            must = f"encoder_training.{name} must be 0 with the loss {training.loss.name}"
            yield sentence(must, getattr(training, name), f"That loss cannot take soft labels. Use one of {losses}.")


def batch_conflicts(training: EncoderTraining) -> Iterator[str]:
    """Yield a sentence for every conflict between the settings of a batch of an encoder or of heads."""
    contrasts = "projections" in training.loss.entry.needs
    if contrasts and training.batch_size * training.views < 2:
        yield sentence("encoder_training.batch_size must be >= 2 for a contrastive loss", training.batch_size)
    for name, none in (("views", 1), ("queue", 0)):
        if not contrasts and getattr(training, name) > none:
            got = getattr(training, name)
            yield sentence(f"encoder_training.{name} must be {none} with the loss {training.loss.name}", got)
    least = training.loss.entry.views
    if contrasts and training.views < least:
        must = f"encoder_training.views must be >= {least} with the loss {training.loss.name}"
        yield sentence(must, training.views, f"Set encoder_training.views = {least}.")
    if training.queue_balanced and not training.queue:
        do = "Set encoder_training.queue."
        yield sentence("encoder_training.queue_balanced must be false when encoder_training.queue is 0", "true", do)
    if training.sampler == "m-per-class" and training.m_per_class > training.batch_size:
        got = f"{training.m_per_class} > {training.batch_size}"
        yield sentence("encoder_training.m_per_class must be at most encoder_training.batch_size", got)
