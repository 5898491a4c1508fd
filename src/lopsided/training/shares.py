"""Which rows of a batch each rank computes, and in which chunks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of all ranks: ``rows`` of the data, cut into chunks, and each chunk cut into one share per rank.

    The chunks do not depend on the number of ranks, so neither do the rows behind synchronised batch statistics.
    """

    rows: Indices
    chunks: tuple[tuple[slice, ...], ...]
    """For each chunk and rank, the rank's share as a slice of ``rows``. A share may be empty."""

    def __len__(self) -> int:
        return len(self.rows)

    def shares(self, rank: int) -> list[slice]:
        """Return the shares of a rank, one per chunk."""
        return [shares[rank] for shares in self.chunks]

    def positions(self, rank: int) -> Indices:
        """Return the positions in ``rows`` of all rows of a rank."""
        return np.concatenate([np.arange(share.start, share.stop) for share in self.shares(rank)])

    @cached_property
    def sizes(self) -> list[int]:
        """The number of rows of each rank."""
        return [len(self.positions(rank)) for rank in range(len(self.chunks[0]))]

    @cached_property
    def order(self) -> Indices:
        """The positions in ``rows`` of the rows of all ranks, in the order in which they are gathered."""
        return np.concatenate([self.positions(rank) for rank in range(len(self.chunks[0]))])


def cut(rows: Indices, num_ranks: int = 1, *, chunk_size: int | None = None, least: int = 1) -> Batch:
    """Cut a batch into chunks of at most ``chunk_size`` rows, and each chunk into shares of 0 or >= ``least`` rows.

    The sizes of the chunks differ by at most one row. No chunk has a single row, because one row has no batch
    statistics: three rows in chunks of two become one chunk. If the shares of a chunk differ in size, the ranks with
    the larger shares change from chunk to chunk.
    """
    num_chunks = 1 if chunk_size is None else max(min(-(-len(rows) // chunk_size), len(rows) // 2), 1)
    chunks, favoured = [], 0
    for chunk in _split(slice(0, len(rows)), num_chunks, 1):
        num = chunk.stop - chunk.start
        chunks.append(tuple(_split(chunk, num_ranks, least, favoured)))
        filled = _filled(num, num_ranks, least)
        favoured += num % filled if filled == num_ranks else filled
    return Batch(rows, tuple(chunks))


def _filled(num: int, parts: int, least: int) -> int:
    """Return how many of the parts of ``num`` rows can have ``least`` rows, at least 1."""
    return max(min(parts, num // least), 1)


def _split(whole: slice, parts: int, least: int, favoured: int = 0) -> Sequence[slice]:
    """Split a slice into consecutive parts. The parts are filled in cyclic order, starting at ``favoured``: the first
    ones get one row more than the others, and the last ones stay empty if there is not enough for ``least`` rows each.

    >>> _split(slice(0, 5), 3, 2)
    [slice(0, 3, None), slice(3, 5, None), slice(5, 5, None)]
    >>> _split(slice(0, 5), 3, 2, favoured=1)
    [slice(0, 0, None), slice(0, 3, None), slice(3, 5, None)]
    """
    num = whole.stop - whole.start
    filled = _filled(num, parts, least)
    ends = [whole.start]
    for part in range(parts):
        turn = (part - favoured) % parts
        size = num // filled + (turn < num % filled) if turn < filled else 0
        ends.append(ends[-1] + size)
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]
