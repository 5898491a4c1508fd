"""Sequences of images, in memory or in files, that are loaded in batches, and of vectors instead of images."""

from __future__ import annotations

import hashlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from lopsided.data.decoding import (
    FileFacts,
    Glance,
    Header,
    Pixels,
    UnreadableImageError,
    decode_image,
    examine,
    fit_image,
    give_up_on,
    given_up,
    hash_file,
    read_glance,
    read_header,
)
from lopsided.data.stored import ImagePath, cells_of
from lopsided.errors import DataError, InputError, sentence
from lopsided.recipe.blocks import Cells

if TYPE_CHECKING:
    import torch

Indices: TypeAlias = npt.NDArray[np.int64]
Progress: TypeAlias = Callable[[int, int], None]
"""Called with the number of finished images and the total number of images."""

_T = TypeVar("_T")
_WINDOW = 256
DECODING = "lopsided-decoding"
"""Begin of the names of threads that decode images."""


class Known(Protocol):
    """Remembers images that were decoded without an error, by the SHA-256 of their files."""

    def find(self, digest: str) -> Header | None:
        """Return the header of an image that is known to be readable, otherwise None."""

    def add(self, headers: Mapping[str, Header]) -> None:
        """Remember that the images with these digests are readable."""


class Images(ABC):
    """A fixed sequence of images. ``load`` returns a uint8 batch of selected images."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def channels(self) -> int:
        """The number of channels: 1 if all images are grey, otherwise 3."""

    @abstractmethod
    def take(self, indices: Indices) -> Images:
        """Return the images at ``indices``, in that order. ``channels`` does not change."""

    def cells(self) -> list[Cells]:
        """Return the cells of a table that stand beside each image; empty ones without a table."""
        return [()] * len(self)

    @abstractmethod
    def digest(self, indices: Indices) -> list[str]:
        """Return the SHA-256 of each image: of the bytes of its file, or of its array in memory."""

    def unreadable(
        self,
        *,
        workers: int = 0,
        progress: Progress | None = None,
        known: Known | None = None,
        glances: Sequence[int] = (),
    ) -> list[tuple[int, UnreadableImageError]]:
        """Return the errors of the unreadable images, with their indices.

        Those in memory are decoded already. Images in files are not decoded again if they are ``known``, or were
        decoded before. They keep ``glances`` of these indices, so that nobody opens them again for one.
        """
        if progress is not None:
            progress(len(self), len(self))
        return []

    @abstractmethod
    def size(self, index: int) -> tuple[int, int]:
        """Return height and width of one image."""

    def sizes(self) -> npt.NDArray[np.int64]:
        """Return the upright height and width of each image, or once if they are known to be the same."""
        return np.array([self.size(row) for row in range(len(self))], dtype=np.int64).reshape(-1, 2)

    @abstractmethod
    def _describe(self, index: int) -> str: ...

    @abstractmethod
    def _decode(self, index: int, image_size: int | None, channels: int) -> Pixels: ...

    def load(self, indices: Indices, image_size: int | None, channels: int, *, workers: int = 0) -> torch.Tensor:
        """Load a batch as a uint8 tensor (b, channels, image_size, image_size).

        With ``image_size=None`` images keep their size, (b, channels, h, w), and must all have the same size.
        ``workers`` threads decode in parallel, as Pillow releases the GIL; 0: one per core. The result does not depend
        on their number.
        """
        import torch

        return torch.from_numpy(self._load(np.asarray(indices, dtype=np.int64), image_size, channels, workers))

    def _load(self, indices: Indices, image_size: int | None, channels: int, workers: int) -> Pixels:
        _check_request(image_size, channels)
        if not len(indices):
            side = image_size or 0
            return np.empty((0, channels, side, side), dtype=np.uint8)
        decoded = ordered_map(lambda i: self._decode(i, image_size, channels), indices.tolist(), workers)
        first = next(decoded)
        batch = np.empty((len(indices), *first.shape), dtype=np.uint8)
        batch[0] = first
        for row, pixels in enumerate(decoded, start=1):
            if pixels.shape != first.shape:
                raise _different_sizes(
                    (self._describe(int(indices[0])), first.shape[1:]),
                    (self._describe(int(indices[row])), pixels.shape[1:]),
                )
            batch[row] = pixels
        return batch


class ArrayImages(Images):
    """Images in memory: one uint8 array (n, channels, h, w)."""

    def __init__(self, pixels: Pixels) -> None:
        self.pixels = pixels
        self._digests: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def channels(self) -> int:
        """The number of channels of the array, 1 or 3."""
        return int(self.pixels.shape[1])

    def take(self, indices: Indices) -> ArrayImages:
        """Return the images at ``indices``, in that order."""
        some = ArrayImages(self.pixels[indices])
        some._digests = {row: self._digests[i] for row, i in enumerate(indices.tolist()) if i in self._digests}
        return some

    def digest(self, indices: Indices) -> list[str]:
        """Return the SHA-256 of the shape and pixels of each image."""
        shape = repr(self.pixels.shape[1:]).encode()
        for i in indices.tolist():
            if i not in self._digests:
                self._digests[i] = hashlib.sha256(shape + self.pixels[i].tobytes()).hexdigest()
        return [self._digests[i] for i in indices.tolist()]

    def size(self, index: int) -> tuple[int, int]:
        """Return height and width, which are the same for all images of the array."""
        return int(self.pixels.shape[2]), int(self.pixels.shape[3])

    def sizes(self) -> npt.NDArray[np.int64]:
        """Return height and width once, because all images have the same."""
        return np.array([self.size(0)], dtype=np.int64)

    def picture(self, index: int) -> Image.Image:
        """Return an image as a Pillow image."""
        pixels = self.pixels[index]
        return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))

    def _describe(self, index: int) -> str:
        return f"image {index}"

    def _decode(self, index: int, image_size: int | None, channels: int) -> Pixels:
        return fit_image(self.picture(index), image_size, channels)

    def _load(self, indices: Indices, image_size: int | None, channels: int, workers: int) -> Pixels:
        height, width = self.pixels.shape[2:]
        if channels >= self.channels and (image_size is None or height == width == image_size):
            _check_request(image_size, channels)
            batch = self.pixels[indices]
            return batch if channels == self.channels else np.repeat(batch, channels, axis=1)
        return super()._load(indices, image_size, channels, workers)


class FileImages(Images):
    """Images in files, decoded when they are loaded.

    A file is read once for its digest, its header and the check that it can be decoded. What this told is shared with
    all subsets. A file that changes afterwards is refused when it is loaded, so no feature gets the name of another
    image. ``like`` are images of the same source: they decide how many channels there are.
    """

    def __init__(
        self, paths: Sequence[ImagePath], channels: int | None = None, *, like: FileImages | None = None
    ) -> None:
        self.paths = tuple(paths)
        self._channels, self._like = channels, like
        self._facts: dict[ImagePath, FileFacts] = {} if like is None else like._facts

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def channels(self) -> int:
        """1 if every header is that of a grey image, otherwise 3. Reading stops at the first colour image."""
        if self._like is not None:
            return self._like.channels
        return self._channels or (1 if self._all_grey() else 3)

    def take(self, indices: Indices) -> FileImages:
        """Return the images at ``indices``, in that order. ``channels`` does not change."""
        return self.beside([self.paths[i] for i in indices])

    def cells(self) -> list[Cells]:
        """Return the cells that go with the paths."""
        return [cells_of(path) for path in self.paths]

    def beside(self, paths: Sequence[ImagePath]) -> FileImages:
        """Return images of other files, with the channels of these images."""
        return FileImages(paths, like=self._like or self)

    def digest(self, indices: Indices) -> list[str]:
        """Return the SHA-256 of the bytes of each file."""
        paths = [self.paths[i] for i in indices]
        unread = list(dict.fromkeys(path for path in paths if path not in self._facts))
        self._facts.update(zip(unread, ordered_map(hash_file, unread), strict=True))
        lost = next((path for path in paths if not self._facts[path].digest), None)
        if lost is not None:
            raise UnreadableImageError(lost, self._facts[lost].error)
        return [self._facts[path].digest for path in paths]

    def hashed(self, *, progress: Progress | None = None) -> FileImages:
        """Return the images whose files can be read, after hashing all of them."""
        for row in range(0, len(self), _WINDOW):
            paths = self.paths[row : row + _WINDOW]
            unread = [path for path in paths if path not in self._facts]
            self._facts.update(zip(unread, ordered_map(hash_file, unread), strict=True))
            if progress is not None:
                progress(row + len(paths), len(self))
        return self.beside([path for path in self.paths if self._facts[path].digest])

    def copies(self) -> list[list[int]]:
        """Return the indices of files with the same content, after hashing all of them. Unreadable files have none."""
        self.hashed()
        rows: dict[str, list[int]] = {}
        for row, path in enumerate(self.paths):
            rows.setdefault(self._facts[path].digest, []).append(row)
        return [same for digest, same in rows.items() if digest and len(same) > 1]

    def unreadable(
        self,
        *,
        workers: int = 0,
        progress: Progress | None = None,
        known: Known | None = None,
        glances: Sequence[int] = (),
    ) -> list[tuple[int, UnreadableImageError]]:
        """Return the errors of the unreadable files, with their indices."""
        checked = {path for path, facts in self._facts.items() if facts.error or facts.header}
        unread = list(dict.fromkeys(path for path in self.paths if path not in checked))
        wanted = {self.paths[index] for index in glances}

        def look(path: ImagePath) -> FileFacts:
            return examine(path, None if known is None else known.find, glance=path in wanted)

        for done, (path, facts) in enumerate(zip(unread, ordered_map(look, unread, workers), strict=True)):
            self._facts[path] = facts
            if progress is not None:
                progress(len(self) - len(unread) + done + 1, len(self))
        if progress is not None and not unread:
            progress(len(self), len(self))
        if known is not None:
            read = [self._facts[path] for path in unread]
            known.add({facts.digest: facts.header for facts in read if facts.header is not None})
        return [
            (index, UnreadableImageError(path, self._facts[path].error))
            for index, path in enumerate(self.paths)
            if self._facts[path].error
        ]

    def glance(self, index: int) -> Glance:
        """Return an image made small. The file is opened unless the check kept it."""
        path = self.paths[index]
        return read_glance(path, self._facts.get(path))

    def headers(self) -> list[Header]:
        """Return what is known of each image."""
        return [self._header(path) for path in self.paths]

    def check_sizes(self) -> None:
        """Raise unless all headers have the same size. Loading without ``image_size`` requires this."""
        for row, path in enumerate(self.paths):
            if self.size(row) != self.size(0):
                raise _different_sizes((str(self.paths[0]), self.size(0)), (str(path), self.size(row)))

    def _all_grey(self) -> bool:
        seen = False
        for path in self.paths:
            try:
                grey = self._header(path).grey
            except UnreadableImageError:  # Decoding reports this image.
                continue
            if not grey:
                return False
            seen = True
        return seen

    def size(self, index: int) -> tuple[int, int]:
        """Return height and width in the header of a file."""
        return self._header(self.paths[index]).size

    def _header(self, path: ImagePath) -> Header:
        facts = self._facts.get(path, FileFacts(""))
        if facts.error:
            raise UnreadableImageError(path, facts.error)
        return facts.header or read_header(path)

    def _describe(self, index: int) -> str:
        return str(self.paths[index])

    def _decode(self, index: int, image_size: int | None, channels: int) -> Pixels:
        path = self.paths[index]
        return decode_image(path, image_size, channels, self._facts.get(path))


def longest_side(images: Images, rows: Indices) -> int:
    """Return the median of the longer sides of up to 32 images. They decide whether images are small."""
    few = rows[np.linspace(0, len(rows) - 1, min(len(rows), 32)).astype(np.int64)]
    return int(np.median([max(images.size(row)) for row in few.tolist()]))


def ordered_map(function: Callable[..., _T], items: Iterable[object], workers: int = 0) -> Iterator[_T]:
    """Map with ``workers`` threads, 0 for one per core, and yield the results in order.

    At most ``_WINDOW`` results are held.
    """
    workers = workers or os.cpu_count() or 1
    if workers == 1:
        yield from map(function, items)
        return
    rest = iter(items)
    with decoding_threads(workers) as pool:
        while window := list(islice(rest, _WINDOW)):
            yield from pool.map(function, window)


@contextmanager
def decoding_threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Start threads that decode images. What is not done when the block ends, as by an interrupt, is given up."""
    ended = threading.Event()
    pool = ThreadPoolExecutor(number, DECODING, initializer=give_up_on, initargs=(*given_up(), ended))
    try:
        yield pool
    finally:
        ended.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _check_request(image_size: int | None, channels: int) -> None:
    if channels not in (1, 3):
        raise InputError(sentence("channels must be 1 or 3", channels))
    if image_size is not None and image_size < 1:
        raise InputError(sentence("image_size must be >= 1", image_size, "Use None to keep the size of the images."))


