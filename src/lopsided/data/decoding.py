"""Decode one image file to one uint8 array, for any mode, depth or orientation.

The rules for every file:

- Of an animation the first frame is read, of a TIFF the first page.
- The image is turned upright by its EXIF orientation.
- 16-bit values are scaled to 8 bits (0 to 0, 65535 to 255), never clipped. Many cameras write 12 bits into 16: if no
  value is above 4095, that is white. 32-bit images are refused, because the file does not define the value of white.
- DICOM files are shown as their window says (``dicom``).
- Transparent parts become white, because the colour stored in a transparent pixel is arbitrary.
- The whole image is resized to a square with Pillow's antialiased bilinear filter. A JPEG that becomes much smaller is
  decoded at a half, a quarter or an eighth of its size, which halves the time: see ``_reduction``.

Only the formats listed in ``_formats`` are tried. Pillow supports more, such as EPS, which starts another program.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from time import thread_time
from typing import Any, BinaryIO, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE, TiffImageFile

from lopsided.data.dicom import SUFFIXES as DICOM_SUFFIXES
from lopsided.data.dicom import is_dicom, open_dicom
from lopsided.data.stored import Stored
from lopsided.errors import DataError, MissingDependencyError

Pixels: TypeAlias = npt.NDArray[np.uint8]
FolderId: TypeAlias = tuple[int, int]
"""Device and inode: the same for every path to a folder."""

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff"}
    | {".webp", ".avif", ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k"}
    | DICOM_SUFFIXES
)
MAX_PIXELS = 89_478_485
"""Largest number of pixels that a header may declare. Above this number Pillow warns (256 MB as RGB)."""

MAX_SCANS, MAX_SCANNED = 100, 1_500_000_000
"""Largest number of scans of a JPEG, and of scans times pixels, which take about 15 s to decode. Progressive JPEGs have
about ten scans, each of which refines the whole image; a small file can have thousands."""

MAX_SECONDS = 30.0
"""Longest time of a processor that decoding one image may take. Decoders that read their file in pieces (JPEG, PNG,
GIF, JPEG 2000) are stopped then, or when nobody waits for the image any more."""

SMALL_BLOCK, MANY_PIXELS = 512, 1 << 20
"""Bytes that a decoder gets at once of a progressive JPEG with many pixels, where a few bytes may be a whole scan."""

LARGE = 1 << 25
"""Files of more bytes are not read into memory at once; almost no image has more."""

REDUCTIONS = ((8, 2.0), (4, 2.0), (2, 1.5))
"""Factors by which a JPEG may be decoded smaller, each with the least decoded side, relative to the final side."""

GLANCE, PICTURE = 64, 96
"""Side of the square of a glance, and the longer side of its picture, in pixels."""

_MAKE, _MODEL, _SOFTWARE = 0x010F, 0x0110, 0x0131
"""Tags of EXIF."""
_GREY_MODES = frozenset({"1", "L", "LA", "La", "I", "F"})


class UnreadableImageError(DataError):
    """An image that cannot be decoded, with its ``path`` and the ``reason``."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = Path(path)
        self.reason = reason
        repair = "Repair or remove the file, or skip unreadable images: skip_unreadable=true."
        super().__init__(f"Cannot read the image {os.fspath(path)} ({reason}). {repair}")

    def __reduce__(self) -> tuple[type[UnreadableImageError], tuple[Path, str]]:
        return type(self), (self.path, self.reason)


