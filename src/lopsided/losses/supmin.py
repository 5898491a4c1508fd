"""SupMin, supervised minority (Mildenberger et al., 2025): a contrastive loss for two imbalanced classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lopsided.losses._kernel.checks import Reference
from lopsided.losses._views import check_binary_views, split_reference
from lopsided.losses.contrastive import AsymmetricFocalContrastiveLoss, Reduction, Tile, contrastive_loss
from lopsided.losses.objective import AnchorObjective

__all__ = ["SupervisedMinorityLoss", "supervised_minority_loss"]


def supervised_minority_loss(
    z: Tensor,
    y: Tensor,
    *,
    minority: int = 1,
    temperature: float | Tensor = 0.07,
    reference: Reference | None = None,
    reduction: Reduction = "mean",
    tile: Tile = "auto",
) -> Tensor:
    """SupMin of Mildenberger et al., 2025: supervised for the minority, self-supervised for the majority.

    With p_ij the softmax of z_i . z_j / temperature over all other features, the loss of an anchor is
    ``-1/|P_i| sum_{j in P_i} log p_ij``. P_i are all other features of the minority if the anchor is of the minority.
    If it is of the majority, P_i are the other views of its sample (NT-Xent). So the majority keeps its samples apart
    and cannot collapse to one point.

    Args:
        z: Features (n, views, d) of length 1, with at least 2 views.
        y: Labels (n,), 0 or 1.
        minority: The label of the minority.
        temperature: Divides the similarities. A tensor of one element gets its gradient.
        reference: ``(z_ref, y_ref)``, extra contrast samples that are not anchors. Those of the minority are positives
            of the minority; those of the majority are negatives of all anchors.
        reduction: "mean" and "sum" are over all n * views anchors; "none" returns the values, (n, views).
        tile: Rows per block of the kernel, as in ``contrastive_loss``.

    >>> z = torch.nn.functional.normalize(torch.tensor([[[1.0, 0.0], [0.8, 0.6]], [[-1.0, 0.0], [0.0, 1.0]]]), dim=-1)
    >>> supervised_minority_loss(z, torch.tensor([0, 1]), temperature=1.0).round(decimals=4)
    tensor(0.7802)
    """
    ids, others = _relabelled(z, y, minority, reference)
    return contrastive_loss(z, ids, temperature=temperature, reference=others, reduction=reduction, tile=tile)


def _relabelled(z: Tensor, y: Tensor, minority: int, reference: Reference | None) -> tuple[Tensor, Reference | None]:
    """Return labels under which CL is this loss: 0 for the minority, and a label of its own for any other sample."""
    labels = check_binary_views("SupMin", z, y)
    if minority not in (0, 1) or isinstance(minority, bool):
        raise ValueError(f"minority must be the label of the minority, 0 or 1, got {minority!r}.")
    ids = torch.where(labels == minority, 0, 1 + torch.arange(len(labels), device=labels.device))
    if reference is None:
        return ids, None
    z_ref, y_ref = split_reference("SupMin", reference)
    return ids, (z_ref, torch.where(y_ref == minority, 0, -1))


class SupervisedMinorityLoss(nn.Module):
    """:func:`supervised_minority_loss` as a module that normalises the features."""

    def __init__(
        self,
        minority: int = 1,
        temperature: float | nn.Parameter = 0.07,
        *,
        reduction: Reduction = "mean",
        tile: Tile = "auto",
    ) -> None:
        super().__init__()
        if minority not in (0, 1) or isinstance(minority, bool):
            raise ValueError(f"minority must be the label of the minority, 0 or 1, got {minority!r}.")
        self.minority = minority
        self.loss = AsymmetricFocalContrastiveLoss(0.0, 0.0, temperature, reduction=reduction, tile=tile)

    def forward(self, z: Tensor, y: Tensor, *, reference: Reference | None = None) -> Tensor:
        """Return the loss of features ``z`` (n, views, d) with labels ``y`` (n,)."""
        ids, others = _relabelled(z, y, self.minority, reference)
        value: Tensor = self.loss(z, ids, reference=others)
        return value

    def total_and_values(self, z: Tensor, y: Tensor, *, reference: Reference | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum over all anchors, to differentiate, and the detached loss of each, (n, views)."""
        ids, others = _relabelled(z, y, self.minority, reference)
        return self.loss.total_and_values(z, ids, reference=others)

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        return f"minority={self.minority}"


class SupMinObjective(AnchorObjective):
    """The mean of :func:`supervised_minority_loss` over all anchors. The smaller class is the minority."""

    def __init__(self, counts: Tensor, width: int, *, temperature: float = 0.07) -> None:
        super().__init__(counts, width)
        if self.num_classes != 2:
            raise ValueError(f"SupMin must have 2 classes, got {self.num_classes}. Use bcl or afcl for more classes.")
        self.loss = SupervisedMinorityLoss(int(counts.argmin()), temperature)
