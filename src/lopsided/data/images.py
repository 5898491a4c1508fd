"""Sequences of images, in memory or in files, that are loaded in batches."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from lopsided.data.decoding import (
    Pixels,
    UnreadableImageError,
    check_image_file,
    decode_image,
    fit_image,
    read_header,
    read_image,
)
from lopsided.errors import DataError, InputError, sentence

if TYPE_CHECKING:
    import torch

Indices: TypeAlias = npt.NDArray[np.int64]
Progress: TypeAlias = Callable[[int, int], None]
"""Called with the number of finished images and the total number of images."""

_T = TypeVar("_T")
_WINDOW = 256


class Known(Protocol):
    """Remembers which images were decoded without an error, by the SHA-256 of their files."""

    def find(self, digests: Sequence[str]) -> set[str]:
        """Return those of these images that are known to be readable."""

    def add(self, digests: Sequence[str]) -> None:
        """Remember that these images are readable."""


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

    @abstractmethod
    def digest(self, indices: Indices) -> list[str]:
        """Return the SHA-256 of each image: of the bytes of its file, or of its array in memory."""

    @abstractmethod
    def unreadable(
        self, *, workers: int = 0, progress: Progress | None = None, known: Known | None = None
    ) -> list[tuple[int, UnreadableImageError]]:
        """Decode every image once and return the errors of the unreadable images, with their indices.

        Images that are ``known`` to be readable are not decoded.
        """

    @abstractmethod
    def size(self, index: int) -> tuple[int, int]:
        """Return height and width of one image."""

    @abstractmethod
    def _describe(self, index: int) -> str: ...

    @abstractmethod
    def _decode(self, index: int, image_size: int | None, channels: int) -> Pixels: ...

    def load(self, indices: Indices, image_size: int | None, channels: int, *, workers: int = 0) -> torch.Tensor:
        """Load a batch as a uint8 tensor (b, channels, image_size, image_size).

        With ``image_size=None`` images keep their size, (b, channels, h, w), and must all have the same size.
        ``workers`` threads decode in parallel, as Pillow releases the GIL. The result does not depend on their number.
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

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def channels(self) -> int:
        """The number of channels of the array, 1 or 3."""
        return int(self.pixels.shape[1])

    def take(self, indices: Indices) -> ArrayImages:
        """Return the images at ``indices``, in that order."""
        return ArrayImages(self.pixels[indices])

    def digest(self, indices: Indices) -> list[str]:
        """Return the SHA-256 of the shape and pixels of each image."""
        shape = repr(self.pixels.shape[1:]).encode()
        return [hashlib.sha256(shape + self.pixels[i].tobytes()).hexdigest() for i in indices]

    def unreadable(
        self, *, workers: int = 0, progress: Progress | None = None, known: Known | None = None
    ) -> list[tuple[int, UnreadableImageError]]:
        """Return an empty list: images in memory are already decoded."""
        if progress is not None:
            progress(len(self), len(self))
        return []

    def size(self, index: int) -> tuple[int, int]:
        """Return height and width, which are the same for all images of the array."""
        return int(self.pixels.shape[2]), int(self.pixels.shape[3])

    def _describe(self, index: int) -> str:
        return f"image {index}"

    def _decode(self, index: int, image_size: int | None, channels: int) -> Pixels:
        pixels = self.pixels[index]
        image = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
        return fit_image(image, image_size, channels)

    def _load(self, indices: Indices, image_size: int | None, channels: int, workers: int) -> Pixels:
        height, width = self.pixels.shape[2:]
        if channels >= self.channels and (image_size is None or height == width == image_size):
            _check_request(image_size, channels)
            batch = self.pixels[indices]
            return batch if channels == self.channels else np.repeat(batch, channels, axis=1)
        return super()._load(indices, image_size, channels, workers)


