"""Focal loss and asymmetric loss of logits, for the second stage: Eqs. (8)-(14) of the paper.

The losses use ``logsigmoid``, which has full relative precision at both ends. So no probability is rounded to 0 or 1
before its logarithm is taken. For finite logits, the value and the gradient are finite and correct. float16 and
bfloat16 logits are computed in float32, also under autocast, and the result is float32.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from lopsided.losses.objective import Objective, Samples

__all__ = ["AsymmetricLoss", "FocalLoss", "asymmetric_loss", "focal_loss"]


def focal_loss(
    logits: Tensor, target: Tensor, *, gamma: float = 2.0, weight: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """Focal loss, Eq. (8): ``-w_t (1 - p_t)^gamma log p_t``, with p_t the predicted probability of the true class t.

    Binary: logits (n,) or (n, 1) of class 1, and a target of 0s and 1s (float, integer or bool) with n entries.
    Multi-class: logits (n, K) with K >= 2, and an integer target (n,); p is the softmax. Two classes may be given in
    both forms: logits ``x`` and ``stack([0, x], dim=1)`` have the same loss.

    ``weight`` holds one weight per class: (2,) in the binary case, (K,) otherwise. It multiplies the term and does not
    change p_t. ``"mean"`` divides by the sum of the weights w_t of the samples, like torch's ``cross_entropy``; without
    weights this sum is n. ``"sum"`` returns the sum of the terms, ``"none"`` the terms, (n,). At gamma = 0 the loss
    equals ``cross_entropy``, and in the binary case without weights ``binary_cross_entropy_with_logits``.

    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 3.0]])
    >>> target = torch.tensor([0, 1])
    >>> focal_loss(logits, target, gamma=2.0, reduction="none")
    tensor([0.0109, 1.7026])
    >>> torch.allclose(focal_loss(logits, target, gamma=0.0), torch.nn.functional.cross_entropy(logits, target))
    True
    """
    _check_exponent("gamma", gamma)
    _check_reduction(reduction)
    x = _computed(logits)
    if x.ndim == 1 or (x.ndim == 2 and x.shape[1] == 1):
        x = x.reshape(-1)
        classes, t = 2, _binary_target(target, logits)
        true_logit = torch.where(t == 1, x, -x)
    elif x.ndim == 2 and x.shape[1] >= 2:
        classes, t = x.shape[1], _class_target(target, logits)
        # With all other classes combined, the problem is binary, and this difference is the logit of the true class.
        # Computing 1 - p_t from the other classes keeps its digits even if p_t rounds to 1.
        others = x.scatter(1, t[:, None], -torch.inf).logsumexp(dim=1)
        true_logit = x.gather(1, t[:, None]).squeeze(1) - others
    else:
        raise ValueError(
            f"logits must have shape (n,) or (n, 1) for two classes, or (n, K), got {tuple(logits.shape)}. "
            "Move the classes last and flatten all other dimensions into n."
        )
    _check_not_empty(logits)
    loss = _focal_term(true_logit, gamma)
    if weight is None:
        return _reduced(loss, reduction)
    sample_weight = _class_weight(weight, classes).to(loss.dtype)[t]
    loss = sample_weight * loss
    if reduction != "mean":
        return _reduced(loss, reduction)
    total = sample_weight.sum()
    if not torch.compiler.is_compiling() and total == 0:
        raise ValueError(
            "weight must be positive for some class of the batch when reduction='mean', got 0 for every sample. "
            "Skip such a batch, or use reduction='sum'."
        )
    return loss.sum() / total


def asymmetric_loss(
    logits: Tensor,
    target: Tensor,
    *,
    gamma_positive: float = 0.0,
    gamma_negative: float = 4.0,
    margin: float = 0.05,
    reduction: str = "mean",
) -> Tensor:
    """Asymmetric loss (ASL) for multi-label data, Eqs. (9)-(14).

    The term of a label with target 1 is ``-(1 - p)^gamma_positive log p``. The term of a label with target 0 is
    ``-p_m^gamma_negative log(1 - p_m)`` with the shifted probability ``p_m = max(p - margin, 0)``. p is the sigmoid of
    the logit.

    ``logits`` and ``target`` are (n, K); the target holds 0s and 1s (float, integer or bool). As in the paper, the loss
    of a sample is the sum over its K labels. ``"none"`` returns the losses of the samples, (n,); ``"sum"`` and
    ``"mean"`` reduce them over the n samples. With 0, 0, 0 for the three parameters the loss is binary cross-entropy.
    With ``margin=1`` the terms of the negative labels are 0.

    >>> logits = torch.tensor([[3.0, -1.0, 0.5]])
    >>> target = torch.tensor([[1, 0, 0]])
    >>> asymmetric_loss(logits, target)
    tensor(0.1404)
    >>> asymmetric_loss(logits, target, margin=1.0)  # only the positive label
    tensor(0.0486)
    """
    _check_exponent("gamma_positive", gamma_positive)
    _check_exponent("gamma_negative", gamma_negative)
    _check_margin(margin)
    _check_reduction(reduction)
    x = _computed(logits)
    if x.ndim != 2:
        raise ValueError(
            f"logits must have shape (n, K), got {tuple(logits.shape)}. Give a row per sample and a column per label."
        )
    if not isinstance(target, Tensor) or target.shape != logits.shape:
        got = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(
            f"target must be a tensor of the shape of logits {tuple(logits.shape)}, got {got}. "
            "Give a 0 or a 1 for every label of every sample."
        )
    _check_zeros_and_ones(target)
    _check_not_empty(logits)
    negative_term = _shifted_term(x, gamma_negative, margin) if margin > 0 else _focal_term(-x, gamma_negative)
    loss = torch.where(target == 1, _focal_term(x, gamma_positive), negative_term)
    return _reduced(loss.sum(dim=1), reduction)


class FocalLoss(nn.Module):
    """Module form of :func:`focal_loss`; ``weight`` is a buffer and moves with the module."""

    weight: Tensor | None

    def __init__(self, gamma: float = 2.0, weight: Tensor | None = None, reduction: str = "mean") -> None:
        super().__init__()
        _check_exponent("gamma", gamma)
        _check_reduction(reduction)
        self.gamma = gamma
        self.reduction = reduction
        self.register_buffer("weight", weight)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of ``logits`` (n,), (n, 1) or (n, K) for ``target``."""
        return focal_loss(logits, target, gamma=self.gamma, weight=self.weight, reduction=self.reduction)

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        return f"gamma={self.gamma}, weighted={self.weight is not None}, reduction={self.reduction!r}"


