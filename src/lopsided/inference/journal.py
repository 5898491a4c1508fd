"""The journal of a search: what each finished pack added, so that a killed search continues where it was.

The journal lies next to the table that the search writes, one JSON object per line. The first line holds a hash of
everything that the search depends on; each further line belongs to one pack, in the order of the packs. Only the images
that came among the first are listed, so the journal of a million images has some thousand rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lopsided import files

FORMAT = 1


@dataclass(frozen=True)
class Row:
    """An image that came among the first. ``position`` is its place in the pool."""

    position: int
    path: str
    probability: float
    nearness: float | None
    digest: str


@dataclass(frozen=True)
class Entry:
    """What one pack added: its images, how many of them are known or unreadable, and those among the first."""

    pack: int
    key: str
    images: int
    known: int
    unreadable: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """Return one line."""
        rows = [[row.position, row.path, row.probability, row.nearness, row.digest] for row in self.rows]
        content = {"pack": self.pack, "key": self.key, "images": self.images, "known": self.known}
        return json.dumps({**content, "unreadable": self.unreadable, "rows": rows}, allow_nan=False)


class Journal:
    """The journal next to the table ``out``, for the search with this ``key``."""

    def __init__(self, out: Path, key: str) -> None:
        self.path, self.key = out.with_name(f"{out.name}.journal"), key

    def open(self) -> bool:
        """Return whether there is a journal of this search. Otherwise start an empty one."""
        head = {"format": FORMAT, "search": self.key}
        if next(self._lines(), None) == head:
            return True
        files.atomic_write(self.path, json.dumps(head) + "\n")
        return False

    def restart(self) -> None:
        """Forget all packs."""
        self.remove()
        self.open()

    def add(self, entry: Entry) -> None:
        """Append one pack."""
        files.append_line(self.path, entry.to_json())

    def entries(self) -> Iterator[Entry]:
        """Yield the finished packs in order. Lines that a kill left unfinished are skipped."""
        number = 0
        for line in self._lines():
            entry = _entry(line)
            if entry is not None and entry.pack == number:
                number += 1
                yield entry

    def remove(self) -> None:
        """Remove the journal."""
        with files.disk_errors(self.path):
            self.path.unlink(missing_ok=True)

    def _lines(self) -> Iterator[Any]:
        if not os.path.lexists(self.path):
            return
        with files.disk_errors(self.path):
            files.check_regular(self.path)
            with self.path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    with suppress(ValueError, RecursionError):
                        yield json.loads(line)


def _entry(content: Any) -> Entry | None:
    """Return the entry of a line, or None if it is none. A journal is untrusted like any file."""
    try:
        rows = tuple(
            Row(int(position), str(path), float(p), None if near is None else float(near), str(digest))
            for position, path, p, near, digest in content["rows"]
        )
        unreadable = tuple((str(path), str(reason)) for path, reason in content["unreadable"])
        numbers = (int(content[name]) for name in ("pack", "images", "known"))
        pack, images, known = numbers
        return Entry(pack, str(content["key"]), images, known, unreadable, rows)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
