r"""The tiled kernel: value and gradient of the asymmetric focal contrastive loss, without anything of size n x n.

Anchors are visited in blocks of rows. With s a block's similarities over the temperature and p its softmax, the gradient
of an anchor's loss with respect to s_ik is

    q_ik - p_ik * sum_j q_ij,        q_ij = p_ij * dL_i/dp_ij,

    q_ij =  w+_i (gamma p (1-p)^(gamma-1) log p - (1-p)^gamma)    for a positive,
    q_ij =  eta w-_i p / (1-p)                                    for a negative,

so that value and gradient of a block are done in one visit, while it is in cache. The batch is first sorted by class:
the positives of a block are then one run of columns and the negatives the rest. Most blocks need no mask at all, and
each element meets one formula.

Near p = 1 the formulas above lose everything to cancellation. Only the largest entry k of a row can have p > 1/2. Rows
that have such an entry are done by :func:`_visit_peaked`, which takes k out of its row: with a the share of all the others
(a = 1 - p_k), r their softmax among themselves and Q the sum of their q,

    dL/ds_k = h - p_k Q        and        dL/ds_j = q_j - r_j (a Q + h)        for the others,

    h = a q_k = -w+ a^gamma (gamma p_k (-log p_k) + a)    if k is a positive,    eta w- p_k    if it is a negative,

in which nothing is divided by a number that can vanish, at any temperature.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

# exp(s) needs no shift, and sums of it no care, while |s| stays below this: e^80 times a million terms is a float32.
_UNSHIFTED = 40.0
# Block sizes measured on two cores: below 64 rows the matrix product slows down, above 4 MB a block leaves the cache.
_BLOCK_ELEMENTS, _FEWEST_ROWS, _MOST_ROWS = 2**20, 64, 256


def rows_per_block(columns: int) -> int:
    """Rows of a block under ``tile="auto"``, from the number of contrast samples."""
    return min(max(_BLOCK_ELEMENTS // max(columns, 1) // 64 * 64, _FEWEST_ROWS), _MOST_ROWS)


_Rows: TypeAlias = slice | Tensor


class Sweep(NamedTuple):
    """What one visit of all anchors gives: values (n,), gradients of the weighted sum (empty where not asked for)."""

    values: Tensor
    grad_z: Tensor
    grad_reference: Tensor


@dataclass(frozen=True)
class _Terms:
    """The loss's constants, as every block needs them."""

    eta: float
    gamma: float
    released: bool
    want_values: bool
    want_grad: bool


