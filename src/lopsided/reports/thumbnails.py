"""Thumbnails of the images of a run, combined into sheets.

Each sheet is a CSS background image, so pictures need no script and each picture is embedded once. A thumbnail is a
square that holds the whole image; the rest of the square is transparent.

A run keeps pictures of mistakes and doubtful labels, so that its page shows them when the images have moved. A page
never reads files outside the folder of a table unless its reader allows it, because the run folder may be a stranger's.
Kept pictures were made when the run was fitted, or by a report of someone who allowed it.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
from PIL import Image

from lopsided import files
from lopsided.data.decoding import PICTURE as SIDE
from lopsided.data.decoding import UnreadableImageError, read_image
from lopsided.data.images import ArrayImages, FileImages, Progress, Vectors, ordered_map
from lopsided.data.prepare import Sources
from lopsided.data.sources import Source
from lopsided.errors import LopsidedError, RunError
from lopsided.recipe import Recipe
from lopsided.reports.run_data import shown_images
from lopsided.runs.folder import Run

COLUMNS = ROWS = 20
PICTURES = "pictures.safetensors"
_MOST_BYTES = 10_000_000
LOSSLESS, BEST = 100, 75
_LADDER = ((96, BEST), (64, 70), (48, 65), (40, 55), (32, 50), (24, 40), (16, 30))
"""Side in pixels and quality. If the sheets do not fit, the next step is tried."""
_NO_ROOM = "There are no pictures: they do not fit into the page."
_SAMPLED = 8
"""If there are many pictures, one in eight is used to estimate the total size."""
_ENOUGH = ((400, 128), (1_500, 96), (4_000, 64))
"""Maximum number of images, and the side of their pictures. With more images the side is 48."""


@dataclass(frozen=True)
class Thumbnails:
    """Sheets of pictures. Picture i belongs to image i. ``missing`` lists the images without a picture."""

    side: int
    sheets: tuple[bytes, ...]
    missing: tuple[int, ...]
    note: str = ""
    places: Mapping[str, int] = field(default_factory=dict)
    """The numbers of the images by name."""

    @property
    def num_bytes(self) -> int:
        """The number of bytes that the sheets add to a page."""
        return sum(4 * (len(sheet) // 3 + 1) + 80 for sheet in self.sheets)

    def css(self) -> str:
        """Return the CSS rules for ``class="thumb s0 x3 y7"``. The variable --u is the displayed side."""
        if not self.sheets:
            return ""
        rules = [
            f".thumb{{background-size:calc({COLUMNS}*var(--u)) auto;"
            f"image-rendering:{'pixelated' if self.side < 40 else 'auto'}}}"
        ]
        for axis, number in (("x", COLUMNS), ("y", ROWS)):
            rules += [f".{axis}{i}{{background-position-{axis}:calc(-{i}*var(--u))}}" for i in range(number)]
        for i, sheet in enumerate(self.sheets):
            url = base64.b64encode(sheet).decode()
            rules.append(f'.s{i}{{background-image:url("data:image/webp;base64,{url}")}}')
        return "\n".join(rules)

    def classes(self, place: int) -> str:
        """Return the CSS classes of one picture, or an empty text if the image has no picture."""
        if not self.sheets or place in self.missing:
            return ""
        sheet, rest = divmod(place, COLUMNS * ROWS)
        return f"thumb s{sheet} x{rest % COLUMNS} y{rest // COLUMNS}"

    def of(self, name: str) -> str:
        """Return the CSS classes of the picture of an image, or an empty text if it has none."""
        return self.classes(self.places[name]) if name in self.places else ""


def make_thumbnails(
    recipe: Recipe,
    names: Sequence[str],
    budget: int,
    progress: Progress | None = None,
    kept: Mapping[str, Image.Image] = MappingProxyType({}),
) -> Thumbnails:
    """Make the pictures of the images of a run from its source. If the source is missing, a note gives the reason.

    ``budget`` is the maximum number of bytes for the page. The pictures are as large as the budget allows. ``kept`` are
    pictures of images that the source may lack.
    """
    made = partial(Thumbnails, places={name: i for i, name in enumerate(names)})
    without = partial(made, 0, ())
    source, reason = None, ""
    try:
        source = Source.open(recipe.data, download=False)
    except LopsidedError as error:
        if not any(name in kept for name in names):
            return without(tuple(range(len(names))), f"There are no pictures: {error}")
        reason = f" {error}"
    if source is not None and isinstance(source.images, Vectors):
        return without(tuple(range(len(names))), "There are no pictures: the data are vectors.")
    if budget <= 0:
        return without(tuple(range(len(names))), _NO_ROOM)
    places = {} if source is None else {name: i for i, name in reversed(list(enumerate(source.names)))}
    side = next((side for most, side in _ENOUGH if len(names) <= most), 48)
    pictures: list[Image.Image | None] = []
    for name, picture in zip(
        names, ordered_map(lambda name: picture_of(source, places.get(name), side), names), strict=True
    ):
        pictures.append(kept.get(name) if picture is None else picture)
        if progress is not None:
            progress(len(pictures), len(names))
    missing = tuple(i for i, picture in enumerate(pictures) if picture is None)
    if len(missing) == len(names):
        return without(missing, "There are no pictures: none of the images could be found or read.")
    note = f"{len(missing):,} of {len(names):,} pictures could not be found or read.{reason}" if missing else ""
    side = max(picture.width for picture in pictures if picture is not None)
    for rung, quality in _ladder(side):
        sample = pictures[::_SAMPLED] if len(pictures) > _SAMPLED * COLUMNS * ROWS else []
        if _SAMPLED * sum(map(len, _sheets(sample, rung, quality))) > budget:
            continue
        found = made(rung, _sheets(pictures, rung, quality), missing, note)
        if found.num_bytes <= budget:
            return found
    return without(tuple(range(len(names))), _NO_ROOM)


def _ladder(side: int) -> list[tuple[int, int]]:
    """Return the sides and qualities to try. Small pictures are first tried without loss."""
    first = [(side, LOSSLESS)] if side <= 32 else []
    return list(dict.fromkeys([*first, (side, BEST), *(rung for rung in _LADDER if rung[0] <= side)]))


def picture_of(source: Source | None, row: int | None, side: int) -> Image.Image | None:
    """Return an image on a transparent square of at most ``side`` pixels, or None if it cannot be read."""
    if source is None or row is None:
        return None
    try:
        image = _read(source, row, side)
    except UnreadableImageError:
        return None
    image = image.convert("RGB")
    image.thumbnail((side, side), Image.Resampling.BICUBIC)
    square = Image.new("RGBA", (max(image.size), max(image.size)))
    square.paste(image, ((square.width - image.width) // 2, (square.height - image.height) // 2))
    return square


def _read(source: Source, row: int, side: int) -> Image.Image:
    images = source.images
    if isinstance(images, ArrayImages):
        return images.picture(row)
    assert isinstance(images, FileImages)
    return images.glance(row).picture if side == SIDE else read_image(images.paths[row], side)


def _sheets(pictures: Sequence[Image.Image | None], side: int, quality: int) -> tuple[bytes, ...]:
    step = COLUMNS * ROWS
    parts = [pictures[start : start + step] for start in range(0, len(pictures), step)]
    return tuple(ordered_map(lambda part: _sheet(part, side, quality), parts))


def _sheet(pictures: Sequence[Image.Image | None], side: int, quality: int) -> bytes:
    rows = -(-len(pictures) // COLUMNS)
    sheet = Image.new("RGBA", (COLUMNS * side, rows * side))
    for place, picture in enumerate(pictures):
        if picture is not None:
            small = picture if picture.width == side else picture.resize((side, side), Image.Resampling.BOX)
            sheet.paste(small, (place % COLUMNS * side, place // COLUMNS * side))
    content = io.BytesIO()
    sheet.save(content, "WEBP", quality=quality, method=2, lossless=quality == LOSSLESS)
    return content.getvalue()


def keep_shown_pictures(folder: Path, *, allow_outside: bool, sources: Sources | None = None) -> None:
    """Let a finished run keep pictures of the images that its page shows, if it has none and they can be read.

    ``sources`` may have the images at hand.
    """
    from safetensors.numpy import save

    if (folder / PICTURES).is_file():
        return
    try:
        names = [name for name, _ in shown_images(folder)]
        if not names:
            return
        recipe = Run.open(folder).recipe.override(**{"data.allow_outside": allow_outside})
        source = None if sources is None else sources.at_hand(recipe)
        source = source or Source.open(recipe.data, download=False)
    except LopsidedError:
        return
    if not isinstance(source.images, FileImages):
        return
    places = {name: row for row, name in enumerate(source.names)}
    kept: dict[str, bytes] = {}
    for name in names:
        picture = picture_of(source, places.get(name), SIDE)
        if picture is not None:
            content = io.BytesIO()
            picture.save(content, "WEBP", quality=BEST, method=2)
            kept[name] = content.getvalue()
    if kept:
        tensors: dict[str, np.ndarray] = {
            "ends": np.cumsum([len(content) for content in kept.values()]).astype(np.int64),
            "content": np.frombuffer(b"".join(kept.values()), dtype=np.uint8),
        }
        files.atomic_write(folder / PICTURES, save(tensors, metadata={"names": json.dumps(list(kept))}))


def kept_pictures(folder: Path) -> Mapping[str, Image.Image]:
    """Return the pictures that a run kept, by the names of the images."""
    from safetensors import safe_open

    path = folder / PICTURES
    if not path.is_file():
        return {}
    try:
        files.check_regular(path, _MOST_BYTES)
        with files.reading_tensors(), safe_open(path, framework="numpy") as content:
            names = json.loads((content.metadata() or {})["names"])
            ends, data = content.get_tensor("ends").tolist(), content.get_tensor("content").tobytes()
        if len(names) != len(ends) or ends != sorted(ends):
            raise ValueError("its parts do not fit")
        starts = [0, *ends[:-1]]
        return {str(name): _opened(data[a:b]) for name, a, b in zip(names, starts, ends, strict=True)}
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise RunError(f"{path} is no file of pictures ({files.reason(error)}). Remove it.") from None


def _opened(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content), formats=["WEBP"])
    if image.width != image.height or image.width > SIDE:
        raise ValueError("a picture has another size")
    return image.convert("RGBA")
