"""Exact fast paths for convolutions over small feature maps.

A padded 3x3 convolution over a 2x2 map reads mostly padding, and torch's backward pass for it is slow. A few matrix
products without padding give the same numbers. There is one product for each output position and each kernel row that
overlaps the map there. It multiplies a run of neighbouring input positions by the run of kernel taps that cover them.

If the map is channels-last and the weights lie in memory as (kernel rows, kernel columns, channels in, channels out),
every run is a slice and nothing is copied. A 1x1 convolution is one product over all positions.

The state dict keeps its keys, shapes and numbers. Only the order of the weights in memory changes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Pair = tuple[int, int]
MOST_RUNS = 24
"""The largest number of products for which they are faster than torch's convolution: a 3x3 map, but not a 4x4 map."""
MOST_POINTS = 64
"""The largest input for which a 1x1 convolution is faster as one product. With a stride, the product always is."""


class Run(NamedTuple):
    """One product: output position, first input position, first tap, and the number of positions and taps."""

    out: int
    start: int
    tap: int
    length: int


class Plan(NamedTuple):
    """All products of a convolution, and the size of the output map."""

    runs: tuple[Run, ...]
    size_out: Pair


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
    return Plan(tuple(runs), (len(rows), len(columns)))


def _meetings(size: int, kernel: int, stride: int, padding: int, dilation: int) -> list[list[Pair]]:
    """Return, for one axis and each output position, the pairs of input position and tap that lie inside the map."""
    num_out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    met = [[(out * stride - padding + tap * dilation, tap) for tap in range(kernel)] for out in range(num_out)]
    return [[(position, tap) for position, tap in pairs if 0 <= position < size] for pairs in met]


def _neighbours(pairs: list[Pair], dilation: int) -> list[list[Pair]]:
    """Split positions into runs of neighbours. With a dilation, every run has one position."""
    if dilation > 1:
        return [[pair] for pair in pairs]
    return [pairs] if pairs else []


class _SmallMap(torch.autograd.Function):
    """Compute the products of a plan. The backward pass uses their transposes."""

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
        if torch.is_grad_enabled():  # For double backward, use torch's own differentiable gradient.
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
    """Return x as (n, positions x channels), without a copy if x is channels-last."""
    return x.permute(0, 2, 3, 1).reshape(len(x), -1)


def _slices(run: Run, channels: int) -> tuple[slice, slice]:
    return (
        slice(run.start * channels, (run.start + run.length) * channels),
        slice(run.tap * channels, (run.tap + run.length) * channels),
    )


def small_map_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair = (1, 1)
) -> Tensor:
    """Compute ``torch.nn.functional.conv2d`` with one group and zero padding, as matrix products."""
    return _SmallMap.apply(x, weight, bias, stride, padding, dilation)  # type: ignore[no-any-return]


def point_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair) -> Tensor:
    """Compute ``torch.nn.functional.conv2d`` with a 1x1 kernel and no padding, as one matrix product."""
    y = nn.functional.linear(x[:, :, :: stride[0], :: stride[1]].permute(0, 2, 3, 1), weight.flatten(1), bias)
    return y.permute(0, 3, 1, 2)


class SmallMapConv2d(nn.Conv2d):
    """A convolution that uses a fast path if its input map is small enough."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same result as the parent class, up to rounding."""
        path = self.path(x)
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
        """Return the fast path for an input: "point" (1x1 kernel), "runs", or None. Compiled code gets None."""
        if self.groups != 1 or self.padding_mode != "zeros" or isinstance(self.padding, str):
            return None
        if x.dim() != 4 or x.device.type != "cpu" or not len(x) or torch.compiler.is_compiling():
            return None
        if x.shape[1] != self.in_channels or not (x.dtype == self.weight.dtype or torch.is_autocast_enabled("cpu")):
            return None  # torch raises the error for this input.
        height, width = x.shape[2:]
        if self.kernel_size == (1, 1):
            small = height * width <= MOST_POINTS or self.stride != (1, 1)
            return "point" if small and self.padding == (0, 0) else None
        if height * width > MOST_RUNS:  # Such a map needs too many runs. The check avoids most plans.
            return None
        plan = self.plan(x)
        return "runs" if min(plan.size_out) > 0 and len(plan.runs) <= MOST_RUNS else None

    def plan(self, x: Tensor) -> Plan:
        """Return the products that compute this convolution of ``x``."""
        facts = (x.shape[2:], self.kernel_size, self.stride, self.padding, self.dilation)
        return _plan(*(_pair(fact) for fact in facts))


def _pair(value: Sequence[int] | str) -> Pair:
    assert not isinstance(value, str)
    return value[0], value[1]


def use_fast_paths(module: nn.Module, enabled: bool = True) -> int:
    """Turn fast paths on or off for every plain convolution of a module, in place. Return how many changed."""
    old, new = (nn.Conv2d, SmallMapConv2d) if enabled else (SmallMapConv2d, nn.Conv2d)
    changed = [child for child in module.modules() if type(child) is old]
    for child in changed:
        child.__class__ = new
    return len(changed)


def lay_out_weights(module: nn.Module, example: Tensor) -> int:
    """Reorder in memory the weights of convolutions that use the path "runs" for ``example``. Return their number.

    All other weights become channels-last. Call this function before creating an optimizer for the module.
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
    for conv in small:
        taps = conv.weight.detach().permute(2, 3, 1, 0)
        # contiguous() may leave any stride on axes of length 1. A new tensor has the strides of its shape.
        conv.weight.data = taps.new_empty(taps.shape).copy_(taps).permute(3, 2, 0, 1)
    return len(small)
