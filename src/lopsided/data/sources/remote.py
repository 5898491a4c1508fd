"""Sources behind an address: class folders, tables, and data sets of the Hugging Face hub, read through fsspec."""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from lopsided.data.decoding import is_hidden, is_image_name
from lopsided.data.images import FileImages
from lopsided.data.sources.listing import SPLIT_NAMES, TABLE_SUFFIXES, Listing, list_table, select
from lopsided.data.sources.names import Patterns
from lopsided.data.sources.parquet import SUFFIXES, image_column, load_pyarrow, reading_parquet, texts_of
from lopsided.data.sources.vectors import is_vectors, list_vectors
from lopsided.data.stored import ImagePath, Place, Stored, described, reading, rows_of
from lopsided.errors import DataError, sentence
from lopsided.files import check_regular
from lopsided.recipe.blocks import column_name

_OPEN_GROUPS = 4
"""Row groups of a Parquet file whose images are in memory at a time."""


def list_remote(address: str, group: str | None, patterns: Patterns, columns: Sequence[str] = ()) -> Listing:
    """List the images behind an address, without reading them: a table, class folders, or Parquet files of images."""
    place = Place(address)
    if place.is_file():
        return _list_file(place, group, patterns, columns)
    names = place.names
    shards = [name for name in names if PurePosixPath(name).suffix in SUFFIXES]
    if shards and not any(map(is_image_name, names)):
        return _list_shards(place, shards, group, patterns, columns)
    return _list_folder(place)


def holds_images(path: Path) -> bool:
    """Return whether a file of this machine is a Parquet table with images in its cells."""
    if path.suffix.lower() not in SUFFIXES or not path.is_file():
        return False
    try:
        check_regular(path)
        return image_column(load_pyarrow()[1].read_schema(path)) is not None
    except (ImportError, OSError, ValueError):  # Reading it as a table of paths says what is wrong with it.
        return False


def _list_file(place: Place, group: str | None, patterns: Patterns, columns: Sequence[str]) -> Listing:
    suffix = PurePosixPath(place.name).suffix.lower()
    if suffix not in (*TABLE_SUFFIXES, ".npz"):
        raise DataError(sentence("an address must be that of a folder, a table or vectors", str(place)))
    if suffix in SUFFIXES and _image_column(place, "") is not None:
        return _list_shards(place.above(), [place.name], group, patterns, columns)
    with tempfile.TemporaryDirectory(prefix="lopsided-") as folder:
        copy = Path(folder) / place.name
        copy.write_bytes(place.file("").read())
        if is_vectors(copy):
            return replace(list_vectors(copy, group), where=str(place))
        listing = list_table(copy, group=group, allow_outside=False, beside=columns)
    above = place.above()
    files = zip(map(above.file, listing.names), listing.images.cells(), strict=True)
    images = FileImages([described(file, row) for file, row in files])
    return replace(listing, where=str(place), table=None, images=images)


def images_below(place: Place) -> list[str]:
    """Return the names of the images below a folder."""
    return [name for name in place.names if is_image_name(name) and not any(map(is_hidden, name.split("/")))]


def _list_folder(place: Place) -> Listing:
    """List class folders, or class folders below train, val and test."""
    images = images_below(place)
    parts = [name.split("/") for name in images]
    is_split = bool(parts) and all(part[0].lower() in SPLIT_NAMES and len(part) > 2 for part in parts)
    loose = [name for name, part in zip(images, parts, strict=True) if len(part) < 2 + is_split]
    if loose or not images:
        got = f"{len(loose)} directly in {place}, the first {loose[0]}" if loose else f"none in {place}"
        raise DataError(sentence("images must be in one sub-folder per class", got))
    return Listing(
        name=place.name,
        where=str(place),
        images=FileImages([place.file(name) for name in images]),
        labels=[part[1 if is_split else 0] for part in parts],
        names=images,
        splits=[SPLIT_NAMES[part[0].lower()] for part in parts] if is_split else None,
    )


class Cell(Stored):
    """An image in a cell of a Parquet file."""

    def __init__(self, shard: _Shard, row: int) -> None:
        self._shard, self._row, self.address = shard, row, f"{shard.address}#{row}"

    def read(self) -> bytes:
        """Return the bytes of the image."""
        return self._shard.image(self._row)


