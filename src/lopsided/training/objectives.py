"""What a stage minimises, one number per sample, so that each class's part of the loss can be told.

The samples may be a part of a batch, as a rank has one: ``whole`` holds the labels of all of it, and the parts of all
samples add up to the loss of the whole batch. Without it the samples are all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lopsided.losses.classification import focal_loss
from lopsided.losses.contrastive import AsymmetricFocalContrastiveLoss
from lopsided.recipe import Classifier, EncoderTraining


class ContrastiveObjective(nn.Module):
    """One of the four contrastive losses. The sum over the samples of a batch is the mean over anchors."""

    def __init__(self, training: EncoderTraining) -> None:
        super().__init__()
        # CL, FCL and ACL are AFCL at the eta and gamma that a recipe gives them.
        self.loss = AsymmetricFocalContrastiveLoss(
            training.eta,
            training.gamma,
            training.temperature,
            eta_unit=training.eta_unit,
            normalization=training.normalization,
            reduction="none",
        )

    def forward(
        self,
        z: Tensor,
        y: Tensor,
        whole: Tensor | None = None,
        reference: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Each sample's part of the loss, (n,), for projections (n, d) or (n, views, d)."""
        values: Tensor = self.loss(z, y, reference=reference)
        return values.reshape(len(z), -1).mean(dim=1) / len(y if whole is None else whole)


class ClassificationObjective(nn.Module):
    """Cross-entropy, weighted cross-entropy or focal loss. The sum over the samples of a batch is torch's "mean".

    "weighted-ce" weighs class c by n / (K n_c), so that every class weighs the same in the training set.
    """

    weight: Tensor | None

    def __init__(self, settings: EncoderTraining | Classifier, counts: npt.NDArray[np.int64]) -> None:
        super().__init__()
        self.gamma = settings.focal_gamma if settings.loss == "focal" else None
        weight = None
        if settings.loss == "weighted-ce":
            held = np.maximum(counts, 1)
            weight = torch.tensor(counts.sum() / (len(counts) * held), dtype=torch.float32)
        self.register_buffer("weight", weight)

    def forward(self, logits: Tensor, y: Tensor, whole: Tensor | None = None) -> Tensor:
        """Each sample's part of the loss, (n,), for logits (n, K)."""
        whole = y if whole is None else whole
        if self.gamma is not None:
            return focal_loss(logits, y, gamma=self.gamma, reduction="none") / len(whole)
        values = cross_entropy(logits, y, reduction="none")
        if self.weight is None:
            return values / len(whole)
        return values * self.weight[y] / self.weight[whole].sum()
