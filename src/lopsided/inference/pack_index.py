"""The index of the packs of a cache: which pack has the vector of an image. It is in memory and follows the folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

_HEAD = 8
"""Bytes of a digest that the index compares. Of a million images two have the same ones once in 30 million caches; the
pack tells them apart."""

Heads = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int32]


class PackIndex:
    """Finds packs by digests. ``read`` returns the digests of a pack, or None if it cannot be read.

    Digests are in sorted arrays, each at least twice as long as the next, so that a look-up is a few binary searches,
    and a new pack seldom moves many of them. A folder is only listed again if its time has changed.
    """

    def __init__(self, read: Callable[[Path], Sequence[bytes] | None]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._paths: list[Path] = []
        self._numbers: dict[str, int] = {}
        self._alive = np.empty(0, dtype=np.bool_)
        self._levels: list[tuple[Heads, Numbers]] = []
        self._time: int | None = None

    def find(self, folder: Path, digests: Sequence[bytes]) -> list[Path | None]:
        """Return the pack of each digest, or None if it is in no pack."""
        with self._lock:
            self._follow(folder)
            heads = _heads(digests)
            numbers = np.full(len(heads), -1, dtype=np.int32)
            for keys, packs in self._levels:
                places = np.minimum(np.searchsorted(keys, heads), len(keys) - 1)
                hit = (keys[places] == heads) & self._alive[packs[places]]
                numbers[hit] = packs[places[hit]]
        return [None if number < 0 else self._paths[number] for number in numbers.tolist()]

    def forget_time(self) -> None:
        """List the folder at the next look-up. Clocks of file systems are too coarse for what is written at once."""
        self._time = None

    def _follow(self, folder: Path) -> None:
        """Add the packs that are new in the folder, and leave out those that are gone."""
        try:
            time = os.stat(folder).st_mtime_ns
            if time == self._time:
                return
            with os.scandir(folder) as entries:
                names = {entry.name for entry in entries if entry.name.endswith(".safetensors")}
        except OSError:
            time, names = 0, set()
        names = {name for name in names if not name.startswith(".")}
        for name in self._numbers.keys() - names:
            self._alive[self._numbers.pop(name)] = False
        new = sorted(names - self._numbers.keys())
        self._alive = np.concatenate([self._alive, np.ones(len(new), dtype=np.bool_)])
        for name in new:
            self._numbers[name] = number = len(self._paths)
            self._paths.append(folder / name)
            digests = self._read(folder / name)
            if digests:
                heads = np.sort(_heads(digests))
                self._levels.append((heads, np.full(len(heads), number, dtype=np.int32)))
                self._merge()
        self._time = time

    def _merge(self) -> None:
        while len(self._levels) > 1 and 2 * len(self._levels[-1][0]) > len(self._levels[-2][0]):
            (heads, packs), (more_heads, more_packs) = self._levels[-2:]
            heads, packs = np.concatenate([heads, more_heads]), np.concatenate([packs, more_packs])
            order = np.argsort(heads, kind="stable")
            order = order[self._alive[packs[order]]]
            self._levels[-2:] = [(heads[order], packs[order])] if len(order) else []


def _heads(digests: Sequence[bytes]) -> Heads:
    return np.frombuffer(b"".join(digest[:_HEAD] for digest in digests), dtype=np.uint64)
