"""One image file to one uint8 array, whatever its mode, depth or orientation.

What comes out, for every file:

- The first frame of an animation, the first page of a TIFF.
- Turned upright when EXIF says how the camera was held.
- 16-bit values scaled to 8 bits (0 to 0, 65535 to 255), never clipped. 32-bit images are refused: nothing in such a
  file says which value is white.
- Transparent parts over white, because the colour stored behind a transparent pixel is arbitrary.
- The whole image resized to a square with Pillow's antialiased bilinear filter. A JPEG that is to become much smaller
  is decoded at a half, a quarter or an eighth of its size, which halves the time: see ``_reduction``.

Only the formats named below are tried. Pillow knows more, among them EPS, which starts another program.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE, TiffImageFile

from lopsided.errors import DataError, sentence

Pixels: TypeAlias = npt.NDArray[np.uint8]
FolderId: TypeAlias = tuple[int, int]
"""What is the same for a folder whichever path leads to it."""

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff"}
    | {".webp", ".avif", ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k"}
)
MAX_PIXELS = 89_478_485
"""The most pixels that an image may have by its header: the number at which Pillow starts to warn (256 MB as RGB)."""

_GREY_MODES = frozenset({"1", "L", "LA", "La", "I", "F"})


class UnreadableImageError(DataError):
    """An image that cannot be decoded; ``path`` and ``reason`` are kept for lists of such images."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = Path(path)
        self.reason = reason
        repair = "Repair or remove it, or skip unreadable images (--skip-unreadable)."
        super().__init__(sentence("every image must be readable", f"{os.fspath(path)} ({reason})", repair))

    def __reduce__(self) -> tuple[type[UnreadableImageError], tuple[Path, str]]:
        return type(self), (self.path, self.reason)


def is_image_name(name: str) -> bool:
    """Whether a file counts as an image by its name: a known suffix, and not hidden."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


def walk_images(folder: Path, above: Iterable[Path] = (), seen: set[FolderId] | None = None) -> Iterator[Path]:
    """Yield all images below a folder in the order of their paths; links are followed, but each folder is read once.

    The folders ``above`` are not read at all. ``seen`` is what earlier walks have read, and is added to.
    """
    seen = set() if seen is None else seen
    seen.update(map(_folder_id, above))
    waiting = [_entries(folder, seen)]
    while waiting:
        for entry in waiting[-1]:
            if entry.name.startswith("."):
                continue
            try:
                is_folder, is_file = entry.is_dir(), entry.is_file()
            except OSError:  # links in a circle
                continue
            if is_folder:
                waiting.append(_entries(entry.path, seen))
                break
            if is_file and is_image_name(entry.name):
                yield Path(entry.path)
        else:
            waiting.pop()


def _entries(folder: str | os.PathLike[str], seen: set[FolderId]) -> Iterator[os.DirEntry[str]]:
    """What a folder holds, in the order of the names; nothing if it was seen before."""
    here = _folder_id(folder)
    if here in seen:
        return iter(())
    seen.add(here)
    try:
        with os.scandir(folder) as entries:
            return iter(sorted(entries, key=lambda entry: entry.name))
    except OSError as error:
        raise DataError(sentence("a folder must be readable", f"{os.fspath(folder)} ({error.strerror})")) from error


def _folder_id(folder: str | os.PathLike[str]) -> FolderId:
    try:
        found = os.stat(folder)
    except OSError as error:
        raise DataError(sentence("a folder must be readable", f"{os.fspath(folder)} ({error.strerror})")) from error
    return found.st_dev, found.st_ino


def decode_image(path: str | os.PathLike[str], image_size: int | None, channels: int) -> Pixels:
    """Decode one file to uint8 (channels, image_size, image_size), or (channels, h, w) when ``image_size`` is None."""
    return fit_image(read_image(path, image_size), image_size, channels)


def read_image(path: str | os.PathLike[str], image_size: int | None = None) -> Image.Image:
    """Decode one file to an upright 8-bit image of mode L or RGB.

    It has its own size, or, when ``image_size`` is given, a smaller one from which a square of that side can be made.
    """
    try:
        check_image_file(path)
        with Image.open(path, formats=_formats()) as image:
            _check_pixels(path, image.size)
            if image_size is not None and (factor := _reduction(image.size, image_size)) > 1:
                image.draft(None, (image.width // factor, image.height // factor))  # Does nothing but to a JPEG.
            return _to_eight_bits(path, ImageOps.exif_transpose(image), _white(image))
    except UnreadableImageError:
        raise
    # Decoders meet hostile bytes here and raise nearly every class there is, from SyntaxError to struct.error.
    except Exception as error:
        raise UnreadableImageError(path, _reason(path, error)) from error


def read_header(path: str | os.PathLike[str]) -> tuple[tuple[int, int], bool]:
    """Read an image's (height, width), as stored, and whether it is grey, without decoding it."""
    try:
        check_image_file(path)
        with Image.open(path, formats=_formats()) as image:
            _check_pixels(path, image.size)
            return (image.height, image.width), image.mode in _GREY_MODES or image.mode.startswith("I;16")
    except UnreadableImageError:
        raise
    except Exception as error:
        raise UnreadableImageError(path, _reason(path, error)) from error


