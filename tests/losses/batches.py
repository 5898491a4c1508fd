"""Batches that the contrastive losses are tried on, by name, in float64; and the paths that must all agree."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lopsided.losses import (
    asymmetric_contrastive_loss,
    asymmetric_focal_contrastive_loss,
    contrastive_loss,
    focal_contrastive_loss,
)

# None is the dense path; 5 and 3 divide none of the sizes below; 64 takes each batch whole.
PATHS = {"dense": None, "tile 1": 1, "tile 3": 3, "tile 5": 5, "tile 64": 64, "auto": "auto"}
LOSSES = {
    "CL": (contrastive_loss, {}),
    "FCL": (focal_contrastive_loss, {}),
    "ACL": (asymmetric_contrastive_loss, {"eta": 60.0}),
    "AFCL": (asymmetric_focal_contrastive_loss, {"eta": 60.0, "gamma": 2.5}),
}


def unit(*shape: int, seed: int = 0) -> Tensor:
    """Random features of length 1."""
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(*shape, dtype=torch.float64, generator=generator), dim=-1)


def clusters(n: int, num_classes: int, spread: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features around one centre per class."""
    y = torch.arange(n) % num_classes
    return normalize(unit(num_classes, 6, seed=seed)[y] + spread * unit(n, 6, seed=seed + 1), dim=1), y


def _antipodal(spread: float) -> tuple[Tensor, Tensor]:
    y = torch.arange(8) % 2
    centre = unit(1, 6)
    return normalize((2.0 * y[:, None] - 1) * centre + spread * unit(8, 6, seed=5), dim=1), y


def _mostly_alone() -> tuple[Tensor, Tensor]:
    return unit(9, 5, seed=3), torch.tensor([0, 0, 0, 0, 7, 0, 0, 0, 0])


BATCHES = {
    "random": lambda: (unit(11, 6), torch.tensor([0, 1, 0, 2, 1, 0, 0, 2, 0, 1, 0])),
    "identical": lambda: (unit(1, 6).repeat(8, 1), torch.arange(8) % 2),
    "tight clusters": lambda: clusters(9, 3, 1e-3),
    "pairs": lambda: clusters(10, 5, 1e-2),
    "antipodal clusters": lambda: _antipodal(1e-3),
    "antipodal points": lambda: _antipodal(0.0),
    "wrong way round": lambda: (_antipodal(1e-2)[0], torch.arange(8) // 4),
    "one class": lambda: (unit(7, 6), torch.zeros(7, dtype=torch.long)),
    "all classes different": lambda: (unit(7, 6), torch.arange(7)),
    "all different and close": lambda: (normalize(unit(1, 6) + 1e-2 * unit(7, 6), dim=1), torch.arange(7)),
    "a lonely anchor": _mostly_alone,
    "two samples": lambda: (unit(2, 4), torch.tensor([0, 0])),
    "three samples": lambda: (unit(3, 4), torch.tensor([0, 1, 0])),
    "one sample": lambda: (unit(1, 4), torch.tensor([3])),
}
