"""The images of a folder, a table or a known data set, before classes are chosen and checked.

A folder has one sub-folder per class, or the class folders under train/, val/ and test/,
or images of one class. A CSV or Parquet table has the columns path and label, and optionally group and split.
"""

from __future__ import annotations

import codecs
import csv
import io
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

import numpy as np

from lopsided.data.decoding import SUFFIXES, is_hidden, is_image_name, walk_images
from lopsided.data.images import FileImages, Images
from lopsided.data.sources import several_labels
from lopsided.data.sources.parquet import SUFFIXES as PARQUET
from lopsided.data.sources.parquet import read_parquet, reading_parquet, texts_of
from lopsided.data.stored import ImagePath, described, rows_of
from lopsided.errors import DataError, sentence
from lopsided.facts import Fact, cautions
from lopsided.files import check_regular
from lopsided.recipe.blocks import column_name

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
    facts: tuple[Fact, ...] = ()
    """Cautions about how the images are listed."""

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


def list_folder(folder: Path) -> Listing:
    """List the images of a folder. Hidden files and files without an image suffix are ignored.

    ``train``, ``val`` and ``test`` (or their longer names) are split folders in two cases: the folder holds ``train``
    and another split folder, or only ``train``; or it holds split folders only, and these hold folders and no images.
    Otherwise they are classes.
    """
    below = _folders(folder)
    if not below and (loose := _loose(folder)):  # One class, named like the folder.
        return _listing(folder, [(folder / name, folder.resolve().name) for name in loose], None)
    splits = {child: SPLIT_NAMES[child.name.lower()] for child in below if child.name.lower() in SPLIT_NAMES}
    trains = "train" in splits.values() and (len(splits) > 1 or len(below) == 1)
    only = bool(splits) and len(splits) == len(below)
    if not trains and not (only and all(_folders(child) and not _loose(child) for child in splits)):
        rows = _class_rows(folder, (folder,))
        return _listing(folder, rows, None)
    others = [child.name for child in below if child not in splits]
    if others:
        names = ", ".join(sorted(child.name for child in splits))
        raise DataError(
            f"{folder} holds both splits ({names}) and a class ({others[0]!r}). Move one of them elsewhere."
        )
    if len(set(splits.values())) < len(splits):
        got = f"{', '.join(sorted(child.name for child in splits))} in {folder}"
        raise DataError(sentence("each split must have only one folder", got))
    rows, marks = [], []
    for child, split in splits.items():
        found = _class_rows(child, (folder, child))
        rows += found
        marks += [split] * len(found)
    return _listing(folder, rows, marks)


def _listing(folder: Path, rows: list[tuple[Path, str]], splits: list[str] | None) -> Listing:
    return Listing(
        name=folder.resolve().name,
        where=str(folder),
        images=FileImages([path for path, _ in rows]),
        labels=[label for _, label in rows],
        names=[path.relative_to(folder).as_posix() for path, _ in rows],
        splits=splits,
    )


def _folders(folder: Path) -> list[Path]:
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"Cannot read the folder {folder} ({error.strerror}).") from error
    return [child for child in children if child.is_dir() and not is_hidden(child.name)]


def _loose(folder: Path) -> list[str]:
    return sorted(child.name for child in folder.iterdir() if is_image_name(child.name) and child.is_file())


def _class_rows(folder: Path, above: tuple[Path, ...]) -> list[tuple[Path, str]]:
    loose = _loose(folder)
    if loose:
        got = f"{len(loose)} directly in {folder}, the first {loose[0]}"
        repair = "Put each image in the folder of its class."
        raise DataError(sentence("images must be in one sub-folder per class", got, repair))
    rows = []
    for child in _folders(folder):
        images = list(walk_images(child, above))
        if not images:
            repair = f"Add images or remove the folder (known suffixes: {' '.join(sorted(SUFFIXES))})."
            raise DataError(sentence("every class folder must hold at least one image", f"none in {child}", repair))
        rows += [(path, child.name) for path in images]
    if not rows:
        repair = "Put the images of each class in a separate sub-folder."
        raise DataError(sentence("a folder of images must hold one sub-folder per class", f"none in {folder}", repair))
    return rows


