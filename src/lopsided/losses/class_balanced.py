"""Class-balanced loss: weights by the effective number of samples (Cui et al., 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lopsided.losses._counts import Counts, check_counts, check_range
from lopsided.losses.classification import LossObjective, _check_reduction, _checked, _entropy

__all__ = ["ClassBalancedLoss", "class_balanced_loss", "class_balanced_weights"]

_ADVICE = "0 gives equal weights; 1 gives weights in inverse proportion to the counts."


def class_balanced_weights(counts: Counts, beta: float = 0.9999) -> Tensor:
    """Weights of the classes, float64 (K,): ``(1 - beta) / (1 - beta^n_c)``, scaled to sum to K.

    ``(1 - beta^n) / (1 - beta)`` is the effective number of n samples (Proposition 1 of Cui et al., 2019). It is 1 at
    beta = 0 and tends to n for beta to 1, so beta = 1 stands for this limit. A class without images counts as 1 image.

    >>> class_balanced_weights([5000, 50])
    tensor([0.0250, 1.9750], dtype=torch.float64)
    """
    check_range("beta", beta, 0.0, 1.0, advice=_ADVICE)
    numbers = check_counts(counts)
    if beta == 1:
        weights = 1 / numbers
    else:
        log_beta = torch.log(torch.tensor(beta, dtype=torch.float64, device=numbers.device))
        weights = (1 - beta) / -torch.expm1(numbers * log_beta)
    return weights * (len(weights) / weights.sum())


def class_balanced_loss(
    logits: Tensor, target: Tensor, counts: Counts, *, beta: float = 0.9999, reduction: str = "mean"
) -> Tensor:
    """Class-balanced softmax cross-entropy of Cui et al., 2019: ``-w_y log softmax(f)_y``.

    w are the :func:`class_balanced_weights`. ``"mean"`` divides the sum by the number of samples n, as in the paper. It
    does not divide by the sum of the weights, as torch's ``cross_entropy`` does.

    ``logits`` are (n, K), ``target`` is an integer tensor (n,), ``counts`` holds the K numbers of training images.

    >>> class_balanced_loss(torch.tensor([[2.0, 0.0]]), torch.tensor([1]), [5000, 50])
    tensor(4.2006)
    """
    return _weighted(logits, target, class_balanced_weights(counts, beta), reduction)


def _weighted(logits: Tensor, target: Tensor, weights: Tensor, reduction: str) -> Tensor:
    x, t = _checked(logits, target, len(weights), reduction, looked_up=False)
    if reduction == "mean":  # Torch's mean would divide by the weights.
        return _entropy(x, t, weights.to(x), "sum") / len(t)
    return _entropy(x, t, weights.to(x), reduction)


class ClassBalancedLoss(nn.Module):
    """Module form of :func:`class_balanced_loss`; the weights are a buffer and move with the module."""

    weights: Tensor

    def __init__(self, counts: Counts, beta: float = 0.9999, reduction: str = "mean") -> None:
        super().__init__()
        _check_reduction(reduction)
        self.beta, self.reduction = beta, reduction
        self.register_buffer("weights", class_balanced_weights(counts, beta).float())

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of ``logits`` (n, K) for ``target`` (n,)."""
        return _weighted(logits, target, self.weights, self.reduction)

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        return f"classes={len(self.weights)}, beta={self.beta:g}, reduction={self.reduction!r}"


class ClassBalancedObjective(LossObjective):
    """The mean of :func:`class_balanced_loss` over the batch."""

    def __init__(self, counts: Tensor, width: int, *, beta: float = 0.9999) -> None:
        super().__init__(counts, width)
        self.loss = ClassBalancedLoss(counts, beta, "none")
