"""Contrastive losses as pytorch-metric-learning calls its own: with pairs of a miner and a memory of past batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lopsided.losses.contrastive import AsymmetricFocalContrastiveLoss


class MetricLearningLoss(nn.Module):
    """A contrastive loss with the arguments that pytorch-metric-learning passes, which is not imported.

    ``indices_tuple`` are the pairs (anchors, positives, anchors, negatives) or triplets (anchors, positives, negatives)
    of a miner. Only these are the contrast samples of an anchor; without a miner, all are. With ``ref_emb``, such as
    the memory of ``CrossBatchMemory``, the contrast samples are the reference alone. An anchor without any pair has the
    loss 0, and counts in the mean.

    >>> from lopsided.losses import AsymmetricFocalContrastiveLoss
    >>> criterion = MetricLearningLoss(AsymmetricFocalContrastiveLoss(eta=0.5, gamma=2.0, eta_unit="parity"))
    >>> z, y = torch.eye(4), torch.tensor([0, 0, 1, 1])
    >>> bool(criterion(z, y) == criterion.loss(z, y))
    True
    """

    def __init__(self, loss: AsymmetricFocalContrastiveLoss) -> None:
        super().__init__()
        if not isinstance(loss, AsymmetricFocalContrastiveLoss):
            raise TypeError(f"MetricLearningLoss takes a contrastive loss (CL, FCL, ACL or AFCL), got {loss!r}.")
        self.loss = loss

    def _get_name(self) -> str:
        return "MetricLearningLoss"

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of embeddings (n, d) with labels (n,)."""
        labels, num = labels.to(embeddings.device), len(embeddings)
        loss: Callable[..., Tensor] = self.loss
        if ref_emb is None or ref_emb is embeddings:
            if indices_tuple is None:
                return loss(embeddings, labels)
            return loss(embeddings, labels, contrast=_chosen(indices_tuple, embeddings, num))
        if ref_labels is None:
            raise ValueError("ref_emb needs its labels. Pass ref_labels.")
        reference = (ref_emb, ref_labels.to(embeddings.device))
        if indices_tuple is None:
            return loss(embeddings, labels, reference=reference, contrast="reference")
        batch = embeddings.new_zeros(num, num, dtype=torch.bool)
        chosen = torch.cat([batch, _chosen(indices_tuple, embeddings, len(ref_emb))], dim=1)
        return loss(embeddings, labels, reference=reference, contrast=chosen)


# CrossBatchMemory takes losses by the names of their classes. The pairs of SupConLoss are the pairs of these losses.
MetricLearningLoss.__name__ = "SupConLoss"


def _chosen(indices: Sequence[Tensor], embeddings: Tensor, columns: int) -> Tensor:
    """Return which samples a miner chose for each anchor, as a boolean mask (n, columns)."""
    mask = embeddings.new_zeros(len(embeddings), columns, dtype=torch.bool)
    anchors = (indices[0], indices[0]) if len(indices) == 3 else (indices[0], indices[2])
    others = (indices[1], indices[2]) if len(indices) == 3 else (indices[1], indices[3])
    for rows, places in zip(anchors, others, strict=True):
        mask[rows.to(mask.device), places.to(mask.device)] = True
    return mask