def fit_image(image: Image.Image, image_size: int | None, channels: int) -> Pixels:
    """Turn an L or RGB image into uint8 (channels, h, w), resized to a square when ``image_size`` is given."""
    mode = "L" if channels == 1 else "RGB"
    # A grey image becomes RGB after resizing: the same pixels for a third of the work.
    if image.mode != mode and mode == "L":
        image = image.convert(mode)
    if image_size is not None and image.size != (image_size, image_size):
        image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
    if image.mode != mode:
        image = image.convert(mode)
    pixels = np.asarray(image)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _reduction(size: tuple[int, int], image_size: int) -> int:
    """The factor by which a JPEG may be decoded smaller: 1, 2, 4 or 8.

    What is left must be at least twice the final side, or one and a half times if the factor is 2. On dermatoscopic
    photographs of 600 x 450 that become 128 x 128, the pixels differ by 0.3 of 255 on average, and 99 in 100 by 1 or 0.
    """
    for factor in (8, 4, 2):
        if min(size) // factor >= 2 * image_size:
            return factor
    return 2 if min(size) // 2 >= 1.5 * image_size else 1


@cache
def _formats() -> tuple[str, ...]:
    wanted = ("JPEG", "PNG", "TIFF", "WEBP", "BMP", "GIF", "PPM", "JPEG2000", "AVIF")
    Image.init()
    return tuple(name for name in wanted if name in Image.OPEN)


def check_image_file(path: str | os.PathLike[str]) -> None:
    """Raise for what is there and no file: reading a pipe may wait for ever, and a device may never end."""
    if not stat.S_ISREG(mode := os.stat(path).st_mode) and not stat.S_ISDIR(mode):
        raise UnreadableImageError(path, "a pipe, a socket or a device, where a file is needed")


def _check_pixels(path: str | os.PathLike[str], size: tuple[int, int]) -> None:
    if size[0] * size[1] > MAX_PIXELS:
        raise UnreadableImageError(path, f"{size[0]} x {size[1]} pixels, where {MAX_PIXELS:,} are allowed")


def _white(image: Image.Image) -> int | None:
    """The value of white in a grey image of more than 8 bits; None for any other image."""
    if image.mode.startswith("I;16"):
        return 4095 if isinstance(image, TiffImageFile) and image.tag_v2.get(BITSPERSAMPLE) == (12,) else 65535
    # A PGM of 16 bits is opened in mode "I", its values already scaled to 65535.
    return 65535 if image.mode == "I" and image.format in ("PPM", "PNG") else None


def _to_eight_bits(path: str | os.PathLike[str], image: Image.Image, white: int | None) -> Image.Image:
    if white is not None:
        wide = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((wide * 255 + white // 2) // white).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UnreadableImageError(path, "32 bits per pixel, where 8 or 16 are understood")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        flat = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
        return flat.convert("L") if image.mode in _GREY_MODES else flat
    return image.convert("L" if image.mode in _GREY_MODES else "RGB")


def _reason(path: str | os.PathLike[str], error: Exception) -> str:
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        pixels = re.search(r"\d+", str(error))
        size = f"{int(pixels.group()):,}" if pixels else "too many"
        return f"{size} pixels, where {MAX_PIXELS:,} are allowed"
    if isinstance(error, UnidentifiedImageError):
        empty = os.path.getsize(path) == 0
        return "the file is empty" if empty else "its content is no image of a known format"
    if isinstance(error, MemoryError):  # A length inside the file may ask for gigabytes.
        return "it asks for more memory than there is"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = " ".join(str(error).split())
    return text or type(error).__name__
