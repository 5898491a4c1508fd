"""Open, draw and split the images of a recipe, before training."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lopsided.data.folds import fold_splits
from lopsided.data.images import FileImages, Known, Progress
from lopsided.data.more import add_more
from lopsided.data.scenarios import draw, draw_held_out, parse_scenario
from lopsided.data.sources import Source, check_splits
from lopsided.data.splits import How, Splits, split
from lopsided.facts import Fact, notes
from lopsided.recipe import Recipe

USUAL_SIDE = 224
"""Side in pixels to which images of different sizes are resized if the recipe sets no size, unless they are smaller.

Most pretrained encoders were trained at this size, and most tools for photographs use it.
"""


class Sources:
    """The images of a command: listed once, whatever number of recipes asks for the same data."""

    def __init__(self) -> None:
        self._listed: tuple[tuple[object, ...], Source] | None = None

    def listed(self, recipe: Recipe) -> Source:
        """Return all images of a recipe's data. Missing and unreadable files are not noticed."""
        data = recipe.data
        asked = (data.source, data.classes, data.group, data.allow_outside, data.include, data.exclude)
        if self._listed is None or self._listed[0] != asked:
            self._listed = asked, Source.open(data)
        return self._listed[1]

    def drawn(self, recipe: Recipe, *, more: bool = False) -> Source:
        """Return the images that a recipe trains and tests with, without reading them.

        Further training images are listed with ``more``. To find those that are labelled twice, all files are then
        read.
        """
        source = self.listed(recipe)
        if recipe.data.scenario is not None:
            source = source.subset(drawn_rows(recipe, source))
        return _with_more(recipe, source) if more else source

    def open(
        self, recipe: Recipe, progress: Progress | None = None, known: Known | None = None
    ) -> tuple[Source, Source | None]:
        """Check the images of a recipe, and draw the scenario. Also return the held-out images of ``data.held_out``.

        Images that are ``known`` to be readable are not decoded.
        """
        data, source = recipe.data, self.listed(recipe)
        if not data.skip_unreadable:
            source.check_present()
        given = data.split in ("auto", "given")
        if given:
            check_splits(source, data.source or "")
        workers = recipe.threads or os.cpu_count() or 1
        if data.skip_unreadable:  # Before the draw, because the scenario must hold for the readable images.
            source = source.verify(skip_unreadable=True, workers=workers, progress=progress, known=known)
            if given:
                check_splits(source, data.source or "")
        held_out = None
        if data.scenario is not None:
            drawn = drawn_rows(recipe, source)
            if data.held_out:
                rows = draw_held_out(source.labels, source.classes, drawn, data_seed(recipe), source.groups)
                held_out = source.subset(rows)
            source = source.subset(drawn)
        if not data.skip_unreadable:
            source = source.verify(workers=workers, progress=progress, known=known)
            held_out = None if held_out is None else held_out.verify(workers=workers, known=known)
        source = _with_more(recipe, source, held_out)
        if source.more is not None:
            more = source.more.verify(skip_unreadable=data.skip_unreadable, workers=workers, known=known)
            source = replace(source, more=more, unreadable=source.unreadable + more.unreadable)
        if data.image_size is None:
            side = usual_side(*filter(None, (source, source.more, held_out)))
            source = replace(source, resized=side)
        return source, held_out


def drawn_rows(recipe: Recipe, source: Source) -> NDArray[np.int64]:
    """Return the rows of the images that the scenario of a recipe draws, and of images that stay as they are.

    If the data define splits and the recipe uses them, the scenario draws training images, and validation and test
    images stay as they are, as in the long-tailed data sets of the field: fewer test images only widen the intervals.
    """
    assert recipe.data.scenario is not None
    kept = np.zeros(len(source), dtype=bool)
    if source.splits is not None and split_rule(recipe, source) == "given":
        kept = source.splits != "train"
    pool = np.flatnonzero(~kept)
    drawn = pool[draw(source.labels[pool], source.classes, parse_scenario(recipe.data.scenario), data_seed(recipe))]
    kept[drawn] = True
    return np.flatnonzero(kept)


def _with_more(recipe: Recipe, source: Source, held_out: Source | None = None) -> Source:
    data = recipe.data
    if not data.more:
        return source
    return add_more(source, data.more, group=data.group, allow_outside=data.allow_outside, held_out=held_out)


def usual_side(*sources: Source) -> int | None:
    """Return the side to which images of different sizes are resized by default, or None if all have the same size.

    It is ``USUAL_SIDE``, or the median of the shorter sides if that is smaller.
    """
    parts = [source.images.sizes() for source in sources if isinstance(source.images, FileImages)]
    sizes = np.concatenate([np.empty((0, 2), dtype=np.int64), *parts])
    if not len(sizes) or (sizes == sizes[0]).all():
        return None
    return min(USUAL_SIDE, int(np.median(sizes.min(axis=1))))


def data_seed(recipe: Recipe) -> int:
    """Return the seed of the scenario and the split: the seed of the run with ``data.redraw``, otherwise 0."""
    return recipe.seed if recipe.data.redraw else 0


def split_rule(recipe: Recipe, source: Source) -> How:
    """Return the rule that splits a source: the rule of the recipe, or the rule that ``auto`` means for the source."""
    how = recipe.data.split
    if how != "auto":
        return how
    return "given" if source.splits is not None else "group" if source.groups is not None else "stratified"


def split_source(recipe: Recipe, source: Source) -> Splits:
    """Split a source by the rule of a recipe.

    With ``data.fold``, the test split is that fold. A recipe with folds but without ``data.fold`` describes the model
    of all images, so it has no test split.
    """
    data, seed, how = recipe.data, data_seed(recipe), split_rule(recipe, source)
    if data.folds is not None and data.fold is not None:
        return fold_splits(source, how=how, folds=data.folds, fold=data.fold, val=data.val, seed=seed)
    return split(source, how=how, val=data.val, test=data.test if data.folds is None else 0.0, seed=seed)


def split_note(recipe: Recipe, source: Source) -> Fact:
    """Return the note on how a source is split."""
    how, data = split_rule(recipe, source), recipe.data
    auto = data.split == "auto"
    if data.folds is not None and data.fold is not None:
        repeat, fold = divmod(data.fold - 1, data.folds)
        return notes.fold_of(how, auto, fold + 1, data.folds, repeat + 1)
    return notes.split(how, auto, scenario=how == "given" and data.scenario is not None)
