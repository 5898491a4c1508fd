"""Scaling of features before the classifier: the square or cube root, then length 1 (power normalisation).

Features of a convolutional network are sums of activations: a few are large, and most are near zero. A root brings them
closer together, and length 1 removes the contrast of the image (Perronnin, Sanchez and Mensink, 2010; the square root
turns SIFT into RootSIFT, Arandjelovic and Zisserman, 2012).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

Scaling = Literal["none", "root", "cube-root"]

_POWERS = {"root": 1 / 2, "cube-root": 1 / 3}
_STEEP = 1e-4
"""The slope of a root in training is bounded by its slope here: 50 for the square root, 155 for the cube root."""


def scaled(features: Tensor, scaling: Scaling, parts: int = 1, plain: int = 0) -> Tensor:
    """Return features (n, f) as the classifier gets them. "root": ``sign(x) sqrt(|x|)``, divided by its length.

    "cube-root": the same with the cube root.

    ``parts`` is the number of models whose features are side by side. The features of each have length 1. The last
    ``plain`` features of each are no activations, and stay as they are.

    >>> scaled(torch.tensor([[9.0, -16.0], [0.0, 0.0]]), "root").tolist()
    [[0.6000000238418579, -0.800000011920929], [0.0, 0.0]]
    >>> [round(x, 4) for x in scaled(torch.tensor([[27.0, -64.0]]), "cube-root")[0].tolist()]
    [0.6, -0.8]
    """
    if scaling == "none":
        return features
    found = []
    for part in features.chunk(parts, dim=1):
        own = part[:, : part.shape[1] - plain]
        found += [normalize(own.sign() * _root(own.abs(), _POWERS[scaling]), dim=1), part[:, own.shape[1] :]]
    return torch.cat(found, dim=1) if parts > 1 or plain else found[0]


def _root(x: Tensor, power: float) -> Tensor:
    """Return ``x**power``. Below ``_STEEP`` its slope is that at ``_STEEP``: many activations are exactly 0."""
    root = x.detach().pow(power)
    if not x.requires_grad:
        return root
    return root + (x - x.detach()) * (power * x.detach().clamp(min=_STEEP).pow(power - 1))
