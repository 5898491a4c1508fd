"""Open, draw and split the images of a recipe, before training."""

from __future__ import annotations

import os

from lopsided.data.images import FileImages, Progress
from lopsided.data.scenarios import draw, draw_held_out, parse_scenario
from lopsided.data.sources import Source, check_splits, open_source
from lopsided.data.splits import Splits, split
from lopsided.recipe import Recipe


def open_drawn(recipe: Recipe, progress: Progress | None = None) -> Source:
    """Open the source of a recipe, check its images, and draw the scenario."""
    return open_sources(recipe, progress)[0]


def open_sources(recipe: Recipe, progress: Progress | None = None) -> tuple[Source, Source | None]:
    """Return the source of ``open_drawn``, and the held-out images if ``data.held_out`` is set, otherwise None."""
    data = recipe.data
    where = data.source or ""
    source = open_source(
        where,
        classes=data.classes,
        group=data.group,
        missing_ok=data.skip_unreadable,
        allow_outside=data.allow_outside,
    )
    given = data.split in ("auto", "given")
    if given:
        check_splits(source, where)
    workers = recipe.threads or os.cpu_count() or 1
    same_size = data.image_size is None and recipe.augment.normalisation != "weights"
    if data.skip_unreadable:  # Before the draw, because the scenario must hold for the readable images.
        source = source.verify(skip_unreadable=True, workers=workers, progress=progress)
        if given:
            check_splits(source, where)
    held_out = None
    if data.scenario is not None:
        seed = data_seed(recipe)
        drawn = draw(source.labels, source.classes, parse_scenario(data.scenario), seed)
        if data.held_out:
            rows = draw_held_out(source.labels, source.classes, drawn, seed, source.groups)
            held_out = source.subset(rows)
        source = source.subset(drawn)
    if not data.skip_unreadable:
        source = source.verify(same_size=same_size, workers=workers, progress=progress)
        held_out = None if held_out is None else held_out.verify(same_size=same_size, workers=workers)
    elif same_size and isinstance(source.images, FileImages):
        source.images.check_sizes()
    return source, held_out


def data_seed(recipe: Recipe) -> int:
    """Return the seed of the scenario and the split: the seed of the run with ``data.redraw``, otherwise 0."""
    return recipe.seed if recipe.data.redraw else 0


def split_source(recipe: Recipe, source: Source) -> Splits:
    """Split a source by the rule of a recipe."""
    how = recipe.data.split
    if how == "auto":
        how = "given" if source.splits is not None else "group" if source.groups is not None else "stratified"
    return split(source, how=how, val=recipe.data.val, test=recipe.data.test, seed=data_seed(recipe))
