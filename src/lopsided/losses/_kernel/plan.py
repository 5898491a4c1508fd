"""In which order the anchors are visited, and what stands in the columns they meet."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Measured on two cores: below 64 rows the matrix product slows down, above 4 MB a block leaves the cache.
_BLOCK_ELEMENTS, _FEWEST_ROWS, _MOST_ROWS = 2**20, 64, 256

# Reasoned and not measured. A block takes about 60 operations, whose launches take about 0.3 ms. Sixteen million
# entries keep a device busy for several times as long, so that larger blocks gain nothing. They hold ten numbers per
# entry at once, 640 MiB in single precision, and may take a quarter of the memory that is free.
_DEVICE_ELEMENTS, _NUMBERS_PER_ENTRY, _SHARE_OF_FREE = 2**24, 10, 4
_UNKNOWN_DEVICE_ELEMENTS = 2**22  # 160 MiB, where nobody says how much is free


def rows_per_block(columns: int, device: str = "cpu", itemsize: int = 4, free: int | None = None) -> int:
    """Rows of a block under ``tile="auto"``.

    A block on a CPU is sized for its cache, from the number of contrast samples alone. On any other ``device`` it is
    sized for its memory, of which ``free`` bytes are there to be used, by numbers of ``itemsize`` bytes.
    """
    columns = max(columns, 1)
    if device == "cpu":
        return min(max(_BLOCK_ELEMENTS // columns // 64 * 64, _FEWEST_ROWS), _MOST_ROWS)
    elements = _UNKNOWN_DEVICE_ELEMENTS
    if free is not None:
        elements = min(_DEVICE_ELEMENTS, free // _SHARE_OF_FREE // (_NUMBERS_PER_ENTRY * itemsize))
    rows = max(elements // columns, 1)
    return rows // 64 * 64 or rows


def free_memory(device: torch.device) -> int | None:
    """Bytes that torch can still use on a CUDA device, or None for any other; the device does not have to finish."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@dataclass(frozen=True)
class Segment:
    """A run of columns and what stands in it: "positive", "negative", or "mixed" with a mask made on the spot."""

    start: int
    stop: int
    kind: str
    own: bool = False  # whether the block's anchors themselves stand in it

    @property
    def columns(self) -> slice:
        """Where it stands."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Block:
    """Rows, and the segments that together are all columns."""

    start: int
    stop: int
    segments: tuple[Segment, ...]

    @property
    def masked(self) -> bool:
        """Whether every column needs the mask."""
        return len(self.segments) == 1 and self.segments[0].kind == "mixed"


def plain_plan(n: int, m: int, tile: int) -> Iterator[Block]:
    """Blocks of rows in the order they have, each against all columns, with a mask."""
    everything = (Segment(0, m, "mixed", own=True),)
    return (Block(start, min(start + tile, n), everything) for start in range(0, n, tile))


def sorted_plan(y: Tensor, y_reference: Tensor | None, tile: int) -> Iterator[Block]:
    """Blocks of sorted rows. A class of at least ``tile`` rows has blocks of its own; smaller neighbours share one."""
    n, m = len(y), len(y) + (0 if y_reference is None else len(y_reference))
    classes, counts = torch.unique_consecutive(y, return_counts=True)
    stops = counts.cumsum(0).tolist()
    starts = [0, *stops[:-1]]
    if y_reference is None:
        low = high = [0] * len(starts)
    else:
        low = torch.searchsorted(y_reference, classes).tolist()
        high = torch.searchsorted(y_reference, classes, right=True).tolist()

    def block(start: int, stop: int, first: int, last: int) -> Block:
        kind = "positive" if first == last else "mixed"
        own = Segment(starts[first], stops[last], kind, own=True)
        others = Segment(n + low[first], n + high[last], kind)
        return Block(start, stop, tuple(_fill((own, others), m)))

    first = 0
    while first < len(starts):
        last = first
        if stops[first] - starts[first] >= tile:
            pieces = -(-(stops[first] - starts[first]) // tile)
            cuts = [starts[first] + (stops[first] - starts[first]) * i // pieces for i in range(pieces + 1)]
            yield from (block(a, b, first, first) for a, b in itertools.pairwise(cuts))
        else:
            while last + 1 < len(starts) and stops[last + 1] - starts[first] <= tile:
                last += 1
            yield block(starts[first], stops[last], first, last)
        first = last + 1


def _fill(runs: tuple[Segment, ...], m: int) -> Iterator[Segment]:
    """The runs that hold positives, and the negatives between them."""
    position = 0
    for run in runs:
        if run.stop == run.start:
            continue
        if run.start > position:
            yield Segment(position, run.start, "negative")
        yield run
        position = run.stop
    if position < m:
        yield Segment(position, m, "negative")
