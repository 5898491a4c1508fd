"""Feature blocks and the columns that they give: how columns are scaled and weighed before the classifier.

Features of a convolutional network are sums of activations: a few are large, and most are near zero. A root brings them
closer together, and length 1 removes the contrast of the image: power normalisation (Perronnin, Sanchez and Mensink,
2010; the square root turns SIFT into RootSIFT, Arandjelovic and Zisserman, 2012).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from lopsided.models.blocks.columns import SHARE
from lopsided.recipe.blocks import FINAL, Block
from lopsided.recipe.encoder_spec import Scaling

if TYPE_CHECKING:
    from lopsided.models.graph import Graph

POWERS = {"root": 1 / 2, "cube-root": 1 / 3}
_STEEP = 1e-4
"""The slope of a root in training is bounded by its slope here: 50 for the square root, 155 for the cube root."""


@dataclass(frozen=True)
class Columns:
    """Columns side by side that belong to one block and are scaled and weighed together.

    ``member`` is the place of the encoder or block that computes them, among those that are joined.
    """

    block: Block
    width: int
    member: int = 0


@dataclass(frozen=True)
class Layout:
    """The columns of the features of a model, from left to right."""

    groups: tuple[Columns, ...]

    @classmethod
    def final(cls, width: int) -> Layout:
        """Return the layout of the final layer of one encoder."""
        return cls((Columns(FINAL, width),))

    @property
    def width(self) -> int:
        """The number of all columns."""
        return sum(group.width for group in self.groups)

    @cached_property
    def local(self) -> npt.NDArray[np.int64]:
        """The places of the columns that are about one position each."""
        return self.columns(*{group.block.name for group in self.groups if group.block.is_local})

    @cached_property
    def whole(self) -> Layout:
        """The layout of the columns that are about the whole image."""
        return Layout(tuple(group for group in self.groups if not group.block.is_local))

    def columns(self, *names: str) -> npt.NDArray[np.int64]:
        """Return the places of the columns of blocks of these names.

        >>> Layout((Columns(FINAL, 2), Columns(Block("stages", "", "encoder", ""), 3))).columns("stages").tolist()
        [2, 3, 4]
        """
        return np.flatnonzero([group.block.name in names for group in self.groups for _ in range(group.width)])

    def final_of(self, features: Tensor) -> Tensor:
        """Return the columns of final layers."""
        parts = zip(self.groups, self._parts(features), strict=True)
        return torch.cat([columns for group, columns in parts if group.block.name == FINAL.name], dim=1)

    def importance(self, beside: int = 0) -> npt.NDArray[np.float64] | None:
        """Return how much a regression weighs each column; None: all the same.

        The squared weights of a group add up to its share times the number of columns without a share. ``beside`` is
        the number of features of table columns that follow.
        """
        parts = [(group.block.share, group.width) for group in self.groups] + [(SHARE, beside)] * (beside > 0)
        if all(share is None for share, _ in parts):
            return None
        base = sum(width for share, width in parts if share is None)
        weights = [1.0 if share is None else np.sqrt(share * base / width) for share, width in parts]
        return np.repeat(weights, [width for _, width in parts])

    def kinds(self, beside: int = 0) -> list[npt.NDArray[np.int64]]:
        """Return the places of the columns of final layers, of other layers of encoders, and of images themselves.

        ``beside`` is the number of features of table columns that follow; they are a kind of their own.

        >>> stages, pixels = Block("stages", "", "encoder", ""), Block("pixels", "", "image", "")
        >>> layout = Layout((Columns(FINAL, 2), Columns(stages, 1), Columns(stages, 2), Columns(pixels, 1)))
        >>> [places.tolist() for places in layout.kinds(beside=2)]
        [[0, 1], [2, 3, 4], [5], [6, 7]]
        """
        kinds = [
            "final" if group.block.name == FINAL.name else group.block.reads
            for group in self.groups
            for _ in range(group.width)
        ] + ["table"] * beside
        return [np.flatnonzero([kind == own for own in kinds]) for kind in dict.fromkeys(kinds)]

    def _parts(self, features: Tensor) -> tuple[Tensor, ...]:
        """Return the columns of each group."""
        return torch.split_with_sizes(features, [group.width for group in self.groups], dim=1)

    def scaled(self, features: Tensor, scaling: Scaling) -> Tensor:
        """Return features (n, f) as the classifier gets them."""
        parts = dict(enumerate(self._parts(features)))
        joint = [place for place, group in enumerate(self.groups) if group.block.scaling == "joint"]
        together = scaled(torch.cat([parts[place] for place in joint], dim=1), scaling)
        parts |= zip(joint, Layout(tuple(self.groups[place] for place in joint))._parts(together), strict=True)
        apart = [place for place, group in enumerate(self.groups) if group.block.scaling == "apart"]
        parts |= {place: scaled(parts[place], scaling) for place in apart}
        return torch.cat(list(parts.values()), dim=1)


def scaled(features: Tensor, scaling: Scaling) -> Tensor:
    """Return ``sign(x) sqrt(|x|)`` of features (n, f), divided by its length; "cube-root": with the cube root.

    >>> scaled(torch.tensor([[9.0, -16.0], [0.0, 0.0]]), "root").tolist()
    [[0.6000000238418579, -0.800000011920929], [0.0, 0.0]]
    >>> [round(x, 4) for x in scaled(torch.tensor([[27.0, -64.0]]), "cube-root")[0].tolist()]
    [0.6, -0.8]
    """
    if scaling == "none":
        return features
    return normalize(features.sign() * _root(features.abs(), POWERS[scaling]), dim=1)


def _root(x: Tensor, power: float) -> Tensor:
    """Return ``x**power``. Below ``_STEEP`` its slope is that at ``_STEEP``: many activations are exactly 0."""
    root = x.detach().pow(power)
    if not x.requires_grad:
        return root
    return root + (x - x.detach()) * (power * x.detach().clamp(min=_STEEP).pow(power - 1))


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

    @classmethod
    def widths_by(cls, state: Mapping[str, Tensor]) -> tuple[int, ...] | None:
        """Return ``widths`` given only the weights of an encoder; None: its layers are needed."""
        return None

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
