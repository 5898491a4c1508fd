"""Contrastive losses of a batch that several processes (ranks) share: exact values and exact gradients.

Each rank encodes its share of a batch. The shares may differ in size. A rank's own samples are its anchors, and the
samples of all ranks are its contrast samples. A plain ``all_gather`` gives the right loss and a wrong gradient: it
drops the derivative of every rank's loss by the features of the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lopsided.losses._kernel.checks import Reference, check_word
from lopsided.losses.contrastive import AsymmetricFocalContrastiveLoss

__all__ = ["DistributedLoss", "Gathered", "gather_reference"]

Group = Any
"""A torch process group, or None for the default group."""


class Gathered(NamedTuple):
    """The samples of the other ranks, seen from one rank."""

    reference: tuple[Tensor, Tensor | None] | None
    """Features and labels of the other ranks, for the argument ``reference``. None if there are no other samples."""
    everyone: tuple[Tensor, Tensor | None]
    """Features and labels of all ranks, in the order of ranks, without a graph: for a queue that all ranks share."""
    weight: float
    """The factor of this rank's mean loss: its number of anchors, divided by the mean number of anchors of a rank."""


def gather_reference(
    z: Tensor, y: Tensor | None = None, *, ignore_index: int | None = None, group: Group = None
) -> Gathered:
    """Gather the features (n, d) or (n, views, d) and labels (n,) of all ranks, with exact gradients.

    ``weight * loss(z, y, reference=reference)`` is a rank's part of the loss of the whole batch. The mean of the parts
    over the ranks is that loss, also if the ranks have unequal numbers of samples. ``DistributedDataParallel`` takes
    the mean of the gradients over the ranks, which is then the gradient of the whole batch.

    The backward pass sums the gradients of the features over the ranks. So every rank must call it. Without a process
    group, nothing is exchanged, and the weight is 1. Samples with the label ``ignore_index`` do not count as anchors.
    """
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    if _num_ranks(group) == 1:
        return Gathered(None, (wide.detach(), y), 1.0)
    sizes, rank = _sizes(z, y, group), dist.get_rank(group)
    # A rank with all samples has no others to take a gradient for, so that its backward pass exchanges nothing.
    everyone: Tensor = _Gather.apply(wide if max(sizes) < sum(sizes) else wide.detach(), sizes, group)
    labels = None if y is None else _gather_rows(y.long(), sizes, group)
    before = sum(sizes[:rank])
    after = before + sizes[rank]
    reference = None
    if after - before < sum(sizes):
        others, y_others = (None if x is None else torch.cat([x[:before], x[after:]]) for x in (everyone, labels))
        assert others is not None
        reference = (others, y_others)
    counts = sizes
    if labels is not None and ignore_index is not None:
        counts = [int((part != ignore_index).sum()) for part in torch.split(labels, sizes)]
    weight = len(counts) * counts[rank] / max(sum(counts), 1)
    return Gathered(reference, (everyone.detach(), labels), weight)


