"""Where in the image the stages of an encoder find what they find: the mean of each channel in regions of the image.

``stages`` has one mean per channel, so it cannot tell the middle of an image from its border, or its top from its
bottom. ``Regions`` divides the maps of the first stages into 4 rows and 4 columns. A region and its mirror image, left
to right, are averaged: eight numbers per channel. Averages over mirror images have less noise, and pictures of the same
things seldom differ in left and right, but often in up and down.

Late stages have many channels and few positions. With all stages the metrics were no better than with the first ones,
up to ``CHANNELS`` channels, and a regression on thousands of images took several times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lopsided.models.blocks.block import FeatureBlock
from lopsided.models.blocks.stages import Maps, has_stem, stages_by, stages_of

if TYPE_CHECKING:
    from lopsided.models.graph import Graph

SIDE = 4
"""Rows and columns of regions."""
WIDTH = SIDE * SIDE // 2
"""Numbers per channel."""
CHANNELS = 128
"""The first stages are read that have at most this number of channels together, and at least one stage."""
_FOLD = np.array([[0.5, 0], [0, 0.5], [0, 0.5], [0.5, 0]], dtype=np.float32)
"""Averages columns of regions and their mirror images."""


class Regions(FeatureBlock):
    """Eight numbers per channel of each of the first stages of an encoder."""

    def __init__(self, encoder: nn.Module | None = None) -> None:
        super().__init__()
        assert encoder is not None
        self._channels = first_stages(stages_of(encoder))
        self.taps = tuple(self._channels)
        self._maps = Maps(encoder)

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of columns of each stage."""
        return tuple(WIDTH * number for number in self._channels.values())

    @classmethod
    def widths_by(cls, state: Mapping[str, Tensor]) -> tuple[int, ...] | None:
        """Return the widths of an EfficientNet or one of its relatives."""
        return tuple(WIDTH * n for n in first_stages(stages_by(state)).values()) if has_stem(state) else None

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the columns of one stage after the other."""
        parts = []
        for name, output in zip(self.taps, inputs, strict=True):
            x = self._maps(name, output)
            rows, columns = (torch.from_numpy(averages(int(size))).to(x) for size in x.shape[2:])
            parts.append((rows @ x @ (columns.T @ torch.from_numpy(_FOLD).to(x))).flatten(1))
        return torch.cat(parts, dim=1)

    def write(self, graph: Graph, inputs: Sequence[str]) -> str:
        """Add the same steps for the maps of a convolutional encoder, of any size."""
        parts = []
        for x in inputs:
            rows, columns = (write_averages(graph, x, axis) for axis in (2, 3))
            folded = graph.add("MatMul", [graph.add("Transpose", [columns], perm=[1, 0]), graph.constant(_FOLD)])
            parts.append(graph.flatten(graph.add("MatMul", [rows, graph.add("MatMul", [x, folded])])))
        return graph.add("Concat", parts, axis=1)


def first_stages(channels: Mapping[str, int]) -> dict[str, int]:
    """Return the first stage and those after it that have at most ``CHANNELS`` channels together.

    >>> first_stages({"stem": 32, "one": 96, "two": 128}), first_stages({"stem": 384, "one": 384})
    ({'stem': 32, 'one': 96}, {'stem': 384})
    """
    sums = accumulate(channels.values())
    taken = {name for name, total in zip(channels, sums, strict=True) if total <= CHANNELS} | {next(iter(channels))}
    return {name: number for name, number in channels.items() if name in taken}


@cache
def averages(size: int, parts: int = SIDE, margin: int = 0) -> npt.NDArray[np.float32]:
    """Return the matrix (parts, size) by which ``adaptive_avg_pool2d`` averages along an axis.

    Each part takes in ``margin`` more positions on both sides, as far as there are any.

    >>> averages(6).round(1).tolist()[:2]
    [[0.5, 0.5, 0.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0, 0.0, 0.0]]
    >>> averages(3, 3, 1)[[0, 2]].tolist()
    [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    """
    edges = np.arange(parts + 1) * size / parts
    begin, end = np.maximum(np.floor(edges[:-1, None]) - margin, 0), np.minimum(np.ceil(edges[1:, None]) + margin, size)
    pixels = np.arange(size)
    found: npt.NDArray[np.float32] = (((begin <= pixels) & (pixels < end)) / (end - begin)).astype(np.float32)
    return found


def write_averages(graph: Graph, x: str, axis: int, parts: int = SIDE, margin: int = 0) -> str:
    """Add nodes that compute ``averages`` of the size of a value along an axis. Return the name of the matrix."""
    number = graph.add("Squeeze", [graph.add("Shape", [x], start=axis, end=axis + 1)])
    zero, one, count, more = (graph.constant(np.array(value, np.float32)) for value in (0, 1, parts, margin))
    size = graph.add("Cast", [number], to=1)
    pixels = graph.add("Range", [zero, size, one])
    places = (graph.constant(np.arange(first, first + parts, dtype=np.float32)[:, None]) for first in (0, 1))
    edges = [graph.add("Div", [graph.add("Mul", [place, size]), count]) for place in places]  # Exact if it divides.
    begin = graph.add("Max", [graph.add("Sub", [graph.add("Floor", [edges[0]]), more]), zero])
    end = graph.add("Min", [graph.add("Add", [graph.add("Ceil", [edges[1]]), more]), size])
    lower, upper = graph.add("Max", [begin, pixels]), graph.add("Min", [end, graph.add("Add", [pixels, one])])
    overlap = graph.add("Max", [graph.add("Sub", [upper, lower]), zero])
    return graph.add("Div", [overlap, graph.add("Sub", [end, begin])])
