"""BCL: balanced contrastive learning (Zhu et al., 2022), its joint stage, and its class averaging alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lopsided.losses._counts import check_range
from lopsided.losses._kernel.autograd import _saveable
from lopsided.losses._kernel.averaged import AveragedRows, AveragedTotal
from lopsided.losses._kernel.checks import (
    Arguments,
    Reference,
    check_inputs,
    check_number,
    check_tile,
    check_word,
)
from lopsided.losses.contrastive import Reduction, Tile, _unit, _unit_reference
from lopsided.losses.logit_adjusted import LogitAdjustedLoss
from lopsided.losses.objective import Objective, Samples

__all__ = [
    "AveragedContrastiveLoss",
    "BalancedContrastiveLoss",
    "averaged_contrastive_loss",
    "balanced_contrastive_loss",
]

_TEMPERATURE = "The authors use 0.07."


def balanced_contrastive_loss(
    z: Tensor,
    y: Tensor,
    prototypes: Tensor,
    *,
    temperature: float = 0.07,
    reference: Reference | None = None,
    reduction: Reduction = "mean",
    tile: Tile = "auto",
) -> Tensor:
    r"""Balanced contrastive loss of Zhu et al., 2022: class averaging and class complement.

    B_c are all features of class c and the prototype of class c (class complement). With s_ik = z_i . z_k / temperature
    and ``B_c \ i`` without the anchor itself, the loss of an anchor i of class y is the mean over its positives j in
    ``B_y \ i`` of ``-log(exp(s_ij) / sum_c mean_{k in B_c \ i} exp(s_ik))``. The mean in place of a sum (class
    averaging) lets every class count the same in the denominator. Classes that are absent from the batch are there by
    their prototypes, so every anchor has a positive and all classes as negatives.

    Args:
        z: Features (n, d) or (n, views, d) of length 1. Every view is an anchor.
        y: Labels (n,) from 0 to K - 1.
        prototypes: (K, d), of length 1, one per class. They are not anchors and get a gradient.
        temperature: Divides the similarities.
        reference: ``(z_ref, y_ref)``, extra contrast samples that are not anchors.
        reduction: "mean" and "sum" are over all anchors; "none" returns the values, (n,) or (n, views).
        tile: Rows per block of the kernel. It never changes the result.

    >>> z, c = torch.eye(2)[[0, 0, 1]], torch.eye(2)
    >>> balanced_contrastive_loss(z, torch.tensor([0, 0, 1]), c, temperature=1.0).round(decimals=4)
    tensor(0.3133)
    """
    check_word("reduction", reduction, ("mean", "sum", "none"))
    number = check_number("temperature", temperature, above_zero=True, advice=_TEMPERATURE)
    if reduction == "none":
        return _values(z, y, prototypes, number, reference, tile)
    total, values = _total_and_values(z, y, prototypes, number, reference, tile)
    return total / values.numel() if reduction == "mean" else total


def averaged_contrastive_loss(
    z: Tensor,
    y: Tensor,
    *,
    temperature: float = 0.07,
    reference: Reference | None = None,
    reduction: Reduction = "mean",
    tile: Tile = "auto",
) -> Tensor:
    r"""CL with class averaging: every class of the batch counts the same in the softmax, however many images it has.

    With s_ik = z_i . z_k / temperature and C_c the contrast samples of class c without the anchor, the loss of an
    anchor i of class y is the mean over its positives j of ``-log(exp(s_ij) / sum_c mean_{k in C_c} exp(s_ik))``. It is
    :func:`balanced_contrastive_loss` without prototypes. The loss of an anchor without a positive is 0. The arguments
    are those of :func:`balanced_contrastive_loss`.

    >>> z = torch.eye(2)[[0, 0, 1, 1]]
    >>> averaged_contrastive_loss(z, torch.tensor([0, 0, 1, 1]), temperature=1.0).round(decimals=4)
    tensor(0.3133)
    """
    check_word("reduction", reduction, ("mean", "sum", "none"))
    number = check_number("temperature", temperature, above_zero=True, advice=_TEMPERATURE)
    values = _values(z, y, None, number, reference, tile)
    return values if reduction == "none" else values.mean() if reduction == "mean" else values.sum()


class _Parts:
    """Flat and checked arguments, and the mean similarity of each anchor to its positives, (n,).

    Only without prototypes is an anchor ``lonely``: no other column is of its class.
    """

    def __init__(
        self, z: Tensor, y: Tensor, prototypes: Tensor | None, temperature: float, reference: Reference | None
    ) -> None:
        checked = check_inputs(z, y, reference, None, "all", None, temperature)
        found = Arguments(*map(_saveable, checked))  # type: ignore[arg-type]
        assert found.y is not None
        anchors = found.z
        columns = [anchors, *([] if found.reference is None else [found.reference])]
        labels = [found.y, *([] if found.y_reference is None else [found.y_reference])]
        if prototypes is None:
            named, places = torch.unique(torch.cat(labels), return_inverse=True)
            classes, labels = len(named), [places]
            own_labels = places[: len(anchors)]
        else:
            classes = _check_prototypes(prototypes, z, found.y, found.y_reference)
            columns.append(prototypes.to(anchors))
            labels.append(torch.arange(classes, device=anchors.device))
            own_labels = found.y
        self.queries, self.columns = anchors, torch.cat(columns)
        self.y, self.y_columns = own_labels, torch.cat(labels)
        counts = anchors.new_zeros(classes).index_add_(0, self.y_columns, anchors.new_ones(len(self.y_columns)))
        others = counts[self.y] - 1  # of the anchor's class, without the anchor
        self.lonely = others < 1 if prototypes is None else None
        others = others.clamp(min=1)
        self.log_weight = -counts.log()[self.y_columns]
        self.own = (counts[self.y] / others).log()
        sums = self.columns.new_zeros(classes, self.columns.shape[1]).index_add(0, self.y_columns, self.columns)
        # The gradient of index_select is a sum of rows; the gradient of sums[y] adds numbers one by one.
        of_class = (anchors * (sums.index_select(0, self.y) - anchors)).sum(1)
        self.positive = of_class / (others * temperature)
        self.temperature, self.shape = temperature, z.shape[:-1]

    def arguments(self, tile: Tile) -> tuple[Tensor | float | int, ...]:
        """Return the arguments of the kernel."""
        given = check_tile(tile)
        if given is None:
            raise ValueError("tile must be 'auto' or an int >= 1 for BCL, got None. It has no dense path.")
        inputs = (self.queries, self.columns, self.y, self.y_columns, self.log_weight, self.own)
        if not torch.is_grad_enabled():  # Otherwise the kernel would compute a gradient for nothing.
            inputs = tuple(x.detach() for x in inputs)  # type: ignore[assignment]
        return (*inputs, self.temperature, given)


def _total_and_values(
    z: Tensor, y: Tensor, prototypes: Tensor, temperature: float, reference: Reference | None, tile: Tile
) -> tuple[Tensor, Tensor]:
    parts = _Parts(z, y, prototypes, temperature, reference)
    total, values = AveragedTotal.apply(*parts.arguments(tile))
    return total - parts.positive.sum(), (values - parts.positive.detach()).reshape(parts.shape)


def _values(
    z: Tensor, y: Tensor, prototypes: Tensor | None, temperature: float, reference: Reference | None, tile: Tile
) -> Tensor:
    parts = _Parts(z, y, prototypes, temperature, reference)
    if len(parts.columns) < 2:  # There is nothing to contrast with.
        return (parts.queries * 0.0).sum(1).reshape(parts.shape)
    values: Tensor = AveragedRows.apply(*parts.arguments(tile)) - parts.positive
    if parts.lonely is not None:
        values = values.masked_fill(parts.lonely, 0.0)
    return values.reshape(parts.shape)


def _check_prototypes(prototypes: Tensor, z: Tensor, *labels: Tensor | None) -> int:
    """Return the number of classes. Raise if the prototypes do not fit the features or the labels."""
    fits = isinstance(prototypes, Tensor) and prototypes.ndim == 2 and prototypes.is_floating_point()
    if not fits or prototypes.shape[1] != z.shape[-1] or len(prototypes) < 2:
        got = tuple(prototypes.shape) if isinstance(prototypes, Tensor) else type(prototypes).__name__
        raise ValueError(f"prototypes must have shape (K, {z.shape[-1]}), one row for each class, got {got}.")
    classes = prototypes.shape[0]
    for y in labels:
        if y is not None and len(y) and y.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = (int(value) for value in y.aminmax())
            if low < 0 or high >= classes:
                wrong = low if low < 0 else high
                raise ValueError(f"y must hold labels from 0 to {classes - 1}, one per prototype, got {wrong}.")
    return classes


class BalancedContrastiveLoss(nn.Module):
    """:func:`balanced_contrastive_loss` as a module that owns the prototypes and normalises features and prototypes.

    The prototypes are parameters: give ``criterion.parameters()`` to the optimizer. The authors compute them from the
    weights of a classifier by two linear layers; ``prototypes`` in the call replaces those of the module, for
    prototypes that are computed in such a way.
    """

    def __init__(
        self,
        num_classes: int,
        width: int,
        temperature: float = 0.07,
        *,
        reduction: Reduction = "mean",
        tile: Tile = "auto",
    ) -> None:
        super().__init__()
        self.temperature = check_number("temperature", temperature, above_zero=True, advice=_TEMPERATURE)
        self.reduction = check_word("reduction", reduction, ("mean", "sum", "none"))
        self.tile = tile
        self.prototypes = nn.Parameter(torch.randn(num_classes, width))

    def forward(
        self, z: Tensor, y: Tensor, *, reference: Reference | None = None, prototypes: Tensor | None = None
    ) -> Tensor:
        """Return the loss of features ``z`` (n, d) or (n, views, d) with labels ``y`` (n,)."""
        arguments = self._arguments(z, y, reference, prototypes)
        if self.reduction == "none":
            return _values(*arguments, self.tile)
        total, values = _total_and_values(*arguments, self.tile)
        return total / values.numel() if self.reduction == "mean" else total

    def total_and_values(
        self, z: Tensor, y: Tensor, *, reference: Reference | None = None, prototypes: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum over all anchors, to differentiate, and the detached loss of each, (n,) or (n, views)."""
        return _total_and_values(*self._arguments(z, y, reference, prototypes), self.tile)

    def _arguments(
        self, z: Tensor, y: Tensor, reference: Reference | None, prototypes: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, float, Reference | None]:
        given = self.prototypes if prototypes is None else prototypes
        return _unit(z), y, _unit(given), self.temperature, _unit_reference(reference)

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        classes, width = self.prototypes.shape
        return f"{classes}, {width}, temperature={self.temperature:g}, reduction={self.reduction!r}"


