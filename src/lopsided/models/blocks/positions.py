"""What is where in an image: numbers for each of 7 x 7 positions, from two middle stages of an encoder.

A mean over positions hides what is a small part of an image. ``Positions`` keeps the positions apart. A distance by the
images at the same position, as in PaDiM (Defard et al., 2021), finds what does not belong there. Stages in the middle
still have fine maps, and already know textures and parts.

The channels of both maps are mixed to fewer numbers. PaDiM draws some of the channels; orthogonal mixtures of all of
them lose less (Kim et al., 2021). They are rows of a cosine transform, so that nothing is drawn or stored. Fewer
positions lose less than fewer numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lopsided.models.blocks.block import FeatureBlock
from lopsided.models.blocks.regions import averages, write_averages
from lopsided.models.blocks.stages import Maps, has_stem, stages_of

if TYPE_CHECKING:
    from lopsided.models.graph import Graph

SIDE = 7
"""Rows and columns of positions, whatever the size of the maps is."""
NUMBERS = 128
"""Numbers at each position."""
WIDTH = SIDE * SIDE * NUMBERS
"""All columns: the numbers of the first position, then those of the next one in its row."""
MARGIN = 1
"""A position takes in so many positions of the map around it, so that a small shift does no harm."""
_FINE = "blocks.2", "blocks.4"
"""The stages of EfficientNet and its relatives that have an eighth and a sixteenth of the side of an image."""


class Positions(FeatureBlock):
    """A few numbers for each position of the maps of two middle stages of an encoder."""

    widths = (WIDTH,)

    def __init__(self, encoder: nn.Module | None = None) -> None:
        super().__init__()
        assert encoder is not None
        self._channels = middle_stages(stages_of(encoder))
        self.taps = tuple(self._channels)
        self._maps = Maps(encoder)

    @classmethod
    def widths_by(cls, state: Mapping[str, Tensor]) -> tuple[int, ...] | None:
        """Return the width for an EfficientNet or one of its relatives."""
        return cls.widths if has_stem(state) else None

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the numbers of one position after the other."""
        total: Tensor | None = None
        for name, output, mixture in zip(self.taps, inputs, self._mixtures(), strict=True):
            x = self._maps(name, output)
            rows, columns = (torch.from_numpy(averages(int(size), SIDE, MARGIN)).to(x) for size in x.shape[2:])
            mixed = (rows @ x @ columns.T).flatten(2).transpose(1, 2) @ torch.from_numpy(mixture).to(x)
            total = mixed if total is None else total + mixed
        assert total is not None
        return total.flatten(1)

    def write(self, graph: Graph, inputs: Sequence[str]) -> str:
        """Add the same steps for the maps of a convolutional encoder, of any size."""
        parts = []
        for x, mixture in zip(inputs, self._mixtures(), strict=True):
            rows, columns = (write_averages(graph, x, axis, SIDE, MARGIN) for axis in (2, 3))
            turned = graph.add("Transpose", [columns], perm=[1, 0])
            placed = graph.add("MatMul", [rows, graph.add("MatMul", [x, turned])])
            places = graph.add("Transpose", [placed], perm=[0, 2, 3, 1])
            parts.append(graph.flatten(graph.add("MatMul", [places, graph.constant(mixture)])))
        return graph.add("Sum", parts)

    def _mixtures(self) -> list[npt.NDArray[np.float32]]:
        """Return the matrix (channels, NUMBERS) of each map."""
        numbers = list(self._channels.values())
        return np.split(mixtures(sum(numbers)), np.cumsum(numbers)[:-1])


def middle_stages(channels: Mapping[str, int]) -> dict[str, int]:
    """Return two stages in the middle, with their numbers of channels.

    >>> middle_stages({"act1": 64, "layer1": 256, "layer2": 512, "layer3": 1024, "layer4": 2048})
    {'layer2': 512, 'layer3': 1024}
    """
    names, first = list(channels), (len(channels) - 1) // 2
    taken = _FINE if set(_FINE) < set(names) and "bn1" in channels else names[first : first + 2]
    return {name: channels[name] for name in taken}


@cache
def mixtures(channels: int) -> npt.NDArray[np.float32]:
    """Return orthonormal columns, (channels, NUMBERS): evenly spread rows of the cosine transform.

    Fewer channels than numbers have their columns followed by zeros.


    >>> found = mixtures(152)
    >>> bool(np.allclose(found.T @ found, np.eye(NUMBERS), atol=1e-6))
    True
    """
    order = np.arange(min(channels, NUMBERS)) * channels // min(channels, NUMBERS)
    waves = np.cos(np.pi * (np.arange(channels)[:, None] + 0.5) * order / channels) * np.sqrt(2 / channels)
    waves[:, order == 0] /= np.sqrt(2)
    return np.pad(waves, ((0, 0), (0, NUMBERS - waves.shape[1]))).astype(np.float32)
