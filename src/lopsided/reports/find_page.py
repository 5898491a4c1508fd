"""The page of a search: look through the candidates and mark them by keyboard. It works offline, as a single file."""

from __future__ import annotations

import base64
import hashlib
import io
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from lopsided import files
from lopsided.data.decoding import UnreadableImageError, read_image
from lopsided.data.images import Progress, ordered_map
from lopsided.inference.find import Row, page_path, write_found
from lopsided.recipe.words import amount
from lopsided.reports.page import LIMIT, render
from lopsided.reports.wording import clean, number, probability, signed
from lopsided.runs.progress import Counting

if TYPE_CHECKING:
    from lopsided.runs.find import Found

MOST = 2_000
"""The largest number of images on a page."""
_LADDER = ((384, 80), (320, 78), (256, 75), (192, 70), (160, 65), (128, 60), (96, 55), (64, 50))
"""Side in pixels and quality of the pictures. If they do not fit, the next step is tried."""
_SAMPLE = 40
"""Pictures that are made to estimate the size of all of them."""
_REST = 600
"""Bytes of the page per image, besides its picture."""


@dataclass(frozen=True)
class Picture:
    """A small version of an image, as WebP."""

    content: bytes
    small: bool
    """Whether the image has so few pixels that they are better shown as squares."""


def write_search(
    found: Found, out: Path, counting: Counting = lambda label: nullcontext(None), *, page: bool = True
) -> None:
    """Write the page and the table of a search, and remove its journal, which is no longer needed."""
    if page:
        write_find_page(found, page_path(out), counting("making pictures"))
    write_found(found.result, found.label, out)
    found.result.journal.remove()


def write_find_page(found: Found, path: Path, counting: AbstractContextManager[Progress | None] | None = None) -> int:
    """Write the page of a search, atomically. Return the number of images on it."""
    with counting or nullcontext() as progress:
        page, shown = find_page(found, progress)
    files.atomic_write(path, page)
    return shown


def find_page(found: Found, progress: Progress | None = None) -> tuple[str, int]:
    """Return the page of a search, and the number of images on it."""
    rows, notes = _shown(found.result.rows)
    pictures = _pictures([row.path for row in rows], progress)
    ranks = {row.position: rank for rank, row in enumerate(found.result.rows, start=1)}
    items = [_item(row, ranks[row.position], small) for row, small in zip(rows, pictures, strict=True)]
    classes = found.card.classes
    other = next(name for name in classes if name != found.label) if len(classes) == 2 else ""
    listed = "\0".join([found.label, *(item["full"] for item in items)])
    data = {
        "kind": "find",
        "id": hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()[:32],
        "label": found.label,
        "other": other,
        "items": items,
    }
    page = render(
        "find.html.j2",
        data=data,
        further="find",
        title=f"Is this {clean(found.label)}?",
        label=clean(found.label),
        other=clean(other),
        summary=_summary(found),
        notes=notes,
    )
    return page, len(items)


def _shown(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Return the rows of the page, and sentences about those that it does not show."""
    readable = [row for row in rows if row.path.isascii() or clean(row.path) == row.path]
    notes = []
    if len(readable) < len(rows):
        some = amount(len(rows) - len(readable), "image")
        notes.append(f"{some} cannot be marked here, because the file name is not valid text.")
    if len(readable) > MOST:
        notes.append(f"The page shows the first {MOST:,} images. The table lists all {len(rows):,}.")
    return readable[:MOST], notes


def _item(row: Row, rank: int, small: Picture | None) -> dict[str, Any]:
    return {
        "rank": rank,
        "path": row.path,
        "full": os.path.abspath(row.path),
        "p": number(row.probability) if row.probability > 0.5 else probability(row.probability),
        "near": "" if row.nearness is None else signed(row.nearness),
        "picture": "" if small is None else base64.b64encode(small.content).decode(),
        "small": small is not None and small.small,
    }


def _summary(found: Found) -> str:
    result = found.result
    text = f"{amount(len(result.rows), 'image')} of {result.images:,}, the most likely first."
    if result.known:
        text += f" {amount(result.known, 'image')} that are labelled already left out."
    if result.unreadable:
        text += f" {result.unreadable:,} unreadable."
    return text


def _pictures(paths: Sequence[str], progress: Progress | None) -> list[Picture | None]:
    """Return the pictures, as large as fits. The pictures of unreadable images are None."""
    budget = 3 * (LIMIT - 150_000 - _REST * len(paths)) // 4
    step = max(1, len(paths) // _SAMPLE)
    for side, quality in _LADDER:
        some = [picture(path, side, quality) for path in paths[::step]]
        if step * sum(len(each.content) for each in some if each is not None) > budget and side > _LADDER[-1][0]:
            continue
        made: list[Picture | None] = []
        for each in ordered_map(partial(picture, side=side, quality=quality), paths):
            made.append(each)
            if progress is not None:
                progress(len(made), len(paths))
        if sum(len(each.content) for each in made if each is not None) <= budget:
            return made
    return [None] * len(paths)


def picture(path: str | os.PathLike[str], side: int, quality: int) -> Picture | None:
    """Return the picture of an image, at most ``side`` pixels wide and high; None if the image is unreadable."""
    try:
        image = read_image(path, side)
    except UnreadableImageError:
        return None
    small = max(image.size) <= 64
    image.thumbnail((side, side), Image.Resampling.BICUBIC)
    content = io.BytesIO()
    image.convert("RGB").save(content, "WEBP", quality=quality, method=2, lossless=small)
    return Picture(content.getvalue(), small)
