"""Short names of current encoders, such as ``dinov2-small``, and addresses of weights on the Hugging Face hub.

A short name stands for a timm model, the weights that timm has for it, and the side of its images. It is replaced where
a recipe is made, so recipes, records and models hold timm's names. Weights of anybody else have an address with the
commit, because what a name without it means may change: ``hf-hub:OWNER/NAME@COMMIT``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HUB = re.compile(r"hf-hub:([\w.-]+/[\w.-]+)@([0-9a-f]{40})")
"""An address of weights: the repository and the commit."""


@dataclass(frozen=True)
class Named:
    """A timm model with its tag, and the side of its images if timm's is too large for a CPU."""

    encoder: str
    image_size: int | None = None


NAMES = {
    "dinov2-small": Named("vit_small_patch14_dinov2.lvd142m", 224),
    "dinov2-base": Named("vit_base_patch14_dinov2.lvd142m", 224),
    "dinov3-small": Named("vit_small_patch16_dinov3.lvd1689m", 224),
    "dinov3-base": Named("vit_base_patch16_dinov3.lvd1689m", 224),
    "dinov3-convnext-tiny": Named("convnext_tiny.dinov3_lvd1689m", 224),
    "siglip-base": Named("vit_base_patch16_siglip_224.webli"),
    "siglip2-base": Named("vit_base_patch16_siglip_224.v2_webli"),
    "clip-base": Named("vit_base_patch16_clip_224.laion2b"),
    "convnext-tiny": Named("convnext_tiny.in12k_ft_in1k"),
    "convnextv2-tiny": Named("convnextv2_tiny.fcmae_ft_in22k_in1k"),
    "lite0": Named("tf_efficientnet_lite0"),
}


def with_full_names(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of a recipe with timm's names instead of short ones.

    The weights are timm's unless the changes have others, or embedded ones exist. So is the side of the images.

    >>> with_full_names({"encoder.name": "dinov2-small+stages"})  # doctest: +NORMALIZE_WHITESPACE
    {'encoder.name': 'vit_small_patch14_dinov2.lvd142m+stages', 'encoder.weights': 'timm',
     'augment.normalisation': 'weights', 'data.image_size': 224}
    """
    words = str(changes.get("encoder.name", "")).split("+")
    named = [NAMES[word] for word in words if word in NAMES]
    if not named:
        return dict(changes)
    full = {**changes, "encoder.name": "+".join(NAMES[word].encoder if word in NAMES else word for word in words)}
    embedded = all(each is NAMES["lite0"] for each in named)
    full.setdefault("encoder.weights", "embedded" if embedded else "timm")
    full.setdefault("augment.normalisation", "weights")
    if named[0].image_size is not None:
        full.setdefault("data.image_size", named[0].image_size)
    return full
