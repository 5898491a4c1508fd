"""Where the tiled kernel meets autograd and torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lopsided.losses._kernel.tiled import sweep

_TWICE = "A second derivative needs the dense path, got the tiled one. Pass tile=None to differentiate twice."


_sweep_op = torch.library.custom_op("lopsided::sweep", sweep, mutates_args=())
"""The kernel as one opaque operation, so that torch.compile keeps it whole instead of unrolling its blocks."""


@_sweep_op.register_fake
def _(
    z: Tensor, reference: Tensor | None, learnt: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    want_values, want_grad, want_reference_grad = others[-3:]
    # Sizes by shape, which may be symbols, and row-major whatever the layout of the input: as the kernel returns them.
    values = z.new_empty(z.shape[0] if want_values else 0)
    grad_z = z.new_empty(z.shape) if want_grad else z.new_empty(0)
    grad_reference = z.new_empty(0)
    if want_grad and want_reference_grad and reference is not None:
        grad_reference = z.new_empty(reference.shape)
    grad_temperature = z.new_empty(()) if want_grad and learnt is not None else z.new_empty(0)
    return values, grad_z, grad_reference, grad_temperature


def _run(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if torch.compiler.is_compiling():
        found: tuple[Tensor, Tensor, Tensor, Tensor] = _sweep_op(*arguments)
        return found
    device = arguments[0].device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return sweep(*arguments)
    return sweep(*arguments)


class TiledTotal(torch.autograd.Function):
    """The sum over anchors times a factor, and the loss per anchor, through which no gradient flows.

    Forward makes values and gradient in one visit of the blocks; backward multiplies.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        """``arguments``: the eight of ``Arguments``, the factor of the sum, and the options of the kernel."""
        *inputs, ctx.factor = arguments[:9]
        ctx.wanted = of_z, of_reference, of_temperature = ctx.needs_input_grad[:3]
        values, *found = _run(*inputs, None, *arguments[9:], True, of_z or of_reference or of_temperature, of_reference)
        # The inputs are kept for the error of a second derivative alone, so only where there can be one.
        kept = [x if wanted else None for x, wanted in zip(inputs[:3], ctx.wanted, strict=True)]
        ctx.save_for_backward(*kept, *found)
        ctx.mark_non_differentiable(values)
        return values.sum() * ctx.factor, values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients of forward, scaled."""
        saved = ctx.saved_tensors  # Once: torch.utils.checkpoint recomputes them at each reading, and refuses a second.
        inputs, found = saved[:3], saved[3:]
        grad = grads[0] * ctx.factor
        scaled = [one * grad if wanted else None for one, wanted in zip(found, ctx.wanted, strict=True)]
        return *[_no_second_derivative(one, *inputs, grad) for one in scaled], *[None] * 12


class TiledRows(torch.autograd.Function):
    """The loss per anchor. Backward visits the anchors again, each weighted by the gradient that arrives for it."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """``arguments``: the eight of ``Arguments``, and the options of the kernel."""
        inputs, ctx.options = arguments[:8], arguments[8:]
        ctx.save_for_backward(*map(_saveable, inputs))
        return _run(*inputs, None, *ctx.options, True, False, False)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """A second visit."""
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[:3]
        inputs = [None if x is None else x.detach() for x in saved]
        _, *found = _run(*inputs, grads[0].detach().contiguous(), *ctx.options, False, True, wanted[1])
        kept = [one if is_wanted else None for one, is_wanted in zip(found, wanted, strict=True)]
        return *[_no_second_derivative(one, *saved[:3], grads[0]) for one in kept], *[None] * 11


def _saveable(x: Tensor | None) -> Tensor | None:
    """What torch.inference_mode made cannot be saved for backward as it is."""
    if x is None or torch.compiler.is_compiling() or not x.is_inference():
        return x
    return x.clone()


class _NoSecondDerivative(torch.autograd.Function):
    """Passes a gradient through, and says what to do when someone differentiates it again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *_: Tensor | None) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(_TWICE)


def _no_second_derivative(grad: Tensor | None, *inputs: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    if torch.compiler.is_compiling():
        guarded: Tensor = _first_derivative_op(grad, *inputs)
        return guarded
    if not torch.is_grad_enabled():
        return grad
    passed: Tensor = _NoSecondDerivative.apply(grad, *inputs)
    return passed


@torch.library.custom_op("lopsided::first_derivative", mutates_args=())
def _first_derivative_op(
    grad: Tensor, z: Tensor | None, reference: Tensor | None, learnt: Tensor | None, outer: Tensor
) -> Tensor:
    """The same guard inside a compiled graph."""
    return grad.clone()


@_first_derivative_op.register_fake
def _(grad: Tensor, z: Tensor | None, reference: Tensor | None, learnt: Tensor | None, outer: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _refuse(*_: Any) -> Any:
    raise RuntimeError(_TWICE)


_first_derivative_op.register_autograd(_refuse)
