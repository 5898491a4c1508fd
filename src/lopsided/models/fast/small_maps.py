"""Exact fast paths for convolutions over small feature maps.

A padded 3x3 convolution over a 2x2 map touches mostly padding, and the library's backward for it is slow. The same
numbers come from a few matrix products without padding: for each position of the output, and each row of the kernel
that meets the map there, the run of input positions under that row times the run of taps above it. Channels-last maps
and weights that lie in memory as (kernel rows, kernel columns, channels in, channels out) make every such run a slice,
so that nothing is copied. A 1x1 convolution is one product over all positions.

The state dict keeps its keys, shapes and numbers; only the order of the weights in memory changes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Pair = tuple[int, int]
MOST_RUNS = 24
"""Products per pass up to which they beat the library's convolution: all of a 3x3 map, but not of a 4x4 map."""
MOST_POINTS = 64
"""Positions of the input up to which a 1x1 convolution is better one product; with a stride it always is."""


_USED = "used_taps"


class Run(NamedTuple):
    """A product: output position, first input position and first tap under it, and their number."""

    out: int
    start: int
    tap: int
    length: int


class Plan(NamedTuple):
    """All products of a convolution, and the size of the map that they give."""

    runs: tuple[Run, ...]
    size_out: Pair
    taps: Pair
    """The first and the last tap that any of them uses."""


