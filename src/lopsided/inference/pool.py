"""List the images of a pool: files, folders and tables of paths. A pool may hold millions of images.

It is scored in packs, parts of fixed size, each by itself, here or on another machine. The images of a pack do not
depend on what was done before, and an image is always in the same batch. So a search that was killed and continued, or
shared among machines, gives the scores of one that was not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lopsided.data.decoding import FolderId, walk_images
from lopsided.data.listed import Listed
from lopsided.data.sources.listing import TABLE_SUFFIXES, Inside, csv_rows, read_columns, reading_csv
from lopsided.data.sources.names import Twins
from lopsided.data.sources.remote import images_below
from lopsided.data.stored import ImagePath, Place, Stored, cells_of, described, is_address, no_columns, rows_of
from lopsided.errors import DataError, sentence
from lopsided.inference.feature_cache import Features
from lopsided.recipe.blocks import column_name

_ALL = Listed()


def find_images(
    paths: Sequence[str | os.PathLike[str]],
    listed: Listed = _ALL,
    twins: Twins | None = None,
    *,
    columns: Sequence[str] = (),
) -> tuple[int, Iterator[ImagePath]]:
    """Return the number of images in files, folders and tables, and an iterator that does not hold all of them.

    A path may be an address, too, such as s3://bucket/inbox. A file in ``paths`` counts as an image with any suffix,
    except that of a table. A table has a column path, or ``listed.path_column``, and may have others. Its relative
    paths are relative to its folder, and paths outside of it must be allowed. No file or folder is read twice, even if
    a path is below another path or several links lead to one folder; a table may name any image again. Patterns select
    images by their paths below the given folder, as in training, given files by their paths as they are given, and
    those of a table by the paths in the table. ``twins`` counts pairs of images that differ only in the
    suffix. With ``columns`` all paths must be tables that have them, and their cells go with the path of each image.
    """
    given, patterns = _distinct(paths), listed.patterns
    other = next((path for path in given if columns and not (isinstance(path, Path) and is_table(path))), None)
    if other is not None:
        raise no_columns(f"{other}, which is none", columns)
    rows = partial(table_images, listed=listed, columns=columns)
    number, found = 0, 0
    for path, name in _images(given, rows):
        found += 1
        if patterns.keep(name):
            number += 1
            if twins is not None:
                twins.add(str(path))
    for place in given:
        if isinstance(place, Path) and place.is_dir() and next(walk_images(place), None) is None:
            raise DataError(sentence("a folder of images must hold at least one", f"none below {place}"))
        if isinstance(place, Path) and is_table(place) and next(rows(place), None) is None:
            raise DataError(sentence("a table must name at least one image", f"no rows in {place}"))
    if not number:
        raise DataError(sentence("the patterns must leave at least one image", f"none of {found:,} with {patterns}"))
    return number, (path for path, name in _images(given, rows) if patterns.keep(name))


def is_table(path: Path) -> bool:
    """Return whether a path is that of a table, by its suffix."""
    return path.suffix.lower() in TABLE_SUFFIXES and path.is_file()


def _images(
    paths: Iterable[Path | Place], rows: Callable[[Path], Iterator[tuple[ImagePath, str]]]
) -> Iterator[tuple[ImagePath, str]]:
    """Yield each image with the name that patterns are compared with. ``rows`` yields those of a table."""
    seen: set[FolderId] = set()
    for path in paths:
        if isinstance(path, Place):
            names = [""] if path.is_file() else images_below(path)
            yield from ((path.file(name), name or path.address) for name in names)
        elif path.is_dir():
            yield from ((image, image.relative_to(path).as_posix()) for image in walk_images(path, seen=seen))
        elif is_table(path):
            yield from rows(path)
        else:
            yield path, path.as_posix()


def table_images(table: Path, listed: Listed, columns: Sequence[str]) -> Iterator[tuple[ImagePath, str]]:
    """Yield the images of a table, row by row. Whether a file exists is found out when it is read."""
    inside, path_column = Inside(table, listed.allow_outside), listed.path_column or "path"
    for line, (text, *cells) in _rows(table, path_column, columns):
        if not text or "\0" in text:
            raise DataError(
                sentence(f"the column {path_column} must be filled in every line", f"{text!r} in line {line}")
            )
        name = inside.check(line, text)
        yield described(table.parent / name, cells), name


def _rows(table: Path, path_column: str, beside: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield line number, path and columns of each row. A CSV file is read line by line."""
    used = [path_column, *map(column_name, beside)]
    must, do = f"a table of images must have the column {path_column}", "Name another one with --path-column."
    if table.suffix.lower() in (".parquet", ".pq"):
        columns = read_columns(table, set(used))
        if path_column not in columns:
            raise DataError(sentence(must, f"{', '.join(columns) or 'none'} in {table}", do))
        yield from enumerate(rows_of(table, columns, used), start=2)
        return
    with reading_csv(table), table.open(encoding="utf-8-sig", newline="") as file:
        rows = csv_rows(table, file)
        _, names = next(rows, (1, []))
        if path_column not in names:
            raise DataError(sentence(must, f"{', '.join(names) or 'none'} in {table}", do))
        rows_of(table, dict.fromkeys(names, ()), beside)  # Raises if a column is missing.
        places = [names.index(name) for name in used]
        yield from ((line, [cells[place] for place in places]) for line, cells in rows)


