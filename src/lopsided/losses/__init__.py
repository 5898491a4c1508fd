"""Losses: contrastive (CL, FCL, ACL, AFCL) and for classification. This room needs torch alone.

Importing the room imports nothing, so that the catalogue can be read without torch; each name is imported when it is
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from lopsided.losses.objective import Objective, Samples
    from lopsided.losses.queue import FeatureQueue
    from lopsided.losses.ranks import DistributedLoss, Gathered, gather_reference

__all__ = [
    "AsymmetricContrastiveLoss",
    "AsymmetricFocalContrastiveLoss",
    "AsymmetricLoss",
    "ContrastiveLoss",
    "DistributedLoss",
    "FeatureQueue",
    "FocalContrastiveLoss",
    "FocalLoss",
    "Gathered",
    "Objective",
    "Samples",
    "asymmetric_contrastive_loss",
    "asymmetric_focal_contrastive_loss",
    "asymmetric_loss",
    "contrastive_loss",
    "focal_contrastive_loss",
    "focal_loss",
    "gather_reference",
    "parity_eta",
]

_ROOMS = {
    "classification": {"AsymmetricLoss", "FocalLoss", "asymmetric_loss", "focal_loss"},
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
