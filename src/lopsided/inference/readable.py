"""Which images were decoded without an error, kept in the cache of features, so that a later run need not check them.

An image is found by the SHA-256 of its file, so a file that was changed is checked again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import PIL

from lopsided import __version__
from lopsided.data.decoding import Header
from lopsided.inference.feature_cache import Shelf


class ReadableImages:
    """The images that this version of Pillow can decode. A disk error is no error: the images are then checked."""

    def __init__(self) -> None:
        engine = f"pillow {PIL.__version__}, lopsided {__version__}"  # Both refuse images.
        facts = {"encoder": "readable images", "holds": "height, width, grey", "image_size": None, "engine": engine}
        self._shelf = Shelf([(3, facts)])
        self._keys, self._rows = self._shelf.everything()

    def find(self, digest: str) -> Header | None:
        """Return the header of an image that is known to be readable, otherwise None."""
        (key,) = np.frombuffer(bytes.fromhex(digest), "S32")
        place = int(np.searchsorted(self._keys, key))
        if place == len(self._keys) or self._keys[place] != key:
            return None
        height, width, grey = self._rows[place].tolist()
        return Header((int(height), int(width)), bool(grey))

    def add(self, headers: Mapping[str, Header]) -> None:
        """Remember that the images with these digests are readable."""
        new = {digest: header for digest, header in headers.items() if self.find(digest) is None}
        rows = [(*header.size, header.grey) for header in new.values()]
        self._shelf.keep(list(new), np.array(rows, dtype=np.float32).reshape(-1, 3))
        self._shelf.flush()
