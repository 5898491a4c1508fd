"""The formulas of the loss on a block of p, for entries of at most 1/2, in place and in buffers that blocks share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def parity_eta(n: int) -> float:
    """Eta at which both terms of the loss weigh the same for uninformative features: (n-1) log(n-1).

    There the first term is log(n-1) and the second about 1/(n-1), for n contrast samples, the anchor included.

    >>> round(parity_eta(128))
    615
    """
    return (n - 1) * math.log(n - 1) if n > 2 else 0.0


@dataclass(frozen=True)
class Terms:
    """The loss's constants, as every block needs them."""

    eta: float
    gamma: float
    released: bool
    want_values: bool
    want_grad: bool


class Scratch:
    """Buffers that all blocks share, so that memory is touched once and stays in cache."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, columns: int) -> Tensor:
        """A buffer of this shape, with whatever its last user left in it."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < rows * columns:
            buffer = self._buffers[name] = self._like.new_empty(rows, columns)
        return buffer if buffer.shape == (rows, columns) else buffer.view(-1)[: rows * columns].view(rows, columns)


def weights(num_positive: Tensor, m: int, terms: Terms) -> tuple[Tensor, Tensor | None]:
    """1/|P_i| and eta/|N_i|, anything for an empty set, whose sum is 0; the released formula has 1/m in both places."""
    if terms.released:
        w_pos = torch.full_like(num_positive, 1.0 / m)
        return w_pos, w_pos * terms.eta if terms.eta > 0 else None
    w_pos = num_positive.clamp(min=1).reciprocal()
    if terms.eta == 0:
        return w_pos, None
    return w_pos, ((m - 1) - num_positive).clamp_(min=1).reciprocal_().mul_(terms.eta)


def add_q(
    grad: Tensor,
    ratio: Tensor | None,
    minus_q: Tensor | None,
    positives: Tensor | None,
    kind: str,
    w_pos: Tensor,
    w_neg: Tensor | None,
) -> None:
    """Add q to the gradient of a block: from both parts where they were computed, -w+ for a positive at gamma = 0."""
    if ratio is not None and w_neg is not None:
        grad.addcmul_(ratio, w_neg)
    if minus_q is not None:
        grad.addcmul_(minus_q, w_pos, value=-1.0)
    elif positives is not None:
        grad.addcmul_(positives, w_pos, value=-1.0)
    elif kind == "positive":
        grad.sub_(w_pos)


def negative_part(
    p: Tensor, positives: Tensor | None, terms: Terms, scratch: Scratch, i: int
) -> tuple[Tensor | None, Tensor, Tensor]:
    """p/(1-p) of the negatives, and the row sums of log(1-p) and of p/(1-p)."""
    minus_p = torch.neg(p, out=scratch.take(f"ratio{i}", *p.shape))
    if positives is not None:
        minus_p.addcmul_(p, positives)  # exactly 0 at the positives, for which all that follows is 0
    work = scratch.take("work", *p.shape)
    nothing = p.new_zeros(())  # a row sum that nobody asked for
    values = torch.log1p(minus_p, out=work).sum(1) if terms.want_values else nothing
    if not terms.want_grad:
        return None, values, nothing
    ratio = minus_p.div_(torch.sub(minus_p.new_full((), -1.0), minus_p, out=work))
    return ratio, values, ratio.sum(1)


def positive_part(
    p: Tensor,
    log_p: Tensor,
    positives: Tensor | None,
    terms: Terms,
    scratch: Scratch,
    i: int,
    itself: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """-q/w+ of the positives where gamma > 0, and the row sums of (1-p)^gamma log p and of -q/w+; spends ``log_p``.

    ``itself`` is the column of each anchor where there is one among columns that are all positives: it is none.

    With V = (1-p)^gamma, the first is V - gamma p/(1-p) V log p: few passes over few buffers, which is what the time
    goes into. exp(gamma log(1-p)) is several times faster than torch.pow and as exact, 1-p being at least 1/2.
    """
    gamma, nothing = terms.gamma, p.new_zeros(())
    not_p = torch.sub(p.new_ones(()), p, out=scratch.take("work", *p.shape))
    if gamma == 1:
        product = torch.mul(not_p, log_p, out=scratch.take(f"q{i}", *p.shape)) if terms.want_values else log_p
        minus_q, values = not_p, _row_sum(product, positives) if terms.want_values else nothing
        if terms.want_grad:
            minus_q = torch.addcmul(not_p, p, log_p, value=-1.0, out=scratch.take(f"q{i}", *p.shape))
    else:
        minus_q = torch.log(not_p, out=scratch.take(f"q{i}", *p.shape)).mul_(gamma).exp_()
        log_p.mul_(minus_q)
        values = _row_sum(log_p, positives) if terms.want_values else nothing
        if terms.want_grad:
            minus_q.addcmul_(torch.div(p, not_p, out=not_p), log_p, value=-gamma)
    if not terms.want_grad:
        return None, values, nothing
    if positives is not None:
        minus_q.mul_(positives)
    elif itself is not None:  # Before the sum: beside its 1, what a large gamma leaves of the others would be lost.
        minus_q.scatter_(1, itself, 0.0)
    return minus_q, values, minus_q.sum(1)


def _row_sum(x: Tensor, positives: Tensor | None) -> Tensor:
    return x.sum(1) if positives is None else torch.linalg.vecdot(x, positives)
