"""Fields of a recipe that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lopsided.errors import InputError, sentence
from lopsided.losses import catalogue
from lopsided.recipe.encoder_spec import encoder_conflicts
from lopsided.recipe.second_stage import second_stage_conflicts
from lopsided.recipe.sections import USUAL_VIEWS, EncoderTraining
from lopsided.recipe.training import training_conflicts
from lopsided.recipe.views import AUTO

if TYPE_CHECKING:
    from lopsided.recipe.schema import Recipe

MAX_MEMBERS = 100
"""The largest number of encoders in an ensemble."""
FROZEN_LOSSES = ("ce", "weighted-ce")
"""Losses of the logistic regression: each image counts the same, or each class."""


def check_classes(recipe: Recipe, num_classes: int) -> None:
    """Raise if a loss that is for one number of classes is used with another."""
    sections = {"two-stage": ("encoder_training", "classifier"), "frozen": ()}.get(recipe.method, ("encoder_training",))
    if recipe.retrains:
        sections = ("encoder_training", "classifier")
    for section in sections:
        entry = getattr(recipe, section).loss.entry
        if entry.classes not in (None, num_classes):
            text = f"The loss {entry.name} is for {entry.classes} classes, but the data have {num_classes}."
            raise InputError(f"{text} Choose another loss with {section}.loss; `lopsided losses` lists them.")


def conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every pair of fields that contradict each other."""
    data, training = recipe.data, recipe.encoder_training
    if data.test + data.val >= 1:
        got = f"{data.test} + {data.val}"
        yield sentence("data.test + data.val must be < 1", got, "The remaining images are for training.")
    if data.classes is not None and (len(data.classes) < 2 or len(set(data.classes)) < len(data.classes)):
        yield sentence("data.classes must be at least two different names", list(data.classes))
    if data.held_out and data.scenario is None:
        do = "Set data.scenario, or remove data.held_out."
        yield sentence("data.held_out must be false when data.scenario is unset", "true", do)
    yield from _fold_conflicts(recipe)
    yield from encoder_conflicts(recipe)
    if recipe.encoder.views == AUTO and recipe.method != "frozen":
        do = "Name the views, such as flip."
        yield sentence(f'encoder.views must name views with method "{recipe.method}"', AUTO, do)
    yield from _loss_conflicts(recipe)
    if recipe.method == "adapter" and recipe.adapter.blend == 0 and recipe.regression.strength is not None:
        do = "Set adapter.blend, or remove regression.strength."
        yield sentence("regression.strength must be unset when adapter.blend is 0", recipe.regression.strength, do)
    yield from second_stage_conflicts(recipe)
    yield from _batch_conflicts(training, "projections" in training.loss.entry.needs)
    if not recipe.is_frozen:
        yield from training_conflicts(recipe)
    if recipe.method == "fine-tune":
        yield from _fine_tune_conflicts(recipe)
    if recipe.selection.patience is not None and data.val == 0:
        do = "Set data.val, or remove selection.patience."
        yield sentence("selection.patience must be unset when data.val is 0", recipe.selection.patience, do)
    if recipe.selection.patience is not None and recipe.selection.metric == "last":
        do = "Choose another selection.metric, or remove selection.patience."
        yield sentence("selection.patience must be unset when selection.metric is last", recipe.selection.patience, do)


def can_ensemble(recipe: Recipe) -> bool:
    """Return whether an ensemble is possible and useful: each member must be an encoder and a linear layer."""
    return not recipe.is_frozen and recipe.classifier_loss.entry.head == "linear" and not recipe.blends


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
    if recipe.final == "ensemble" and recipe.method != "frozen" and not can_ensemble(recipe):
        what = 'method "adapter"' if recipe.is_frozen else f"the loss {recipe.classifier_loss.name}"
        what = "fine_tune.blend, which gives each model two encoders" if recipe.blends else what
        yield f'final cannot be "ensemble" with {what}. Use final = "refit".'
    if recipe.final == "ensemble" and recipe.encoder.views == AUTO:
        do = 'Name the views, or use final = "refit".'
        yield f'final cannot be "ensemble" if encoder.views is auto: each fold may choose other views. {do}'
    if data.split == "given":
        do = "Use another split, or leave out folds."
        yield f'data.folds cannot be used with data.split = "given": the data define their own splits. {do}'
    if recipe.ensembles and data.folds > MAX_MEMBERS:
        do = "Use fewer folds, or --final refit."
        yield sentence(f"data.folds must be at most {MAX_MEMBERS} for an ensemble", data.folds, do)
    if data.val + 1 / data.folds >= 1:
        must = f"data.val must be below {1 - 1 / data.folds:.3g} with {data.folds} folds, to leave images for training"
        yield sentence(must, data.val)


