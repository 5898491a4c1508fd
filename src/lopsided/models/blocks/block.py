"""The interface between a feature block and the models that have it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lopsided.models.graph import Graph


class FeatureBlock(nn.Module):
    """Columns of features of an image: how torch computes them, and how they are written into an ONNX graph.

    A block that reads an encoder is built with it and names layers of it in ``taps``. Its inputs are the outputs of
    these layers. Any other block has one input, the images in [0, 1], (n, 3, h, w).
    """

    taps: tuple[str, ...] = ()

    def __init__(self, encoder: nn.Module | None = None) -> None:
        super().__init__()

    @property
    @abstractmethod
    def widths(self) -> tuple[int, ...]:
        """The number of columns of each group. The columns of a group are scaled and weighed together."""

    @abstractmethod
    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the columns, (n, sum of ``widths``)."""

    @abstractmethod
    def write(self, graph: Graph, inputs: Sequence[str]) -> str:
        """Add nodes that compute the columns from the values of these names. Return the name of their value."""


class Tapped(nn.Module):
    """An encoder and the blocks that read its layers, in one pass: the final layer, then the columns of each block."""

    def __init__(self, encoder: nn.Module, blocks: Sequence[FeatureBlock]) -> None:
        super().__init__()
        self.encoder, self._readers = encoder, nn.ModuleList(blocks)

    @property
    def blocks(self) -> list[FeatureBlock]:
        """The blocks that read the encoder."""
        return [block for block in self._readers if isinstance(block, FeatureBlock)]

    def forward(self, x: Tensor) -> Tensor:
        """Return features (n, f) of images (n, c, h, w)."""
        outputs: dict[str, Tensor] = {}

        def listen(name: str) -> torch.utils.hooks.RemovableHandle:
            layer = self.encoder.get_submodule(name)
            return layer.register_forward_hook(lambda _, __, output: outputs.update({name: output}))

        handles = [listen(name) for name in {name: None for block in self.blocks for name in block.taps}]
        try:
            columns = [self.encoder(x)]
        finally:
            for handle in handles:
                handle.remove()
        columns += [block(*(outputs[name] for name in block.taps)) for block in self.blocks]
        return torch.cat(columns, dim=1)
