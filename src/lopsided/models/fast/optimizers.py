"""The optimizers of a stage, in torch's fused form where it exists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lopsided.models.fast.small_maps import used_taps
from lopsided.recipe import Classifier, EncoderTraining

MOMENTUM = 0.9
"""Momentum of the optimizer "sgd"."""


class _InMemoryOrder(torch.optim.Optimizer):
    """Passes every weight to torch's fused kernel in its memory order.

    In every step, the kernel copies the gradient of a weight that is not contiguous, such as a channels-last weight.
    The update is elementwise, so a contiguous view of the same memory gives the same numbers without the copy.

    Unused taps of a convolution kernel (``small_maps.used_taps``) never had a gradient. Without weight decay they
    cannot change, so they are left out.
    """

    def _init_group(self, group: Any, params: Any, grads: Any, averages: Any, squares: Any, *rest: Any) -> Any:
        result = super()._init_group(group, params, grads, averages, squares, *rest)  # type: ignore[misc]
        weights = [weight for weight in group["params"] if weight.grad is not None]
        for index, weight in enumerate(weights):
            # The kernel assumes that moments have the memory layout of the weight. Loaded moments may differ.
            grads[index] = _laid_like(weight, grads[index])
            for name, moments in (("exp_avg", averages), ("exp_avg_sq", squares)):
                moments[index] = self.state[weight][name] = _laid_like(weight, moments[index])
        for index, tensors in enumerate(zip(params, grads, averages, squares, strict=True)):
            used = used_taps(weights[index]) if group["weight_decay"] == 0 else None
            views = _contiguous_views(tensors) if used is None else _views_of_taps(tensors, used)
            params[index], grads[index], averages[index], squares[index] = views
        return result


def _laid_like(weight: Tensor, tensor: Tensor) -> Tensor:
    return tensor if tensor.stride() == weight.stride() else torch.empty_like(weight).copy_(tensor)


def _contiguous_views(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    first = tensors[0]
    if first.is_contiguous() or any(tensor.stride() != first.stride() for tensor in tensors):
        return tensors
    strides = first.stride()
    order = sorted(range(first.dim()), key=lambda axis: (-strides[axis], axis))
    views = tuple(tensor.permute(order) for tensor in tensors)
    return views if views[0].is_contiguous() else tensors


def _views_of_taps(tensors: tuple[Tensor, ...], used: slice) -> tuple[Tensor, ...]:
    by_tap = tuple(tensor.permute(2, 3, 1, 0) for tensor in tensors)
    if not all(tensor.is_contiguous() for tensor in by_tap):
        return tensors
    return tuple(tensor.flatten(0, 1)[used] for tensor in by_tap)


class Adam(_InMemoryOrder, torch.optim.Adam):
    """torch's Adam without copies of weights that are not contiguous."""


class AdamW(_InMemoryOrder, torch.optim.AdamW):
    """torch's AdamW without copies of weights that are not contiguous."""


def make_optimizer(
    module: nn.Module, settings: EncoderTraining | Classifier, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer of a stage, in its fused form on devices that support it."""
    fused = device.type in ("cpu", "cuda")
    common = {"lr": settings.lr, "weight_decay": settings.weight_decay, "fused": fused}
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=MOMENTUM, **common)  # type: ignore[arg-type]
    kind = Adam if settings.optimizer == "adam" else AdamW
    return kind(parameters, **common)  # type: ignore[arg-type]
