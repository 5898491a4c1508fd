"""Further labelled images for training: tables of marks, such as those of the page of `lopsided find`.

Such images were chosen by a model, so they say nothing about the model's figures. They are training images only: they
never become validation or test images, and each fold is trained with all of them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lopsided.data.images import FileImages
from lopsided.data.sources import Source
from lopsided.data.sources.names import suggest_names
from lopsided.data.sources.tables import TABLE_SUFFIXES, Inside, read_columns
from lopsided.data.splits import Splits
from lopsided.errors import DataError, sentence
from lopsided.facts import Fact, notes

MARKS = ("yes", "no", "skip")
"""What the column mark of a table may hold. A row that is skipped, or says "no" without a label, has no label."""


@dataclass(frozen=True)
class _Row:
    path: Path
    label: str
    group: str
    where: str


def add_more(
    source: Source,
    tables: Sequence[str],
    *,
    group: str | None = None,
    allow_outside: bool = False,
    held_out: Source | None = None,
) -> Source:
    """Return a source with the images of tables as further training images.

    A table has the columns path and label, and optionally mark and group. An image that is byte-identical to one of
    the source or of an earlier row is left out if the labels agree; otherwise an error is raised. Images and groups of
    ``held_out`` are left out, because they are tested.
    """
    if not isinstance(source.images, FileImages):
        do = "Use a folder or a table of images."
        raise DataError(f"Further labels (--more) need images in files, but those of {source.name} are arrays. {do}")
    rows: list[_Row] = []
    facts: list[Fact] = []
    for table in map(Path, tables):
        found, left = _read(table, source, group, allow_outside)
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
        facts.append(notes.further_without_group(lacking, len(rows), group or "group"))
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
    rows = len(source) + np.arange(len(more))
    if source.groups is not None and more.groups is not None:
        held = set(source.groups[np.concatenate([splits.val, splits.test])].tolist())
        rows = rows[[group not in held for group in more.groups.tolist()]]
    joined = replace(
        source,
        images=source.images.beside([*source.images.paths, *more.images.paths]),
        labels=np.concatenate([source.labels, more.labels]),
        names=(*source.names, *more.names),
        groups=None if source.groups is None else np.concatenate([source.groups, _groups(more)]),
        splits=None if source.splits is None else np.concatenate([source.splits, np.full(len(more), "train")]),
        more=None,
    )
    return joined, Splits(np.concatenate([splits.train, rows]), splits.val, splits.test)


def _groups(more: Source) -> np.ndarray[tuple[int], np.dtype[np.str_]]:
    assert more.groups is not None
    return more.groups


def _read(table: Path, source: Source, group: str | None, allow_outside: bool) -> tuple[list[_Row], Counter[str]]:
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
    groups = columns.get(group or "group", [""] * number)
    inside, rows, left = Inside(table, allow_outside), [], Counter[str]()
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
        rows.append(_Row(Path(os.path.abspath(where)), label, own, f"{table.name}:{line}"))
    return rows, left


def _digests(images: FileImages, rows: Sequence[_Row]) -> dict[Path, str]:
    """Return the digests of the images of all rows. Raise if files are missing."""
    missing = [row for row in rows if not os.path.isfile(row.path)]
    if missing:
        where = f"{missing[0].path} ({missing[0].where})"
        raise DataError(f"Further labels name missing images: {len(missing):,} of {len(rows):,}, the first {where}.")
    paths = list(dict.fromkeys(row.path for row in rows))
    return dict(zip(paths, images.beside(paths).digest(np.arange(len(paths))), strict=True))


def _not_held_out(rows: Sequence[_Row], digests: Mapping[Path, str], held_out: Source) -> tuple[list[_Row], int]:
    """Return the rows that have neither an image nor a group of the held-out images, and the number of the others."""
    tested = set(held_out.images.digest(np.arange(len(held_out))))
    groups = set() if held_out.groups is None else set(held_out.groups.tolist())
    free = [row for row in rows if digests[row.path] not in tested and row.group not in groups]
    return free, len(rows) - len(free)


def _new(
    source: Source, images: FileImages, rows: Sequence[_Row], digests: Mapping[Path, str]
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
