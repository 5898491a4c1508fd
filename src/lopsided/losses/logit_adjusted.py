"""Logit adjustment (Menon et al., 2021) and balanced softmax (Ren et al., 2020).

Balanced softmax adds log n_c to the logit of class c, where n_c is its number of training images. Logit adjustment adds
tau log pi_c, where pi_c is the class's share. The softmax does not change if a constant is added to all logits, so both
losses are equal at tau = 1. The catalogue therefore has one entry, ``logit-adjusted``.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from lopsided.losses._counts import Counts, check_counts, check_range
from lopsided.losses.classification import LossObjective, _check_reduction, _checked, _entropy

__all__ = ["BalancedSoftmaxLoss", "LogitAdjustedLoss", "balanced_softmax_loss", "logit_adjusted_loss"]

_ADVICE = "The paper uses 1; 0 is plain cross-entropy."


def logit_adjusted_loss(
    logits: Tensor, target: Tensor, counts: Counts, *, tau: float = 1.0, reduction: str = "mean"
) -> Tensor:
    """Logit-adjusted cross-entropy of Menon et al., 2021.

    The loss of a sample of class y is ``-log softmax(f + tau log pi)_y``. f are the logits and pi_c = n_c / n the class
    shares of the training images. The adjustment belongs to the loss: the model predicts with f alone. At tau = 1, the
    softmax of f carries equal class shares, and ``argmax f`` maximises the mean of the recalls.

    ``logits`` are (n, K), ``target`` is an integer tensor (n,), ``counts`` holds the K numbers of training images. A
    class without images counts as 1 image. ``reduction`` is "mean", "sum" or "none".

    >>> import torch
    >>> logits, target = torch.tensor([[2.0, 0.0]]), torch.tensor([1])
    >>> logit_adjusted_loss(logits, target, [80, 20])
    tensor(3.4196)
    """
    check_range("tau", tau, 0.0, math.inf, advice=_ADVICE)
    return _adjusted(logits, target, _offsets(counts, tau), reduction)


def balanced_softmax_loss(logits: Tensor, target: Tensor, counts: Counts, *, reduction: str = "mean") -> Tensor:
    """Balanced softmax of Ren et al., 2020: :func:`logit_adjusted_loss` with tau = 1.

    The loss of a sample of class y is ``-log(n_y exp(f_y) / sum_c n_c exp(f_c))``.
    """
    return logit_adjusted_loss(logits, target, counts, reduction=reduction)


def _offsets(counts: Counts, tau: float) -> Tensor:
    numbers = check_counts(counts)
    return tau * (numbers / numbers.sum()).log()


def _adjusted(logits: Tensor, target: Tensor, offsets: Tensor, reduction: str) -> Tensor:
    x, t = _checked(logits, target, len(offsets), reduction, looked_up=False)
    return _entropy(x + offsets.to(x), t, reduction=reduction)


class LogitAdjustedLoss(nn.Module):
    """Module form of :func:`logit_adjusted_loss`; the offsets are a buffer and move with the module."""

    offsets: Tensor

    def __init__(self, counts: Counts, tau: float = 1.0, reduction: str = "mean") -> None:
        super().__init__()
        self.tau = check_range("tau", tau, 0.0, math.inf, advice=_ADVICE)
        _check_reduction(reduction)
        self.reduction = reduction
        self.register_buffer("offsets", _offsets(counts, tau).float())

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of ``logits`` (n, K) for ``target`` (n,)."""
        return _adjusted(logits, target, self.offsets, self.reduction)

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        return f"classes={len(self.offsets)}, tau={self.tau:g}, reduction={self.reduction!r}"


class BalancedSoftmaxLoss(LogitAdjustedLoss):
    """Module form of :func:`balanced_softmax_loss`."""

    def __init__(self, counts: Counts, reduction: str = "mean") -> None:
        super().__init__(counts, 1.0, reduction)


class LogitAdjustedObjective(LossObjective):
    """The mean of :func:`logit_adjusted_loss` over the batch."""

    def __init__(self, counts: Tensor, width: int, *, tau: float = 1.0) -> None:
        super().__init__(counts, width)
        self.loss = LogitAdjustedLoss(counts, tau, "none")
