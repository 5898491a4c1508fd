"""Open, draw and split the images of a recipe, before training, and add further labelled images.

Further images come from tables of marks, such as those of the page of `lopsided find`. They were chosen by a model, so
they say nothing about the model's figures. They are training images only: they never become validation or test images,
and each fold is trained with all of them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lopsided.data.cues import cue_rows, seeks_cues
from lopsided.data.images import FileImages, Images, Known, Progress
from lopsided.data.scenarios import draw, draw_held_out, parse_scenario
from lopsided.data.sources import Source, check_splits
from lopsided.data.sources.listing import TABLE_SUFFIXES, Inside, read_columns
from lopsided.data.sources.names import groups_of, patient_cautions, suggest_names
from lopsided.data.sources.source import Asked
from lopsided.data.splits import How, Splits, fold_splits, split
from lopsided.data.stored import ImagePath, described, rows_of
from lopsided.errors import DataError, sentence
from lopsided.facts import Fact, notes
from lopsided.recipe import Recipe
from lopsided.recipe.sections import Data

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
        source = self.at_hand(recipe)
        if source is None:
            source = Source.open(recipe.data)
            self._listed = _asked(recipe), source
        return source

    def at_hand(self, recipe: Recipe) -> Source | None:
        """Return all images of a recipe's data if they were the last to be listed."""
        return self._listed[1] if self._listed is not None and self._listed[0] == _asked(recipe) else None

    def drawn(self, recipe: Recipe, *, more: bool = False) -> Source:
        """Return the images that a recipe trains and tests with, without reading them.

        Further training images are listed with ``more``. To find those that are labelled twice, all files are then
        read.
        """
        source = self.listed(recipe)
        if recipe.data.scenario is not None:
            source = source.subset(drawn_rows(recipe, source))
        return add_more(source, recipe.data) if more else source

    def open(
        self, recipe: Recipe, progress: Progress | None = None, known: Known | None = None, *, cues: bool = False
    ) -> tuple[Source, Source | None]:
        """Check the images of a recipe, and draw the scenario. Also return the held-out images of ``data.held_out``.

        Images that are ``known`` to be readable are not decoded, except with ``cues`` those that are searched for them.
        """
        data, source = recipe.data, self.listed(recipe)
        if not data.skip_unreadable:
            source.check_present()
        given = data.split in ("auto", "given")
        if given:
            check_splits(source, data.source or "")
        workers = recipe.threads or 0
        glances = cue_rows(source.labels, recipe.seed).tolist() if cues and seeks_cues(recipe) else ()
        if data.skip_unreadable:  # Before the draw, because the scenario must hold for the readable images.
            source = source.verify(
                skip_unreadable=True, workers=workers, progress=progress, known=known, glances=glances
            )
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
            source = source.verify(workers=workers, progress=progress, known=known, glances=glances)
            held_out = None if held_out is None else held_out.verify(workers=workers, known=known)
        source = add_more(source, data, held_out)
        if source.more is not None:
            more = source.more.verify(skip_unreadable=data.skip_unreadable, workers=workers, known=known)
            source = replace(source, more=more, unreadable=source.unreadable + more.unreadable)
        source = replace(source, facts=(*source.facts, *patient_cautions(source)))
        if data.image_size is None:
            side = usual_side(*(each.images for each in (source, source.more, held_out) if each is not None))
            source = replace(source, resized=side)
        return source, held_out


def _asked(recipe: Recipe) -> tuple[object, ...]:
    """Return the fields on which a listing depends."""
    return recipe.data.source, recipe.data.corrections, Asked.by(recipe.data)


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


def usual_side(*parts: Images) -> int | None:
    """Return the side to which images of different sizes are resized by default, or None if all have the same size.

    It is ``USUAL_SIDE``, or the median of the shorter sides if that is smaller.
    """
    sizes = np.concatenate([np.empty((0, 2), dtype=np.int64), *(images.sizes() for images in parts)])
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


