"""Images as users of Python pass them: paths, Pillow images, arrays, and data frames with a column path."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lopsided.data.decoding import Pixels, fit_image, flat_image
from lopsided.data.images import ArrayImages, FileImages, Images, Indices
from lopsided.data.sources import source_from_arrays
from lopsided.data.stored import described, rows_of
from lopsided.errors import InputError, sentence
from lopsided.recipe.blocks import column_name

PATH = "path"
"""The column of a data frame, or of a table, that has the paths of images."""


class Pictures(Images):
    """Images in memory, of any sizes: Pillow images of mode L or RGB."""

    def __init__(self, pictures: Sequence[Image.Image], channels: int | None = None) -> None:
        self.pictures = tuple(pictures)
        self._channels = channels or (1 if all(each.mode == "L" for each in self.pictures) else 3)

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def channels(self) -> int:
        """1 if all images are grey, otherwise 3."""
        return self._channels

    def take(self, indices: Indices) -> Pictures:
        """Return the images at ``indices``, in that order. ``channels`` does not change."""
        return Pictures([self.pictures[i] for i in indices], self._channels)

    def digest(self, indices: Indices) -> list[str]:
        """Return the SHA-256 of the shape and pixels of each image, as those of images in one array."""
        arrays = [fit_image(self.pictures[i], None, self._channels) for i in indices]
        return [hashlib.sha256(repr(each.shape).encode() + each.tobytes()).hexdigest() for each in arrays]

    def size(self, index: int) -> tuple[int, int]:
        """Return height and width of one image."""
        return self.pictures[index].height, self.pictures[index].width

    def _describe(self, index: int) -> str:
        return f"image {index}"

    def _decode(self, index: int, image_size: int | None, channels: int) -> Pixels:
        return fit_image(self.pictures[index], image_size, channels)


def given_paths(values: Any) -> list[str | os.PathLike[str]]:
    """Return the paths that a user passed, in a list, a series or a data frame; none if it is something else."""
    if hasattr(values, "columns"):
        values = values[PATH] if PATH in values.columns else ()
    entries = _entries(values)
    return entries if all(_kind(entry) == "path" for entry in entries) else []


def given_images(values: Any) -> Images | None:
    """Return what a user passed as images, or None if it is something else, such as vectors.

    Images are paths, Pillow images or arrays in a list, a series, or a data frame with the column path, or one array of
    images (see ``source_from_arrays``). Relative paths are below the working folder.
    """
    if hasattr(values, "columns"):
        values = values[PATH] if PATH in values.columns else ()
    if getattr(values, "ndim", 0) in (3, 4):
        return source_from_arrays(values).images
    entries = _entries(values)
    kinds = [_kind(entry) for entry in entries]
    if not entries or kinds[0] is None:
        return None
    other = next((place for place, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        got = f"{_named(entries[0])} in entry 0 and {_named(entries[other])} in entry {other}"
        raise InputError(sentence("all images must be of one kind: paths, Pillow images or arrays", got))
    if kinds[0] == "path":
        return FileImages([Path(entry).expanduser() for entry in entries])
    if kinds[0] == "picture":
        return Pictures([flat_image(entry, f"image {place}") for place, entry in enumerate(entries)])
    if len({tuple(entry.shape) for entry in entries}) > 1:
        return Pictures([_picture(entry) for entry in entries])
    return source_from_arrays(_stacked(entries)).images


def given_columns(values: Any, columns: Sequence[str], images: Images) -> Images:
    """Return images with the cells of the columns that stand beside them in a data frame. Raise if they do not."""
    if not columns:
        return images
    if not hasattr(values, "columns") or not isinstance(images, FileImages):
        what = "a data frame" if isinstance(images, FileImages) else "paths"
        names = ", ".join(map(column_name, columns))
        do = f"Pass a data frame with the columns path, {names}."
        raise InputError(sentence(f"the columns {names} must stand beside each image", f"no {what}", do))
    texts = {str(name): _texts(values[name]) for name in values.columns if name != PATH}
    rows = zip(images.paths, rows_of("the data frame", texts, columns), strict=True)
    return images.beside([described(path, row) for path, row in rows])


def _texts(column: Any) -> list[str]:
    """Return the cells of a column of a data frame as texts, as a CSV file would have them: 3, not 3.0."""
    whole = (isinstance(value, float) and value.is_integer() for value in column)
    return [str(int(value)) if is_whole else str(value) for value, is_whole in zip(column, whole, strict=True)]


def _entries(values: Any) -> list[Any]:
    """Return the entries of a list, a series or an array of objects; none for anything else."""
    if isinstance(values, str | os.PathLike | Image.Image):
        return [values]
    if isinstance(values, list | tuple):
        return list(values)
    plain = getattr(values, "ndim", 0) == 1 and getattr(getattr(values, "dtype", None), "kind", "O") in "OUT"
    return list(values) if plain else []


def _kind(entry: object) -> str | None:
    if isinstance(entry, str | os.PathLike):
        return "path"
    if isinstance(entry, Image.Image):
        return "picture"
    return "array" if getattr(entry, "ndim", 0) in (2, 3) else None


def _named(entry: object) -> str:
    return {"path": "a path", "picture": "a Pillow image", "array": "an array"}.get(
        _kind(entry) or "", type(entry).__name__
    )


def _stacked(entries: Sequence[Any]) -> Any:
    """Return arrays or tensors of one shape as one. Tensors stay tensors, whose channels come first."""
    if hasattr(entries[0], "detach"):
        import torch

        return torch.stack(list(entries))
    return np.stack(entries)


def _picture(entry: Any) -> Image.Image:
    """Return one array or tensor as a Pillow image."""
    images = source_from_arrays(entry[None]).images
    assert isinstance(images, ArrayImages)
    return images.picture(0)