TABLE_SUFFIXES = frozenset({".csv", ".tsv"}) | PARQUET


def list_table(
    table: Path,
    *,
    group: str | None,
    allow_outside: bool,
    columns: tuple[str, str] = ("path", "label"),
    beside: Sequence[str] = (),
) -> Listing:
    """List the images of a table.

    Relative paths are relative to the folder of the table. A path outside that folder needs ``allow_outside``,
    because a table may come from a stranger: an absolute path, a path with ``~`` or ``..``, or a path through a link.
    Labels are text: 01 and 1 are two classes. ``group`` names the group column; the default is the column ``group``,
    if the table has it. ``columns`` are the names of the columns with paths and labels, and ``beside`` those of columns
    that stand beside each image.
    """
    path, label = columns
    cells, lines = _read(table, {path, label, group or "group", "split", *map(column_name, beside)}, path)
    needed = [path, label] + ([group] if group else [])
    missing = [name for name in needed if name not in cells]
    if missing == ["label"]:
        several_labels.check_flags(table, read_columns(table))
    if missing:
        got = f"{', '.join(cells) or 'none'} in {table}"
        do = "If they have other names, use --path-column and --label-column. Vectors are in Parquet or NPZ files."
        do = "" if missing == [group] else do
        raise DataError(sentence(f"a table must have the columns {' and '.join(needed)}", got, do))
    if not cells[path]:
        raise DataError(sentence("a table must name at least one image", f"no rows in {table}"))
    optional = ["split"] if group else ["group", "split"]
    for name in needed + [name for name in optional if name in cells]:
        check_filled(table, name, cells[name], lines)
    inside = Inside(table, allow_outside)
    names = [inside.check(line, text) for line, text in zip(lines, cells[path], strict=True)]
    several_labels.check_rows(table, names, cells[label])
    several_labels.check_cells(table, names, cells[label])
    _check_once(table, names, lines)
    splits = splits_of(table, cells["split"], lines) if "split" in cells else None
    return Listing(
        name=table.stem,
        where=str(table),
        table=table,
        images=FileImages(_described(table, names, rows_of(table, cells, beside) if beside else [])),
        labels=cells[label],
        names=names,
        groups=cells.get(group or "group"),
        splits=splits,
        facts=() if group or "group" in cells else _repeating(cells, (path, label, "split", *beside)),
    )


def _described(table: Path, names: Sequence[str], cells: Sequence[Sequence[str]]) -> list[ImagePath]:
    paths = [table.parent / name for name in names]
    return [described(path, row) for path, row in zip(paths, cells, strict=True)] if cells else list(paths)


def _repeating(cells: Mapping[str, Sequence[str]], known: Sequence[str]) -> tuple[Fact, ...]:
    """Return a caution about the column that repeats most as one of groups does, such as that of patients or lesions.

    Each of its values stands for few images: at least a fifth of the rows differ, and at least one in twenty repeats.
    Columns of measurements, and those that are ``known`` to be something else, are left out.
    """
    number = len(cells[known[0]])
    found = {}
    for name, values in cells.items():
        different = len(set(values))
        is_like_groups = number >= _LEAST_ROWS and 0.2 * number <= different <= 0.95 * number and all(values)
        if name not in known and is_like_groups and not any("." in value for value in values):
            found[different] = name
    return (cautions.repeating_column(found[min(found)], min(found), number),) if found else ()


_LEAST_ROWS = 20
"""With fewer rows, a column that repeats says nothing."""