def is_image_name(name: str) -> bool:
    """Return whether a file name is that of an image: a known suffix, and not hidden."""
    return not is_hidden(name) and os.path.splitext(name)[1].lower() in SUFFIXES


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is not for users: its name starts with a dot, or archives of macOS contain it."""
    return name.startswith(".") or name == "__MACOSX"


def walk_images(folder: Path, above: Iterable[Path] = (), seen: set[FolderId] | None = None) -> Iterator[Path]:
    """Yield all images below a folder, sorted by path. Links are followed, but each folder is read only once.

    The folders ``above`` are not read. ``seen`` holds the folders that earlier walks have read, and is updated.
    """
    seen = set() if seen is None else seen
    seen.update(map(_folder_id, above))
    waiting = [_entries(folder, seen)]
    while waiting:
        for entry in waiting[-1]:
            if is_hidden(entry.name):
                continue
            try:
                is_folder, is_file = entry.is_dir(), entry.is_file()
            except OSError:  # Circular links.
                continue
            if is_folder:
                waiting.append(_entries(entry.path, seen))
                break
            if is_file and is_image_name(entry.name):
                yield Path(entry.path)
        else:
            waiting.pop()


def _entries(folder: str | os.PathLike[str], seen: set[FolderId]) -> Iterator[os.DirEntry[str]]:
    """Return the entries of a folder, sorted by name; none if the folder was seen before."""
    here = _folder_id(folder)
    if here in seen:
        return iter(())
    seen.add(here)
    try:
        with os.scandir(folder) as entries:
            return iter(sorted(entries, key=lambda entry: entry.name))
    except OSError as error:
        raise DataError(f"Cannot read the folder {os.fspath(folder)} ({error.strerror}).") from error


def _folder_id(folder: str | os.PathLike[str]) -> FolderId:
    try:
        found = os.stat(folder)
    except OSError as error:
        raise DataError(f"Cannot read the folder {os.fspath(folder)} ({error.strerror}).") from error
    return found.st_dev, found.st_ino


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of an image: its upright height and width, and whether it is grey.

    ``twelve`` is whether its 16-bit values are read as 12-bit values, and ``paged`` whether it is a TIFF of several
    pages, of which the first is read.
    """

    size: tuple[int, int]
    grey: bool
    twelve: bool = False
    paged: bool = False


