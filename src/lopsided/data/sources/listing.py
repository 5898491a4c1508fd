"""What a folder, a table or a known data set holds, as it was found, before classes are chosen and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
"""How folders and tables may call the three splits, in any case of letters."""


@dataclass(frozen=True, eq=False)
class Listing:
    """Images with the class name of each; ``order`` is the order of the classes where the source has one."""

    name: str
    where: str
    images: Images
    labels: Sequence[str]
    names: Sequence[str]
    order: Sequence[str] | None = None
    groups: Sequence[str] | None = None
    splits: Sequence[str] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)

    def classes(self) -> tuple[str, ...]:
        """The classes that occur, in the source's order, or sorted: as numbers when all of them are numbers."""
        found = set(self.labels)
        if self.order is not None:
            return tuple(name for name in self.order if name in found)
        if all(name.isdecimal() for name in found):
            return tuple(sorted(found, key=lambda name: (int(name), name)))
        return tuple(sorted(found))


def check_files(paths: Sequence[Path], where: Path) -> None:
    """Raise when files that a table names are missing, with the first of them and their number."""
    missing = [path for path in paths if not os.path.isfile(path)]  # Unlike a Path's method it raises for no name.
    if missing:
        got = f"{len(missing)} missing of {len(paths)}, the first {missing[0]}"
        raise DataError(sentence(f"every image that {where} names must exist", got))