class AsymmetricLoss(nn.Module):
    """Module form of :func:`asymmetric_loss`."""

    def __init__(
        self,
        gamma_positive: float = 0.0,
        gamma_negative: float = 4.0,
        margin: float = 0.05,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        _check_exponent("gamma_positive", gamma_positive)
        _check_exponent("gamma_negative", gamma_negative)
        _check_margin(margin)
        _check_reduction(reduction)
        self.gamma_positive = gamma_positive
        self.gamma_negative = gamma_negative
        self.margin = margin
        self.reduction = reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of ``logits`` (n, K) for ``target`` (n, K)."""
        return asymmetric_loss(
            logits,
            target,
            gamma_positive=self.gamma_positive,
            gamma_negative=self.gamma_negative,
            margin=self.margin,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        return (
            f"gamma_positive={self.gamma_positive}, gamma_negative={self.gamma_negative}, "
            f"margin={self.margin}, reduction={self.reduction!r}"
        )


def _focal_term(logit: Tensor, gamma: float) -> Tensor:
    """Return ``-(1 - p)^gamma log p`` with p the sigmoid of ``logit``.

    The power is computed as ``exp(gamma log(1 - p))``. For gamma below 1, the gradient of ``pow`` is not finite at
    1 - p = 0, although the gradient of the term is finite.
    """
    term = -logsigmoid(logit)
    return term if gamma == 0 else (gamma * logsigmoid(-logit)).exp() * term


def _shifted_term(logit: Tensor, gamma: float, margin: float) -> Tensor:
    """Return ``-q^gamma log(1 - q)`` with q = max(p - margin, 0), p the sigmoid of ``logit`` and margin > 0.

    With ``edge`` the logit at which p = margin, q = p (1 - margin) (1 - exp(edge - logit)). The logarithm of this
    product loses no digits near the edge, keeps a margin that is tiny compared with p, and avoids the gradient of
    ``pow`` at 0 for gamma below 1. Below the edge, the argument is replaced before the logarithm is taken. The negated
    comparison keeps NaN.
    """
    if margin == 1:
        return torch.where(logit.isnan(), logit, 0.0)
    edge = math.log(margin) - math.log1p(-margin)
    gap = edge - logit
    above = ~(gap >= 0)
    log_q = logsigmoid(logit) + math.log1p(-margin) + _log1mexp(torch.where(above, gap, -1.0))
    # For small q, compute 1 - q from q. For q near 1, compute it as (1 - p) + margin.
    small = log_q <= math.log(0.5)
    log_rest = torch.where(
        small,
        torch.log1p(-torch.where(small, log_q, -1.0).exp()),
        torch.logaddexp(logsigmoid(-logit), torch.full_like(logit, math.log(margin))),
    )
    term = -log_rest if gamma == 0 else -(gamma * log_q).exp() * log_rest
    return torch.where(above, term, 0.0)


def _log1mexp(x: Tensor) -> Tensor:
    """Return ``log(1 - exp(x))`` for x < 0.

    Near 0 it uses ``expm1``. Far from 0 it uses ``log1p``, because the gradient of ``expm1`` is not exact there.
    """
    near = x > -math.log(2)
    return torch.where(
        near, (-torch.expm1(torch.where(near, x, -1.0))).log(), torch.log1p(-torch.where(near, -1.0, x).exp())
    )


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return loss.mean()
    return loss.sum() if reduction == "sum" else loss


def _computed(logits: Tensor) -> Tensor:
    """Return the logits in the dtype in which the loss is computed."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a torch tensor, got {type(logits).__name__}. Convert with torch.as_tensor.")
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}. Pass the raw outputs of the model.")
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _binary_target(target: Tensor, logits: Tensor) -> Tensor:
    """Return the target as class indices 0 and 1, (n,)."""
    n = logits.shape[0]
    if not isinstance(target, Tensor) or tuple(target.shape) not in ((n,), (n, 1)):
        got = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(
            f"target must be a tensor of shape ({n},) or ({n}, 1) for logits {tuple(logits.shape)}, got {got}. "
            "Give one 0 or 1 per sample."
        )
    _check_zeros_and_ones(target)
    return target.reshape(-1).long()


