"""Rescale the classifier of a trained encoder: tau-normalisation and learnt scales.

Kang et al., "Decoupling representation and classifier for long-tailed recognition" (ICLR 2020), section 4.2. A
classifier that is trained on imbalanced images has longer weight vectors for frequent classes. Both methods change only
these lengths:

- tau-normalisation: ``w_k / ||w_k||^tau``. The bias is dropped, as in the paper. Tau is given, or chosen on validation
  images from 0, 0.1, ..., 2, the values of the authors' code.
- learnable weight scaling (LWS): ``s_k (w_k x + b_k)``, where only the scales ``s_k`` are trained.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lopsided.models.heads import ClassifierHead

TAUS = tuple(round(0.1 * step, 1) for step in range(21))
"""The values of tau that validation images choose from. 0 only drops the bias."""


def tau_normalised(weight: Tensor, tau: float) -> Tensor:
    """Return rows ``w_k / ||w_k||^tau``, computed in float64. A row of zeros stays as it is.

    >>> tau_normalised(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    rows = weight.double()
    lengths = rows.norm(dim=1, keepdim=True)
    return (rows / torch.where(lengths > 0, lengths, 1.0) ** tau).to(weight.dtype)


def choose_tau(weight: Tensor, features: Tensor, figure: Callable[[Tensor], float]) -> tuple[float, dict[str, float]]:
    """Return the tau with the highest ``figure`` of its logits, the lowest if several tie, and the figure of each."""
    found = {tau: figure(features @ tau_normalised(weight, tau).T) for tau in TAUS}
    return max(found, key=lambda tau: (found[tau], -tau)), {f"{tau:g}": value for tau, value in found.items()}


def normalise(head: ClassifierHead, tau: float) -> None:
    """Apply tau-normalisation to a classifier, in place, and drop its bias."""
    with torch.no_grad():
        head.weight.copy_(tau_normalised(head.weight, tau))
        head.bias.zero_()


class Scales(nn.Module):
    """One scale per class for the logits of a classifier, which itself is not trained."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(num_classes))

    def forward(self, logits: Tensor) -> Tensor:
        """Return scaled logits (n, K)."""
        return logits * self.scales

    def apply_to(self, head: ClassifierHead) -> None:
        """Make the scales part of the weights of a classifier."""
        with torch.no_grad():
            head.weight.mul_(self.scales[:, None])
            head.bias.mul_(self.scales)