def _distinct(paths: Sequence[str | os.PathLike[str]]) -> list[Path | Place]:
    kept: list[Path | Place] = []
    folders = {os.path.abspath(path) for path in paths if os.path.isdir(path)}
    seen: set[str] = set()
    for given in paths:
        if is_address(given):
            kept.append(Place(os.fspath(given)))
            continue
        path, absolute = Path(given), os.path.abspath(given)
        if not path.exists():
            raise DataError(sentence("each path must be an image or a folder", f"{path}, which does not exist"))
        if not path.is_file() and not path.is_dir():  # Opening a pipe would wait for a writer.
            raise DataError(sentence("each path must be an image or a folder", f"{path}, which is neither"))
        above = {str(parent) for parent in Path(absolute).parents}
        if absolute not in seen and (not (above & folders) or is_table(path)):
            seen.add(absolute)
            kept.append(path)
    return kept


PACK = 512
"""Images of a pack. A killed search loses the work of at most one pack per machine."""

Mapper: TypeAlias = Callable[[Iterable["Pack"]], Iterator["Scores"]]
"""Scores packs and yields the scores in the order of the packs."""


@dataclass(frozen=True)
class Pack:
    """Consecutive images of a pool. ``number`` counts the packs from 0."""

    number: int
    paths: tuple[ImagePath, ...]
    stamp: str = ""
    """A hash of what the file system tells about the files, which changes when one of them is replaced."""

    @property
    def key(self) -> str:
        """A hash of the paths, and of the cells beside them."""
        key = hashlib.sha256(b"\0".join(map(os.fsencode, self.paths)))
        cells = [cells_of(path) for path in self.paths]
        key.update(repr(cells).encode() if any(cells) else b"")
        return key.hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class Scores:
    """What is known of the images of a pack. Arrays hold one row per image; those of an unreadable image are NaN."""

    pack: Pack
    reasons: tuple[str, ...]
    """Why an image is unreadable; an empty text if it is not."""
    digests: tuple[str, ...]
    """The SHA-256 of each readable file."""
    probabilities: npt.NDArray[np.float64]
    nearness: npt.NDArray[np.float64] | None = None
    features: Features | None = None
    """Features of the encoder, if they were asked for: those of all views of an image side by side."""
    made_by: str = ""
    """The libraries that computed the features; see ``Scorer.made_by``."""
    typicality: npt.NDArray[np.float64] | None = None
    """How usual each image is among the images that the model knows; None if the model has no bank of them."""


def packs(paths: Iterable[ImagePath], size: int = PACK) -> Iterator[Pack]:
    """Yield the images of a pool in packs."""
    rest, number = iter(paths), 0
    while part := tuple(islice(rest, size)):
        yield Pack(number, part, _stamp(part))
        number += 1


def _stamp(paths: Iterable[ImagePath]) -> str:
    """Return a hash of sizes and times of files; "" if there is a file of which only its content tells."""
    stamp = hashlib.sha256()
    for path in paths:
        if isinstance(path, Stored):
            return ""
        try:
            facts = os.stat(path)
            stamp.update(repr((facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)).encode())
        except OSError:
            stamp.update(b"none")
    return stamp.hexdigest()[:32]


def hash_digests(digests: Iterable[str]) -> str:
    """Return one hash for the digests of the images of a pack."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:32]


def joined(pack: Pack, parts: Sequence[Scores]) -> Scores:
    """Return the scores of a pack, given those of its parts in order."""
    near = [part.nearness for part in parts if part.nearness is not None]
    features = [part.features for part in parts if part.features is not None]
    typical = [part.typicality for part in parts if part.typicality is not None]
    return Scores(
        pack,
        tuple(reason for part in parts for reason in part.reasons),
        tuple(digest for part in parts for digest in part.digests),
        np.concatenate([part.probabilities for part in parts]),
        np.concatenate(near) if near else None,
        np.concatenate(features) if features else None,
        parts[0].made_by,
        np.concatenate(typical) if typical else None,
    )