def read_columns(table: Path, used: Collection[str] | None = None) -> dict[str, list[str]]:
    """Return the columns of a table as text. Empty cells are empty strings.

    Of a Parquet table, only the columns in ``used`` (all if None) are converted to text; the other columns are empty.
    """
    return _read(table, used)[0]


class Inside:
    """Checks that the paths in a table stay below its folder, unless ``allow_outside``: a stranger may have made it.

    A path may lead outside because it is absolute, by ``~`` or ``..``, or through a link. Each folder is resolved only
    once. A path to a file below the folder becomes relative to it, so that an image has one name however it is written.
    """

    def __init__(self, table: Path, allow_outside: bool) -> None:
        self.table, self.allow_outside = table, allow_outside
        self._root = os.path.realpath(table.parent)
        self._folders: dict[str, str] = {}

    def check(self, line: int, text: str) -> str:
        """Return the normal form of the path in a line, or raise."""
        path = self._relative(os.path.normpath(self._translated(text)))
        if self.allow_outside:
            return Path(path).as_posix()
        if os.path.isabs(path) or Path(path).parts[:1] == ("..",):
            raise self._outside(line, text)
        place = self._resolved(os.path.join(self._root, path))
        if os.path.islink(place):
            place = os.path.realpath(place)
        if place != self._root and not place.startswith(os.path.join(self._root, "")):
            raise self._outside(line, f"{Path(path).as_posix()}, which links to {place},")
        return Path(path).as_posix()

    def _translated(self, text: str) -> str:
        """Return a path of Windows or with ``~`` as this system writes it, unless a file has exactly this name."""
        if not (text.startswith("~") or "\\" in text) or os.path.lexists(os.path.join(self._root, text)):
            return text
        path = text.replace("\\", "/")
        return os.path.expanduser(path) if path.startswith("~/") else path

    def _relative(self, path: str) -> str:
        if os.path.isabs(path):
            for place, root in ((path, os.path.abspath(self.table.parent)), (self._resolved(path), self._root)):
                if place.startswith(os.path.join(root, "")):
                    return os.path.relpath(place, root)
        return path

    def _resolved(self, path: str) -> str:
        """Return a path with all links resolved except the last part."""
        above, last = os.path.split(path)
        if above not in self._folders:
            self._folders[above] = os.path.realpath(above)
        return os.path.join(self._folders[above], last)

    def _outside(self, line: int, what: str) -> DataError:
        repair = "Move the table above its images, or allow outside paths with --allow-outside."
        got = f"{what} in line {line} of {self.table}"
        return DataError(sentence("paths must stay below the folder of the table", got, repair))


def _read(
    table: Path, used: Collection[str] | None = None, path: str = "path"
) -> tuple[dict[str, list[str]], Sequence[int]]:
    """Return the columns, and the line of the file on which each row ends. The first row of Parquet is line 2.

    Of a Parquet table, only the columns in ``used`` (all if None) are converted to text; the other columns are empty.
    """
    if table.suffix.lower() in PARQUET:
        columns = _read_parquet(table, used)
        return columns, range(2, 2 + max(map(len, columns.values()), default=0))
    with reading_csv(table):
        numbered = list(csv_rows(table, io.StringIO(table.read_bytes().decode("utf-8-sig"), newline=""), path))
    if not numbered:
        raise DataError(f"The CSV table {table} is empty. Its first line must hold the column names.")
    (_, names), *body = numbered
    _check_different(table, names)
    return {name: [cells[i] for _, cells in body] for i, name in enumerate(names)}, [line for line, _ in body]


