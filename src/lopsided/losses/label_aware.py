"""Label-aware smoothing (MiSLAS; Zhong et al., 2021): frequent classes get smoother labels."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from lopsided.losses._counts import Counts, check_counts, check_range
from lopsided.losses.classification import LossObjective, _check_reduction, _checked, _reduced

__all__ = ["LabelAwareSmoothingLoss", "label_aware_smoothing", "label_aware_smoothing_loss"]


def label_aware_smoothing(counts: Counts, smooth_head: float = 0.3, smooth_tail: float = 0.0) -> Tensor:
    """Smoothing of each class, float64 (K,), in the concave form of Zhong et al., 2021.

    With n_1 and n_K the largest and the smallest count, class c has the smoothing
    ``tail + (head - tail) sin(pi/2 (n_c - n_K) / (n_1 - n_K))``. The largest class gets ``smooth_head``, the smallest
    ``smooth_tail``. If all counts are equal, every class gets ``smooth_head``.

    >>> label_aware_smoothing([5000, 500, 50])
    tensor([0.3000, 0.0427, 0.0000], dtype=torch.float64)
    """
    check_range("smooth_head", smooth_head, 0.0, 0.999, advice="The paper uses 0.3 to 0.4.")
    check_range("smooth_tail", smooth_tail, 0.0, 0.999, advice="The paper uses 0 to 0.1.")
    if smooth_tail > smooth_head:
        raise ValueError(
            f"smooth_tail must be <= smooth_head ({smooth_head:g}), got {smooth_tail:g}. "
            "Frequent classes get smoother labels."
        )
    numbers = check_counts(counts)
    low, high = numbers.min(), numbers.max()
    position = torch.where(high > low, (numbers - low) / (high - low).clamp(min=1e-300), 1.0)
    return smooth_tail + (smooth_head - smooth_tail) * torch.sin(math.pi / 2 * position)


def label_aware_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    counts: Counts,
    *,
    smooth_head: float = 0.3,
    smooth_tail: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy with the label-aware smoothing of Zhong et al., 2021.

    The label of a sample of class y is 1 - e_y for class y and e_y / (K - 1) for every other class. e are the
    smoothings of :func:`label_aware_smoothing`. The loss is the cross-entropy with this label. The authors' released
    code instead gives e_y / K to every class and adds 1 - e_y for class y. That is the same with e_y (K - 1) / K in
    place of e_y.

    ``logits`` are (n, K), ``target`` is an integer tensor (n,), ``counts`` holds the K numbers of training images.

    >>> label_aware_smoothing_loss(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), [90, 10])
    tensor(0.7269)
    """
    return _smoothed(logits, target, label_aware_smoothing(counts, smooth_head, smooth_tail), reduction)


def _smoothed(logits: Tensor, target: Tensor, smoothing: Tensor, reduction: str) -> Tensor:
    classes = len(smoothing)
    x, t = _checked(logits, target, classes, reduction)
    # The mean over all classes and the true class together give the label: the true class is in the mean, too.
    uniform = smoothing.to(x)[t] * (classes / (classes - 1))
    logs = log_softmax(x, dim=1)
    own = logs.gather(1, t[:, None]).squeeze(1)
    return _reduced((uniform - 1) * own - uniform * logs.mean(dim=1), reduction)


class LabelAwareSmoothingLoss(nn.Module):
    """Module form of :func:`label_aware_smoothing_loss`; the smoothings are a buffer and move with the module."""

    smoothing: Tensor

    def __init__(
        self, counts: Counts, smooth_head: float = 0.3, smooth_tail: float = 0.0, reduction: str = "mean"
    ) -> None:
        super().__init__()
        _check_reduction(reduction)
        self.smooth_head, self.smooth_tail, self.reduction = smooth_head, smooth_tail, reduction
        self.register_buffer("smoothing", label_aware_smoothing(counts, smooth_head, smooth_tail).float())

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of ``logits`` (n, K) for ``target`` (n,)."""
        return _smoothed(logits, target, self.smoothing, self.reduction)

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        smooth = f"smooth_head={self.smooth_head:g}, smooth_tail={self.smooth_tail:g}"
        return f"classes={len(self.smoothing)}, {smooth}, reduction={self.reduction!r}"


class LabelAwareSmoothingObjective(LossObjective):
    """The mean of :func:`label_aware_smoothing_loss` over the batch."""

    def __init__(self, counts: Tensor, width: int, *, smooth_head: float = 0.3, smooth_tail: float = 0.0) -> None:
        super().__init__(counts, width)
        self.loss = LabelAwareSmoothingLoss(counts, smooth_head, smooth_tail, "none")