class DistributedLoss(nn.Module):
    """The loss of a batch that several ranks share, from a contrastive loss for one process.

    Every rank calls it with its own share, which may be empty, and gets the loss of the whole batch. Every rank must
    also call ``backward``. ``gradients`` says what happens to the gradients of the weights afterwards: "mean" if their
    mean over the ranks is taken, as by ``DistributedDataParallel``, or "sum" if they are summed.

    >>> from lopsided.losses import ContrastiveLoss
    >>> z, y = torch.eye(4), torch.tensor([0, 0, 1, 1])
    >>> bool(DistributedLoss(ContrastiveLoss())(z, y) == ContrastiveLoss()(z, y))  # a single process
    True
    """

    def __init__(
        self,
        loss: AsymmetricFocalContrastiveLoss,
        *,
        gradients: Literal["mean", "sum"] = "mean",
        group: Group = None,
    ) -> None:
        super().__init__()
        if not isinstance(loss, AsymmetricFocalContrastiveLoss):
            got = type(loss).__name__
            raise TypeError(f"loss must be a contrastive loss of this package, got {got}. Build on gather_reference.")
        if loss.reduction == "none":
            raise ValueError("The reduction of the loss must be 'mean' or 'sum', got 'none'.")
        self.loss, self.group = loss, group
        self.gradients = check_word("gradients", gradients, ("mean", "sum"))

    def forward(
        self,
        z: Tensor,
        y: Tensor,
        *,
        reference: Reference | None = None,
        temperature: float | Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the samples of all ranks.

        ``z`` and ``y`` are the share of this rank. ``reference`` are further contrast samples, such as a queue. They
        must be the same on all ranks.
        """
        others = gather_reference(z, y, group=self.group).reference
        if len(z):
            all_others = _join(others, reference)
            total, values = self.loss.total_and_values(z, y, reference=all_others, temperature=temperature)
            ignored = self.loss.ignore_index
            views = values.numel() // len(z)
            count = total.new_tensor(values.numel()) if ignored is None else (y != ignored).sum().to(total) * views
        else:  # Nothing to add, but the gradients of the other ranks still pass through here.
            own = self.loss.temperature if temperature is None else temperature
            dtype = torch.promote_types(z.dtype, torch.float32)
            inputs = [z, *(() if others is None else others[:1]), *([own] if isinstance(own, Tensor) else [])]
            total = torch.stack([x.sum().to(z.device, dtype) * 0.0 for x in inputs]).sum()
            count = torch.zeros_like(total)
        num_ranks = _num_ranks(self.group)
        mean, factor = self.loss.reduction == "mean", num_ranks if self.gradients == "mean" else 1
        whole: Tensor = _Whole.apply(total, count, mean, factor, num_ranks > 1, self.group)
        return whole

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"gradients={self.gradients!r}"


def _num_ranks(group: Group) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _join(others: Reference | None, more: Reference | None) -> Reference | None:
    """The features of other ranks, without their views, and then ``more``."""
    if others is None or more is None:
        return more if others is None else others
    flat = []
    for z, y in (others, more):
        views = z.shape[1] if z.ndim == 3 else 1
        assert y is not None
        flat.append((z.reshape(-1, z.shape[-1]), y.repeat_interleave(views)))
    (z, y), (z_more, y_more) = flat
    return torch.cat([z, z_more.to(z.dtype)]), torch.cat([y, y_more])


def _sizes(z: Tensor, y: Tensor | None, group: Group) -> list[int]:
    """The number of samples of each rank. All ranks raise if the other dimensions differ."""
    if z.ndim not in (2, 3):
        raise ValueError(f"z must have shape (n, d) or (n, views, d), got {tuple(z.shape)}.")
    own = torch.tensor([len(z), z.shape[1] if z.ndim == 3 else 0, z.shape[-1], y is not None], device=z.device)
    parts = [torch.empty_like(own) for _ in range(_num_ranks(group))]
    dist.all_gather(parts, own, group=group)
    facts = torch.stack(parts).tolist()
    if any(row[1:] != facts[0][1:] for row in facts):
        named = "; ".join(
            f"rank {rank} has {views or 1} views of {width} numbers, {'with' if labels else 'without'} labels"
            for rank, (_, views, width, labels) in enumerate(facts)
        )
        raise ValueError(f"All ranks must pass features of the same shape, and all or none of them labels: {named}.")
    return [int(row[0]) for row in facts]


def _gather_rows(rows: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """The rows of all ranks. They are padded, because all ranks must exchange equal shapes."""
    if not any(sizes):
        return rows
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


class _Gather(torch.autograd.Function):
    """The rows of all ranks. Backward sums the gradients of a rank's rows over all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _gather_rows(rows.detach(), sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum over the ranks; each rank returns its own rows."""
        total, rank = grads[0].contiguous().clone(), dist.get_rank(ctx.group)
        dist.all_reduce(total, group=ctx.group)
        before = sum(ctx.sizes[:rank])
        return total[before : before + ctx.sizes[rank]], None, None


class _Whole(torch.autograd.Function):
    """The sum or mean over the anchors of all ranks. Its gradient is that of this rank's anchors, times ``factor``."""

    @staticmethod
    def forward(
        ctx: Any, total: Tensor, count: Tensor, mean: bool, factor: int, exchange: bool, group: Group
    ) -> Tensor:
        sums = torch.stack([total.detach(), count])
        if exchange:
            dist.all_reduce(sums, group=group)
        divisor = sums[1].clamp(min=1) if mean else torch.ones_like(sums[1])
        ctx.save_for_backward(factor / divisor)
        return sums[0] / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradient of this rank's part."""
        return grads[0] * ctx.saved_tensors[0], *[None] * 5
