"""Warnings about a run: reasons to trust its figures less."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lopsided.data.inputs import Part, Prepared
from lopsided.data.splits import Leaks
from lopsided.recipe import Recipe

FEW_TEST, FEW_VAL = 30, 10
"""With fewer images of a class, its recall is uncertain on the test split and a noisy guide on the validation split."""


def cautions(recipe: Recipe, prepared: Prepared, leaks: Leaks) -> Iterator[str]:
    """Yield the warnings of a run."""
    yield from _of_splits(recipe, prepared)
    yield from _of_leaks(leaks)
    if recipe.method != "frozen":
        yield from _of_batches(recipe, prepared)


def _of_splits(recipe: Recipe, prepared: Prepared) -> Iterator[str]:
    if prepared.test is None:
        yield "There is no test split: the run cannot estimate how well the model does on new images."
    else:
        few = _few(prepared, prepared.test, FEW_TEST)
        if few:
            yield f"The test split holds fewer than {FEW_TEST} images of {few}: check how wide the intervals are."
    if recipe.method == "frozen":  # It selects no epoch.
        return
    if prepared.val is None:
        yield "There is no validation split: the run keeps the weights of the last epoch, not of the best one."
    else:
        few = _few(prepared, prepared.val, FEW_VAL)
        if few:
            yield f"The validation split holds fewer than {FEW_VAL} images of {few}: the choice of the epoch is noisy."


def _few(prepared: Prepared, part: Part, least: int) -> str:
    counts = np.bincount(part.labels, minlength=len(prepared.classes))
    named = [f"{name} ({n})" for name, n in zip(prepared.classes, counts.tolist(), strict=True) if n < least]
    return ", ".join(named[:5]) + (f" and {len(named) - 5} more classes" if len(named) > 5 else "")


def _of_leaks(leaks: Leaks) -> Iterator[str]:
    if leaks.groups:
        number = f"{len(leaks.groups):,} groups are" if len(leaks.groups) > 1 else "One group is"
        yield (
            f"{number} in more than one split, for example {leaks.groups[0]}: the figures will be too high. "
            'Split by group (data.split = "group").'
        )
    if leaks.duplicates:
        first, where, other, there = leaks.duplicates[0]
        number = f"{len(leaks.duplicates):,} images are" if len(leaks.duplicates) > 1 else "One image is"
        yield (
            f"{number} byte-identical to an image in another split, for example {other} in {there} and {first} in "
            f"{where}: the figures will be too high."
        )


def _of_batches(recipe: Recipe, prepared: Prepared) -> Iterator[str]:
    training, counts = recipe.encoder_training, prepared.counts()
    if "projections" not in training.loss.entry.needs:
        return
    features = len(prepared.train) * training.views
    if training.queue > features:
        yield (
            f"The queue holds up to {training.queue:,} features, but the training images have only {features:,}: older "
            "features of an image become positives of the same image. Use a smaller queue (encoder_training.queue)."
        )
    if training.sampler == "m-per-class":
        expected = float(training.m_per_class)
    else:
        weights = {"plain": counts, "sqrt": np.sqrt(counts), "balanced": np.minimum(counts, 1)}[training.sampler]
        size = min(training.batch_size, len(prepared.train))
        expected = size * float(weights[prepared.minority] / weights.sum())
    if expected < 2 and training.views == 1 and not training.queue:
        pushes = training.loss.entry.pushes
        learns = pushes is not None and training.loss.parameters[pushes] > 0
        does = "its anchors have few positives" if learns else "anchors without a positive do not learn"
        yield (
            f"A batch holds {expected:.1f} images of {prepared.classes[prepared.minority]} on average: {does}. "
            "Use larger batches, encoder_training.views = 2, a queue (encoder_training.queue), or "
            'encoder_training.sampler = "balanced".'
        )
