"""The groups of images that are predicted: by their names, by the folders that hold them, or by a column of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeAlias

from lopsided.data.columns import cells_of
from lopsided.data.sources.groups import PARENT, PLACE, groups_of
from lopsided.data.stored import is_address
from lopsided.errors import DataError, InputError, sentence
from lopsided.inference.pool import is_table, table_images

if TYPE_CHECKING:
    from lopsided.data.sources.listing import Listing

Grouping: TypeAlias = Callable[[str], str]
"""Gives the group of an image by its path."""


def grouping(
    images: Sequence[str], vectors: Sequence[Listing], group: str | None, pattern: str | None, path_column: str | None
) -> Grouping | None:
    """Return what tells the groups of images, or of tables of vectors, as with ``evaluate``; None if nothing does."""
    if group is not None and pattern is not None:
        raise InputError("--group and --group-from both say what the groups are. Leave out one of the two.")
    if pattern is not None:
        groups_of([], pattern)  # Raises if the pattern has no group.
        return lambda path: _by_pattern(path, pattern)
    if vectors:
        return _in_order(vectors)
    if group == PARENT:
        return lambda path: PurePosixPath(path).parent.name
    return None if group is None else _by_column(images, group, path_column or "path").__getitem__


def _in_order(tables: Sequence[Listing]) -> Grouping | None:
    """Return what tells the groups of vectors one after the other; None if a table has no groups."""
    if any(table.groups is None for table in tables):
        return None
    groups = (group for table in tables for group in table.groups or ())
    return lambda _: next(groups)


def _by_pattern(path: str, pattern: str) -> str:
    name = groups_of([path], pattern)[0]
    if name is None:
        do = "Change the pattern, or leave these images out with --exclude."
        raise DataError(sentence(f"every image must have a group by the pattern {pattern!r}", f"none for {path}", do))
    return name


def _by_column(images: Sequence[str], column: str, path_column: str) -> dict[str, str]:
    """Return the cell of a column for each image of tables."""
    other = next((given for given in images if is_address(given) or not is_table(Path(given))), None)
    if other is not None:
        do = f"Or take groups from the names of files, as in --group-from '{PLACE}_*'."
        must = f"--group must be {PARENT}, or a column of a table of images"
        raise InputError(sentence(must, f"{column!r} for {other}", do))
    found = {}
    for table in map(Path, images):
        for path, name in table_images(table, allow_outside=True, columns=[column], path_column=path_column):
            (found[str(path)],) = cells_of(path)
            if not found[str(path)]:
                got = f"an empty cell for {name} in {table}"
                raise DataError(sentence(f"the column {column} must be filled for every image", got))
    return found
