"""SupProto, supervised prototypes (Mildenberger et al., 2025): a contrastive loss for two imbalanced classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from lopsided.losses._counts import check_range
from lopsided.losses._kernel.checks import Reference, check_number, check_word
from lopsided.losses._views import check_binary_views, split_reference
from lopsided.losses.contrastive import (
    AsymmetricFocalContrastiveLoss,
    Reduction,
    Tile,
    _unit,
    _unit_reference,
    contrastive_loss,
)
from lopsided.losses.objective import AnchorObjective

__all__ = ["SupervisedPrototypesLoss", "opposite_prototypes", "supervised_prototypes_loss"]

_MARGIN = "The authors use 1; 2 always pulls between opposite prototypes."
_TEMPERATURE = "The authors use 0.07."


def opposite_prototypes(width: int) -> Tensor:
    """Two fixed prototypes, (2, width): a random direction of length 1, and the opposite direction."""
    direction = normalize(torch.randn(width), dim=0)
    return torch.stack([direction, -direction])


def supervised_prototypes_loss(
    z: Tensor,
    y: Tensor,
    prototypes: Tensor,
    *,
    margin: float = 1.0,
    temperature: float = 0.07,
    reference: Reference | None = None,
    reduction: Reduction = "mean",
    tile: Tile = "auto",
) -> Tensor:
    """SupProto of Mildenberger et al., 2025: NT-Xent that also pulls samples to a fixed prototype of their class.

    With s_ij = z_i . z_j / temperature and A_i all other features, the loss of an anchor is
    ``-1/|P_i| sum_{j in P_i} s_ij + log sum_{k in A_i} exp(s_ik)``. P_i are the other views of its sample. The
    prototype of its class is also in P_i as long as the anchor is not yet ``margin`` nearer to it than to the other
    prototype: z_i . c_own <= z_i . c_other + margin. No prototype is in A_i. With opposite prototypes and margin 1,
    anchors with z_i . c_own <= 1/2 are pulled.

    Args:
        z: Features (n, views, d) of length 1, with at least 2 views.
        y: Labels (n,), 0 or 1.
        prototypes: (2, d), of length 1, such as :func:`opposite_prototypes`. They get no gradient.
        margin: How much nearer an anchor must be to its own prototype before the pull ends.
        temperature: Divides the similarities.
        reference: ``(z_ref, y_ref)``, extra contrast samples that are not anchors. They are in every A_i.
        reduction: "mean" and "sum" are over all n * views anchors; "none" returns the values, (n, views).
        tile: Rows per block of the kernel, as in ``contrastive_loss``.

    >>> z = torch.nn.functional.normalize(torch.tensor([[[1.0, 0.0], [0.8, 0.6]], [[-1.0, 0.0], [0.0, 1.0]]]), dim=-1)
    >>> c = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    >>> supervised_prototypes_loss(z, torch.tensor([0, 1]), c, margin=2.0, temperature=1.0).round(decimals=4)
    tensor(0.6302)
    """
    check_word("reduction", reduction, ("mean", "sum", "none"))
    check_range("margin", margin, 0.0, 2.0, advice=_MARGIN)
    number = check_number("temperature", temperature, above_zero=True, advice=_TEMPERATURE)
    ids, others = _relabelled(z, y, reference)
    value = contrastive_loss(z, ids, temperature=number, reference=others, reduction=reduction, tile=tile)
    return _add(value, _pull(z, y, prototypes, margin, number), reduction)


def _relabelled(z: Tensor, y: Tensor, reference: Reference | None) -> tuple[Tensor, Reference | None]:
    """Return labels under which CL is NT-Xent: a label of its own for each sample."""
    labels = check_binary_views("SupProto", z, y)
    ids = torch.arange(len(labels), device=labels.device)
    if reference is None:
        return ids, None
    z_ref, y_ref = split_reference("SupProto", reference)
    return ids, (z_ref, torch.full_like(y_ref, -1))


def _pull(z: Tensor, y: Tensor, prototypes: Tensor, margin: float, temperature: float) -> Tensor:
    """Return what the prototypes add to the loss of each anchor, (n, views).

    For v other views with the mean similarity s, NT-Xent has -s. With the prototype's similarity c as one more
    positive it is -(v s + c) / (v + 1), which is more by (s - c) / (v + 1).
    """
    if not isinstance(prototypes, Tensor) or prototypes.shape != (2, z.shape[-1]):
        got = tuple(prototypes.shape) if isinstance(prototypes, Tensor) else type(prototypes).__name__
        raise ValueError(f"prototypes must have shape (2, {z.shape[-1]}), one row per class, got {got}.")
    z, labels = z.to(torch.promote_types(z.dtype, torch.float32)), y.long()
    views, c = z.shape[1], prototypes.detach().to(z)
    own, other = c[labels].unsqueeze(1), c[1 - labels].unsqueeze(1)
    pulled = (z.detach() * (own - other)).sum(-1) <= margin
    more = (z * ((z.sum(1, keepdim=True) - z) / (views - 1) - own)).sum(-1)
    return torch.where(pulled, more, 0.0) / (views * temperature)


def _add(value: Tensor, pull: Tensor, reduction: str) -> Tensor:
    return value + (pull if reduction == "none" else pull.sum() if reduction == "sum" else pull.mean())


class SupervisedPrototypesLoss(nn.Module):
    """:func:`supervised_prototypes_loss` as a module that normalises the features.

    The prototypes are a buffer, drawn when the module is built. Set the seed before, or load the state of a module, to
    get the same prototypes again.
    """

    prototypes: Tensor

    def __init__(
        self,
        width: int,
        margin: float = 1.0,
        temperature: float = 0.07,
        *,
        reduction: Reduction = "mean",
        tile: Tile = "auto",
    ) -> None:
        super().__init__()
        self.margin = check_range("margin", margin, 0.0, 2.0, advice=_MARGIN)
        self.temperature = check_number("temperature", temperature, above_zero=True, advice=_TEMPERATURE)
        self.loss = AsymmetricFocalContrastiveLoss(
            0.0, 0.0, self.temperature, normalize=False, reduction=reduction, tile=tile
        )
        self.register_buffer("prototypes", opposite_prototypes(width))

    def forward(self, z: Tensor, y: Tensor, *, reference: Reference | None = None) -> Tensor:
        """Return the loss of features ``z`` (n, views, d) with labels ``y`` (n,)."""
        z, ids, others = self._prepared(z, y, reference)
        value: Tensor = self.loss(z, ids, reference=others)
        return _add(value, _pull(z, y, self.prototypes, self.margin, self.temperature), self.loss.reduction)

    def total_and_values(self, z: Tensor, y: Tensor, *, reference: Reference | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum over all anchors, to differentiate, and the detached loss of each, (n, views)."""
        z, ids, others = self._prepared(z, y, reference)
        total, values = self.loss.total_and_values(z, ids, reference=others)
        pull = _pull(z, y, self.prototypes, self.margin, self.temperature)
        return total + pull.sum(), values + pull.detach()

    def _prepared(self, z: Tensor, y: Tensor, reference: Reference | None) -> tuple[Tensor, Tensor, Reference | None]:
        ids, others = _relabelled(z, y, reference)
        return _unit(z), ids, _unit_reference(others)

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        return f"width={self.prototypes.shape[1]}, margin={self.margin:g}, temperature={self.temperature:g}"


class SupProtoObjective(AnchorObjective):
    """The mean of :func:`supervised_prototypes_loss` over all anchors, with opposite prototypes."""

    def __init__(self, counts: Tensor, width: int, *, margin: float = 1.0, temperature: float = 0.07) -> None:
        super().__init__(counts, width)
        if self.num_classes != 2:
            raise ValueError(f"SupProto must have 2 classes, got {self.num_classes}. Use bcl or afcl for more classes.")
        self.loss = SupervisedPrototypesLoss(width, margin, temperature)
