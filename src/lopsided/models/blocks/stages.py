"""What the layers before the last one know: mean and deviation of each channel after each stage of an encoder.

The final layer of a network that was trained to name objects may have lost colours, textures and small structures that
the stages before it still have (Head2Toe, Evci et al. 2022). They are computed in the same pass, so they cost nothing.

- A convolutional encoder has the maps of its stem and of its stages: mean and deviation over the positions.
- A transformer has many equal blocks, of which ``DEPTHS`` are read: the class token and the mean of the other tokens,
  or mean and deviation of the tokens if there is no class token.

Each stage is a group of columns, so that each has the same weight, whatever the number of its channels is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lopsided.errors import InputError
from lopsided.models.blocks.block import FeatureBlock

if TYPE_CHECKING:
    from lopsided.models.graph import Graph

DEPTHS = 4
"""How many blocks of a transformer are read, at equal distances; the last block is one of them."""
_BLOCKS = "+stages, +regions and +positions"
"""The blocks that read stages."""
_MAP, _TOKENS = 4, 3
"""Numbers of axes: of a map (n, c, h, w), and of tokens (n, t, c)."""


class Stages(FeatureBlock):
    """Two numbers per channel of each stage of an encoder."""

    def __init__(self, encoder: nn.Module | None = None) -> None:
        super().__init__()
        assert encoder is not None
        self._channels = stages_of(encoder)
        self.taps = tuple(self._channels)
        self._maps = Maps(encoder)

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of columns of each stage."""
        return tuple(2 * number for number in self._channels.values())

    @classmethod
    def widths_by(cls, state: Mapping[str, Tensor]) -> tuple[int, ...] | None:
        """Return the widths of an EfficientNet or one of its relatives."""
        return tuple(2 * number for number in stages_by(state).values()) if has_stem(state) else None

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the columns of one stage after the other."""
        return torch.cat([self._pooled(name, x) for name, x in zip(self.taps, inputs, strict=True)], dim=1)

    def _pooled(self, name: str, x: Tensor) -> Tensor:
        if self._maps.prefix and isinstance(x, Tensor) and x.ndim == _TOKENS:
            return torch.cat([x[:, 0], x[:, self._maps.prefix :].mean(dim=1)], dim=1)
        x = self._maps(name, x)
        mean = x.mean(dim=(2, 3), keepdim=True)
        deviation = (x - mean).square().mean(dim=(2, 3)).sqrt()
        return torch.cat([mean.flatten(1), deviation], dim=1)

    def write(self, graph: Graph, inputs: Sequence[str]) -> str:
        """Add the same steps for the maps of a convolutional encoder."""
        parts = []
        for x in inputs:
            mean = graph.add("ReduceMean", [x], axes=[2, 3], keepdims=1)
            # The length of what is left is faster than a mean of squares. Row by row it is exact on large maps, too.
            rows = graph.add("ReduceL2", [graph.add("Sub", [x, mean])], axes=[3], keepdims=0)
            length = graph.add("ReduceL2", [rows], axes=[2], keepdims=0)
            number = graph.add("ReduceProd", [graph.add("Shape", [x], start=2)])
            root = graph.add("Sqrt", [graph.add("Cast", [number], to=1)])
            parts += [graph.flatten(mean), graph.add("Div", [length, graph.flatten(root)])]
        return graph.add("Concat", parts, axis=1)


class Maps:
    """Turns the outputs of layers of an encoder into maps (n, c, h, w). Tokens of an image make a square, or a row."""

    def __init__(self, encoder: nn.Module) -> None:
        self._channels_last = getattr(encoder, "output_fmt", "NCHW") == "NHWC"
        self.prefix = int(getattr(encoder, "num_prefix_tokens", 0) or 0)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """Return the map of the output of the layer ``name``."""
        if not isinstance(x, Tensor) or x.ndim not in (_MAP, _TOKENS):
            raise InputError(f"The output of the layer {name} is no map of features. Leave out {_BLOCKS}.")
        if x.ndim == _MAP:
            return x.permute(0, 3, 1, 2) if self._channels_last else x
        tokens = x[:, self.prefix :].transpose(1, 2)
        side = math.isqrt(tokens.shape[2])
        return tokens.reshape(*tokens.shape[:2], side if side * side == tokens.shape[2] else 1, -1)


def has_stem(state: Mapping[str, Tensor]) -> bool:
    """Return whether weights are those of EfficientNet, MobileNet or one of their relatives in timm."""
    return "conv_stem.weight" in state


def stages_of(encoder: nn.Module) -> dict[str, int]:
    """Return the names of the layers that are read, with their numbers of channels. Raise if timm lists none."""
    state = encoder.state_dict()
    if has_stem(state):
        return stages_by(state)
    listed: Any = getattr(encoder, "feature_info", None)
    if not isinstance(listed, list) or not listed or not all("module" in stage for stage in listed):
        raise InputError(f"timm does not name the stages of {type(encoder).__name__}. Leave out {_BLOCKS}.")
    channels = {str(stage["module"]): int(stage["num_chs"]) for stage in listed}
    if len(channels) <= 2 * DEPTHS:
        return channels
    names = list(channels)
    return {name: channels[name] for name in (names[len(names) * (i + 1) // DEPTHS - 1] for i in range(DEPTHS))}


def stages_by(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the stages of EfficientNet, MobileNet and their relatives, given their weights alone.

    timm lists one stage for each size of map. These networks have several, and a stem, which it leaves out.
    """
    numbers = {int(key.split(".")[1]) for key in state if key.startswith("blocks.")}
    names = ["bn1", *(f"blocks.{number}" for number in sorted(numbers))]
    # The last norm of a stage has the channels of its map.
    norms = {
        name: [key for key in state if key.startswith(f"{name}.") and key.endswith("running_mean")] for name in names
    }
    return {name: len(state[keys[-1]]) for name, keys in norms.items()}
