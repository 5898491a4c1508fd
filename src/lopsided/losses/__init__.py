"""Losses: contrastive (CL, FCL, ACL, AFCL) and for classification. This room needs torch alone."""

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