class _Shard:
    """A Parquet file with a column of images. Images are read a row group at a time, and the last groups are kept."""

    def __init__(self, place: Place, name: str, column: str) -> None:
        self.address = f"{place}/{name}" if name else str(place)
        self._column, self._lock = column, threading.Lock()
        self._groups: OrderedDict[int, list[Any]] = OrderedDict()
        _, parquet = load_pyarrow()
        with reading(self.address), reading_parquet(self.address):
            self._file = parquet.ParquetFile(place.open(name))
        metadata = self._file.metadata
        self._starts = [0]
        for group in range(metadata.num_row_groups):
            self._starts.append(self._starts[-1] + metadata.row_group(group).num_rows)

    def columns(self, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return some columns of all rows."""
        with reading(self.address), reading_parquet(self.address):
            table = self._file.read(columns=[name for name in names if name in self._file.schema_arrow.names])
            return {name: table.column(name).to_pylist() for name in table.column_names}

    def label_names(self, column: str) -> list[str] | None:
        """Return the names of the classes that the file tells of, as data sets of the hub do."""
        about = (self._file.schema_arrow.metadata or {}).get(b"huggingface")
        try:
            names = json.loads(about or b"null")["info"]["features"][column]["names"]
            return [str(name) for name in names]
        except (TypeError, ValueError, LookupError):
            return None

    def __len__(self) -> int:
        return self._starts[-1]

    def image(self, row: int) -> bytes:
        """Return the bytes of the image in a row."""
        group = next(place for place, end in enumerate(self._starts[1:]) if row < end)
        with self._lock, reading(self.address), reading_parquet(self.address):
            if group not in self._groups:
                cells = self._file.read_row_group(group, columns=[self._column]).column(self._column).to_pylist()
                self._groups[group] = [cell.get("bytes") if isinstance(cell, dict) else cell for cell in cells]
                while len(self._groups) > _OPEN_GROUPS:
                    self._groups.popitem(last=False)
            content = self._groups[group][row - self._starts[group]]
        if not isinstance(content, bytes):
            raise DataError(f"Row {row + 1} of {self.address} holds no image.")
        return content


def _image_column(place: Place, name: str) -> str | None:
    with reading(str(place)), reading_parquet(place), place.open(name) as file:
        return image_column(load_pyarrow()[1].read_schema(file))


def _list_shards(
    place: Place, files: Sequence[str], group: str | None, patterns: Patterns, beside: Sequence[str]
) -> Listing:
    """List the images in Parquet files, whose names or folders say the split."""
    column = _image_column(place, files[0])
    if column is None:
        raise DataError(
            sentence("Parquet files of a data set must have a column of images", f"none in {place}/{files[0]}")
        )
    cells: list[ImagePath] = []
    labels: list[str] = []
    names: list[str] = []
    groups: list[str] = []
    splits: list[str] = []
    wanted = ["label", "labels", group or "group", *map(column_name, beside)]
    for file in files:
        shard, split = _Shard(place, file, column), _split_of(file)
        columns = shard.columns(wanted)
        key = next((name for name in ("label", "labels") if name in columns), None)
        if key is None or (group is not None and group not in columns):
            needed = " and ".join(["label", *([] if group is None else [group])])
            raise DataError(sentence(f"a data set must have the columns {needed}", f"none in {shard.address}"))
        known = shard.label_names(key)
        texts = {name: texts_of(values) for name, values in columns.items()}
        metadata = rows_of(shard.address, texts, beside) if beside else [()] * len(columns[key])
        for row, label in enumerate(columns[key]):
            is_known = known is not None and isinstance(label, int) and 0 <= label < len(known)
            labels.append(known[label] if known is not None and is_known else "" if label in (None, -1) else str(label))
            names.append(f"{split or PurePosixPath(file).stem}/{len(cells):06d}")
            cells.append(described(Cell(shard, row), metadata[row]))
        groups += map(str, columns.get(group or "group", ()))
        splits += [split] * len(columns[key])
    if len(set(splits) - {""}) < 2 or "" in splits:
        splits = []
    listing = Listing(
        name=place.name,
        where=str(place),
        images=FileImages(cells),
        labels=labels,
        names=names,
        groups=groups if len(groups) == len(cells) and groups else None,
        splits=splits or None,
    )
    listing = select(listing, patterns.keep, str(patterns)) if patterns else listing
    without = [name for name, label in zip(listing.names, listing.labels, strict=True) if not label]
    if without:
        got = f"{len(without):,} of {len(listing.names):,} without in {place}, the first {without[0]}"
        do = f"Leave them out, such as with --exclude '{without[0].partition('/')[0]}/*'."
        raise DataError(sentence("every image must have a label", got, do))
    return listing


def _split_of(file: str) -> str:
    """Return the split that the name or the folder of a Parquet file says, or "".

    >>> [_split_of(f"{name}.parquet") for name in ("data/validation-00000-of-00002", "default/test/0000", "a")]
    ['val', 'test', '']
    """
    path = PurePosixPath(file)
    stem = re.sub(r"-\d+(-of-\d+)?(-[0-9a-f]+)?$", "", path.stem)
    return next(
        (SPLIT_NAMES[part.lower()] for part in (stem, *reversed(path.parts[:-1])) if part.lower() in SPLIT_NAMES), ""
    )
