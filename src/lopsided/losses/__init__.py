"""Losses: contrastive (CL, FCL, ACL, AFCL) and for classification. This room needs torch alone."""

from lopsided.losses.classification import AsymmetricLoss, FocalLoss, asymmetric_loss, focal_loss
from lopsided.losses.contrastive import (
    AsymmetricContrastiveLoss,
    AsymmetricFocalContrastiveLoss,
    ContrastiveLoss,
    FocalContrastiveLoss,
    asymmetric_contrastive_loss,
    asymmetric_focal_contrastive_loss,
    contrastive_loss,
    focal_contrastive_loss,
    parity_eta,
)

__all__ = [
    "AsymmetricContrastiveLoss",
    "AsymmetricFocalContrastiveLoss",
    "AsymmetricLoss",
    "ContrastiveLoss",
    "FocalContrastiveLoss",
    "FocalLoss",
    "asymmetric_contrastive_loss",
    "asymmetric_focal_contrastive_loss",
    "asymmetric_loss",
    "contrastive_loss",
    "focal_contrastive_loss",
    "focal_loss",
    "parity_eta",
]
