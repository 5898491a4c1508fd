"""Fields of a recipe that contradict each other, whatever the method is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lopsided.errors import InputError, sentence
from lopsided.losses import catalogue
from lopsided.recipe.blocks import column_name
from lopsided.recipe.encoder_spec import encoder_conflicts
from lopsided.recipe.sections import USUAL_BETA, EncoderTraining
from lopsided.recipe.views import AUTO

if TYPE_CHECKING:
    from lopsided.recipe.schema import Recipe

MAX_MEMBERS = 100
"""The largest number of encoders in an ensemble."""


def check_classes(recipe: Recipe, num_classes: int) -> None:
    """Raise if a loss that is for one number of classes is used with another."""
    for section in recipe.spec.loss_sections(recipe):
        entry = getattr(recipe, section).loss.entry
        if entry.classes not in (None, num_classes):
            text = f"The loss {entry.name} is for {entry.classes} classes, but the data have {num_classes}."
            raise InputError(f"{text} Choose another loss with {section}.loss; `lopsided losses` lists them.")


def conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every pair of fields that contradict each other."""
    data, spec = recipe.data, recipe.spec
    if data.test + data.val >= 1:
        got = f"{data.test} + {data.val}"
        yield sentence("data.test + data.val must be < 1", got, "The remaining images are for training.")
    if data.classes is not None and not 0 < len(data.classes) == len(set(data.classes)):
        yield sentence("data.classes must be different names", list(data.classes))
    if data.held_out and data.scenario is None:
        do = "Set data.scenario, or remove data.held_out."
        yield sentence("data.held_out must be false when data.scenario is unset", "true", do)
    yield from _column_conflicts(recipe)
    yield from _fold_conflicts(recipe)
    yield from encoder_conflicts(recipe)
    if recipe.encoder.views == AUTO and not spec.chooses_views:
        do = "Name the views, such as flip."
        yield sentence(f'encoder.views must name views with method "{spec.name}"', AUTO, do)
    yield from spec.conflicts(recipe)
    if recipe.selection.patience is not None and data.val == 0:
        do = "Set data.val, or remove selection.patience."
        yield sentence("selection.patience must be unset when data.val is 0", recipe.selection.patience, do)
    if recipe.selection.patience is not None and recipe.selection.metric == "last":
        do = "Choose another selection.metric, or remove selection.patience."
        yield sentence("selection.patience must be unset when selection.metric is last", recipe.selection.patience, do)


def _column_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every conflict of the columns that stand beside each image."""
    data = recipe.data
    if not data.columns:
        return
    names = [column_name(asked) for asked in data.columns]
    if len(set(names)) < len(names):
        yield sentence("data.columns must be different names", list(data.columns))
    taken = next((name for name in names if name in (data.path_column or "path", data.label_column or "label")), None)
    if taken is not None:
        yield f"data.columns cannot hold {taken}, which is what the image is and not what is known beside it."
    if recipe.spec.trains_encoder:
        do = "Use --recipe quick, thorough, adapter or few."
        yield f'data.columns needs an encoder that is not trained, but method "{recipe.method}" trains it. {do}'
    if recipe.final == "ensemble":
        yield 'final cannot be "ensemble" with data.columns: each fold may have other categories. Use final = "refit".'


def _fold_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every conflict between the fields of folds."""
    data = recipe.data
    if data.folds is None:
        idle = (("data.fold", None, data.fold), ("data.repeats", 1, data.repeats), ("final", "auto", recipe.final))
        for name, default, value in idle:
            if value != default:
                must = f"{name} must be {'unset' if default is None else default} when data.folds is unset"
                yield sentence(must, value, "Set data.folds (--folds).")
        return
    why = recipe.spec.why_no_ensemble(recipe)
    if recipe.final == "ensemble" and why is not None:
        yield f'final cannot be "ensemble" with {why}. Use final = "refit".'
    if recipe.final == "ensemble" and recipe.encoder.views == AUTO:
        do = 'Name the views, or use final = "refit".'
        yield f'final cannot be "ensemble" if encoder.views is auto: each fold may choose other views. {do}'
    if data.split == "given":
        do = "Use another split, or leave out folds."
        yield f'data.folds cannot be used with data.split = "given": the data define their own splits. {do}'
    if recipe.final_model == "ensemble" and data.folds > MAX_MEMBERS:
        do = "Use fewer folds, or final=refit."
        yield sentence(f"data.folds must be at most {MAX_MEMBERS} for an ensemble", data.folds, do)
    if data.val + 1 / data.folds >= 1:
        must = f"data.val must be below {1 - 1 / data.folds:.3g} with {data.folds} folds, to leave images for training"
        yield sentence(must, data.val)


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
