"""Sources: labelled images from a known data set, a folder, a table or arrays, with one interface.

``KINDS`` are the kinds of sources, in the order in which they are tried. A new kind is one entry there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lopsided.data.decoding import Pixels, UnreadableImageError
from lopsided.data.images import ArrayImages, FileImages, Images, Known, Progress
from lopsided.data.listed import Labelled
from lopsided.data.sources import fashion, isic
from lopsided.data.sources.listing import SPLITS, TABLE_SUFFIXES, Listing, list_folder, list_table, read_columns, select
from lopsided.data.sources.names import by_pattern, no_groups, of_folder, suggest_names
from lopsided.data.sources.remote import holds_images, list_remote
from lopsided.data.sources.vectors import is_vectors, list_vectors
from lopsided.data.stored import Place, is_address, no_columns
from lopsided.errors import DataError, InputError, sentence
from lopsided.facts import Fact, notes
from lopsided.recipe.sections import Data

UNUSUAL = "unusual"
"""The second class of a source of one class. It has no images; a model of such a source calls unusual images so."""


@dataclass(frozen=True, eq=False)
class Source:
    """Labelled images. ``labels`` are indices into ``classes``; without labels they are -1 and ``classes`` is empty.

    ``resized`` is the side to which images of different sizes are resized if the recipe sets no size. ``left_out`` is
    the number of images that ``include`` and ``exclude`` left out.
    """

    name: str
    images: Images
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    names: tuple[str, ...]
    groups: npt.NDArray[np.str_] | None = None
    splits: npt.NDArray[np.str_] | None = None
    unreadable: tuple[tuple[str, str], ...] = ()
    resized: int | None = None
    left_out: int = 0
    more: Source | None = None
    """Further images that are for training only."""
    facts: tuple[Fact, ...] = ()
    """Notes on how the images were found."""
    table: Path | None = None
    """The table that names the files of the images."""

    @classmethod
    def open(cls, data: Data, *, download: bool = True) -> Source:
        """List the images of the section ``data`` of a recipe. Nothing is read, and missing files are not noticed.

        A single class gets a second one without images, ``UNUSUAL``.
        """
        asked = Asked.by(data, download=download)
        source = open_source(data.source or "", missing_ok=True, min_classes=1, **vars(asked))
        if data.corrections:
            source = corrected(source, data.corrections)
        if len(source.classes) > 1:
            return source
        (normal,) = source.classes
        if normal == UNUSUAL:
            raise DataError(f"The only class of {source.name} is called {UNUSUAL}, as what is unlike it. Rename it.")
        return replace(source, classes=(normal, UNUSUAL), facts=(*source.facts, notes.one_class(normal)))

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: npt.ArrayLike) -> Source:
        """Return the images at ``indices``, in that order, with the same classes."""
        rows = np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            images=self.images.take(rows),
            labels=self.labels[rows],
            names=tuple(self.names[i] for i in rows),
            groups=None if self.groups is None else self.groups[rows],
            splits=None if self.splits is None else self.splits[rows],
        )

    def counts(self) -> dict[str, int]:
        """Return the number of images of each class."""
        numbers = np.bincount(self.labels[self.labels >= 0], minlength=len(self.classes))
        return dict(zip(self.classes, numbers.tolist(), strict=True))

    def relabel(self, classes: Sequence[str]) -> Source:
        """Return the source with labels as indices into ``classes``, for example the classes of a trained model."""
        places = {name: i for i, name in enumerate(classes)}
        unknown = [name for name, number in self.counts().items() if number and name not in places]
        if unknown and UNUSUAL in places and set(places) & set(self.classes) - {UNUSUAL}:  # All that is not normal.
            places |= dict.fromkeys(unknown, places[UNUSUAL])
        elif unknown:
            must = f"labels must be classes of the model ({', '.join(classes)})"
            do = suggest_names(unknown, classes) or "Leave such images out with --known-classes."
            raise DataError(sentence(must, f"{', '.join(unknown)} in {self.name}", do))
        table = np.array([places.get(name, -1) for name in self.classes] + [-1], dtype=np.int64)
        return replace(self, labels=table[self.labels], classes=tuple(classes))

    def check_present(self) -> None:
        """Raise if files that a table names are missing. The message gives their number and the first three."""
        if self.table is None or not isinstance(self.images, FileImages):
            return
        paths = self.images.paths
        missing = [path for path in paths if not os.path.isfile(path)]  # Unlike Path.is_file, this never raises.
        if missing:
            number = f"{len(missing)} of {len(paths)}, the first {', '.join(map(str, missing[:3]))}"
            raise DataError(f"{self.table} lists missing images: {number}.")

    def verify(
        self,
        *,
        skip_unreadable: bool = False,
        same_size: bool = False,
        workers: int = 0,
        progress: Progress | None = None,
        known: Known | None = None,
        glances: Sequence[int] = (),
    ) -> Source:
        """Decode every image once, so that training does not fail on a broken image after an hour.

        Unreadable images raise an error with the first image and their number. With ``skip_unreadable`` the returned
        source omits unreadable images and lists them in its ``unreadable``. ``same_size`` also checks that all images
        have the same size, as loading without resizing requires. Images that are ``known`` are not decoded, except for
        ``glances``: indices of images to keep small copies of.
        """
        broken = self.images.unreadable(workers=workers, progress=progress, known=known, glances=glances)
        if broken and not skip_unreadable:
            first = broken[0][1]
            more = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
            raise UnreadableImageError(first.path, first.reason + more)
        rows = np.setdiff1d(np.arange(len(self)), [index for index, _ in broken])
        source = self if not broken else self.subset(rows)
        emptied = [name for name, number in source.counts().items() if not number and self.counts()[name]]
        if emptied:
            got = f"none in {emptied[0]} of {self.name} (for example {broken[0][1].path}: {broken[0][1].reason})"
            raise DataError(sentence("every class must hold a readable image", got))
        if same_size and isinstance(source.images, FileImages):
            source.images.check_sizes()
        listed = tuple((self.names[index], error.reason) for index, error in broken)
        return replace(source, unreadable=self.unreadable + listed)


def corrected(source: Source, tables: Sequence[str]) -> Source:
    """Return a source with the labels of tables instead of its own, for the images that these tables name.

    A table has the columns path and label. A path is the name of an image in the source, or leads to its file; files
    are not opened. The last label of an image counts.
    """
    places = {name: row for row, name in enumerate(source.names)}
    if isinstance(source.images, FileImages):
        files = {os.path.abspath(path): row for row, path in enumerate(source.images.paths) if isinstance(path, Path)}
    else:
        files = {}
    labels = source.labels.copy()
    for table in map(Path, tables):
        if table.suffix.lower() not in TABLE_SUFFIXES or not table.is_file():
            what = "which is none" if table.exists() else "which does not exist"
            raise DataError(sentence("corrections must be a CSV or Parquet table", f"{table}, {what}"))
        columns = read_columns(table, {"path", "label"})
        if not {"path", "label"} <= set(columns):
            got = f"{', '.join(columns) or 'none'} in {table}"
            raise DataError(sentence("a table of corrections must have the columns path and label", got))
        for line, (path, label) in enumerate(zip(columns["path"], columns["label"], strict=True), start=2):
            row = places.get(path, files.get(os.path.abspath(table.parent / path)))
            if row is None:
                got = f"{path!r:.200} in row {line} of {table}"
                raise DataError(sentence(f"corrections must name images of {source.name}", got))
            if label not in source.classes:
                must = f"corrected labels must be classes of {source.name} ({', '.join(source.classes)})"
                do = suggest_names([label], source.classes)
                raise DataError(sentence(must, f"{label!r:.60} in row {line} of {table}", do))
            labels[row] = source.classes.index(label)
    fact = notes.corrected_labels(int((labels != source.labels).sum()), len(source))
    return replace(source, labels=labels, facts=(*source.facts, fact))


def open_source(
    data: str | os.PathLike[str],
    *,
    skip_unreadable: bool = False,
    missing_ok: bool = False,
    min_classes: int = 2,
    **options: Any,
) -> Source:
    """Open a source by name, or a folder or table by path. ``options`` are the fields of ``Asked``.

    The name of a source always means that source, in any working folder. Write ``./fashion-mnist`` for a folder of that
    name. A folder with the official layout of ISIC 2018 or the IDX files of Fashion-MNIST is opened as that source.

    Pixels are not read, except with ``skip_unreadable``: then every image is decoded once, and unreadable images are
    omitted and listed. ``Source.verify`` does the same with threads and progress. With ``missing_ok``, missing files of
    a table do not raise here but in ``Source.verify``.
    """
    asked = Asked(**options)
    listing = list_data(data, asked)
    if asked.columns and not all(listing.images.cells()):
        raise no_columns(f"{os.fspath(data)}, which is none", asked.columns)
    source = _assemble(listing, asked.classes)
    if not (skip_unreadable or missing_ok):
        source.check_present()
    if len(source.classes) < min_classes:
        got = f"{len(source.classes)} ({', '.join(source.classes)}) in {listing.where}"
        raise DataError(sentence(f"a source must hold at least {min_classes} classes", got))
    return source.verify(skip_unreadable=True) if skip_unreadable else source


def _assemble(listing: Listing, classes: Sequence[str] | None) -> Source:
    found = listing.classes()
    for name in found:
        if not name.isascii() and name.encode(errors="replace").decode() != name:
            shown = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
            got = f"{shown} in {listing.where}"
            raise DataError(sentence("the name of a class must be UTF-8", got, "Rename its folder."))
    chosen = found if classes is None else _choose(classes, found, listing.aliases, listing.where)
    places = {name: i for i, name in enumerate(chosen)}
    labels = np.array([places.get(name, -1) for name in listing.labels], dtype=np.int64)
    source = Source(
        name=listing.name,
        images=listing.images,
        labels=labels,
        classes=chosen,
        names=tuple(listing.names),
        groups=None if listing.groups is None else np.array(listing.groups, dtype=np.str_),
        splits=None if listing.splits is None else np.array(listing.splits, dtype=np.str_),
        left_out=listing.left_out,
        table=listing.table,
        facts=listing.facts if listing.groups is None else (),
    )
    return source if (labels >= 0).all() else source.subset(np.flatnonzero(labels >= 0))


def _choose(asked: Sequence[str], found: Sequence[str], aliases: Mapping[str, str], where: str) -> tuple[str, ...]:
    lowered = {name.lower(): name for name in found}
    if len(lowered) < len(found):  # Two classes differ only in case, so only exact names are accepted.
        lowered = {}
    chosen: list[str] = []
    for name in asked:
        match = name if name in found else lowered.get(name.lower(), aliases.get(name.lower()))
        if match is None or match not in found:
            do = suggest_names([name], found)
            raise DataError(sentence(f"each class must be one of {', '.join(found)}", f"{name!r} for {where}", do))
        chosen.append(match)
    if len(set(chosen)) < len(chosen):
        raise InputError(sentence("each class must be named only once", ", ".join(asked)))
    return tuple(chosen)


def check_splits(source: Source, where: str) -> None:
    """Raise unless a source with splits can be trained on: it has a train split, and the same classes in all splits."""
    if source.splits is None:
        return
    held = {split: set(source.labels[source.splits == split].tolist()) for split in SPLITS if split in source.splits}
    if "train" not in held:
        raise DataError(sentence("a source with splits must have a train split", f"only {', '.join(held)} in {where}"))
    for split, labels in held.items():
        for index in sorted(labels ^ held["train"]):
            only = split if index in labels else "train"
            must = f"labels must be the same in train and {split}"
            name = source.classes[index]
            do = suggest_names([name], [other for other in source.classes if other != name])
            raise DataError(sentence(must, f"{name!r} only in {only} of {where}", do))


def source_from_arrays(
    x: Any,
    y: Any = None,
    *,
    classes: Sequence[str] | None = None,
    groups: Any = None,
    name: str = "arrays",
) -> Source:
    """Make a source from an array or tensor of images: (n, h, w), (n, h, w, c) or (n, c, h, w), with c = 1 or 3.

    Values are uint8, or floats in [0, 1], which are rounded to 8 bits. If both the second and the last axis can be
    channels, a tensor is read as (n, c, h, w) and an array as (n, h, w, c). ``y`` holds one label per image. If
    ``classes`` is given, integer labels are indices into ``classes`` and other labels are class names.
    """
    pixels = _pixels(x)
    n = len(pixels)
    labels, names = np.full(n, -1, dtype=np.int64), tuple(classes or ())
    if y is not None:
        labels, names = _labels(y, n, classes)
    if groups is not None and len(groups) != n:
        raise DataError(sentence(f"groups must hold one entry per image ({n})", len(groups)))
    return Source(
        name=name,
        images=ArrayImages(pixels),
        labels=labels,
        classes=names,
        names=tuple(str(i) for i in range(n)),
        groups=None if groups is None else np.array([str(group) for group in _numpy(groups)], dtype=np.str_),
    )


def _numpy(values: Any) -> npt.NDArray[Any]:
    # A tensor may be on another device and require a gradient. The attribute is checked without importing torch.
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def _pixels(x: Any) -> Pixels:
    array = _numpy(x)
    must = "images must be an array (n, h, w), (n, h, w, c) or (n, c, h, w) with c = 1 or 3"
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4:
        first, last = array.shape[1] in (1, 3), array.shape[3] in (1, 3)
        if not first and not last:
            raise DataError(sentence(must, f"shape {array.shape}"))
        if last and not (first and hasattr(x, "detach")):
            array = array.transpose(0, 3, 1, 2)
    else:
        raise DataError(sentence(must, f"shape {array.shape}"))
    if array.size == 0:
        raise DataError(sentence("images must not be empty", f"shape {array.shape}"))
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if not np.issubdtype(array.dtype, np.floating):
        raise DataError(sentence("images must be uint8 or float", array.dtype))
    low, high = float(array.min()), float(array.max())
    if math.isnan(low):
        got = f"NaN in {int(np.isnan(array).any(axis=(1, 2, 3)).sum()):,} of {len(array):,} images"
        raise DataError(sentence("float images must be in [0, 1]", got, "Replace NaN by a number."))
    if not (low >= 0.0 and high <= 1.0):
        raise DataError(sentence("float images must be in [0, 1]", f"values from {low:g} to {high:g}"))
    return np.ascontiguousarray(np.rint(array * 255.0).astype(np.uint8))


def _labels(y: Any, n: int, classes: Sequence[str] | None) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    values = _numpy(y)
    if values.shape != (n,):
        raise DataError(sentence(f"labels must have the shape ({n},), one per image", values.shape))
    if classes is None:
        found, labels = np.unique(values, return_inverse=True)
        return labels.astype(np.int64), tuple(str(value) for value in found)
    if np.issubdtype(values.dtype, np.integer):
        if values.min() < 0 or values.max() >= len(classes):
            got = f"{values.min()} to {values.max()}"
            raise DataError(sentence(f"integer labels must be indices into {len(classes)} classes", got))
        return values.astype(np.int64), tuple(classes)
    places = {str(name): i for i, name in enumerate(classes)}
    unknown = sorted({str(value) for value in values} - set(places))
    if unknown:
        raise DataError(sentence(f"each label must be one of {', '.join(classes)}", ", ".join(unknown)))
    return np.array([places[str(value)] for value in values], dtype=np.int64), tuple(classes)


@dataclass(frozen=True)
class Asked(Labelled):
    """Options for opening a source.

    ``classes`` selects classes and their order; upper and lower case do not matter. ``group`` names the group column of
    a table, or is "parent" for the folders of images inside those of classes; ``group_from`` is a pattern that takes
    the group from the name of an image (see ``groups_of``). ``columns`` are those of a table that stand beside each
    image. Without ``download`` nothing is downloaded.
    """

    classes: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    download: bool = True

    @classmethod
    def by(cls, data: Data, *, download: bool = True) -> Asked:
        """Return the options that the section ``data`` of a recipe has."""
        own = {each.name: getattr(data, each.name) for each in fields(cls) if each.name != "download"}
        return cls(**own, download=download)


@dataclass(frozen=True)
class Kind:
    """A kind of source.

    ``list`` lists the images of a path, or of the source called ``name`` if the path is None. ``holds`` returns whether
    a path is of this kind. ``find`` returns whether a named source is on this machine, and its place or how to get it.
    ``group`` gives a listing the groups that the user named, unless ``list`` did.
    """

    list: Callable[[Path | None, Asked], Listing]
    holds: Callable[[Path], bool] = lambda path: False
    name: str | None = None
    find: Callable[[], tuple[bool, str]] | None = None
    group: Callable[[Listing, str], Listing] = no_groups


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
        group=lambda listing, _: listing,
    ),
    Kind(
        lambda path, asked: list_vectors(_path(path), asked.group),
        is_vectors,
        group=lambda listing, _: listing,
    ),
    Kind(
        lambda path, asked: list_remote(
            f"file://{os.path.abspath(_path(path))}", asked.group, asked.patterns, asked.columns or ()
        ),
        holds_images,
        group=lambda listing, _: listing,
    ),
    Kind(
        lambda path, asked: list_table(
            _path(path),
            group=asked.group,
            allow_outside=asked.allow_outside,
            columns=(asked.path_column or "path", asked.label_column or "label"),
            beside=asked.columns or (),
        ),
        lambda path: path.suffix.lower() in TABLE_SUFFIXES and path.is_file(),
        group=lambda listing, _: listing,
    ),
    Kind(lambda path, asked: list_folder(_path(path)), lambda path: path.is_dir(), group=of_folder),
)
SOURCE_NAMES = tuple(kind.name for kind in KINDS if kind.name is not None)


def list_data(data: str | os.PathLike[str], asked: Asked) -> Listing:
    """List the images of a source by name, or of a folder or table by path."""
    if asked.group is not None and asked.group_from is not None:
        raise InputError("--group and --group-from both say what the groups are. Leave out one of the two.")
    if is_address(data):
        listing = _list_address(os.fspath(data), asked)
        return listing if asked.group_from is None else by_pattern(listing, asked.group_from)
    path = None if data in SOURCE_NAMES else Path(data)
    kind = _kind(data, images=asked.path_column is not None)
    if kind is None:
        exists = "which is none of these" if Path(data).exists() else "which does not exist"
        named = ", ".join(SOURCE_NAMES)
        must = f"DATA must be a folder, a CSV or Parquet table, an NPZ file of vectors, or one of {named}"
        raise DataError(sentence(must, f"{os.fspath(data)}, {exists}"))
    listing = kind.list(path, asked)
    if asked.patterns and not listing.left_out:
        listing = select(listing, asked.patterns.keep, str(asked.patterns))
    if asked.group_from is not None:
        return by_pattern(listing, asked.group_from)
    return listing if asked.group is None else kind.group(listing, asked.group)


def _list_address(address: str, asked: Asked) -> Listing:
    if not asked.download:
        raise DataError(f"{address} is not on this machine.")
    listing = list_remote(address, asked.group, asked.patterns, asked.columns or ())
    if asked.patterns and not listing.left_out:
        listing = select(listing, asked.patterns.keep, str(asked.patterns))
    return listing if asked.group is None or listing.groups is not None else of_folder(listing, asked.group)


def name_of(data: str | os.PathLike[str]) -> str:
    """Return the name of a source without opening it; for a missing path, the last part of the path."""
    if is_address(data):
        return Place(os.fspath(data)).name
    kind, path = _kind(data), Path(data)
    if kind is not None and kind.name is not None:
        return kind.name
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.suffix.lower() in (*TABLE_SUFFIXES, ".npz") else path.name


def _kind(data: str | os.PathLike[str], *, images: bool = False) -> Kind | None:
    """Return the kind of a source. The name of a source always means that source, never a path.

    With ``images``, a table names images, whatever the name of its column of paths is.
    """
    named = data in SOURCE_NAMES
    kinds = [kind for kind in KINDS if not (images and kind.holds is is_vectors)]
    return next((kind for kind in kinds if (kind.name == data if named else kind.holds(Path(data)))), None)
