"""Views of images: exact symmetries of the square, as tensors. ``lopsided.recipe.views`` names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def look(images: Tensor, view: str) -> Tensor:
    """Return one view of images (n, c, h, w): every pixel has the value of another pixel."""
    return _LOOKS[view](images)


def mean_over_views(images: Tensor, views: Sequence[str], encode: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the mean of ``encode`` over views of images. Views are added up in order, so that the sum is repeatable.

    With one view, this is ``encode`` of that view, to the last bit. Several views go through ``encode`` as one batch,
    so that an exported file holds the encoder once.
    """
    if len(views) == 1:
        return encode(look(images, views[0]))
    rows = encode(torch.cat([look(images, view) for view in views]))
    parts = rows.reshape(len(views), -1, *rows.shape[1:])
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / len(views)


_LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "hflip": lambda x: x.flip(-1),
    "vflip": lambda x: x.flip(-2),
    "rot180": lambda x: x.flip(-2, -1),
    "rot90": lambda x: torch.rot90(x, 1, (-2, -1)),
    "rot270": lambda x: torch.rot90(x, -1, (-2, -1)),
    "transpose": lambda x: x.transpose(-2, -1),
    "transverse": lambda x: x.flip(-2, -1).transpose(-2, -1),
}