def _class_target(target: Tensor, logits: Tensor) -> Tensor:
    """Return the target as class indices 0 to K - 1, (n,)."""
    t = _index_target(target, logits)
    if not torch.compiler.is_compiling() and len(t) > 0:
        _check_indices(t, logits.shape[1])
    return t


def _index_target(target: Tensor, logits: Tensor) -> Tensor:
    """Return the target as integers, (n,). Their values are not checked."""
    n = logits.shape[0]
    if not isinstance(target, Tensor) or tuple(target.shape) != (n,):
        got = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(
            f"target must be a tensor of shape ({n},) for logits {tuple(logits.shape)}, got {got}. "
            "Give one class index per sample; for several labels per sample use asymmetric_loss."
        )
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(
            f"target must hold integers for logits {tuple(logits.shape)}, got {target.dtype}. "
            "Give the index of the true class, for example with target.long()."
        )
    return target.long()


def _checked(
    logits: Tensor, target: Tensor, classes: int, reduction: str, *, looked_up: bool = True
) -> tuple[Tensor, Tensor]:
    """Return logits in the dtype of the computation, and the target as integers, for a loss with class counts.

    ``looked_up``: the loss looks up values of classes, so that the integers must be indices of classes.
    """
    _check_reduction(reduction)
    x = _computed(logits)
    if x.ndim != 2 or x.shape[1] != classes:
        got = tuple(x.shape)
        raise ValueError(f"logits must have shape (n, {classes}), one column for each of the counts, got {got}.")
    t = (_class_target if looked_up else _index_target)(target, logits)
    _check_not_empty(logits)
    return x, t


def _check_indices(t: Tensor, classes: int) -> None:
    low, high = (int(value) for value in t.aminmax())
    if low < 0 or high >= classes:
        raise ValueError(
            f"target must hold class indices from 0 to {classes - 1}, got {low if low < 0 else high}. "
            "Drop samples without a class and number the classes from 0."
        )


