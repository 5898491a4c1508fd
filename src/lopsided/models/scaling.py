"""Scaling of features before the classifier: the square root, then length 1 (power normalisation).

Features of a convolutional network are sums of activations: a few are large, and most are near zero. The square root
brings them closer together, and length 1 removes the contrast of the image (Perronnin, Sanchez and Mensink, 2010; the
same step turns SIFT into RootSIFT, Arandjelovic and Zisserman, 2012).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

Scaling = Literal["none", "root"]

_STEEP = 1e-4
"""The slope of the square root in training is bounded by its slope here, which is 50."""


def scaled(features: Tensor, scaling: Scaling, parts: int = 1) -> Tensor:
    """Return features (n, f) as the classifier gets them. "root": ``sign(x) sqrt(|x|)``, divided by its length.

    ``parts`` is the number of models whose features are side by side. The features of each have length 1.

    >>> scaled(torch.tensor([[9.0, -16.0], [0.0, 0.0]]), "root").tolist()
    [[0.6000000238418579, -0.800000011920929], [0.0, 0.0]]
    """
    if scaling == "none":
        return features
    roots = features.sign() * _root(features.abs())
    if parts == 1:
        return normalize(roots, dim=1)
    return torch.cat([normalize(part, dim=1) for part in roots.chunk(parts, dim=1)], dim=1)


def _root(x: Tensor) -> Tensor:
    """Return the square root. Below ``_STEEP`` its slope is that at ``_STEEP``: many activations are exactly 0."""
    root = x.detach().sqrt()
    if not x.requires_grad:
        return root
    return root + (x - x.detach()) * (0.5 / root.clamp(min=_STEEP**0.5))
