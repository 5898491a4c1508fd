"""The optimizers of a stage, in torch's fused form where it exists."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lopsided.recipe import Classifier, EncoderTraining

MOMENTUM = 0.9
"""Momentum of the optimizer "sgd"."""


Kind = TypeVar("Kind", torch.optim.Adam, torch.optim.AdamW)


def in_memory_order(optimizer: Kind) -> Kind:
    """Make an optimizer pass every weight to torch's fused kernel in its memory order, and return the optimizer.

    In every step, the kernel copies the gradient of a weight that is not contiguous, such as a channels-last weight.
    The update is elementwise, so a contiguous view of the same memory gives the same numbers without the copy.

    The views replace the optimizer's parameters and state during a step. The first step of a weight creates its state
    and is torch's own.
    """
    kept: list[list[Tensor]] = []

    # The hooks take the optimizer as an argument: a closure over it would be a cycle, which frees its state late.
    def hand_over(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        kept[:] = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [_view(weight, optimizer.state) for weight in group["params"]]

    def take_back(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, weights in zip(optimizer.param_groups, kept, strict=True):
            for view, weight in zip(group["params"], weights, strict=True):
                if view is not weight:
                    del optimizer.state[view]
            group["params"] = weights

    optimizer.register_step_pre_hook(hand_over)
    optimizer.register_step_post_hook(take_back)
    return optimizer


def _view(weight: Tensor, state: dict[Tensor, Any]) -> Tensor:
    """Return a view of a weight with its gradient and state, or the weight itself if it has none."""
    if weight.grad is None:
        return weight
    # The kernel assumes that gradient and moments have the memory layout of the weight. Loaded moments may differ.
    weight.grad = _laid_like(weight, weight.grad)
    if weight not in state:
        return weight
    own = state[weight]
    own.update({name: _laid_like(weight, own[name]) for name in ("exp_avg", "exp_avg_sq")})
    tensors = (weight.detach(), weight.grad, own["exp_avg"], own["exp_avg_sq"])
    view, view.grad, average, square = _contiguous_views(tensors)
    state[view] = {**own, "exp_avg": average, "exp_avg_sq": square}
    return view


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


def make_optimizer(
    module: nn.Module,
    settings: EncoderTraining | Classifier,
    device: torch.device,
    groups: list[dict[str, Any]] | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer of a stage, in its fused form on devices that support it.

    ``groups`` are groups of parameters with settings of their own. Without them, all parameters are one group.
    """
    fused = device.type in ("cpu", "cuda")
    common = {"lr": settings.lr, "weight_decay": settings.weight_decay, "fused": fused}
    parameters: list[Any] = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if groups is not None:
        parameters = [dict(group) for group in groups]  # The optimizer adds its own settings.
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=MOMENTUM, **common)  # type: ignore[arg-type]
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return in_memory_order(kind(parameters, **common))  # type: ignore[arg-type]