@contextmanager
def reading_csv(table: Path) -> Iterator[None]:
    """Turn errors of reading a CSV table into errors of one sentence."""
    try:
        check_regular(table)
        yield
    except OSError as error:
        raise DataError(f"Cannot read the table {table} ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        if error.start == 0 and error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise _utf16(table) from error
        reason = f"byte {error.start} is invalid. Save it as UTF-8."
        raise DataError(f"The CSV table {table} is not UTF-8: {reason}") from error
    except csv.Error as error:
        raise DataError(f"The CSV table {table} is not well formed ({error}).") from error


def _utf16(table: Path) -> DataError:
    return DataError(f"The CSV table {table} is UTF-16, not UTF-8. Save it as UTF-8.")


def csv_rows(table: Path, file: TextIO, path: str = "path") -> Iterator[tuple[int, list[str]]]:
    """Yield the last line and the cells of each row that is not empty. Line breaks inside cells are kept."""
    header = file.readline()
    if "\0" in header[:2]:  # UTF-16 without a byte order mark is valid UTF-8, with NUL beside each letter.
        raise _utf16(table)
    file.seek(0)
    reader = csv.reader(file, delimiter=_delimiter(header, path), strict=True)
    width = 0
    for row in filter(None, reader):
        width = width or len(row)
        if len(row) != width:
            got = f"{len(row)} cells in line {reader.line_num} of {table}"
            raise DataError(sentence(f"every line must have {width} cells, like the first line", got))
        yield reader.line_num, [cell.strip() for cell in row]


def _delimiter(header: str, path: str = "path") -> str:
    """Return the sign that separates the column ``path`` from the others, or else the first sign in the header."""
    signs = [sign for sign in ",;\t" if sign in header] or [","]
    for sign in signs:
        if any(name.strip() == path for name in next(csv.reader([header], delimiter=sign), [])):
            return sign
    return signs[0]


def _check_different(table: Path, columns: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in columns:
        if name in seen:
            raise DataError(sentence("the columns of a table must have different names", f"{name!r} twice in {table}"))
        seen.add(name)


def _read_parquet(table: Path, used: Collection[str] | None) -> dict[str, list[str]]:
    content = read_parquet(table)
    names = content.column_names
    _check_different(table, names)
    with reading_parquet(table):
        if {"path", "label"} <= set(names):
            paths, labels = (content.column(name).to_pylist() for name in ("path", "label"))
            several_labels.check_lists(table, paths, labels)
        return {
            name: texts_of(content.column(name).to_pylist()) if used is None or name in used else [] for name in names
        }


def check_filled(table: Path, column: str, values: Sequence[str], numbers: Sequence[int], unit: str = "line") -> None:
    """Raise if a cell of a column is empty or holds NUL. ``numbers`` are those of the lines, or of other units."""
    for line, value in zip(numbers, values, strict=True):
        if not value:
            got = f"an empty cell in {unit} {line} of {table}"
            raise DataError(sentence(f"the column {column} must be filled in every {unit}", got))
        if "\0" in value:  # No file name contains NUL, and some programs would cut the text there.
            got = f"one in {unit} {line} of {table}"
            raise DataError(sentence(f"the column {column} must not contain NUL characters", got))


def _check_once(table: Path, names: Sequence[str], numbers: Sequence[int]) -> None:
    if len(set(names)) == len(names):
        return
    lines: dict[str, list[int]] = {}
    for line, name in zip(numbers, names, strict=True):
        lines.setdefault(name, []).append(line)
    repeated = [f"{name} in lines {' and '.join(map(str, at[:3]))}" for name, at in lines.items() if len(at) > 1]
    number = f"{len(repeated):,} repeated, the first " if len(repeated) > 1 else ""
    got = f"{number}{', '.join(repeated[:3])} of {table}"
    raise DataError(sentence("each image must be listed only once", got))


def splits_of(table: Path, values: Sequence[str], numbers: Sequence[int], unit: str = "line") -> list[str]:
    """Return the splits that a column names."""
    for line, value in zip(numbers, values, strict=True):
        if value.lower() not in SPLIT_NAMES:
            got = f"{value!r} in {unit} {line} of {table}"
            raise DataError(sentence("the column split must hold train, val or test", got))
    return [SPLIT_NAMES[value.lower()] for value in values]