@dataclass(frozen=True, slots=True)
class Glance:
    """An image made small: a square of ``GLANCE`` pixels in RGB, and a ``picture`` that keeps its shape.

    ``maker`` is the camera or program that the file names, and ``compression`` how it was written; "" if it names none.
    """

    pixels: Pixels
    picture: Image.Image
    maker: str
    compression: str


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What one reading of a file told. ``error`` is the reason why it cannot be read or decoded; "" if it can.

    ``header`` and ``glance`` are None as long as nobody asked for them. A file that cannot be read has no ``digest``,
    its SHA-256. ``stamp`` are facts of the file system that change with the content.
    """

    digest: str
    stamp: tuple[int, ...] = ()
    header: Header | None = None
    error: str = ""
    glance: Glance | None = None


def examine(
    path: str | os.PathLike[str], known: Callable[[str], Header | None] | None = None, *, glance: bool = False
) -> FileFacts:
    """Read a file once: hash it, read its header, and decode it unless its digest is ``known`` or a glance is wanted.

    What is hashed is what is decoded, even if the file is replaced meanwhile.
    """
    facts = FileFacts("")
    try:
        with _opened(path) as (file, stamp):
            facts = FileFacts(_digest(file), stamp)
            header = None if known is None else known(facts.digest)
            if header is None or glance:
                with _image(path, file) as image:
                    header = _header(image)
                    if glance:
                        facts = replace(facts, glance=_glance(path, image))
                    else:
                        _decoded(path, image, 1)  # At an eighth of its size a JPEG is still read to the last byte.
                    header = replace(header, twelve=_white(image) == _TWELVE)
            return replace(facts, header=header)
    except UnreadableImageError as error:
        return replace(facts, error=error.reason)


def hash_file(path: str | os.PathLike[str]) -> FileFacts:
    """Read a file and hash it, without decoding."""
    try:
        with _opened(path) as (file, stamp):
            return FileFacts(_digest(file), stamp)
    except UnreadableImageError as error:
        return FileFacts("", error=error.reason)


def read_pixels(
    path: str | os.PathLike[str],
    image_size: int | None,
    channels: int,
    known: Callable[[str], bool] | None = None,
    *,
    most_pixels: int = MAX_PIXELS,
) -> tuple[FileFacts, Pixels | None]:
    """Read a file once: hash it and decode it, unless its digest is ``known`` or its header declares more pixels."""
    facts = FileFacts("")
    try:
        with _opened(path) as (file, stamp):
            facts = FileFacts(_digest(file), stamp)
            if known is not None and known(facts.digest):
                return facts, None
            with _image(path, file, most_pixels) as image:
                return facts, fit_image(_decoded(path, image, image_size), image_size, channels)
    except UnreadableImageError as error:
        return replace(facts, error=error.reason), None


def decode_image(
    path: str | os.PathLike[str], image_size: int | None, channels: int, facts: FileFacts | None = None
) -> Pixels:
    """Decode one file to uint8 (channels, image_size, image_size), or (channels, h, w) when ``image_size`` is None."""
    return fit_image(read_image(path, image_size, facts), image_size, channels)


def read_image(
    path: str | os.PathLike[str], image_size: int | None = None, facts: FileFacts | None = None
) -> Image.Image:
    """Decode one file to an upright 8-bit image of mode L or RGB.

    The image keeps its size, or is smaller if ``image_size`` is given, but large enough for a square of that side. If
    the file has changed since an earlier reading gave ``facts``, an error is raised: what is computed from the image
    will be filed under that digest.
    """
    with _same_image(path, facts) as image:
        return _decoded(path, image, image_size)


def read_glance(path: str | os.PathLike[str], facts: FileFacts | None = None) -> Glance:
    """Decode one file to a glance. As with ``read_image``, the file must be that of ``facts``."""
    if facts is not None and facts.glance is not None:
        return facts.glance
    with _same_image(path, facts) as image:
        return _glance(path, image)


@contextmanager
def _same_image(path: str | os.PathLike[str], facts: FileFacts | None) -> Iterator[Image.Image]:
    """Open an image, and raise if its file has changed since an earlier reading gave ``facts``."""
    with _opened(path) as (file, stamp):
        # A stamp changes with a new name or permission, too, so only the content decides.
        if facts is not None and facts.digest and stamp != facts.stamp and _digest(file) != facts.digest:
            raise UnreadableImageError(path, "its content has changed since it was first read")
        with _image(path, file) as image:
            yield image


def read_header(path: str | os.PathLike[str]) -> Header:
    """Return the header of an image, without decoding the image."""
    with _opened(path) as (file, _), _opened_image(file, path) as image:
        _check_pixels(path, image.size, MAX_PIXELS)
        return _header(image)


def _glance(path: str | os.PathLike[str], image: Image.Image) -> Glance:
    maker, compression = _origin(image)
    small = _decoded(path, image, GLANCE)
    picture = small.convert("RGB")
    picture.thumbnail((PICTURE, PICTURE), Image.Resampling.BICUBIC)
    return Glance(fit_image(small, GLANCE, 3), picture, maker, compression)


def _origin(image: Image.Image) -> tuple[str, str]:
    """Return camera or program and compression that a file names."""
    named = {str(image.getexif().get(tag, "")).strip(" \0") for tag in (_MAKE, _MODEL, _SOFTWARE)}
    maker = " ".join(sorted(filter(None, named)))[:80]
    tables = getattr(image, "quantization", None) or {}
    if not tables:
        return maker, image.format or ""
    sampling = [layer[1:3] for layer in getattr(image, "layer", ())]
    digest = hashlib.sha256(repr((sorted(tables.items()), sampling)).encode()).hexdigest()[:6]
    return maker, f"JPEG with the tables {digest}"


@contextmanager
def _image(path: str | os.PathLike[str], file: BinaryIO, most_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """Open the content of a file as an image that may be decoded: its size and its scans are within bounds."""
    with _opened_image(file, path, most_pixels) as image:
        _check_pixels(path, image.size, most_pixels)
        if isinstance(image, ImageFile.ImageFile) and image.format in ("JPEG", "MPO"):
            _check_scans(path, image.width * image.height, file)
            if image.info.get("progressive") and image.width * image.height > MANY_PIXELS:
                image.decodermaxblock = SMALL_BLOCK
        yield image


def _check_scans(path: str | os.PathLike[str], pixels: int, file: BinaryIO) -> None:
    most = min(MAX_SCANS, MAX_SCANNED // max(pixels, 1))
    content: bytes | mmap.mmap
    if isinstance(file, io.BytesIO):
        # Most files need no closer look: there are no more scans than bytes that may begin one.
        if file.getvalue().count(_SCAN) <= most:
            return
        content = file.getvalue()
    else:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    scans = sum(1 for _ in islice(_scans(content), most + 1))
    if scans > most:
        raise UnreadableImageError(path, f"more than {most} scans, which would take too long to decode")


_SCAN = b"\xff\xda"
_MARKER = re.compile(rb"\xff+([\x01-\xcf\xd8-\xfe])")
"""The next marker of a JPEG. A byte 255 in compressed data is followed by 0, or by a marker for a restart."""


def _scans(content: bytes | mmap.mmap) -> Iterator[int]:
    """Yield the place of each scan of a JPEG."""
    marker = _MARKER.search(content, 2)
    while marker is not None and marker[1] != b"\xd9":  # The end of the image.
        if marker[1] == _SCAN[1:]:
            yield marker.start()
        alone = marker[1] in (b"\x01", b"\xd8")
        length = 0 if alone else int.from_bytes(content[marker.end() : marker.end() + 2], "big")
        marker = _MARKER.search(content, marker.end() + length)


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Refuse what is no file, and turn any error into an ``UnreadableImageError``.

    With hostile bytes, decoders raise almost any exception, from SyntaxError to struct.error.
    """
    try:
        check_image_file(path)
        yield
    except (UnreadableImageError, MissingDependencyError):
        raise
    except Exception as error:
        raise UnreadableImageError(path, _reason(path, error)) from error


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[BinaryIO, tuple[int, ...]]]:
    """Open an image file and give its content, in memory unless it is large, and its stamp."""
    if isinstance(path, Stored):
        with _reading(path):
            content = path.read()
            # Nothing else tells whether it is the content of an earlier reading.
            yield io.BytesIO(content), (int(hashlib.sha256(content).hexdigest(), 16),)
        return
    with _reading(path), open(path, "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_size <= LARGE:
            yield io.BytesIO(file.read()), _stamp(found)
            return
        yield file, _stamp(found)
        if _stamp(os.fstat(file.fileno())) != _stamp(found):
            raise UnreadableImageError(path, "its content has changed while it was read")


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _opened_image(file: BinaryIO, path: str | os.PathLike[str], most_pixels: int = MAX_PIXELS) -> Image.Image:
    if is_dicom(file):
        return open_dicom(file, most_pixels)
    return Image.open(cast("BinaryIO", _Watched(file, path)), formats=_formats())


class _Watched:
    """A file that gives its decoder no more bytes when it takes too long, or when nobody waits for the image."""

    def __init__(self, file: BinaryIO, path: str | os.PathLike[str]) -> None:
        self._file, self._path, self._end = file, path, thread_time() + MAX_SECONDS

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        if thread_time() > self._end:
            raise UnreadableImageError(self._path, f"decoding it takes more than {MAX_SECONDS:g} s")
        if any(event.is_set() for event in given_up()):
            raise UnreadableImageError(self._path, "interrupted")
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


_thread = threading.local()


def given_up() -> tuple[threading.Event, ...]:
    """Return the events of which any says that nobody waits for what this thread decodes."""
    return getattr(_thread, "events", ())


def give_up_on(*events: threading.Event) -> None:
    """Let this thread give up the image that it decodes when one of the events is set."""
    _thread.events = events


def _digest(file: BinaryIO) -> str:
    digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    file.seek(0)
    return digest


def _header(image: Image.Image) -> Header:
    grey = image.mode in _GREY_MODES or image.mode.startswith("I;16")
    # Half of the photographs of a telephone are stored on their side.
    turned = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    size = (image.width, image.height) if turned else (image.height, image.width)
    return Header(size, grey, paged=image.format == "TIFF" and getattr(image, "is_animated", False))


def _decoded(path: str | os.PathLike[str], image: Image.Image, image_size: int | None) -> Image.Image:
    if image_size is not None and (factor := _reduction(image.size, image_size)) > 1:
        image.draft(None, (image.width // factor, image.height // factor))  # Changes only a JPEG.
    image.load()
    white = _white(image)
    ImageOps.exif_transpose(image, in_place=True)  # Otherwise it copies each image, also one that is upright.
    return _to_eight_bits(path, image, white)


def flat_image(image: Image.Image, name: str) -> Image.Image:
    """Return a Pillow image upright, with 8 bits and mode L or RGB, as if it had been read from a file."""
    return _to_eight_bits(name, ImageOps.exif_transpose(image), _white(image))


def fit_image(image: Image.Image, image_size: int | None, channels: int) -> Pixels:
    """Turn an L or RGB image into uint8 (channels, h, w), resized to a square when ``image_size`` is given."""
    mode = "L" if channels == 1 else "RGB"
    # A grey image is converted to RGB after resizing: the same pixels for a third of the work.
    if image.mode != mode and mode == "L":
        image = image.convert(mode)
    if image_size is not None and image.size != (image_size, image_size):
        image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
    if image.mode != mode:
        image = image.convert(mode)
    pixels = np.asarray(image)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _reduction(size: tuple[int, int], image_size: int) -> int:
    """Return the factor by which a JPEG may be decoded smaller: 1, 2, 4 or 8.

    The decoded sides must be at least 2 times the final side, or 1.5 times if the factor is 2. On dermatoscopic
    photographs of 600 x 450, resized to 128 x 128, pixels differ by 0.3 of 255 on average, and 99 of 100 by 0 or 1.
    """
    return next((factor for factor, least in REDUCTIONS if min(size) // factor >= least * image_size), 1)


@cache
def _formats() -> tuple[str, ...]:
    wanted = ("JPEG", "PNG", "TIFF", "WEBP", "BMP", "GIF", "PPM", "JPEG2000", "AVIF")
    Image.init()
    return tuple(name for name in wanted if name in Image.OPEN)


def check_image_file(path: str | os.PathLike[str]) -> None:
    """Raise if a path is a pipe, a socket or a device: reading a pipe can block forever, and a device may never end."""
    if isinstance(path, Stored):
        return
    if not stat.S_ISREG(mode := os.stat(path).st_mode) and not stat.S_ISDIR(mode):
        raise UnreadableImageError(path, "a pipe, a socket or a device, not a file")


def _check_pixels(path: str | os.PathLike[str], size: tuple[int, int], most: int) -> None:
    if size[0] * size[1] > most:
        raise UnreadableImageError(path, f"{size[0]} x {size[1]} pixels, but at most {most:,} are allowed")


_TWELVE, _SIXTEEN = 4095, 65535


def _white(image: Image.Image) -> int | None:
    """Return the value of white in a grey image of more than 8 bits, which is decoded; None for any other image."""
    if image.mode.startswith("I;16"):
        if isinstance(image, TiffImageFile) and image.tag_v2.get(BITSPERSAMPLE) == (12,):
            return _TWELVE
    elif image.mode != "I" or image.format not in ("PPM", "PNG"):
        return None
    elif image.format == "PPM":  # Pillow scales the values of a 16-bit PGM to 65535 by the white of the file.
        return _SIXTEEN
    return _TWELVE if int(np.asarray(image).max(initial=0)) <= _TWELVE else _SIXTEEN


def _to_eight_bits(path: str | os.PathLike[str], image: Image.Image, white: int | None) -> Image.Image:
    if white is not None:
        wide = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((wide * 255 + white // 2) // white).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UnreadableImageError(path, "32 bits per pixel, but only 8 and 16 are supported")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        flat = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
        return flat.convert("L") if image.mode in _GREY_MODES else flat
    mode = "L" if image.mode in _GREY_MODES else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _reason(path: str | os.PathLike[str], error: Exception) -> str:
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        pixels = re.search(r"\d+", str(error))
        size = f"{int(pixels.group()):,}" if pixels else "too many"
        return f"{size} pixels, but at most {MAX_PIXELS:,} are allowed"
    if isinstance(error, UnidentifiedImageError):
        empty = not isinstance(path, Stored) and os.path.getsize(path) == 0
        return "the file is empty" if empty else "not an image of a supported format"
    if isinstance(error, MemoryError):  # A length in the file may request gigabytes.
        return "it needs more memory than is available"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = " ".join(str(error).split()).removesuffix(".")
    return text or type(error).__name__
