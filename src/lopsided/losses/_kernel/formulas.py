"""The formulas of the loss on a block of p, for entries of at most 1/2, in place and in buffers that blocks share."""

from __future__ import annotations

import functools
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
    parity: bool  # Whether eta is in units of parity. Only masked weights still need to know.
    released: bool
    want_values: bool
    want_grad: bool


class Scratch:
    """Buffers that all blocks share, so that memory is touched once and stays in cache."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    @functools.cached_property
    def one(self) -> Tensor:
        """1, kept because a small block feels the time to make it anew."""
        return self._like.new_ones(())

    @functools.cached_property
    def zero(self) -> Tensor:
        """0, for a row sum that nobody asked for."""
        return self._like.new_zeros(())

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


def masked_weights(
    num_positive: Tensor, num_contrast: Tensor, counts: Tensor, terms: Terms
) -> tuple[Tensor, Tensor | None]:
    """The same weights if each anchor has its own number of contrast samples; 0 for an anchor that does not count.

    The released formula divides by the contrast samples with the anchor, as in a batch without the samples left out.
    """
    divisor = num_contrast + 1 if terms.released else num_positive.clamp(min=1)
    w_pos = counts / divisor
    if terms.eta == 0:
        return w_pos, None
    divisor = divisor if terms.released else (num_contrast - num_positive).clamp_(min=1)
    w_neg = counts / divisor * terms.eta
    if terms.parity:  # parity_eta of each row; a row that does not count may have no contrast sample
        w_neg = w_neg * torch.special.xlogy(num_contrast, num_contrast)
    return w_pos, w_neg


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
    work = scratch.take("work", *p.shape)
    if positives is not None:
        p = torch.addcmul(p, p, positives, value=-1.0, out=work)  # exactly 0 at the positives, as is all that follows
    ratio = None
    if terms.want_grad:
        ratio = torch.sub(scratch.one, p, out=scratch.take(f"ratio{i}", *p.shape))
        torch.div(p, ratio, out=ratio)
    # It spends ``work``, so it comes last.
    values = _sum_of_log_not_p(p, work, scratch.one) if terms.want_values else scratch.zero
    return ratio, values, scratch.zero if ratio is None else ratio.sum(1)


# A logarithm costs ten times a product, but an operation on fewer numbers than this costs no less than its call.
_FEWEST_FOLDED = 2**15


def _sum_of_log_not_p(p: Tensor, work: Tensor, one: Tensor) -> Tensor:
    """Row sums of log(1-p), with few logarithms; spends ``work``, which may be ``p`` itself.

    Two entries a and b count as much as the one entry a + b(1-a), because 1 minus that is (1-a)(1-b). So a row is
    folded in half as often as it pays. All numbers added are positive, so that small p keep their digits, which 1-p
    would lose. No 1-p vanishes on the way: entries of at most 1/2 that sum to at most 1 have a product of 1-p of at
    least 1/4.
    """
    width = p.shape[1]
    while len(p) * width > _FEWEST_FOLDED and width > 1:
        half = (width + 1) // 2
        torch.lerp(p[:, : width - half], one, p[:, half:width], out=work[:, : width - half])
        if p is not work and half > width - half:
            work[:, half - 1] = p[:, half - 1]  # the odd one in the middle
        p, width = work, half
    return torch.log1p(p[:, :width].neg()).sum(1)


# Up to this exponent, products are cheaper than exp(gamma log(1-p)), and lose no more than rounding 1-p did.
_LARGEST_PRODUCT = 32


def _power(x: Tensor, exponent: float, out: Tensor) -> Tensor:
    """x^exponent, for x from 1/2 to 1; ``x`` itself for the exponent 1, otherwise in ``out``."""
    if not exponent.is_integer() or not 1 <= exponent <= _LARGEST_PRODUCT:
        # Several times faster than torch.pow and as exact, x being at least 1/2.
        return torch.log(x, out=out).mul_(exponent).exp_()
    if exponent == 1:
        return x
    if exponent % 3 == 0:
        return torch.pow(_power(x, exponent / 3, out), 3, out=out)  # two products in one pass
    if exponent % 2 == 0:
        return torch.square(_power(x, exponent / 2, out), out=out)
    return torch.mul(_power(x, exponent - 1, out), x, out=out)


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

    With W = (1-p)^(gamma-1) and T = p W log p, the first is W (1-p) - gamma T, and the second the sum of W log p - T:
    few passes over few buffers, and no logarithm or exponential if gamma is a small whole number.
    """
    gamma = terms.gamma
    work = scratch.take("work", *p.shape)
    v = torch.sub(scratch.one, p, out=scratch.take(f"q{i}", *p.shape))
    w = None if gamma == 1 else _power(v, gamma - 1, work)
    # W = 0 where there is no positive, so that it is 0 in all that follows. Before the sums: beside the 1 of an anchor
    # itself, what a large gamma leaves of the others would be lost.
    if positives is not None:
        w = positives if w is None else torch.mul(w, positives, out=work)
    elif itself is not None:
        (v if w is None else w).scatter_(1, itself, 0.0)
    if w is not None:
        log_p.mul_(w)
        v.mul_(w)
    t = torch.mul(p, log_p, out=work)
    values = log_p.sum(1).sub_(t.sum(1)) if terms.want_values else scratch.zero
    if not terms.want_grad:
        return None, values, scratch.zero
    minus_q = v.sub_(t, alpha=gamma)
    return minus_q, values, minus_q.sum(1)
