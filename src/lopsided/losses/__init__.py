"""Losses: contrastive (CL, FCL, ACL, AFCL, averaged CL, BCL, SupMin, SupProto) and for classification.

This room needs torch alone.

Importing the room imports nothing, so that the catalogue can be read without torch; each name is imported when it is
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lopsided.losses.bcl import (
        AveragedContrastiveLoss,
        BalancedContrastiveLoss,
        averaged_contrastive_loss,
        balanced_contrastive_loss,
    )
    from lopsided.losses.class_balanced import ClassBalancedLoss, class_balanced_loss, class_balanced_weights
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
    from lopsided.losses.contrastive import ContrastiveLoss as SupConLoss
    from lopsided.losses.label_aware import (
        LabelAwareSmoothingLoss,
        label_aware_smoothing,
        label_aware_smoothing_loss,
    )
    from lopsided.losses.ldam import CosineClassifier, LDAMLoss, ldam_loss, ldam_margins
    from lopsided.losses.logit_adjusted import (
        BalancedSoftmaxLoss,
        LogitAdjustedLoss,
        balanced_softmax_loss,
        logit_adjusted_loss,
    )
    from lopsided.losses.metric_learning import MetricLearningLoss
    from lopsided.losses.objective import Objective, Samples
    from lopsided.losses.queue import FeatureQueue
    from lopsided.losses.ranks import DistributedLoss, Gathered, gather_reference
    from lopsided.losses.supmin import SupervisedMinorityLoss, supervised_minority_loss
    from lopsided.losses.supproto import SupervisedPrototypesLoss, opposite_prototypes, supervised_prototypes_loss

__all__ = [
    "AsymmetricContrastiveLoss",
    "AsymmetricFocalContrastiveLoss",
    "AsymmetricLoss",
    "AveragedContrastiveLoss",
    "BalancedContrastiveLoss",
    "BalancedSoftmaxLoss",
    "ClassBalancedLoss",
    "ContrastiveLoss",
    "CosineClassifier",
    "DistributedLoss",
    "FeatureQueue",
    "FocalContrastiveLoss",
    "FocalLoss",
    "Gathered",
    "LDAMLoss",
    "LabelAwareSmoothingLoss",
    "LogitAdjustedLoss",
    "MetricLearningLoss",
    "Objective",
    "Samples",
    "SupConLoss",
    "SupervisedMinorityLoss",
    "SupervisedPrototypesLoss",
    "asymmetric_contrastive_loss",
    "asymmetric_focal_contrastive_loss",
    "asymmetric_loss",
    "averaged_contrastive_loss",
    "balanced_contrastive_loss",
    "balanced_softmax_loss",
    "class_balanced_loss",
    "class_balanced_weights",
    "contrastive_loss",
    "focal_contrastive_loss",
    "focal_loss",
    "gather_reference",
    "label_aware_smoothing",
    "label_aware_smoothing_loss",
    "ldam_loss",
    "ldam_margins",
    "logit_adjusted_loss",
    "opposite_prototypes",
    "parity_eta",
    "supervised_minority_loss",
    "supervised_prototypes_loss",
]

_ROOMS = {
    "classification": {"AsymmetricLoss", "FocalLoss", "asymmetric_loss", "focal_loss"},
    "bcl": {
        "AveragedContrastiveLoss",
        "BalancedContrastiveLoss",
        "averaged_contrastive_loss",
        "balanced_contrastive_loss",
    },
    "class_balanced": {"ClassBalancedLoss", "class_balanced_loss", "class_balanced_weights"},
    "label_aware": {"LabelAwareSmoothingLoss", "label_aware_smoothing", "label_aware_smoothing_loss"},
    "ldam": {"CosineClassifier", "LDAMLoss", "ldam_loss", "ldam_margins"},
    "logit_adjusted": {"BalancedSoftmaxLoss", "LogitAdjustedLoss", "balanced_softmax_loss", "logit_adjusted_loss"},
    "supmin": {"SupervisedMinorityLoss", "supervised_minority_loss"},
    "supproto": {"SupervisedPrototypesLoss", "opposite_prototypes", "supervised_prototypes_loss"},
    "metric_learning": {"MetricLearningLoss"},
    "objective": {"Objective", "Samples"},
    "queue": {"FeatureQueue"},
    "ranks": {"DistributedLoss", "Gathered", "gather_reference"},
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = next((room for room, names in _ROOMS.items() if name in names), "contrastive")
    found = getattr(importlib.import_module(f"{__name__}.{room}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
