"""Colours and contrast of the regions of an image, as a few features beside those of a pretrained encoder.

The final layer of the embedded encoder has lost much of the colours, the brightness and their layout, which tell skin
lesions apart; that of a ResNet-50 has lost less (docs/encoder-tables.md). ``Pixels`` has no weights. It divides an
image into 8 x 8 cells and returns mean and deviation of each colour in a cell, averaged over the cell and its mirror
images: 96 numbers. Averages over mirror images have less noise, and which way round an image is, the encoder can tell.

So few numbers would be lost beside thousands of features of an encoder. The share of the block lets a regression weigh
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lopsided.models.blocks.block import FeatureBlock

if TYPE_CHECKING:
    from lopsided.models.graph import Graph

SIDE, CELLS = 64, 8
"""Images are averaged to ``SIDE`` pixels per side, so that deviations do not depend on the size, then to cells."""
WIDTH = 2 * 3 * (CELLS // 2) ** 2
Floats = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float32]


class Pixels(FeatureBlock):
    """Mean and deviation of colours in the cells of images with values in [0, 1]: (n, 3, h, w) to (n, 96)."""

    widths = (WIDTH,)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return all means, then all deviations."""
        (x,) = inputs
        rows, columns, cells, spread, fold = (torch.from_numpy(part).to(x) for part in matrices(*x.shape[2:]))
        small = rows @ x @ columns
        mean = cells @ small @ cells.T
        rest = small - spread @ mean @ spread.T
        deviation = (cells @ (rest * rest) @ cells.T).sqrt()
        return torch.cat([(fold @ part @ fold.T).flatten(1) for part in (mean, deviation)], dim=1)

    def write(self, graph: Graph, inputs: Sequence[str]) -> str:
        """Add the same steps, with the matrices of the size of the images."""
        rows, columns, cells, spread, fold = matrices(*graph.image_size)

        def between(left: Matrix, value: str, right: Matrix) -> str:
            turned = np.ascontiguousarray(right)
            return graph.add("MatMul", [graph.add("MatMul", [graph.constant(left), value]), graph.constant(turned)])

        small = between(rows, inputs[0], columns)
        mean = between(cells, small, cells.T)
        rest = graph.add("Sub", [small, between(spread, mean, spread.T)])
        deviation = graph.add("Sqrt", [between(cells, graph.add("Mul", [rest, rest]), cells.T)])
        parts = [graph.flatten(between(fold, part, fold.T)) for part in (mean, deviation)]
        return graph.add("Concat", parts, axis=1)


@cache
def matrices(height: int, width: int) -> tuple[Matrix, ...]:
    """Return the matrices that average images of a size, from the left and from the right, and those of the cells.

    These are (8, 64), which averages pixels to cells, (64, 8), which repeats a cell, and (4, 8), which averages a cell
    and its mirror image.
    """
    cells = areas(SIDE, CELLS)
    half = np.eye(CELLS // 2, CELLS)
    found = areas(height, SIDE), areas(width, SIDE).T, cells, (cells.T > 0) * 1.0, (half + half[:, ::-1]) / 2
    return tuple(np.ascontiguousarray(part, dtype=np.float32) for part in found)


def areas(size: int, parts: int) -> Floats:
    """Return the matrix (parts, size) of averages over ``parts`` equal intervals of ``size`` pixels.

    >>> areas(3, 2).round(2).tolist()
    [[0.67, 0.33, 0.0], [0.0, 0.33, 0.67]]
    """
    edges = np.linspace(0, size, parts + 1)
    pixels = np.arange(size)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    found: Floats = np.maximum(overlap, 0) * parts / size
    return found
