"""Which images were decoded without an error, kept in the cache of features, so that a later run need not check them.

An image is found by the SHA-256 of its file, so a file that was changed is checked again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import PIL

from lopsided import __version__
from lopsided.errors import RunError
from lopsided.inference.feature_cache import Space, cache_limit, cache_root, tidy, trim


class ReadableImages:
    """The images that this version of Pillow can decode. A disk error is no error: the images are then checked."""

    def __init__(self) -> None:
        root = cache_root()
        engine = f"pillow {PIL.__version__}, lopsided {__version__}"  # Both refuse images.
        facts = {"encoder": "readable images", "image_size": None, "engine": engine}
        self._space = None if root is None else Space(root, facts)
        if self._space is not None:
            tidy(self._space)

    def find(self, digests: Sequence[str]) -> set[str]:
        """Return those of these images that are known to be readable."""
        if self._space is None:
            return set()
        _, found = self._space.fetch(digests, 1)
        return {digest for digest, there in zip(digests, found, strict=True) if there}

    def add(self, digests: Sequence[str]) -> None:
        """Remember that these images are readable."""
        if self._space is None or not digests:
            return
        unique = list(dict.fromkeys(digests))
        try:
            self._space.store(unique, np.ones((len(unique), 1), dtype=np.float32))
            trim(self._space.root, cache_limit())
        except RunError:
            self._space = None
