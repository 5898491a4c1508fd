"""The kinds of sources, in the order in which they are tried. A new kind is one entry here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lopsided.data.sources import fashion, isic
from lopsided.data.sources.folders import list_folder
from lopsided.data.sources.listing import Listing, select
from lopsided.data.sources.names import Patterns
from lopsided.data.sources.tables import TABLE_SUFFIXES, list_table
from lopsided.errors import DataError, InputError, sentence


@dataclass(frozen=True)
class Asked:
    """Options for opening a source; see ``open_source``."""

    classes: Sequence[str] | None = None
    group: str | None = None
    allow_outside: bool = False
    download: bool = True
    patterns: Patterns = field(default_factory=Patterns)


@dataclass(frozen=True)
class Kind:
    """A kind of source.

    ``list`` lists the images of a path, or of the source called ``name`` if the path is None. ``holds`` returns whether
    a path is of this kind. ``find`` returns whether a named source is on this machine, and its place or how to get it.
    """

    list: Callable[[Path | None, Asked], Listing]
    holds: Callable[[Path], bool] = lambda path: False
    name: str | None = None
    find: Callable[[], tuple[bool, str]] | None = None
    has_groups: bool = False


def _list_isic(path: Path | None, asked: Asked) -> Listing:
    root = isic.find_isic() if path is None else isic.isic_root(path)
    assert root is not None
    return isic.list_isic(root, classes=asked.classes, group=asked.group)


def _find_isic() -> tuple[bool, str]:
    try:
        return True, str(isic.find_isic())
    except DataError:
        return False, f"unpack the official archives and set LOPSIDED_DATA to the folder that holds {isic.INPUT}"


def _find_fashion() -> tuple[bool, str]:
    folder = fashion.find_folder()
    if folder is None:
        return False, "downloaded at the first use; or put the files below $LOPSIDED_DATA"
    return True, str(folder)


def _path(path: Path | None) -> Path:
    assert path is not None
    return path


KINDS = (
    Kind(
        lambda path, asked: fashion.list_tops(),
        name="fashion-mnist-tops",
        find=lambda: (True, "embedded in the package"),
    ),
    Kind(
        lambda path, asked: fashion.list_fashion(path, download=asked.download),
        lambda path: path.is_dir() and fashion.holds_fashion(path),
        name="fashion-mnist",
        find=_find_fashion,
    ),
    Kind(
        _list_isic,
        lambda path: path.is_dir() and isic.isic_root(path) is not None,
        name="isic2018",
        find=_find_isic,
        has_groups=True,
    ),
    Kind(
        lambda path, asked: list_table(_path(path), group=asked.group, allow_outside=asked.allow_outside),
        lambda path: path.suffix.lower() in TABLE_SUFFIXES and path.is_file(),
        has_groups=True,
    ),
    Kind(lambda path, asked: list_folder(_path(path)), lambda path: path.is_dir()),
)
SOURCE_NAMES = tuple(kind.name for kind in KINDS if kind.name is not None)


def list_data(data: str | os.PathLike[str], asked: Asked) -> Listing:
    """List the images of a source by name, or of a folder or table by path."""
    path = None if data in SOURCE_NAMES else Path(data)
    kind = _kind(data)
    if kind is None:
        exists = "which is none of these" if Path(data).exists() else "which does not exist"
        must = f"DATA must be a folder, a CSV or Parquet table, or one of {', '.join(SOURCE_NAMES)}"
        raise DataError(sentence(must, f"{os.fspath(data)}, {exists}"))
    if asked.group is not None and not kind.has_groups:
        repair = "Use a table with the columns path, label and group."
        raise InputError(f"Only a table or isic2018 can have groups, so {data} has no group {asked.group!r}. {repair}")
    listing = kind.list(path, asked)
    return select(listing, asked.patterns.keep, str(asked.patterns)) if asked.patterns else listing


def name_of(data: str | os.PathLike[str]) -> str:
    """Return the name of a source without opening it; for a missing path, the last part of the path."""
    kind, path = _kind(data), Path(data)
    if kind is not None and kind.name is not None:
        return kind.name
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.suffix.lower() in TABLE_SUFFIXES else path.name


def _kind(data: str | os.PathLike[str]) -> Kind | None:
    """Return the kind of a source. The name of a source always means that source, never a path."""
    named = data in SOURCE_NAMES
    return next((kind for kind in KINDS if (kind.name == data if named else kind.holds(Path(data)))), None)