class AveragedContrastiveLoss(nn.Module):
    """:func:`averaged_contrastive_loss` as a module that normalises the features."""

    def __init__(self, temperature: float = 0.07, *, reduction: Reduction = "mean", tile: Tile = "auto") -> None:
        super().__init__()
        self.temperature = check_number("temperature", temperature, above_zero=True, advice=_TEMPERATURE)
        check_word("reduction", reduction, ("mean", "sum", "none"))
        self.reduction: Reduction = reduction
        self.tile = tile

    def forward(self, z: Tensor, y: Tensor, *, reference: Reference | None = None) -> Tensor:
        """Return the loss of features ``z`` (n, d) or (n, views, d) with labels ``y`` (n,)."""
        return averaged_contrastive_loss(
            _unit(z),
            y,
            temperature=self.temperature,
            reference=_unit_reference(reference),
            reduction=self.reduction,
            tile=self.tile,
        )

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        return f"temperature={self.temperature:g}, reduction={self.reduction!r}"


class AveragedObjective(Objective):
    """The mean of :func:`averaged_contrastive_loss` over all anchors."""

    def __init__(self, counts: Tensor, width: int, *, temperature: float = 0.07) -> None:
        super().__init__(counts, width)
        self.loss = AveragedContrastiveLoss(temperature, reduction="none")

    def forward(self, samples: Samples) -> Tensor:
        """Return each sample's part: the mean over its views."""
        assert samples.projections is not None
        values: Tensor = self.loss(samples.projections, samples.y, reference=samples.reference)
        return values.reshape(len(samples.y), -1).mean(dim=1) / len(samples.whole)


