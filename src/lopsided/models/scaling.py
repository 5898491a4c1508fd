"""Scaling of features before the classifier: the square root, then length 1 (power normalisation).

Features of a convolutional network are sums of activations: a few are large, and most are near zero. The square root
brings them closer together, and length 1 removes the contrast of the image (Perronnin, Sanchez and Mensink, 2010; the
same step turns SIFT into RootSIFT, Arandjelovic and Zisserman, 2012).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import normalize

Scaling = Literal["none", "root"]


def scaled(features: Tensor, scaling: Scaling) -> Tensor:
    """Return features (n, f) as the classifier gets them. "root": ``sign(x) sqrt(|x|)``, divided by its length.

    >>> import torch
    >>> scaled(torch.tensor([[9.0, -16.0], [0.0, 0.0]]), "root").tolist()
    [[0.6000000238418579, -0.800000011920929], [0.0, 0.0]]
    """
    if scaling == "none":
        return features
    return normalize(features.sign() * features.abs().sqrt(), dim=1)
