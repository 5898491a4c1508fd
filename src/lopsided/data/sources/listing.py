"""The images of a folder, a table or a known data set, before classes are chosen and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lopsided.data.images import Images
from lopsided.errors import DataError, sentence

SPLITS = ("train", "val", "test")
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
"""Names of the three splits in folders and tables, in upper or lower case."""


@dataclass(frozen=True, eq=False)
class Listing:
    """Images with their class names. ``order`` is the order of the classes if the source defines one.

    ``table`` names the files, which may be missing. A folder lists only files that are there.
    """

    name: str
    where: str
    images: Images
    labels: Sequence[str]
    names: Sequence[str]
    order: Sequence[str] | None = None
    groups: Sequence[str] | None = None
    splits: Sequence[str] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    left_out: int = 0
    table: Path | None = None

    def classes(self) -> tuple[str, ...]:
        """Return the classes that occur, in the order of the source, or sorted: as numbers if all are numbers."""
        found = set(self.labels)
        if self.order is not None:
            return tuple(name for name in self.order if name in found)
        if all(name.isdecimal() for name in found):
            return tuple(sorted(found, key=lambda name: (int(name), name)))
        return tuple(sorted(found))


def select(listing: Listing, keep: Callable[[str], bool], what: str) -> Listing:
    """Return the images whose names ``keep`` accepts. ``what`` describes the choice in the error if none is left."""
    rows = [i for i, name in enumerate(listing.names) if keep(name)]
    if not rows:
        got = f"none of {len(listing.names):,} with {what} in {listing.where}"
        do = f"A pattern is compared with names such as {listing.names[0]}."
        raise DataError(sentence("the patterns must leave at least one image", got, do))

    def some(values: Sequence[str]) -> list[str]:
        return [values[i] for i in rows]

    return replace(
        listing,
        images=listing.images.take(np.array(rows, dtype=np.int64)),
        labels=some(listing.labels),
        names=some(listing.names),
        groups=None if listing.groups is None else some(listing.groups),
        splits=None if listing.splits is None else some(listing.splits),
        left_out=len(listing.names) - len(rows),
    )