def _different_sizes(first: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]) -> DataError:
    sizes = " and ".join(f"{size[1]} x {size[0]} in {name}" for name, size in (first, other))
    do = "Set image_size."
    return DataError(sentence("images must have the same size when no image size is set", sizes, do))


Numbers = npt.NDArray[np.floating[Any]]


class Vectors(Images):
    """Rows of finite numbers, (n, d). ``columns`` are the names of the d columns, if they have names."""

    def __init__(self, values: Numbers, columns: Sequence[str] = ()) -> None:
        self.values, self.columns = values, tuple(columns)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def width(self) -> int:
        """The number of columns."""
        return int(self.values.shape[1])

    @property
    def channels(self) -> int:
        """1: a vector has no colours."""
        return 1

    def take(self, indices: Indices) -> Vectors:
        """Return the rows at ``indices``, in that order."""
        return Vectors(self.values[indices], self.columns)

    def digest(self, indices: Indices) -> list[str]:
        """Return the SHA-256 of each row."""
        return [hashlib.sha256(row.astype(np.float64).tobytes()).hexdigest() for row in self.values[indices]]

    def size(self, index: int) -> tuple[int, int]:
        """Return 1 and the number of columns."""
        return 1, self.width

    def fitted(self, shape: Sequence[int], columns: Sequence[str], where: str) -> Vectors:
        """Return the columns that a model takes, in its order, or raise if they are not there."""
        if columns and self.columns:
            missing = [name for name in columns if name not in self.columns]
            if missing:
                got = f"no column {missing[0]!r} in {where}" + (f", and {len(missing) - 1} more" * (len(missing) > 1))
                raise DataError(sentence(f"vectors must have the {len(columns):,} columns of the model", got))
            return Vectors(self.values[:, [self.columns.index(name) for name in columns]], columns)
        if len(shape) != 1 or self.width != shape[0]:
            must = f"the model takes {f'vectors of {shape[0]:,} numbers' if len(shape) == 1 else 'images'}"
            raise DataError(sentence(must, f"vectors of {self.width:,} numbers in {where}"))
        return self

    def _describe(self, index: int) -> str:
        return f"row {index}"

    def _decode(self, index: int, image_size: int | None, channels: int) -> Pixels:
        raise DataError("Vectors are no images and have no pixels.")