MARKS = ("yes", "no", "skip")
"""What the column mark of a table may hold. A row that is skipped, or says "no" without a label, has no label."""


@dataclass(frozen=True)
class _Row:
    path: ImagePath
    label: str
    group: str
    where: str


def add_more(source: Source, data: Data, held_out: Source | None = None) -> Source:
    """Return a source with the images of the tables ``data.more``, if there are any, as further training images.

    A table has the columns path and label, and optionally mark and group; ``data.group_from`` takes groups from paths.
    An image that is byte-identical to one of the source or of an earlier row is left out if the labels agree; otherwise
    an error is raised. Images and groups of ``held_out`` are left out, because they are tested.
    """
    if not data.more:
        return source
    if not isinstance(source.images, FileImages):
        do = "Use a folder or a table of images."
        raise DataError(f"Further labels (--more) need images in files, but those of {source.name} are arrays. {do}")
    rows: list[_Row] = []
    facts: list[Fact] = []
    for table in map(Path, data.more):
        found, left = _read(table, source, data)
        rows += found
        if left:
            facts.append(notes.unlabelled_rows(table.name, dict(left)))
    digests = _digests(source.images, rows)
    rows, same = _new(source, source.images, rows, digests)
    if same:
        facts.append(notes.repeated_labels(same))
    if held_out is not None:
        rows, tested = _not_held_out(rows, digests, held_out)
        if tested:
            facts.append(notes.held_out_labels(tested))
    lacking = 0 if source.groups is None else sum(not row.group for row in rows)
    if lacking:
        facts.append(notes.further_without_group(lacking, len(rows), data.group or "group"))
    places = {name: i for i, name in enumerate(source.classes)}
    names = [str(row.path) for row in rows]
    more = replace(
        source,
        images=source.images.beside([row.path for row in rows]),
        labels=np.array([places[row.label] for row in rows], dtype=np.int64),
        names=tuple(names),
        groups=None if source.groups is None else np.array([row.group or row.where for row in rows], dtype=np.str_),
        splits=None,
        unreadable=(),
        left_out=0,
    )
    if len(more):
        facts.append(notes.further_labels(more.counts()))
    return replace(source, more=more if len(more) else None, facts=(*source.facts, *facts))


def training_source(source: Source, splits: Splits) -> tuple[Source, Splits]:
    """Return a source and its splits with the further training images behind its own images.

    An image of a group that is in the validation or test split is left out of the split, though not of the source.
    """
    more = source.more
    if more is None or not isinstance(source.images, FileImages) or not isinstance(more.images, FileImages):
        return source, splits
    rows, groups = len(source) + np.arange(len(more)), None
    if source.groups is not None and more.groups is not None:
        groups = np.concatenate([source.groups, more.groups])
        held = set(source.groups[np.concatenate([splits.val, splits.test])].tolist())
        rows = rows[[group not in held for group in more.groups.tolist()]]
    joined = replace(
        source,
        images=source.images.beside([*source.images.paths, *more.images.paths]),
        labels=np.concatenate([source.labels, more.labels]),
        names=(*source.names, *more.names),
        groups=groups,
        splits=None if source.splits is None else np.concatenate([source.splits, np.full(len(more), "train")]),
        more=None,
    )
    return joined, Splits(np.concatenate([splits.train, rows]), splits.val, splits.test)


