"""Very small versions of images, kept in the cache of features, so that no image is decoded for them again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import PIL
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from lopsided.data.inputs import Indices, Part
from lopsided.inference.feature_cache import Features, Shelf

SIDE = 16
"""Side of the small images in pixels."""
_BATCH = 256


class SmallImages:
    """Small versions of images that are loaded in one shape, as rows of numbers from 0 to 255."""

    def __init__(self, shape: tuple[int, ...], image_size: int | None) -> None:
        side = (min(SIDE, shape[1]), min(SIDE, shape[2])) if len(shape) == 3 else (0, 0)
        self.width, self._side = shape[0] * side[0] * side[1], side
        facts = {
            "encoder": f"{side[1]} x {side[0]} pixels",
            "shape": list(shape),
            "image_size": image_size,
            "interpolation": "bilinear",
            "engine": f"torch {torch.__version__} cpu",
            "pillow": PIL.__version__,
        }
        self.shelf = Shelf([(self.width, facts)])

    def of(self, part: Part, rows: Indices) -> Features:
        """Return the small versions of some images of a split, (n, width)."""
        keys = None if part.digests is None else [part.digests[row] for row in rows]
        found, known = np.zeros((len(rows), self.width), dtype=np.float32), np.zeros(len(rows), dtype=np.bool_)
        if keys is not None:
            found, known = self.shelf.fetch(keys)
        missing = np.flatnonzero(~known)
        for start in range(0, len(missing), _BATCH):
            places = missing[start : start + _BATCH]
            batch = part.inputs.batch(rows[places])
            found[places] = self._shrunk(batch)
            if keys is not None:
                self.keep([keys[place] for place in places], batch)
        self.shelf.flush()
        return found

    def keep(self, digests: Sequence[str], batch: Tensor) -> None:
        """Keep the small versions of a uint8 batch, by the SHA-256 of the images."""
        self.shelf.keep(digests, self._shrunk(batch))

    def _shrunk(self, batch: Tensor) -> Features:
        found: Features = adaptive_avg_pool2d(batch.to(torch.float32), self._side).flatten(1).numpy()
        return found