_NO_INDEX = -(2**62)
"""A label that no sample has: torch would skip samples with its own default, -100."""


def _entropy(x: Tensor, t: Tensor, weight: Tensor | None = None, reduction: str = "none") -> Tensor:
    """Return torch's ``cross_entropy``. It checks the target itself; a wrong target gets the text of this package."""
    if torch.compiler.is_compiling():
        return cross_entropy(x, t, weight, ignore_index=_NO_INDEX, reduction=reduction)
    try:
        return cross_entropy(x, t, weight, ignore_index=_NO_INDEX, reduction=reduction)
    except IndexError:
        _check_indices(t, x.shape[1])
        raise


def _check_zeros_and_ones(target: Tensor) -> None:
    if target.dtype == torch.bool or torch.compiler.is_compiling():
        return
    wrong = target[(target != 0) & (target != 1)]
    if wrong.numel():
        raise ValueError(f"target must hold 0s and 1s only, got {wrong[0].item()}. Soft labels are not supported.")


def _class_weight(weight: Tensor, classes: int) -> Tensor:
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        got = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"weight must be a floating-point tensor, got {got}. Convert it with weight.float().")
    if tuple(weight.shape) != (classes,):
        raise ValueError(
            f"weight must have shape ({classes},), got {tuple(weight.shape)}. Give one weight per class, class 0 first."
        )
    if not torch.compiler.is_compiling():
        wrong = weight[~((weight >= 0) & weight.isfinite())]
        if wrong.numel():
            raise ValueError(f"weight must be >= 0 and finite, got {wrong[0].item()}. Use 0 to ignore a class.")
    return weight


def _check_not_empty(logits: Tensor) -> None:
    if logits.numel() == 0:
        raise ValueError(
            f"logits must hold at least one sample and label, got shape {tuple(logits.shape)}. Skip empty batches."
        )


def _check_exponent(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}. Use 0 for plain cross-entropy.")


def _check_margin(margin: float) -> None:
    if isinstance(margin, bool) or not isinstance(margin, Real) or not 0 <= margin <= 1:
        raise ValueError(f"margin must be a number from 0 to 1, got {margin!r}. Use 0 for no shift.")


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be one of 'mean', 'sum', 'none', got {reduction!r}.")


class CrossEntropyObjective(Objective):
    """Cross-entropy: the mean over the batch, like torch's ``cross_entropy``."""

    def forward(self, samples: Samples) -> Tensor:
        """Return each sample's part of the loss, (n,)."""
        assert samples.logits is not None
        return self.shared(self.values(samples.logits, samples.y), samples.y, samples.whole)

    def values(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, (n,)."""
        return cross_entropy(logits, y, reduction="none")

    def shared(self, values: Tensor, y: Tensor, whole: Tensor) -> Tensor:
        """Return the contributions of these values to the mean over the whole batch."""
        return values / len(whole)


class LossObjective(CrossEntropyObjective):
    """The mean over the batch of a ``loss`` that returns the value of each sample."""

    loss: nn.Module

    def values(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, (n,)."""
        values: Tensor = self.loss(logits, y)
        return values


class WeightedCrossEntropyObjective(CrossEntropyObjective):
    """Cross-entropy with weight n / (K n_c) for class c, so that all classes have the same total weight in training."""

    weight: Tensor

    def __init__(self, counts: Tensor, width: int) -> None:
        super().__init__(counts, width)
        weight = counts.sum().double() / (len(counts) * counts.clamp(min=1).double())
        self.register_buffer("weight", weight.float())

    def shared(self, values: Tensor, y: Tensor, whole: Tensor) -> Tensor:
        """Return the contributions of these values to the weighted mean, which divides by the sum of the weights."""
        return values * self.weight[y] / self.weight[whole].sum()


class FocalObjective(CrossEntropyObjective):
    """The mean of :func:`focal_loss` over the batch."""

    def __init__(self, counts: Tensor, width: int, *, gamma: float = 2.0) -> None:
        super().__init__(counts, width)
        self.gamma = gamma

    def values(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, (n,)."""
        return focal_loss(logits, y, gamma=self.gamma, reduction="none")
