"""Which recipe ``lopsided fit`` takes if none is named: ``thorough``, or ``quick`` if there are many images.

With one class, or with few images of the second one, it is ``few``.
"""

from __future__ import annotations

from lopsided.data.prepare import Sources
from lopsided.data.sources.source import UNUSUAL
from lopsided.data.vectors import Vectors
from lopsided.facts import Fact, notes
from lopsided.recipe import Recipe
from lopsided.runs import run as runs

QUICK, THOROUGH, FEW = "quick", "thorough", "few"
FEW_RARE = 10
"""With two classes and fewer images of one of them, the distance from the other one helps (docs/few.md)."""
USUAL_ALARMS = 0.05
"""The share of false alarms of a model of one class."""
MANY = 3000
"""With more images, ``thorough`` takes too long to be started without a question."""


def choose_recipe(base: Recipe, data: str | None = None, sources: Sources | None = None) -> tuple[str, list[Fact]]:
    """Return the name of the recipe for these data, and the reason. Images are not decoded.

    ``base`` holds the fields of the data. The size of the images does not matter: docs/which-recipe.md has figures for
    images of 28 pixels, too.
    """
    source = (sources or Sources()).drawn(runs.settle(base, data))
    if isinstance(source.images, Vectors):
        return QUICK, [notes.quick_for_vectors(source.images.width)]
    num, counts = len(source), sorted(source.counts().values())
    if len(counts) == 2 and counts[0] < min(FEW_RARE, counts[1]):
        return FEW, [notes.few_by_counts(counts[0])]
    if usual_recipe(num) == QUICK:
        return QUICK, [notes.quick_by_size(num)]
    return THOROUGH, [notes.thorough_by_size(num)]


def usual_recipe(num: int) -> str:
    """Return the name of the recipe for this number of images."""
    return QUICK if num > MANY else THOROUGH


def one_class_rule(recipe: Recipe, data: str | None = None, sources: Sources | None = None) -> str | None:
    """Return the rule for images of one class: a share of false alarms. None if there are two classes or more."""
    counts = (sources or Sources()).drawn(runs.settle(recipe, data)).counts()
    return f"false-alarms:{UNUSUAL}={USUAL_ALARMS:g}" if counts.get(UNUSUAL) == 0 else None
