"""The logarithm of class-averaged exponentials, block by block, with nothing of size n x m kept.

For anchors q_i (n, d) and columns c_k (m, d), of which the first n are the anchors themselves, it is::

    log sum_{k != i} w_ik exp(q_i . c_k / temperature)

The weight w_ik is exp(log_weight_k), times exp(own_i) if anchor and column have the same label. So each class of
columns counts as one, and the anchor, which is left out, does not count in its own class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lopsided.losses._kernel.autograd import _no_second_derivative, _saveable
from lopsided.losses._kernel.formulas import Scratch
from lopsided.losses._kernel.plan import free_memory, rows_per_block


def sweep(
    queries: Tensor,
    columns: Tensor,
    y: Tensor,
    y_columns: Tensor,
    log_weight: Tensor,
    own: Tensor,
    weight: Tensor | None,
    temperature: float,
    tile: int,
    want_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Values (n,), and the gradients of their sum, or of their sum weighted by ``weight``, by queries and columns."""
    n, m = len(queries), len(columns)
    tile = tile or rows_per_block(m, queries.device.type, queries.element_size(), free_memory(queries.device))
    scratch, index = Scratch(columns), torch.arange(n, device=queries.device).unsqueeze(1)
    values = queries.new_empty(n)
    grad_queries, grad_columns = (torch.empty_like(queries), torch.zeros_like(columns)) if want_grad else (values,) * 2
    scaled, own = queries / temperature, own.unsqueeze(1)
    y, y_columns = y.to(queries.dtype).unsqueeze(1), y_columns.to(queries.dtype)  # Faster than comparing integers.
    for start in range(0, n, tile):
        here = slice(start, min(start + tile, n))
        rows = here.stop - start
        s = torch.addmm(log_weight, scaled[here], columns.t(), out=scratch.take("s", rows, m))
        same = torch.eq(y[here], y_columns, out=scratch.take("same", rows, m))
        s.addcmul_(same, own[here])
        s.scatter_(1, index[here], -torch.inf)
        # The row's largest entry is not -inf: a column other than the anchor always exists.
        top = s.amax(1, keepdim=True)
        total = s.sub_(top).exp_().sum(1, keepdim=True)
        values[here] = (top + total.log()).squeeze(1)
        if want_grad:
            share = total.reciprocal() if weight is None else weight[here, None] / total
            p = s.mul_(share)
            torch.mm(p, columns, out=grad_queries[here])
            grad_columns.addmm_(p.t(), scaled[here])
    if not want_grad:
        return values, values.new_empty(0), values.new_empty(0)
    return values, grad_queries.div_(temperature), grad_columns


_sweep_op = torch.library.custom_op("lopsided::averaged_sweep", sweep, mutates_args=())
"""The kernel as one operation, so that torch.compile does not unroll its blocks."""


@_sweep_op.register_fake
def _(queries: Tensor, columns: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    want_grad = others[-1]
    grads = [queries.new_empty(x.shape if want_grad else 0) for x in (queries, columns)]
    return queries.new_empty(queries.shape[0]), grads[0], grads[1]


def _run(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    if torch.compiler.is_compiling():
        found: tuple[Tensor, Tensor, Tensor] = _sweep_op(*arguments)
        return found
    with torch.autocast(arguments[0].device.type, enabled=False):
        return sweep(*arguments)


class AveragedTotal(torch.autograd.Function):
    """The sum of the values, and the values, through which no gradient flows: one visit of the blocks."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        """``arguments``: queries, columns, y, y_columns, log_weight, own, temperature, tile."""
        *inputs, temperature, tile = arguments
        ctx.wanted = ctx.needs_input_grad[:2]
        values, *grads = _run(*inputs, None, temperature, tile, any(ctx.wanted))
        ctx.save_for_backward(*map(_saveable, inputs[:2]), *grads)
        ctx.mark_non_differentiable(values)
        return values.sum(), values

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        """The gradients of forward, scaled."""
        queries, columns, *grads = ctx.saved_tensors
        scaled = [grad * outer[0] if wanted else None for grad, wanted in zip(grads, ctx.wanted, strict=True)]
        return *[_no_second_derivative(grad, queries, columns, None, outer[0]) for grad in scaled], *[None] * 6


class AveragedRows(torch.autograd.Function):
    """The values. Backward visits the blocks again, each row weighted by the gradient that arrives for it."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """``arguments``: as of ``AveragedTotal``."""
        *inputs, ctx.temperature, ctx.tile = arguments
        ctx.save_for_backward(*map(_saveable, inputs))
        return _run(*inputs, None, ctx.temperature, ctx.tile, False)[0]

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        """A second visit."""
        saved = ctx.saved_tensors  # Once: torch.utils.checkpoint refuses a second reading.
        inputs = [x.detach() for x in saved]
        _, *grads = _run(*inputs, outer[0].detach().contiguous(), ctx.temperature, ctx.tile, True)
        wanted = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)]
        queries, columns = saved[:2]
        return *[_no_second_derivative(grad, queries, columns, None, outer[0]) for grad in wanted], *[None] * 6
