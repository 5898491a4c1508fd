"""Which recipe ``lopsided fit`` takes if none is named: ``thorough``, or ``quick`` if there are many images."""

from __future__ import annotations

import os

from lopsided.data.prepare import Sources
from lopsided.data.vectors import Vectors
from lopsided.facts import Fact, notes
from lopsided.recipe import Recipe
from lopsided.runs import run as runs
from lopsided.runs.folds import USUAL_FOLDS, fold_seconds

QUICK, THOROUGH = "quick", "thorough"
MANY = 3000
"""With more images, ``thorough`` takes too long to be started without a question."""
SECONDS = 0.13
"""Seconds of one core for the features of an image by ``thorough`` and by ``quick``, which is trained for comparison,
as a rough guide."""


def choose_recipe(base: Recipe, data: str | None = None, sources: Sources | None = None) -> tuple[str, list[Fact]]:
    """Return the name of the recipe for these data, and the reason. Images are not decoded.

    ``base`` holds the fields of the data. The size of the images does not matter: docs/which-recipe.md has figures for
    images of 28 pixels, too.
    """
    source = (sources or Sources()).drawn(runs.settle(base, data))
    if isinstance(source.images, Vectors):
        return QUICK, [notes.quick_for_vectors(source.images.width)]
    num = len(source)
    trained = 2 * (USUAL_FOLDS + 1) * fold_seconds(num, len(source.classes))
    minutes = (SECONDS * num / (os.cpu_count() or 1) + trained) / 60
    if usual_recipe(num) == QUICK:
        return QUICK, [notes.quick_by_size(num, minutes)]
    return THOROUGH, [notes.thorough_by_size(num, minutes)]


def usual_recipe(num: int) -> str:
    """Return the name of the recipe for this number of images."""
    return QUICK if num > MANY else THOROUGH