def _read(table: Path, source: Source, data: Data) -> tuple[list[_Row], Counter[str]]:
    """Return the rows of a table that have a label, and the number of the others by their mark."""
    if table.suffix.lower() not in TABLE_SUFFIXES or not table.is_file():
        what = "which is none" if table.exists() else "which does not exist"
        raise DataError(sentence("--more must be a CSV or Parquet table", f"{table}, {what}"))
    columns = read_columns(table)
    missing = [name for name in ("path", "label") if name not in columns]
    if missing:
        got = f"{', '.join(columns) or 'none'} in {table}"
        raise DataError(sentence("a table must have the columns path and label", got))
    number = len(columns["path"])
    marks = columns.get("mark", [""] * number)
    groups = columns.get(data.group or "group", [""] * number)
    if data.group_from is not None:
        groups = [name or "" for name in groups_of(columns["path"], data.group_from)]
    described_by = rows_of(table, columns, data.columns) if data.columns else [()] * number
    inside, rows, left = Inside(table, data.allow_outside), [], Counter[str]()
    for line, (path, label, mark, own) in enumerate(
        zip(columns["path"], columns["label"], marks, groups, strict=True), start=2
    ):
        if mark and mark not in MARKS:
            got = f"{mark!r:.40} in row {line} of {table}"
            raise DataError(sentence("the column mark must hold yes, no or skip", got))
        if mark == "skip" or (mark == "no" and not label):
            left[mark] += 1
            continue
        if not path or not label:
            got = f"an empty cell in row {line} of {table}"
            raise DataError(sentence("path and label must be filled", got))
        if label not in source.classes:
            do = suggest_names([label], source.classes)
            must = f"further labels must be classes of {source.name} ({', '.join(source.classes)})"
            raise DataError(sentence(must, f"{label!r:.60} in row {line} of {table}", do))
        where = table.parent / inside.check(line, path)
        image = described(Path(os.path.abspath(where)), described_by[line - 2])
        rows.append(_Row(image, label, own, f"{table.name}:{line}"))
    return rows, left


def _digests(images: FileImages, rows: Sequence[_Row]) -> dict[ImagePath, str]:
    """Return the digests of the images of all rows. Raise if files are missing."""
    missing = [row for row in rows if not os.path.isfile(row.path)]
    if missing:
        where = f"{missing[0].path} ({missing[0].where})"
        raise DataError(f"Further labels name missing images: {len(missing):,} of {len(rows):,}, the first {where}.")
    paths = list(dict.fromkeys(row.path for row in rows))
    return dict(zip(paths, images.beside(paths).digest(np.arange(len(paths))), strict=True))


def _not_held_out(rows: Sequence[_Row], digests: Mapping[ImagePath, str], held_out: Source) -> tuple[list[_Row], int]:
    """Return the rows that have neither an image nor a group of the held-out images, and the number of the others."""
    tested = set(held_out.images.digest(np.arange(len(held_out))))
    groups = set() if held_out.groups is None else set(held_out.groups.tolist())
    free = [row for row in rows if digests[row.path] not in tested and row.group not in groups]
    return free, len(rows) - len(free)


def _new(
    source: Source, images: FileImages, rows: Sequence[_Row], digests: Mapping[ImagePath, str]
) -> tuple[list[_Row], int]:
    """Return the rows with images that are not labelled yet, and the number of the others.

    Images are compared by content. Raise if a row contradicts a label of the source or an earlier row.
    """
    seen: dict[str, tuple[str, str]] = {}
    there = np.array([i for i, path in enumerate(images.paths) if os.path.isfile(path)], dtype=np.int64)
    for i, digest in zip(there.tolist(), images.digest(there), strict=True):
        seen.setdefault(digest, (source.classes[source.labels[i]], str(images.paths[i])))
    kept, against = [], []
    for row in rows:
        digest = digests[row.path]
        if digest not in seen:
            seen[digest] = (row.label, row.where)
            kept.append(row)
        elif seen[digest][0] != row.label:
            label, where = seen[digest]
            against.append(f"{row.path} is {row.label} in {row.where}, but {label} in {where}")
    if against:
        do = "Correct or remove these rows."
        number = f"{len(against):,} further labels contradict" if len(against) > 1 else "One further label contradicts"
        raise DataError(f"{number} what is known of the same image: {against[0]}. {do}")
    return kept, len(rows) - len(kept)