@functools.lru_cache(maxsize=256)
def _plan(size: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Plan:
    rows, columns = (_meetings(*facts) for facts in zip(size, kernel, stride, padding, dilation, strict=True))
    runs = [
        Run(y * len(columns) + x, row * size[1] + part[0][0], tap * kernel[1] + part[0][1], len(part))
        for y, in_rows in enumerate(rows)
        for x, in_columns in enumerate(columns)
        for row, tap in in_rows
        for part in _neighbours(in_columns, dilation[1])
    ]
    taps = [tap for run in runs for tap in (run.tap, run.tap + run.length - 1)] or [0]
    return Plan(tuple(runs), (len(rows), len(columns)), (min(taps), max(taps)))


def _meetings(size: int, kernel: int, stride: int, padding: int, dilation: int) -> list[list[Pair]]:
    """Along one axis, for each output position: the input positions inside the map, each with the tap that meets it."""
    num_out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    met = [[(out * stride - padding + tap * dilation, tap) for tap in range(kernel)] for out in range(num_out)]
    return [[(position, tap) for position, tap in pairs if 0 <= position < size] for pairs in met]


def _neighbours(pairs: list[Pair], dilation: int) -> list[list[Pair]]:
    """Part positions into runs of neighbours: with a dilation every position is alone."""
    if dilation > 1:
        return [[pair] for pair in pairs]
    return [pairs] if pairs else []


class _SmallMap(torch.autograd.Function):
    """The products of a plan, and their transposes backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair
    ) -> Tensor:
        n, channels, *size = x.shape
        out, _, *kernel = weight.shape
        plan = _plan((size[0], size[1]), (kernel[0], kernel[1]), stride, padding, dilation)
        flat, taps = _flat(x), weight.permute(2, 3, 1, 0).reshape(-1, out)
        y = x.new_zeros(n, plan.size_out[0] * plan.size_out[1] * out)
        if bias is not None:
            y.view(n, -1, out).copy_(bias.expand(n, y.shape[1] // out, out))
        for run in plan.runs:
            inside, under = _slices(run, channels)
            y[:, run.out * out : (run.out + 1) * out].addmm_(flat[:, inside], taps[under])
        ctx.save_for_backward(x, weight)
        ctx.facts = plan, stride, padding, dilation, bias is not None
        return y.view(n, *plan.size_out, out).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        plan, stride, padding, dilation, has_bias = ctx.facts
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], has_bias and ctx.needs_input_grad[2])
        if torch.is_grad_enabled():  # This pass is itself to be differentiated: the library's knows how.
            sizes = [len(grad[0])] if has_bias else None
            rest = (sizes, stride, padding, dilation, False, (0, 0), 1, needs)
            return (*torch.ops.aten.convolution_backward(grad, x, weight, *rest), None, None, None)
        (n, channels, *size), (out, _, *kernel) = x.shape, weight.shape
        flat, taps, outer = _flat(x), weight.permute(2, 3, 1, 0).reshape(-1, out), _flat(grad)
        grad_x = torch.zeros_like(flat) if needs[0] else None
        grad_taps = torch.zeros_like(taps) if needs[1] else None
        for run in plan.runs:
            inside, under = _slices(run, channels)
            here = outer[:, run.out * out : (run.out + 1) * out]
            if grad_x is not None:
                grad_x[:, inside].addmm_(here, taps[under].t())
            if grad_taps is not None:
                grad_taps[under].addmm_(flat[:, inside].t(), here)
        return (
            None if grad_x is None else grad_x.view(n, *size, channels).permute(0, 3, 1, 2),
            None if grad_taps is None else grad_taps.view(*kernel, channels, out).permute(3, 2, 0, 1),
            outer.view(-1, out).sum(0) if needs[2] else None,
            None,
            None,
            None,
        )


def _flat(x: Tensor) -> Tensor:
    """Positions side by side, (n, positions x channels): no copy where x is channels-last."""
    return x.permute(0, 2, 3, 1).reshape(len(x), -1)


def _slices(run: Run, channels: int) -> tuple[slice, slice]:
    return (
        slice(run.start * channels, (run.start + run.length) * channels),
        slice(run.tap * channels, (run.tap + run.length) * channels),
    )


def small_map_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair = (1, 1)
) -> Tensor:
    """``torch.nn.functional.conv2d`` with one group and zeros around the map, as matrix products."""
    return _SmallMap.apply(x, weight, bias, stride, padding, dilation)  # type: ignore[no-any-return]


def point_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair) -> Tensor:
    """``torch.nn.functional.conv2d`` with a 1x1 kernel and no padding, as one matrix product."""
    y = nn.functional.linear(x[:, :, :: stride[0], :: stride[1]].permute(0, 2, 3, 1), weight.flatten(1), bias)
    return y.permute(0, 3, 1, 2)


class SmallMapConv2d(nn.Conv2d):
    """A convolution that takes a fast path where the map it meets is small enough."""

    def forward(self, x: Tensor) -> Tensor:
        """As in the parent, to rounding."""
        path = self.path(x)
        if torch.is_grad_enabled():
            _note_taps(self.weight, self.plan(x) if path == "runs" else None)
        if path is None:
            return super().forward(x)
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if path == "point":
            return point_conv2d(x, weight, bias, _pair(self.stride))
        return small_map_conv2d(x, weight, bias, _pair(self.stride), _pair(self.padding), _pair(self.dilation))

    def path(self, x: Tensor) -> str | None:
        """Which fast path an input takes: "point" (1x1 kernel), "runs", or None, as always in a compiled program."""
        if self.groups != 1 or self.padding_mode != "zeros" or isinstance(self.padding, str):
            return None
        if x.dim() != 4 or x.device.type != "cpu" or not len(x) or torch.compiler.is_compiling():
            return None
        if x.shape[1] != self.in_channels or not (x.dtype == self.weight.dtype or torch.is_autocast_enabled("cpu")):
            return None  # The library says what is wrong with it.
        height, width = x.shape[2:]
        if self.kernel_size == (1, 1):
            small = height * width <= MOST_POINTS or self.stride != (1, 1)
            return "point" if small and self.padding == (0, 0) else None
        if height * width > MOST_RUNS:  # Each position is in a run at least once: spares most maps a plan.
            return None
        plan = self.plan(x)
        return "runs" if min(plan.size_out) > 0 and len(plan.runs) <= MOST_RUNS else None

    def plan(self, x: Tensor) -> Plan:
        """The products that stand for this convolution of ``x``."""
        facts = (x.shape[2:], self.kernel_size, self.stride, self.padding, self.dilation)
        return _plan(*(_pair(fact) for fact in facts))


def _pair(value: Sequence[int] | str) -> Pair:
    assert not isinstance(value, str)
    return value[0], value[1]


def use_fast_paths(module: nn.Module, enabled: bool = True) -> int:
    """Give every plain convolution of a module its fast path, in place, or take it away; returns how many changed."""
    old, new = (nn.Conv2d, SmallMapConv2d) if enabled else (SmallMapConv2d, nn.Conv2d)
    changed = [child for child in module.modules() if type(child) is old]
    for child in changed:
        child.__class__ = new
    return len(changed)


def lay_out_weights(module: nn.Module, example: Tensor) -> int:
    """Order the weights of those convolutions in memory that ``example`` leads over small maps; returns their number.

    The other weights become channels-last. Run it before an optimizer has seen the module.
    """
    small: list[SmallMapConv2d] = []

    def look(conv: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(conv, SmallMapConv2d) and conv.path(inputs[0]) == "runs" and conv not in small:
            small.append(conv)

    module.to(memory_format=torch.channels_last)
    handles = [conv.register_forward_pre_hook(look) for conv in module.modules() if isinstance(conv, SmallMapConv2d)]
    modes = [(child, child.training) for child in module.modules()]
    try:
        with torch.no_grad():
            module.eval()(example)
    finally:
        for child, training in modes:
            child.training = training
        for handle in handles:
            handle.remove()
    elsewhere = {
        id(parameter)
        for child in module.modules()
        if not isinstance(child, SmallMapConv2d)
        for parameter in child.parameters(recurse=False)
    }
    for conv in small:
        taps = conv.weight.detach().permute(2, 3, 1, 0)
        # Strides of axes of length 1 are anyone's guess after contiguous(): here they are those of the shape.
        conv.weight.data = taps.new_empty(taps.shape).copy_(taps).permute(3, 2, 0, 1)
        if id(conv.weight) not in elsewhere:
            setattr(conv.weight, _USED, slice(0, 0))
    return len(small)


def used_taps(weight: Tensor) -> slice | None:
    """Which taps, counted row by row, may have had a gradient other than 0; None if all, or if that is not known.

    A 3x3 kernel over a 1x1 map uses one: eight ninths of the largest weights of a ResNet on small images have no part.
    It is noted at each use for weights that ``lay_out_weights`` has ordered, and a tap that was used once stays noted.
    """
    used: slice | None = getattr(weight, _USED, None)
    return used


def _note_taps(weight: Tensor, plan: Plan | None) -> None:
    """Note the taps that a convolution uses; None: all of them."""
    used: slice | None = getattr(weight, _USED, None)
    if used is None:
        return
    if plan is None:
        setattr(weight, _USED, None)
        return
    first, last = plan.taps
    if used.start == used.stop:
        setattr(weight, _USED, slice(first, last + 1))
    elif first < used.start or last >= used.stop:
        setattr(weight, _USED, slice(min(first, used.start), max(last + 1, used.stop)))
