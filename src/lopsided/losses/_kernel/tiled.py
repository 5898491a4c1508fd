r"""The tiled kernel: value and gradient of the asymmetric focal contrastive loss, without anything of size n x n.

Anchors are visited in blocks of rows. With s a block's similarities over the temperature and p its softmax, the
gradient of an anchor's loss with respect to s_ik is

    q_ik - p_ik * sum_j q_ij,        q_ij = p_ij * dL_i/dp_ij,

    q_ij =  w+_i (gamma p (1-p)^(gamma-1) log p - (1-p)^gamma)    for a positive,
    q_ij =  eta w-_i p / (1-p)                                    for a negative,

so that value and gradient of a block are done in one visit, while it is in cache. The batch is first sorted by class:
the positives of a block are then one run of columns and the negatives the rest. Most blocks need no mask at all, and
each element meets one formula.

Near p = 1 the formulas above lose everything to cancellation. Only the largest entry k of a row can have p > 1/2.
Rows that have such an entry are done by :func:`_visit_peaked`, which takes k out of its row: with a the share of all
the others (a = 1 - p_k), r their softmax among themselves and Q the sum of their q,

    dL/ds_k = h - p_k Q        and        dL/ds_j = q_j - r_j (a Q + h)        for the others,

    h = a q_k = -w+ a^gamma (gamma p_k (-log p_k) + a)    if k is a positive,    eta w- p_k    if it is a negative,

in which nothing is divided by a number that can vanish, at any temperature.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lopsided.losses._kernel.formulas import (
    Scratch,
    Terms,
    add_q,
    masked_weights,
    negative_part,
    parity_eta,
    positive_part,
    weights,
)
from lopsided.losses._kernel.plan import Block, Segment, free_memory, plain_plan, rows_per_block, sorted_plan

_EXACT_IN_FLOAT = 2**24  # whole numbers below this are float32 numbers

_Rows: TypeAlias = slice | Tensor


@dataclass
class _Batch:
    """Anchors in the order of visiting, everything they are contrasted with, and where gradients gather."""

    queries: Tensor  # (n, d), divided by the temperature
    columns: Tensor  # (m, d): the anchors first, then the reference
    row_labels: Tensor | None
    column_labels: Tensor | None
    mask: Tensor | None
    contrast: Tensor | None  # (n, m), or (1, m) for all rows: False for samples that are left out
    anchors: Tensor | None  # (n,): False for rows whose loss is 0
    weight: Tensor | None  # (n,), of each anchor's loss in the gradient
    want_reference_grad: bool
    values: Tensor
    grad_queries: Tensor | None = None  # (n, d), once there is one
    grad_columns: Tensor | None = None  # (n, d), or (m, d) where the reference wants a gradient

    def positives(self, rows: _Rows, columns: slice) -> Tensor:
        """Which columns are positives of these rows, as 1.0 and 0.0; an anchor may still count itself."""
        if self.mask is not None:
            found = self.mask[rows, columns]
        else:
            assert self.row_labels is not None
            assert self.column_labels is not None
            row, column = self.row_labels[rows].unsqueeze(1), self.column_labels[columns]
            if row.dtype == self.columns.dtype:  # Several times faster than comparing integers and converting.
                return torch.eq(row, column, out=row.new_empty(len(row), len(column)))
            found = row == column
        return found.to(self.columns.dtype)

    def left_out(self, rows: _Rows, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Per row: the columns that are left out, the number of the others, and 1.0 if the row counts, 0.0 if not."""
        assert self.contrast is not None
        there = self.contrast.expand(len(self.queries), -1)[rows].scatter(1, own, False)
        num_contrast = there.sum(1)
        counts = num_contrast >= 2  # With a single contrast sample, p is 1 for any features.
        if self.anchors is not None:
            counts = counts & self.anchors[rows]
        # A row that does not count keeps all columns, so that its numbers stay finite. Its weights are 0.
        there = (there | ~counts.unsqueeze(1)).scatter_(1, own, False)
        dtype = self.columns.dtype
        return ~there, num_contrast.to(dtype), counts.to(dtype)

    def add_gradient(self, rows: _Rows, grad: Tensor) -> None:
        """Send the gradient of a block's similarities on to the features on both sides."""
        if grad.shape == (len(self.columns), len(self.columns)):  # One block, no reference: both sides in one product.
            self.grad_columns = (grad + grad.t()) @ self.queries
            return
        if self.grad_queries is None or self.grad_columns is None:
            like = self.columns if self.want_reference_grad else self.queries
            self.grad_queries, self.grad_columns = like.new_zeros(self.queries.shape), like.new_zeros(like.shape)
        if isinstance(rows, slice):
            target = self.grad_queries[rows]
            target.addmm_(grad, self.columns)
        else:
            self.grad_queries.index_add_(0, rows, grad @ self.columns)
        # It has fewer rows than there are columns where the reference wants no gradient.
        self.grad_columns.addmm_(grad[:, : len(self.grad_columns)].t(), self.queries[rows])


