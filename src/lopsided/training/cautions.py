"""The cautions of a run: reasons to trust its metrics less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lopsided.data.images import FileImages
from lopsided.data.inputs import Part, Prepared
from lopsided.data.sources import Source
from lopsided.data.sources.names import name_cautions
from lopsided.data.splits import Leaks
from lopsided.facts import Fact, cautions
from lopsided.recipe import Recipe

FEW_TEST, FEW_VAL = 30, 10
"""With fewer images of a class, its recall is uncertain on the test split and a noisy guide on the validation split."""
LARGE_SIDE = 512
"""Images that are not resized and have a longer side than this make training slow."""
STEEP = 0.5
"""The loss falls steeply if it falls at least at this share of its mean rate over the stage."""
_LEAST_FALL, _LEAST_LATE = 0.05, 0.01
"""The loss must fall by these shares of its first value, in the stage and at its end, to be more than noise."""


def run_cautions(recipe: Recipe, prepared: Prepared, leaks: Leaks) -> Iterator[Fact]:
    """Yield cautions about the splits and the batches of a run."""
    yield from _of_splits(recipe, prepared)
    yield from leak_cautions(leaks, "split")
    if "encoder_training" in recipe.spec.loss_sections(recipe):
        yield from _of_batches(recipe, prepared)


def source_cautions(source: Source, recipe: Recipe, shape: Sequence[int]) -> Iterator[Fact]:
    """Yield cautions about the images and labels of a source. ``shape`` is the shape of an input."""
    yield from name_cautions(source.counts(), source.names)
    if isinstance(source.images, FileImages):
        headers = source.images.headers()
        twelve, paged = sum(header.twelve for header in headers), sum(header.paged for header in headers)
        if twelve:
            yield cautions.twelve_bits(twelve, len(headers))
        if paged:
            yield cautions.first_pages(paged, len(headers))
    if recipe.data.image_size is None and max(shape[1:], default=0) > LARGE_SIDE:
        yield cautions.large_images(shape[2], shape[1])


def falling_cautions(recipe: Recipe, history: Sequence[Mapping[str, Any]]) -> Iterator[Fact]:
    """Yield a caution for each stage whose loss still falls steeply at its last epoch.

    The fall is the difference between the mean loss of the last fifth of the epochs and that of the fifth before. It is
    compared with the mean fall of the stage over as many epochs. A stage that was stopped early has no caution.
    """
    for stage, epochs in recipe.spec.stages(recipe).items():
        flag = "classifier_epochs" if stage == "classifier" else "epochs"
        losses = [float(line["loss"]) for line in history if line.get("stage") == stage]
        if len(losses) == epochs and is_falling(losses):
            yield cautions.falling_loss(stage, losses[-2], losses[-1], flag)


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


def _of_splits(recipe: Recipe, prepared: Prepared) -> Iterator[Fact]:
    if prepared.test is None:
        yield cautions.no_test_split()
    else:
        few = _few(prepared, prepared.test, FEW_TEST)
        if few:
            yield cautions.few_test_images(few, FEW_TEST)
    if not recipe.spec.selects_epochs or (prepared.val is None and not recipe.spec.needs_selection):
        return
    if prepared.val is None:
        yield cautions.no_validation_split()
    else:
        few = _few(prepared, prepared.val, FEW_VAL)
        if few:
            yield cautions.few_validation_images(few, FEW_VAL)


def _few(prepared: Prepared, part: Part, least: int) -> dict[str, int]:
    counts = np.bincount(part.labels, minlength=len(prepared.classes))
    return few_classes(dict(zip(prepared.classes, counts.tolist(), strict=True)), least)


def few_classes(counts: Mapping[str, int], least: int) -> dict[str, int]:
    """Return the classes with fewer images than ``least`` and their numbers."""
    return {name: number for name, number in counts.items() if number < least}


def leak_cautions(leaks: Leaks, unit: str) -> Iterator[Fact]:
    """Yield cautions about groups and images in two splits or folds. ``unit`` is split or fold."""
    if leaks.groups:
        yield cautions.shared_groups(len(leaks.groups), leaks.groups[0], unit)
    if leaks.duplicates:
        yield cautions.shared_images(len(leaks.duplicates), list(leaks.duplicates[0]), unit)


def _of_batches(recipe: Recipe, prepared: Prepared) -> Iterator[Fact]:
    training, counts = recipe.encoder_training, prepared.counts()
    if "projections" not in training.loss.entry.needs:
        return
    features = len(prepared.train) * training.views
    if training.queue > features:
        yield cautions.large_queue(training.queue, features)
    if training.sampler == "m-per-class":
        expected = float(training.m_per_class)
    else:
        weights = {"plain": counts, "sqrt": np.sqrt(counts), "balanced": np.minimum(counts, 1)}[training.sampler]
        size = min(training.batch_size, len(prepared.train))
        expected = size * float(weights[prepared.minority] / weights.sum())
    if expected < 2 and training.views == 1 and not training.queue:
        pushes = training.loss.entry.pushes
        learns = pushes is not None and training.loss.parameters[pushes] > 0
        yield cautions.few_positives(prepared.classes[prepared.minority], expected, learns)