class FileImages(Images):
    """Images in files, decoded when they are loaded."""

    def __init__(self, paths: Sequence[Path], channels: int | None = None) -> None:
        self.paths = tuple(paths)
        self._channels = channels

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def channels(self) -> int:
        """1 if every header is that of a grey image, otherwise 3. Reading stops at the first colour image."""
        return self._channels or (1 if self._all_grey() else 3)

    def take(self, indices: Indices) -> FileImages:
        """Return the images at ``indices``, in that order. ``channels`` does not change."""
        return FileImages([self.paths[i] for i in indices], self.channels)

    def digest(self, indices: Indices) -> list[str]:
        """Return the SHA-256 of the bytes of each file."""
        return [file_digest(self.paths[i]) for i in indices]

    def unreadable(
        self, *, workers: int = 0, progress: Progress | None = None, known: Known | None = None
    ) -> list[tuple[int, UnreadableImageError]]:
        """Decode every file once and return the errors of the unreadable files, with their indices.

        A file whose content is ``known`` to be readable is only read.
        """
        # A file that cannot be read has no digest. Decoding reports it.
        digests = [None] * len(self) if known is None else list(ordered_map(_digest_or_none, self.paths, workers))
        good = set() if known is None else known.find([digest for digest in digests if digest is not None])
        todo = [index for index, digest in enumerate(digests) if digest not in good]
        found = []
        before = len(self) - len(todo)
        for done, error in enumerate(ordered_map(_error_in, [self.paths[index] for index in todo], workers)):
            if error is not None:
                found.append((todo[done], error))
            if progress is not None:
                progress(before + done + 1, len(self))
        if progress is not None and not todo:
            progress(len(self), len(self))
        if known is not None:
            broken = {index for index, _ in found}
            known.add([digest for i in todo if i not in broken and (digest := digests[i]) is not None])
        return found

    def sizes(self) -> npt.NDArray[np.int64]:
        """Return the upright height and width of each image, from its header."""
        return np.array([read_header(path)[0] for path in self.paths], dtype=np.int64).reshape(-1, 2)

    def check_sizes(self) -> None:
        """Raise unless all headers have the same size. Loading without ``image_size`` requires this."""
        first: tuple[int, int] | None = None
        for path in self.paths:
            size, _ = read_header(path)
            first = first or size
            if size != first:
                raise _different_sizes((str(self.paths[0]), first), (str(path), size))

    def _all_grey(self) -> bool:
        seen = False
        for path in self.paths:
            try:
                _, grey = read_header(path)
            except UnreadableImageError:  # Decoding reports this image.
                continue
            if not grey:
                return False
            seen = True
        return seen

    def size(self, index: int) -> tuple[int, int]:
        """Return height and width in the header of a file."""
        return read_header(self.paths[index])[0]

    def _describe(self, index: int) -> str:
        return str(self.paths[index])

    def _decode(self, index: int, image_size: int | None, channels: int) -> Pixels:
        return decode_image(self.paths[index], image_size, channels)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of the bytes of a file."""
    try:
        check_image_file(path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UnreadableImageError(path, (error.strerror or "unreadable").lower()) from error


def ordered_map(function: Callable[..., _T], items: Iterable[object], workers: int) -> Iterator[_T]:
    """Map with ``workers`` threads and yield the results in order. At most ``_WINDOW`` results are held."""
    if workers <= 1:
        yield from map(function, items)
        return
    rest = iter(items)
    with ThreadPoolExecutor(workers) as pool:
        while window := list(islice(rest, _WINDOW)):
            yield from pool.map(function, window)


def _digest_or_none(path: Path) -> str | None:
    try:
        return file_digest(path)
    except UnreadableImageError:
        return None


def _error_in(path: Path) -> UnreadableImageError | None:
    try:
        read_image(path, 1)  # At an eighth of its size a JPEG is still read to the last byte.
    except UnreadableImageError as error:
        return error
    return None


def _check_request(image_size: int | None, channels: int) -> None:
    if channels not in (1, 3):
        raise InputError(sentence("channels must be 1 or 3", channels))
    if image_size is not None and image_size < 1:
        raise InputError(sentence("image_size must be >= 1", image_size, "Use None to keep the size of the images."))


def _different_sizes(first: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]) -> DataError:
    sizes = " and ".join(f"{size[1]} x {size[0]} in {name}" for name, size in (first, other))
    do = "Set --image-size (data.image_size in a recipe)."
    return DataError(sentence("images must have the same size when no image size is set", sizes, do))