def _loss_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every loss that does not fit the method."""
    if recipe.is_frozen or recipe.method == "fine-tune":
        method, heads, linear = recipe.method, recipe.encoder_training.loss, recipe.classifier.loss
        if linear.name not in FROZEN_LOSSES:
            fit = ", ".join(FROZEN_LOSSES)
            yield f'classifier.loss cannot be {linear.name} with method "{method}". Use one of {fit}.'
        if method == "adapter" and (heads.entry.kind != "contrastive" or heads.entry.views > 1):
            fit = ", ".join(entry.name for entry in catalogue.losses(("contrastive",)) if entry.views == 1)
            yield f'encoder_training.loss cannot be {heads.name} with method "adapter". Use one of {fit}.'
        if method == "fine-tune" and heads.entry.head != "linear":
            do = "Use another loss, or the method end-to-end."
            yield f'encoder_training.loss cannot be {heads.name} with method "fine-tune": it needs a cosine head. {do}'
        return
    need = "projections" if recipe.method == "two-stage" else "logits"
    other = "end-to-end" if recipe.method == "two-stage" else "two-stage"
    for path, loss, needed in (
        ("encoder_training.loss", recipe.encoder_training.loss, need),
        ("classifier.loss", recipe.classifier.loss, "logits"),
    ):
        if needed in loss.entry.needs and not (path == "classifier.loss" and loss.entry.kind == "joint"):
            continue
        kinds = ("classification",) if path == "classifier.loss" else _KINDS[recipe.method]
        fit = ", ".join(entry.name for entry in catalogue.losses(kinds))
        if path == "classifier.loss":
            yield f"{path} cannot be {loss.name}. Use one of {fit}."
            continue
        start = f'start from a recipe with method "{other}", such as {_EXAMPLES[other]}'
        do = f"To use {loss.name}, {start}, or add --set method={other}."
        yield f'{path} cannot be {loss.name} with method "{recipe.method}". Use one of {fit}. {do}'


def _fine_tune_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every conflict between the settings of a fine-tuning."""
    section, views = recipe.fine_tune, recipe.encoder_training.views
    if section.steps is not None and section.minutes is not None:
        yield "fine_tune.steps and fine_tune.minutes cannot both be set. Remove one of them."
    if recipe.encoder_training.batch_size < 2:
        yield sentence('encoder_training.batch_size must be >= 2 with method "fine-tune"', 1)
    kind = recipe.classifier.kind
    if recipe.blends and kind != "linear":
        do = 'Set fine_tune.blend = 0, or classifier.kind = "linear".'
        yield sentence(f'fine_tune.blend must be 0 with classifier.kind = "{kind}"', section.blend, do)
    if section.blocks == "all":
        if section.views is not None:
            do = "Set fine_tune.blocks to a number, or remove the field."
            yield sentence('fine_tune.views must be unset when fine_tune.blocks is "all"', section.views, do)
        return
    kept = section.views or USUAL_VIEWS
    if kept < views:
        do = "A batch holds different views of an image."
        yield sentence(f"fine_tune.views must be >= encoder_training.views ({views})", kept, do)
    if recipe.compile:
        do = 'Set compile = false, or fine_tune.blocks = "all".'
        yield sentence("compile must be false when fine_tune.blocks is a number", "true", do)


_KINDS = {"two-stage": ("contrastive", "joint"), "end-to-end": ("classification", "joint")}
_EXAMPLES = {"two-stage": "default", "end-to-end": "baseline-ce"}
"""A named recipe of each method."""


def _batch_conflicts(training: EncoderTraining, contrasts: bool) -> Iterator[str]:
    """Yield a sentence for every conflict between the settings of a batch of the first stage."""
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
