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
    """A batch of all ranks: ``rows`` of the data, cut into chunks, and each chunk into a share for every rank.

    The chunks are the same for any number of ranks, and so is what batch statistics are taken over.
    """

    rows: Indices
    chunks: tuple[tuple[slice, ...], ...]
    """For each chunk and rank, where in ``rows`` its share lies; it may be empty."""

    def __len__(self) -> int:
        return len(self.rows)

    def shares(self, rank: int) -> list[slice]:
        """The shares of a rank, chunk by chunk."""
        return [shares[rank] for shares in self.chunks]

    def positions(self, rank: int) -> Indices:
        """Where in ``rows`` the rows of a rank are, all its chunks together."""
        return np.concatenate([np.arange(share.start, share.stop) for share in self.shares(rank)])

    @cached_property
    def sizes(self) -> list[int]:
        """How many rows each rank has."""
        return [len(self.positions(rank)) for rank in range(len(self.chunks[0]))]

    @cached_property
    def order(self) -> Indices:
        """Where in ``rows`` the rows are that come together when all ranks' are gathered."""
        return np.concatenate([self.positions(rank) for rank in range(len(self.chunks[0]))])


def cut(rows: Indices, num_ranks: int = 1, *, chunk_size: int | None = None, least: int = 1) -> Batch:
    """Cut a batch into chunks of at most ``chunk_size`` rows, and these into shares of ``least`` rows or none.

    Chunks are as equal as can be, and none is of one row, which has no batch statistics: three rows in chunks of two
    are one chunk. The ranks that have a row more than others, or rows at all, take turns from chunk to chunk.
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
    """How many parts of ``num`` rows can have ``least``; one in any case."""
    return max(min(parts, num // least), 1)


def _split(whole: slice, parts: int, least: int, favoured: int = 0) -> Sequence[slice]:
    """Parts that follow each other. From ``favoured`` on, and around, the first ones are larger by one; where not all
    can have ``least``, the last ones are empty.

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