class BCLObjective(Objective):
    """The joint stage of BCL: ``ce_weight`` times logit-adjusted cross-entropy plus ``contrast_weight`` times BCL.

    The cross-entropy is the mean over all views; the authors use a view of its own for it. The logits come from a
    cosine classifier with ``scale``, as the authors' do.
    """

    def __init__(
        self,
        counts: Tensor,
        width: int,
        *,
        ce_weight: float = 1.0,
        contrast_weight: float = 0.35,
        temperature: float = 0.07,
        scale: float = 30.0,
    ) -> None:
        super().__init__(counts, width)
        self.ce_weight = check_range("ce_weight", ce_weight, 0.0, float("inf"), advice="The authors use 1.")
        self.contrast_weight = check_range(
            "contrast_weight", contrast_weight, 0.0, float("inf"), advice="The authors use 0.35."
        )
        self.adjusted = LogitAdjustedLoss(counts, 1.0, "none")
        self.contrast = BalancedContrastiveLoss(self.num_classes, width, temperature)

    def forward(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """Return the sum, with its graph, and each sample's part of it."""
        y, z, logits, num = samples.y, samples.projections, samples.logits, len(samples.whole)
        assert z is not None
        assert logits is not None
        total, values = self.contrast.total_and_values(z, y, reference=samples.reference)
        values = values.reshape(len(y), -1)
        views = values.shape[1]
        each: Tensor = self.adjusted(logits.reshape(len(y) * views, -1), y.repeat_interleave(views))
        ce = each.reshape(len(y), views).mean(dim=1)
        total = self.contrast_weight * total / (views * num) + self.ce_weight * ce.sum() / num
        parts = self.contrast_weight * values.mean(dim=1) / num + self.ce_weight * ce.detach() / num
        return total, parts
