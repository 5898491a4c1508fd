"""Exact fast paths for convolutions over small feature maps.

A padded 3x3 convolution over a 2x2 map touches mostly padding, and the library's backward for it is slow. The same
numbers come from one matrix product: with the map's positions laid side by side, a convolution is a linear map from
(positions in x channels in) to (positions out x channels out), whose blocks are the kernel's taps, and zero where no
tap joins the two positions. On maps of a few positions hardly a block is zero.

The state dict keeps its keys and shapes: the matrix is assembled from the weight in every call, and autograd carries
its gradient back to the weight.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn

Pair = tuple[int, int]
# Blocks of the matrix, positions out times positions in, up to which the product beats the convolution: measured by
# benchmarks/training.py. A 4x4 map has 256 of them, most of them zero, and loses.
_MOST_BLOCKS = 16


class _Layout(NamedTuple):
    """Which tap each block of the matrix holds (the number of taps standing for none), and the size of the output."""

    blocks: tuple[int, ...]
    size_out: Pair
    has_gaps: bool


@functools.lru_cache(maxsize=256)
def _layout(size: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> _Layout:
    along = [_taps(*facts) for facts in zip(size, kernel, stride, padding, dilation, strict=True)]
    none = kernel[0] * kernel[1]
    blocks = [
        none if a is None or b is None else a * kernel[1] + b
        for row in along[0]
        for column in along[1]
        for a in row
        for b in column
    ]
    return _Layout(tuple(blocks), (len(along[0]), len(along[1])), none in blocks)


def _taps(size: int, kernel: int, stride: int, padding: int, dilation: int) -> list[list[int | None]]:
    """Along one axis: the tap that joins each output position (rows) to each input position, None where none does."""
    num_out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    reach = [{out * stride - padding + tap * dilation: tap for tap in range(kernel)} for out in range(num_out)]
    return [[taps.get(position) for position in range(size)] for taps in reach]


def small_map_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair = (1, 1)
) -> Tensor:
    """``torch.nn.functional.conv2d`` with one group and zeros around the map, as one matrix product."""
    n, channels, height, width = x.shape
    out, _, *kernel = weight.shape
    layout = _layout((height, width), (kernel[0], kernel[1]), stride, padding, dilation)
    positions_out, positions_in = layout.size_out[0] * layout.size_out[1], height * width
    taps = weight.flatten(2).permute(2, 0, 1)
    if len(layout.blocks) == 1:
        matrix = taps[layout.blocks[0]]
    else:
        if layout.has_gaps:
            taps = torch.cat([taps, taps.new_zeros(1, out, channels)])
        index = torch.tensor(layout.blocks, device=x.device)
        matrix = taps.index_select(0, index).view(positions_out, positions_in, out, channels)
        matrix = matrix.transpose(1, 2).reshape(positions_out * out, positions_in * channels)
    flat = x.permute(0, 2, 3, 1).reshape(n, positions_in * channels)  # no copy where x is channels-last
    y = nn.functional.linear(flat, matrix, None if bias is None else bias.repeat(positions_out))
    return y.view(n, *layout.size_out, out).permute(0, 3, 1, 2)


class SmallMapConv2d(nn.Conv2d):
    """A convolution that takes the fast path where the map it meets is small enough."""

    def forward(self, x: Tensor) -> Tensor:
        """As in the parent, to rounding."""
        if not self._fits(x):
            return super().forward(x)
        stride, padding, dilation = self.stride, self.padding, self.dilation
        return small_map_conv2d(x, self.weight, self.bias, _pair(stride), _pair(padding), _pair(dilation))

    def _fits(self, x: Tensor) -> bool:
        if self.groups != 1 or self.padding_mode != "zeros" or isinstance(self.padding, str) or x.dim() != 4:
            return False
        positions = x.shape[2] * x.shape[3]
        if positions > _MOST_BLOCKS or self.kernel_size == (1, 1) or x.device.type != "cpu":
            return False
        facts = ((x.shape[2], x.shape[3]), self.kernel_size, self.stride, self.padding, self.dilation)
        size_out = _layout(*(_pair(fact) for fact in facts)).size_out
        return 0 < size_out[0] * size_out[1] * positions <= _MOST_BLOCKS


def _pair(value: tuple[int, ...] | str) -> Pair:
    assert not isinstance(value, str)
    return value[0], value[1]


def use_fast_paths(module: nn.Module, enabled: bool = True) -> int:
    """Give every plain convolution of a module its fast path, in place, or take it away; returns how many changed."""
    old, new = (nn.Conv2d, SmallMapConv2d) if enabled else (SmallMapConv2d, nn.Conv2d)
    changed = [child for child in module.modules() if type(child) is old]
    for child in changed:
        child.__class__ = new
    return len(changed)