def sweep(
    z: Tensor,
    reference: Tensor | None,
    learnt: Tensor | None,
    y: Tensor | None,
    y_reference: Tensor | None,
    mask: Tensor | None,
    contrast: Tensor | None,
    anchors: Tensor | None,
    weight: Tensor | None,
    eta: float,
    gamma: float,
    temperature: float,
    parity: bool,
    released: bool,
    tile: int,
    want_values: bool,
    want_grad: bool,
    want_reference_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Visit all anchors once. There must be three contrast columns at least, the anchor's own among them.

    Return values (n,), and the gradients of their weighted sum by z, by the reference and by the temperature. What is
    not asked for is empty.

    ``tile`` is the number of rows in a block; 0 leaves it to :func:`rows_per_block`. ``learnt`` is the temperature as a
    tensor; it replaces ``temperature`` and gets a gradient. With ``contrast``, all rows are visited by the formulas
    that hold for every p, in the order they have.
    """
    num_columns = len(z) + (0 if reference is None else len(reference))
    tile = tile or rows_per_block(num_columns, z.device.type, z.element_size(), free_memory(z.device))
    host = _answers_at_once(z)
    order = reference_order = None
    if host and contrast is None and y is not None and len(z) > tile:
        order = torch.argsort(y, stable=True)
        z, y = z[order], y[order]
        weight = None if weight is None else weight[order]
    if order is not None and reference is not None and y_reference is not None:
        reference_order = torch.argsort(y_reference, stable=True)
        reference, y_reference = reference[reference_order], y_reference[reference_order]
    columns = z if reference is None else torch.cat([z, reference])
    labels = y if y is None or y_reference is None else torch.cat([y, y_reference])
    if host and labels is not None:
        low, high = torch.aminmax(labels)
        if low.item() > -_EXACT_IN_FLOAT and high.item() < _EXACT_IN_FLOAT:
            labels = labels.to(z.dtype)
    divisor = temperature if learnt is None else learnt
    batch = _Batch(
        queries=z / divisor,
        columns=columns,
        row_labels=labels if labels is None else labels[: len(z)],
        column_labels=labels,
        mask=mask,
        contrast=contrast,
        anchors=anchors,
        weight=weight,
        want_reference_grad=want_reference_grad,
        values=z.new_empty(len(z) if want_values else 0),
    )
    eta = eta * parity_eta(len(columns)) if parity and contrast is None else eta
    terms = Terms(eta, gamma, parity, released, want_values, want_grad)
    if not host or contrast is not None:
        _visit_unasked(batch, terms, tile)
    elif order is not None and y is not None:
        _visit(batch, terms, sorted_plan(y, y_reference, tile))
    else:
        _visit(batch, terms, plain_plan(len(z), len(columns), tile))

    values = batch.values
    grad_z, grad_reference, grad_temperature = _gradients(batch, z, divisor)
    if order is not None:
        values = torch.empty_like(values).index_copy_(0, order, values) if want_values else values
        grad_z = torch.empty_like(grad_z).index_copy_(0, order, grad_z) if want_grad else grad_z
    if reference_order is not None and len(grad_reference):
        grad_reference = torch.empty_like(grad_reference).index_copy_(0, reference_order, grad_reference)
    return values, grad_z, grad_reference, grad_temperature


def _gradients(batch: _Batch, z: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of z, of the reference and of a temperature that is a tensor; empty where not asked for."""
    grad_z, grad_reference, grad_temperature = (z.new_empty(0) for _ in range(3))
    if batch.grad_columns is None:
        return grad_z, grad_reference, grad_temperature
    if isinstance(temperature, Tensor):
        grad_temperature = -_along_similarities(batch, z) / temperature
    if batch.grad_queries is None:  # both sides are in one already
        grad_z = batch.grad_columns
    else:
        grad_z = batch.grad_queries.div_(temperature).add_(batch.grad_columns[: len(z)])
    if batch.want_reference_grad:
        # A copy, because an operation of torch.compile may not return a part of another tensor.
        grad_reference = batch.grad_columns[len(z) :].clone()
    return grad_z, grad_reference, grad_temperature


def _along_similarities(batch: _Batch, z: Tensor) -> Tensor:
    """The sum of dL/ds s over all pairs: minus the temperature times the derivative by it.

    A row of similarities is linear in its query, so that the sum is the product of queries and their gradients.
    """
    if batch.grad_queries is None:  # The sum of both sides, which are equal; the columns are z itself.
        assert batch.grad_columns is not None
        return (z * batch.grad_columns).sum() / 2
    return (batch.queries * batch.grad_queries).sum()


def _answers_at_once(z: Tensor) -> bool:
    """Whether asking about a tensor's content is free. Any other device has to finish its work first."""
    return z.device.type == "cpu"


def _visit(batch: _Batch, terms: Terms, plan: Iterable[Block]) -> None:
    """Visit all blocks, each by the cheaper formulas where these hold."""
    scratch = Scratch(batch.columns)
    index = torch.arange(len(batch.queries), device=batch.columns.device).unsqueeze(1)
    try_smooth = True
    for block in plan:
        here = slice(block.start, block.stop)
        own = index[here]
        peaked = _visit_smooth(batch, terms, block, own, scratch) if try_smooth else own
        num_peaked = 0
        if peaked is not None:
            where = here if len(peaked) == len(own) else peaked.squeeze(1)
            num_peaked = int(_visit_peaked(batch, terms, peaked, where, scratch).sum())
        # Peaked rows come in crowds: after a mostly peaked block, trying the next as smooth is work for nothing.
        try_smooth = num_peaked * 2 <= len(own)


def _visit_unasked(batch: _Batch, terms: Terms, tile: int) -> None:
    """Visit all rows by the formulas that hold for every p, so that the host never waits for the device."""
    scratch, n = Scratch(batch.columns), len(batch.queries)
    index = torch.arange(n, device=batch.columns.device).unsqueeze(1)
    for start in range(0, n, tile):
        here = slice(start, min(start + tile, n))
        _visit_peaked(batch, terms, index[here], here, scratch)


def _visit_smooth(batch: _Batch, terms: Terms, block: Block, own: Tensor, scratch: Scratch) -> Tensor | None:
    """Do the rows of a block in which no p exceeds 1/2, and return the others, which are then still to be done."""
    here, size, m = slice(block.start, block.stop), block.stop - block.start, len(batch.columns)
    s = torch.mm(batch.queries[here], batch.columns.t(), out=scratch.take("s", size, m))
    s.scatter_(1, own, -torch.inf)
    p = torch.softmax(s, 1, out=scratch.take("p", size, m))
    top = p.amax(1)
    is_peaked = None
    if top.max().item() > 0.5:  # NaN is not, and goes through every formula below.
        is_peaked = top > 0.5
        if block.masked or int(is_peaked.sum()) * 2 > size:
            return own
        p[is_peaked] = 0.0  # Harmless, and of weight zero; their values are overwritten afterwards.
    log_total = s.amax(1).sub_(top.log())  # The largest p is exp(0) over the sum of exponentials.
    parts, num_positive = _parts(batch, block, own, p, s)
    w_pos, w_neg = weights(num_positive, m, terms)
    if is_peaked is not None:
        w_pos, w_neg = w_pos * ~is_peaked, None if w_neg is None else w_neg * ~is_peaked
    _finish_smooth(batch, terms, here, p, parts, _SmoothRows(log_total, w_pos, w_neg, num_positive), scratch)
    return None if is_peaked is None else own[is_peaked]


class _Part(NamedTuple):
    """A segment of a block: p and s of it; where the anchors stand in it, if they do; its positives, if it is mixed."""

    segment: Segment
    p: Tensor
    s: Tensor
    itself: Tensor | None
    positives: Tensor | None


def _parts(batch: _Batch, block: Block, own: Tensor, p: Tensor, s: Tensor) -> tuple[list[_Part], Tensor]:
    """The segments of a block, and the number of positives in each row."""
    here, parts, counts = slice(block.start, block.stop), [], []
    for segment in block.segments:
        itself = None
        if segment.own:
            itself = own - segment.start if segment.start else own
        positives = None
        if segment.kind == "mixed":
            positives = batch.positives(here, segment.columns)
            if itself is not None:
                positives.scatter_(1, itself, 0.0)
            counts.append(positives.sum(1))
        elif segment.kind == "positive":
            counts.append(p.new_full((len(own),), segment.stop - segment.start - segment.own))
        if block.masked:
            parts.append(_Part(segment, p, s, itself, positives))
        else:
            parts.append(_Part(segment, p[:, segment.columns], s[:, segment.columns], itself, positives))
    return parts, _add(counts)


def _add(tensors: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, tensors)


class _SmoothRows(NamedTuple):
    """Per row: the logarithm of the sum of exp(s), both weights, and |P_i|."""

    log_total: Tensor
    w_pos: Tensor
    w_neg: Tensor | None
    num_positive: Tensor


def _finish_smooth(
    batch: _Batch, terms: Terms, here: slice, p: Tensor, parts: list[_Part], row: _SmoothRows, scratch: Scratch
) -> None:
    """From s and p to values and gradients."""
    # Row sums of (1-p)^gamma log p and of log(1-p), and of q / w for each of the two terms.
    pulls, pushes, pull_qs, push_qs = [], [], [], []
    if terms.gamma == 0:
        pull_qs.append(-row.num_positive)
    found: list[tuple[Tensor | None, Tensor | None]] = []
    for i, (segment, p_here, s, itself, positives) in enumerate(parts):
        ratio = minus_q = None
        if terms.eta > 0 and segment.kind != "positive":
            ratio, value, q = negative_part(p_here, positives, terms, scratch, i)
            pushes.append(value)
            push_qs.append(q)
        if segment.kind != "negative" and terms.gamma > 0:
            log_p = s.sub_(row.log_total.unsqueeze(1))
            if itself is not None:
                log_p.scatter_(1, itself, 0.0)
            minus_q, value, q = positive_part(p_here, log_p, positives, terms, scratch, i, itself)
            pulls.append(value)
            pull_qs.append(-q)
        elif segment.kind != "negative" and terms.want_values:
            # The similarities of the positives, summed, are all that gamma = 0 needs of them.
            if itself is not None:
                s.scatter_(1, itself, 0.0)
            pulls.append(s.sum(1) if positives is None else torch.linalg.vecdot(s, positives))
        found.append((ratio, minus_q))
    if terms.gamma == 0 and terms.want_values:
        pulls = [_add(pulls).addcmul(row.log_total, row.num_positive, value=-1.0)]
    q_sum, w_pos, w_neg = _store_values(batch, terms, here, row.w_pos, row.w_neg, pulls, pushes, pull_qs, push_qs)
    if not terms.want_grad:
        return
    grad = p.mul_(q_sum)
    for (segment, grad_here, _, itself, positives), (ratio, minus_q) in zip(parts, found, strict=True):
        add_q(grad_here, ratio, minus_q, positives, segment.kind, w_pos, w_neg)
        if itself is not None and positives is None and minus_q is None:
            grad_here.scatter_(1, itself, 0.0)
    batch.add_gradient(here, grad)


def _store_values(
    batch: _Batch,
    terms: Terms,
    here: slice,
    w_pos: Tensor,
    w_neg: Tensor | None,
    pulls: list[Tensor],
    pushes: list[Tensor],
    pull_qs: list[Tensor],
    push_qs: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Store a block's values; return the negated row sums of q and both weights, as columns, for its gradient."""
    if terms.want_values:
        values = w_pos * _add(pulls)
        if w_neg is not None and pushes:
            values.addcmul_(w_neg, _add(pushes))
        batch.values[here] = 0.0 - values  # 0 - 0 is 0, where its negation would print as -0
    if not terms.want_grad:
        return w_pos, w_pos, w_neg
    if batch.weight is not None:
        w_pos = w_pos * batch.weight[here]
        w_neg = None if w_neg is None else w_neg * batch.weight[here]
    q_sum = w_pos * _add(pull_qs)
    if w_neg is not None and push_qs:
        q_sum.addcmul_(w_neg, _add(push_qs))
    return q_sum.neg_().unsqueeze(1), w_pos.unsqueeze(1), None if w_neg is None else w_neg.unsqueeze(1)


def _leave_out(
    batch: _Batch, terms: Terms, own: Tensor, where: _Rows, s: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Make the similarities of all samples that are left out -inf; returns the positives, a mask, and both weights."""
    positives, left_out = batch.positives(where, slice(0, s.shape[1])), None
    if batch.contrast is None:
        s.scatter_(1, own, -torch.inf)
        positives.scatter_(1, own, 0.0)
        w_pos, w_neg = weights(positives.sum(1), s.shape[1], terms)
    else:
        left_out, num_contrast, counts = batch.left_out(where, own)
        s.masked_fill_(left_out, -torch.inf)
        positives.masked_fill_(left_out, 0.0)
        w_pos, w_neg = masked_weights(positives.sum(1), num_contrast, counts, terms)
    return positives, left_out, w_pos, torch.zeros_like(w_pos) if w_neg is None else w_neg


def _visit_peaked(batch: _Batch, terms: Terms, own: Tensor, where: _Rows, scratch: Scratch) -> Tensor:
    """Do rows at any temperature, each with its largest entry k taken out; returns in which of them p_k exceeds 1/2."""
    size, m, gamma = len(own), len(batch.columns), terms.gamma
    s = scratch.take("s", size, m)
    torch.mm(batch.queries[where], batch.columns.t(), out=s)
    positives, left_out, w_pos, w_neg = _leave_out(batch, terms, own, where, s)

    s_k, k = s.max(1, keepdim=True)
    k_positive = positives.gather(1, k).squeeze(1)
    positives.scatter_(1, k, 0.0)
    s.scatter_(1, k, -torch.inf)
    shift = s.amax(1, keepdim=True)
    s.sub_(shift)
    log_p = scratch.take("log_p", size, m).copy_(s)
    total = s.exp_().sum(1, keepdim=True)
    gap = (shift + total.log() - s_k).squeeze(1)  # log of the odds against k
    minus_log_p_k, minus_log_a = -logsigmoid(-gap), -logsigmoid(gap)
    p_k, a = torch.exp(-minus_log_p_k), torch.exp(-minus_log_a)
    log_p.sub_(total.log() + minus_log_a.unsqueeze(1)).scatter_(1, torch.cat([own, k], 1), 0.0)
    if left_out is not None:
        log_p.masked_fill_(left_out, 0.0)
    share = s.div_(total)  # of each entry among all but k
    p = torch.mul(share, a.unsqueeze(1), out=scratch.take("p", size, m))

    ratio = minus_q = None
    push = push_q = torch.zeros_like(a)
    if terms.eta > 0:
        ratio, push, push_q = negative_part(p, positives, terms, scratch, 0)
    if gamma > 0:
        minus_q, pull, q = positive_part(p, log_p, positives, terms, scratch, 0)
        pull_q = -q
    else:
        pull, pull_q = torch.linalg.vecdot(log_p, positives), -positives.sum(1)
    focus = torch.exp(-gamma * minus_log_a)
    if terms.want_values:
        pull = pull - k_positive * focus * minus_log_p_k
        push = push - (1 - k_positive) * minus_log_a
        batch.values[where] = 0.0 - (w_pos * pull + w_neg * push)
    if terms.want_grad:
        if batch.weight is not None:
            w_pos, w_neg = w_pos * batch.weight[where], w_neg * batch.weight[where]
        q_sum = w_pos * pull_q + w_neg * push_q
        h = k_positive * -w_pos * focus * (gamma * p_k * minus_log_p_k + a) + (1 - k_positive) * w_neg * p_k
        grad = share.mul_(-(a * q_sum + h).unsqueeze(1))
        add_q(grad, ratio, minus_q, positives, "mixed", w_pos.unsqueeze(1), w_neg.unsqueeze(1))
        grad.scatter_(1, k, (h - p_k * q_sum).unsqueeze(1))
        batch.add_gradient(where, grad)
    return gap < 0
