"""Fields of a recipe that contradict each other, whatever the method is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lopsided.errors import InputError, sentence
from lopsided.recipe.encoder_spec import encoder_conflicts
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
    if data.classes is not None and (len(data.classes) < 2 or len(set(data.classes)) < len(data.classes)):
        yield sentence("data.classes must be at least two different names", list(data.classes))
    if data.held_out and data.scenario is None:
        do = "Set data.scenario, or remove data.held_out."
        yield sentence("data.held_out must be false when data.scenario is unset", "true", do)
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
