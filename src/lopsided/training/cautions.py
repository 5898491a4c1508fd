"""Warnings about a run: reasons to trust its figures less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lopsided.data.inputs import Part, Prepared
from lopsided.data.sources import Source
from lopsided.data.sources.names import twins, typo_words
from lopsided.data.splits import Leaks
from lopsided.recipe import Recipe

FEW_TEST, FEW_VAL = 30, 10
"""With fewer images of a class, its recall is uncertain on the test split and a noisy guide on the validation split."""
LARGE_SIDE = 512
"""Images that are not resized and have a longer side than this make training slow."""
STEEP = 0.5
"""The loss falls steeply if it falls at least at this share of its mean rate over the stage."""
_LEAST_FALL, _LEAST_LATE = 0.05, 0.01
"""The loss must fall by these shares of its first value, in the stage and at its end, to be more than noise."""


def cautions(recipe: Recipe, prepared: Prepared, leaks: Leaks) -> Iterator[str]:
    """Yield the warnings of a run."""
    yield from _of_splits(recipe, prepared)
    yield from leak_cautions(leaks, "split", "Split")
    if recipe.method != "frozen":
        yield from _of_batches(recipe, prepared)


def source_cautions(source: Source, recipe: Recipe, shape: Sequence[int]) -> Iterator[str]:
    """Yield warnings about the images and labels of a source. ``shape`` is the shape of an input."""
    yield from filter(None, (typo_words(source.counts()), twins(source.names).words()))
    if recipe.data.image_size is None and max(shape[1:]) > LARGE_SIDE:
        yield (
            f"The images have {shape[2]:,} x {shape[1]:,} pixels and are not resized, so training is slow and needs "
            "much memory. Set a size, for example --image-size 224."
        )


def falling_cautions(recipe: Recipe, history: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a warning for each stage whose loss still falls steeply at its last epoch.

    The fall is the difference between the mean loss of the last fifth of the epochs and that of the fifth before. It is
    compared with the mean fall of the stage over as many epochs. A stage that was stopped early has no warning.
    """
    planned = {
        "encoder": (recipe.encoder_training.epochs, "--epochs"),
        "end-to-end": (recipe.encoder_training.epochs, "--epochs"),
        "adapter": (recipe.encoder_training.epochs, "--epochs"),
        "classifier": (recipe.classifier.epochs, "--classifier-epochs"),
    }
    budget = recipe.fine_tune
    if recipe.method == "fine-tune" and (budget.steps or budget.minutes) is None:
        planned["fine-tune"] = (recipe.encoder_training.epochs, "--epochs")
    for stage, (epochs, flag) in planned.items():
        losses = [float(line["loss"]) for line in history if line.get("stage") == stage]
        if len(losses) == epochs and is_falling(losses):
            yield (
                f"The training loss of stage {stage} still fell steeply at its last epoch ({losses[-2]:.4g} to "
                f"{losses[-1]:.4g}), so the model may not be trained enough. Train for more epochs ({flag})."
            )


def is_falling(losses: Sequence[float]) -> bool:
    """Return whether losses, one per epoch, still fall steeply at the end.

    >>> is_falling([10, 9, 8, 7, 6]), is_falling([10, 6, 4, 3.1, 3.0])
    (True, False)
    """
    if len(losses) < 2:
        return False
    width = max(len(losses) // 5, 1)
    late = float(np.mean(losses[-2 * width : -width]) - np.mean(losses[-width:]))
    total, first = losses[0] - losses[-1], abs(losses[0])
    usual = total * width / (len(losses) - 1)
    return total > _LEAST_FALL * first and late > _LEAST_LATE * first and late >= STEEP * usual


def _of_splits(recipe: Recipe, prepared: Prepared) -> Iterator[str]:
    if prepared.test is None:
        yield "There is no test split: the run cannot estimate how well the model does on new images."
    else:
        few = _few(prepared, prepared.test, FEW_TEST)
        if few:
            yield f"The test split holds fewer than {FEW_TEST} images of {few}: check how wide the intervals are."
    if recipe.is_frozen:  # It selects no epoch.
        return
    if prepared.val is None and recipe.method == "fine-tune":
        return  # The averaged weights of a fixed budget are no worse than those of an epoch that few images select.
    if prepared.val is None:
        yield "There is no validation split: the run keeps the weights of the last epoch, not of the best one."
    else:
        few = _few(prepared, prepared.val, FEW_VAL)
        if few:
            yield f"The validation split holds fewer than {FEW_VAL} images of {few}: the choice of the epoch is noisy."


def _few(prepared: Prepared, part: Part, least: int) -> str:
    counts = np.bincount(part.labels, minlength=len(prepared.classes))
    return few_classes(dict(zip(prepared.classes, counts.tolist(), strict=True)), least)


def few_classes(counts: Mapping[str, int], least: int) -> str:
    """Return the classes with fewer images than ``least`` and their numbers, or ""."""
    named = [f"{name} ({n})" for name, n in counts.items() if n < least]
    return ", ".join(named[:5]) + (f" and {len(named) - 5} more classes" if len(named) > 5 else "")


def leak_cautions(leaks: Leaks, unit: str, do: str) -> Iterator[str]:
    """Yield warnings about groups and images in two splits or folds. ``unit`` is split or fold, ``do`` the advice."""
    if leaks.groups:
        number = f"{len(leaks.groups):,} groups are" if len(leaks.groups) > 1 else "One group is"
        yield (
            f"{number} in more than one {unit}, for example {leaks.groups[0]}: the figures will be too high. "
            f"{do} by group (--split group)."
        )
    if leaks.duplicates:
        first, where, other, there = leaks.duplicates[0]
        number = f"{len(leaks.duplicates):,} images are" if len(leaks.duplicates) > 1 else "One image is"
        yield (
            f"{number} byte-identical to an image in another {unit}, for example {other} in {there} and {first} in "
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
