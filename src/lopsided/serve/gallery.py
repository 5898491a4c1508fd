"""Images that the page may show, by ids. A browser never sends a path, and no id leads to a file that is not here."""

from __future__ import annotations

from functools import lru_cache
from threading import Lock

from lopsided.data.stored import ImagePath
from lopsided.reports.find_page import Picture, picture

SIDE, QUALITY = 512, 82
_KEPT = 256
"""Pictures that are kept in memory, each of some ten thousand bytes."""


class Gallery:
    """Files by their ids, the first digits of the SHA-256 of their content."""

    def __init__(self) -> None:
        self._paths: dict[str, ImagePath] = {}
        self._lock = Lock()
        self._made = lru_cache(_KEPT)(lambda name: picture(self._paths[name], SIDE, QUALITY))

    def add(self, digest: str, path: ImagePath) -> str:
        """Add a file with this digest, and return its id."""
        name = digest[:20]
        with self._lock:
            self._paths.setdefault(name, path)
        return name

    def picture(self, name: str) -> Picture | None:
        """Return the picture of an id; None if there is no such id, or the file is no longer readable."""
        return self._made(name) if name in self._paths else None