@dataclass(frozen=True)
class _Segment:
    """A run of columns and what stands in it: "positive", "negative", or "mixed" with a mask made on the spot."""

    start: int
    stop: int
    kind: str
    own: bool = False  # whether the block's anchors themselves stand in it

    @property
    def columns(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class _Block:
    start: int
    stop: int
    segments: tuple[_Segment, ...]


@dataclass
class _Batch:
    """Anchors in the order of visiting, everything they are contrasted with, and where gradients gather."""

    queries: Tensor  # (n, d), divided by the temperature
    columns: Tensor  # (m, d): the anchors first, then the reference
    row_labels: Tensor | None
    column_labels: Tensor | None
    mask: Tensor | None
    weight: Tensor | None  # (n,), of each anchor's loss in the gradient
    values: Tensor
    grad_queries: Tensor
    grad_columns: Tensor  # (n, d), or (m, d) where the reference wants a gradient

    def positives(self, rows: _Rows, columns: slice) -> Tensor:
        """Which columns are positives of these rows, as 1.0 and 0.0; an anchor may still count itself."""
        if self.mask is not None:
            found = self.mask[rows, columns]
        else:
            assert self.row_labels is not None
            assert self.column_labels is not None
            found = self.row_labels[rows].unsqueeze(1) == self.column_labels[columns]
        return found.to(self.columns.dtype)

    def add_gradient(self, rows: _Rows, columns: slice, grad: Tensor) -> None:
        """Send the gradient of a block's similarities on to the features on both sides."""
        if isinstance(rows, slice):
            target = self.grad_queries[rows]
            target.addmm_(grad, self.columns[columns])
        else:
            self.grad_queries.index_add_(0, rows, grad @ self.columns[columns])
        target = self.grad_columns[columns]  # ends early where the reference wants no gradient
        if len(target):
            target.addmm_(grad[:, : len(target)].t(), self.queries[rows])


def sweep(
    z: Tensor,
    reference: Tensor | None,
    y: Tensor | None,
    y_reference: Tensor | None,
    mask: Tensor | None,
    weight: Tensor | None,
    eta: float,
    gamma: float,
    temperature: float,
    released: bool,
    tile: int,
    want_values: bool,
    want_grad: bool,
    want_reference_grad: bool,
) -> Sweep:
    """Visit all anchors once. There must be three contrast columns at least, the anchor's own among them."""
    sort = mask is None and len(z) > tile
    order = torch.argsort(y, stable=True) if sort and y is not None else None
    if order is not None:
        assert y is not None
        z, y = z[order], y[order]
        weight = None if weight is None else weight[order]
    reference_order = None
    if sort and reference is not None and y_reference is not None:
        reference_order = torch.argsort(y_reference, stable=True)
        reference, y_reference = reference[reference_order], y_reference[reference_order]
    columns = z if reference is None else torch.cat([z, reference])
    batch = _Batch(
        queries=z / temperature,
        columns=columns,
        row_labels=y,
        column_labels=y if reference is None or y is None or y_reference is None else torch.cat([y, y_reference]),
        mask=mask,
        weight=weight,
        values=z.new_zeros(len(z) if want_values else 0),
        grad_queries=torch.zeros_like(z) if want_grad else z.new_zeros(0),
        grad_columns=torch.zeros_like(columns if want_reference_grad else z) if want_grad else z.new_zeros(0),
    )
    terms = _Terms(eta, gamma, released, want_values, want_grad)
    plan = _sorted_plan(batch, y_reference, tile) if sort else _plain_plan(len(z), len(columns), tile)
    _visit_all(batch, terms, plan, temperature)

    grad_z, grad_reference = batch.grad_queries, z.new_zeros(0)
    if want_grad:
        grad_z.div_(temperature).add_(batch.grad_columns[: len(z)])
        grad_reference = batch.grad_columns[len(z) :]
    values = batch.values
    if order is not None:
        values = torch.empty_like(values).index_copy_(0, order, values) if want_values else values
        grad_z = torch.empty_like(grad_z).index_copy_(0, order, grad_z) if want_grad else grad_z
    if reference_order is not None and len(grad_reference):
        grad_reference = torch.empty_like(grad_reference).index_copy_(0, reference_order, grad_reference)
    return Sweep(values, grad_z, grad_reference)


def _plain_plan(n: int, m: int, tile: int) -> Iterator[_Block]:
    for start in range(0, n, tile):
        yield _Block(start, min(start + tile, n), (_Segment(0, m, "mixed", own=True),))


def _sorted_plan(batch: _Batch, y_reference: Tensor | None, tile: int) -> Iterator[_Block]:
    """Blocks of sorted rows. A class of at least ``tile`` rows has blocks of its own; smaller neighbours share one."""
    labels, n, m = batch.row_labels, len(batch.queries), len(batch.columns)
    assert labels is not None
    classes, counts = torch.unique_consecutive(labels, return_counts=True)
    stops = counts.cumsum(0).tolist()
    starts = [0, *stops[:-1]]
    if y_reference is None:
        low = high = [0] * len(starts)
    else:
        low = torch.searchsorted(y_reference, classes).tolist()
        high = torch.searchsorted(y_reference, classes, right=True).tolist()

    def block(start: int, stop: int, first: int, last: int) -> _Block:
        kind = "positive" if first == last else "mixed"
        own = _Segment(starts[first], stops[last], kind, own=True)
        others = _Segment(n + low[first], n + high[last], kind)
        return _Block(start, stop, tuple(_fill((own, others), m)))

    first = 0
    while first < len(starts):
        last = first
        if stops[first] - starts[first] >= tile:
            pieces = -(-(stops[first] - starts[first]) // tile)
            cuts = [starts[first] + (stops[first] - starts[first]) * i // pieces for i in range(pieces + 1)]
            yield from (block(a, b, first, first) for a, b in zip(cuts, cuts[1:], strict=False))
        else:
            while last + 1 < len(starts) and stops[last + 1] - starts[first] <= tile:
                last += 1
            yield block(starts[first], stops[last], first, last)
        first = last + 1


def _fill(runs: tuple[_Segment, ...], m: int) -> Iterator[_Segment]:
    """The runs that hold positives, and the negatives between them."""
    position = 0
    for run in runs:
        if run.stop == run.start:
            continue
        if run.start > position:
            yield _Segment(position, run.start, "negative")
        yield run
        position = run.stop
    if position < m:
        yield _Segment(position, m, "negative")


class _Scratch:
    """Buffers that all blocks share, so that memory is touched once and stays in cache."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, columns: int) -> Tensor:
        """A buffer of this shape, with whatever its last user left in it."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < rows * columns:
            buffer = self._buffers[name] = self._like.new_empty(rows * columns)
        return buffer[: rows * columns].view(rows, columns)


def _visit_all(batch: _Batch, terms: _Terms, plan: Iterator[_Block], temperature: float) -> None:
    bound = batch.columns.square().sum(1).max() / temperature
    unshifted = bool(bound <= _UNSHIFTED)  # False for NaN: such a batch takes the path that assumes nothing.
    scratch = _Scratch(batch.columns)
    try_smooth = unshifted
    for block in plan:
        here = slice(block.start, block.stop)
        rows = torch.arange(block.start, block.stop, device=batch.columns.device)
        peaked = _visit_smooth(batch, terms, block, rows, scratch) if try_smooth else rows
        num_peaked = 0
        if len(peaked):
            num_peaked = _visit_peaked(batch, terms, peaked, here if len(peaked) == len(rows) else peaked, scratch)
        # Peaked rows come in crowds: after a block that was mostly peaked, trying the next as smooth is work for nothing.
        try_smooth = unshifted and num_peaked * 2 <= len(rows)


def _weights(num_positive: Tensor, m: int, terms: _Terms) -> tuple[Tensor, Tensor]:
    """1/|P_i| and 1/|N_i|, 0 for an empty set, or twice 1/m for the released formula."""
    if terms.released:
        both = torch.full_like(num_positive, 1.0 / m)
        return both, both
    num_negative = (m - 1) - num_positive
    return (num_positive > 0) / num_positive.clamp(min=1), (num_negative > 0) / num_negative.clamp(min=1)


class _Part(NamedTuple):
    """A segment of a block with its exp(s), later p, later gradient; and which entries are positives, if it is mixed."""

    segment: _Segment
    entries: Tensor
    positives: Tensor | None


def _visit_smooth(batch: _Batch, terms: _Terms, block: _Block, rows: Tensor, scratch: _Scratch) -> Tensor:
    """Do the rows of a block in which no p exceeds 1/2, and return the others, which are then still to be done."""
    here, size, m = slice(block.start, block.stop), len(rows), len(batch.columns)
    queries = batch.queries[here]
    parts: list[_Part] = []
    total, largest = queries.new_zeros(size), queries.new_zeros(size)
    num_positive = queries.new_zeros(size)
    similarity = queries.new_zeros(size)  # of the positives, summed: all that gamma = 0 needs of them
    for i, segment in enumerate(block.segments):
        e = scratch.take(f"e{i}", size, segment.stop - segment.start)
        torch.mm(queries, batch.columns[segment.columns].t(), out=e)
        own = (rows - segment.start).unsqueeze(1)
        positives = None
        if segment.kind == "mixed":
            positives = batch.positives(here, segment.columns)
            if segment.own:
                positives.scatter_(1, own, 0.0)
            num_positive += positives.sum(1)
        elif segment.kind == "positive":
            num_positive += segment.stop - segment.start - segment.own
        if segment.kind != "negative" and terms.gamma == 0 and terms.want_values:
            if segment.own:
                e.scatter_(1, own, 0.0)
            similarity += e.sum(1) if positives is None else torch.linalg.vecdot(e, positives)
        if segment.own:
            e.scatter_(1, own, -torch.inf)
        total += e.exp_().sum(1)
        largest = torch.maximum(largest, e.amax(1))
        parts.append(_Part(segment, e, positives))
    is_peaked = largest * 2 > total
    peaked = rows[is_peaked]
    if len(peaked) == size:
        return peaked
    w_pos, w_neg = _weights(num_positive, m, terms)
    if len(peaked):  # Their entries become harmless numbers of weight zero; their values are overwritten afterwards.
        for part in parts:
            part.entries[is_peaked] = 1.0
        total[is_peaked] = 4.0
        w_pos, w_neg = w_pos * ~is_peaked, w_neg * ~is_peaked
    row = _SmoothRows(rows, total, w_pos, w_neg * terms.eta, num_positive, similarity)
    _finish_smooth(batch, terms, here, parts, row, scratch)
    return peaked


class _SmoothRows(NamedTuple):
    """Per row: its own column, the sum of exp(s), both terms' weights, |P_i|, and the positives' similarities summed."""

    own: Tensor
    total: Tensor
    w_pos: Tensor
    w_neg: Tensor
    num_positive: Tensor
    similarity: Tensor


def _finish_smooth(
    batch: _Batch, terms: _Terms, here: slice, parts: list[_Part], row: _SmoothRows, scratch: _Scratch
) -> None:
    """From exp(s) and its row sums to values and gradients."""
    inverse = row.total.reciprocal().unsqueeze(1)
    pull, push = torch.zeros_like(row.total), torch.zeros_like(row.total)
    pull_q, push_q = torch.zeros_like(row.total), torch.zeros_like(row.total)  # row sums of q / w
    if terms.gamma == 0:
        pull = row.similarity - row.total.log() * row.num_positive
        pull_q = -row.num_positive
    found: list[tuple[Tensor | None, Tensor | None]] = []
    for i, (segment, p, positives) in enumerate(parts):
        p.mul_(inverse)
        ratio = minus_q = None
        if terms.eta > 0 and segment.kind != "positive":
            ratio, value, q = _negative_part(p, positives, terms, scratch, i)
            push, push_q = push + value, push_q + q
        if terms.gamma > 0 and segment.kind != "negative":
            log_p = torch.log(p, out=scratch.take("log_p", *p.shape))
            if segment.own:
                log_p.scatter_(1, (row.own - segment.start).unsqueeze(1), 0.0)
            minus_q, value, q = _positive_part(p, log_p, positives, terms, scratch, i)
            pull, pull_q = pull + value, pull_q - q + (segment.own and positives is None)
        found.append((ratio, minus_q))
    if terms.want_values:
        batch.values[here] = -(row.w_pos * pull + row.w_neg * push)
    if not terms.want_grad:
        return
    w_pos, w_neg = row.w_pos, row.w_neg
    if batch.weight is not None:
        w_pos, w_neg = w_pos * batch.weight[here], w_neg * batch.weight[here]
    minus_q_sum = -(w_pos * pull_q + w_neg * push_q).unsqueeze(1)
    for (segment, grad, positives), (ratio, minus_q) in zip(parts, found, strict=True):
        grad.mul_(minus_q_sum)
        _add_q(grad, ratio, minus_q, positives, segment.kind, w_pos.unsqueeze(1), w_neg.unsqueeze(1))
        if segment.own:
            grad.scatter_(1, (row.own - segment.start).unsqueeze(1), 0.0)
        batch.add_gradient(here, segment.columns, grad)


def _add_q(
    grad: Tensor,
    ratio: Tensor | None,
    minus_q: Tensor | None,
    positives: Tensor | None,
    kind: str,
    w_pos: Tensor,
    w_neg: Tensor,
) -> None:
    """Add q to the gradient of a block: from both parts where they were computed, -w+ for a positive at gamma = 0."""
    if ratio is not None:
        grad.addcmul_(ratio, w_neg)
    if minus_q is not None:
        grad.addcmul_(minus_q, w_pos, value=-1.0)
    elif positives is not None:
        grad.addcmul_(positives, w_pos, value=-1.0)
    elif kind == "positive":
        grad.sub_(w_pos)


def _negative_part(
    p: Tensor, positives: Tensor | None, terms: _Terms, scratch: _Scratch, i: int
) -> tuple[Tensor | None, Tensor, Tensor]:
    """p/(1-p) of the negatives, and the row sums of log(1-p) and of p/(1-p)."""
    minus_p = torch.neg(p, out=scratch.take(f"ratio{i}", *p.shape))
    if positives is not None:
        minus_p.addcmul_(p, positives)  # exactly 0 at the positives, for which all that follows is 0
    work = scratch.take("work", *p.shape)
    nothing = p.new_zeros(len(p))
    values = torch.log1p(minus_p, out=work).sum(1) if terms.want_values else nothing
    if not terms.want_grad:
        return None, values, nothing
    ratio = minus_p.div_(torch.sub(minus_p.new_full((), -1.0), minus_p, out=work))
    return ratio, values, ratio.sum(1)


def _positive_part(
    p: Tensor, log_p: Tensor, positives: Tensor | None, terms: _Terms, scratch: _Scratch, i: int
) -> tuple[Tensor | None, Tensor, Tensor]:
    """-q/w+ of the positives where gamma > 0, and the row sums of (1-p)^gamma log p and of -q/w+."""
    gamma = terms.gamma
    not_p = torch.sub(p.new_ones(()), p, out=scratch.take("work", *p.shape))
    power = scratch.take("power", *p.shape)  # (1-p)^(gamma-1)
    if gamma == 1:
        power.fill_(1.0)
    elif gamma == 2:
        power.copy_(not_p)
    else:  # Twice as fast as torch.pow, and as exact: 1-p is at least 1/2 here.
        torch.log(not_p, out=power).mul_(gamma - 1).exp_()
    minus_q, minus_q_sum, values = None, p.new_zeros(len(p)), p.new_zeros(len(p))
    if terms.want_grad:
        minus_q = torch.addcmul(not_p, p, log_p, value=-gamma, out=scratch.take(f"q{i}", *p.shape)).mul_(power)
        if positives is not None:
            minus_q.mul_(positives)
        minus_q_sum = minus_q.sum(1)
    if terms.want_values:
        power.mul_(not_p).mul_(log_p)
        values = power.sum(1) if positives is None else torch.linalg.vecdot(power, positives)
    return minus_q, values, minus_q_sum


def _visit_peaked(batch: _Batch, terms: _Terms, rows: Tensor, where: _Rows, scratch: _Scratch) -> int:
    """Do rows at any temperature, each with its largest entry k taken out; returns in how many p_k exceeds 1/2."""
    m, gamma, own = len(batch.columns), terms.gamma, rows.unsqueeze(1)
    s = scratch.take("e0", len(rows), m)
    torch.mm(batch.queries[where], batch.columns.t(), out=s).scatter_(1, own, -torch.inf)
    positives = batch.positives(where, slice(0, m)).scatter_(1, own, 0.0)
    w_pos, w_neg = _weights(positives.sum(1), m, terms)
    w_neg = w_neg * terms.eta

    s_k, k = s.max(1, keepdim=True)
    k_positive = positives.gather(1, k).squeeze(1)
    positives.scatter_(1, k, 0.0)
    s.scatter_(1, k, -torch.inf)
    shift = s.amax(1, keepdim=True)
    s.sub_(shift)
    log_p = scratch.take("log_p", len(rows), m).copy_(s)
    total = s.exp_().sum(1, keepdim=True)
    gap = (shift + total.log() - s_k).squeeze(1)  # log of the odds against k
    minus_log_p_k, minus_log_a = -logsigmoid(-gap), -logsigmoid(gap)
    p_k, a = torch.exp(-minus_log_p_k), torch.exp(-minus_log_a)
    log_p.sub_(total.log() + minus_log_a.unsqueeze(1)).scatter_(1, torch.cat([own, k], 1), 0.0)
    share = s.div_(total)  # of each entry among all but k
    p = torch.mul(share, a.unsqueeze(1), out=scratch.take("p", len(rows), m))

    ratio = minus_q = None
    push = push_q = torch.zeros_like(a)
    if terms.eta > 0:
        ratio, push, push_q = _negative_part(p, positives, terms, scratch, 0)
    if gamma > 0:
        minus_q, pull, q = _positive_part(p, log_p, positives, terms, scratch, 0)
        pull_q = -q
    else:
        pull, pull_q = torch.linalg.vecdot(log_p, positives), -positives.sum(1)
    focus = torch.exp(-gamma * minus_log_a)
    if terms.want_values:
        pull = pull - k_positive * focus * minus_log_p_k
        push = push - (1 - k_positive) * minus_log_a
        batch.values[where] = -(w_pos * pull + w_neg * push)
    if terms.want_grad:
        if batch.weight is not None:
            w_pos, w_neg = w_pos * batch.weight[where], w_neg * batch.weight[where]
        q_sum = w_pos * pull_q + w_neg * push_q
        h = k_positive * -w_pos * focus * (gamma * p_k * minus_log_p_k + a) + (1 - k_positive) * w_neg * p_k
        grad = share.mul_(-(a * q_sum + h).unsqueeze(1))
        _add_q(grad, ratio, minus_q, positives, "mixed", w_pos.unsqueeze(1), w_neg.unsqueeze(1))
        grad.scatter_(1, k, (h - p_k * q_sum).unsqueeze(1))
        batch.add_gradient(where, slice(0, m), grad)
    return int((gap < 0).sum())
