"""LDAM: label-distribution-aware margins with deferred re-weighting (Cao et al., 2019)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, normalize

from lopsided.losses._counts import Counts, check_counts, check_range
from lopsided.losses.class_balanced import class_balanced_weights
from lopsided.losses.classification import (
    CrossEntropyObjective,
    _check_reduction,
    _checked,
    _class_weight,
    _computed,
    _reduced,
)
from lopsided.losses.deferred import first_epoch, weighted_parts
from lopsided.losses.objective import Samples

__all__ = ["CosineClassifier", "LDAMLoss", "ldam_loss", "ldam_margins"]


def ldam_margins(counts: Counts, max_margin: float = 0.5) -> Tensor:
    """Margins of the classes, float64 (K,): in proportion to n_c^(-1/4), the largest is ``max_margin``.

    >>> ldam_margins([5000, 50])
    tensor([0.1581, 0.5000], dtype=torch.float64)
    """
    check_range("max_margin", max_margin, 0.0, 1.0, advice="The paper uses 0.5; 0 is cross-entropy of cosines.")
    margins = check_counts(counts) ** -0.25
    return margins * (max_margin / margins.max())


def ldam_loss(
    cosines: Tensor,
    target: Tensor,
    counts: Counts,
    *,
    max_margin: float = 0.5,
    scale: float = 30.0,
    weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """LDAM loss of Cao et al., 2019: cross-entropy of ``scale * (cosines - m_y for class y)``.

    The cosines (n, K) lie between features and class weights that both have length 1, as :class:`CosineClassifier`
    returns them. m are the :func:`ldam_margins`. The margin is subtracted from the cosine of the true class y only.

    ``weight`` holds one weight per class, (K,). Deferred re-weighting trains without it first, and with
    :func:`~lopsided.losses.class_balanced_weights` at the end. ``"mean"`` divides by the sum of the weights of the
    samples, as in the authors' code and in torch's ``cross_entropy``.

    >>> ldam_loss(torch.tensor([[0.5, 0.4]]), torch.tensor([1]), [90, 10], scale=10.0)
    tensor(6.0025)
    """
    check_range("scale", scale, 0.0, math.inf, above=True, advice="The paper uses 30.")
    return _margin_loss(cosines, target, ldam_margins(counts, max_margin), scale, weight, reduction)


def _margin_loss(
    cosines: Tensor, target: Tensor, margins: Tensor, scale: float, weight: Tensor | None, reduction: str
) -> Tensor:
    x, t = _checked(cosines, target, len(margins), reduction)
    values = _with_margins(scale * x, t, scale * margins)
    if weight is None:
        return _reduced(values, reduction)
    weights = _class_weight(weight, len(margins)).to(x)[t]
    total = (weights * values).sum()
    return weights * values if reduction == "none" else total / weights.sum() if reduction == "mean" else total


def _with_margins(logits: Tensor, target: Tensor, margins: Tensor) -> Tensor:
    """Return the cross-entropy of each sample, (n,), with the margin of its class taken from its own logit."""
    t = target[:, None]
    own = logits.gather(1, t) - margins.to(logits)[t]
    return cross_entropy(logits.scatter(1, t, own), target, reduction="none")


class LDAMLoss(nn.Module):
    """Module form of :func:`ldam_loss`; margins and weights are buffers and move with the module.

    ``weight`` may be set after some epochs, which is deferred re-weighting:
    ``criterion.weight = class_balanced_weights(counts)``.
    """

    margins: Tensor
    weight: Tensor | None

    def __init__(
        self,
        counts: Counts,
        max_margin: float = 0.5,
        scale: float = 30.0,
        weight: Tensor | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.scale = check_range("scale", scale, 0.0, math.inf, above=True, advice="The paper uses 30.")
        _check_reduction(reduction)
        self.max_margin, self.reduction = max_margin, reduction
        self.register_buffer("margins", ldam_margins(counts, max_margin).float())
        self.register_buffer("weight", weight)

    def forward(self, cosines: Tensor, target: Tensor) -> Tensor:
        """Return the loss of ``cosines`` (n, K) for ``target`` (n,)."""
        return _margin_loss(cosines, target, self.margins, self.scale, self.weight, self.reduction)

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        return (
            f"classes={len(self.margins)}, max_margin={self.max_margin:g}, scale={self.scale:g}, "
            f"weighted={self.weight is not None}, reduction={self.reduction!r}"
        )


class CosineClassifier(nn.Module):
    """A linear layer that returns cosines (n, K): features and class weights are divided by their lengths."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_classes, features))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Return the cosines of features (n, f) and the weights of the classes."""
        return linear(normalize(x, dim=-1), normalize(self.weight, dim=-1))

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        return f"features={self.weight.shape[1]}, num_classes={self.weight.shape[0]}"


class LDAMObjective(CrossEntropyObjective):
    """The LDAM loss of logits that are ``scale`` times cosines, with deferred re-weighting.

    Once the share ``defer`` of the epochs is over, samples have :func:`class_balanced_weights` with ``beta`` (see
    ``lopsided.losses.deferred``). The last epoch always has these weights, except for ``defer`` = 1.
    """

    margins: Tensor
    weights: Tensor

    def __init__(
        self,
        counts: Tensor,
        width: int,
        *,
        max_margin: float = 0.5,
        scale: float = 30.0,
        beta: float = 0.9999,
        defer: float = 0.8,
    ) -> None:
        super().__init__(counts, width)
        self.defer = check_range("defer", defer, 0.0, 1.0, advice="The paper uses 0.8; 1 never re-weights.")
        check_range("scale", scale, 0.0, math.inf, above=True, advice="The paper uses 30.")
        self.register_buffer("margins", (scale * ldam_margins(counts, max_margin)).float())
        self.register_buffer("weights", class_balanced_weights(counts, beta).float())

    def forward(self, samples: Samples) -> Tensor:
        """Return each sample's part of the loss, (n,)."""
        assert samples.logits is not None
        parts = _with_margins(_computed(samples.logits), samples.y, self.margins) / len(samples.whole)
        if samples.epoch < first_epoch(self.defer, samples.epochs):
            return parts
        return weighted_parts(parts, self.weights, samples)
