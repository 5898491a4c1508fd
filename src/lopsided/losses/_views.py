"""What losses for two classes and several views ask of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from lopsided.losses._kernel.checks import Reference


def check_binary_views(loss: str, z: Tensor, y: Tensor) -> Tensor:
    """Return the labels (n,) of features (n, views, d) of two classes. Raise if there are no views or other labels."""
    if not isinstance(z, Tensor) or z.ndim != 3 or z.shape[1] < 2:
        got = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
        do = "Encode two augmented views of each sample."
        raise ValueError(f"z must have shape (n, views, d) with at least 2 views for {loss}, got {got}. {do}")
    return check_binary_labels(loss, "y", y)


def check_binary_labels(loss: str, name: str, y: Tensor) -> Tensor:
    """Return labels that are 0 or 1. Their content is checked where reading it costs nothing."""
    if not isinstance(y, Tensor) or y.ndim != 1 or y.is_floating_point() or y.is_complex():
        got = f"{y.dtype} of shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"{name} must be an integer tensor with one label per sample, got {got}.")
    labels = y.long()
    if labels.device.type == "cpu" and not torch.compiler.is_compiling() and len(labels):
        low, high = (int(value) for value in labels.aminmax())
        if low < 0 or high > 1:
            wrong = low if low < 0 else high
            raise ValueError(f"{name} must hold the labels 0 and 1, got {wrong}. {loss} is for two classes.")
    return labels


def split_reference(loss: str, reference: Reference) -> tuple[Tensor, Tensor]:
    """Return the features and labels of a reference."""
    if not isinstance(reference, (tuple, list)) or len(reference) != 2 or not isinstance(reference[1], Tensor):
        raise TypeError(
            f"reference must be a pair (z_ref, y_ref) of tensors for {loss}, got {type(reference).__name__}."
        )
    z_ref, y_ref = reference
    assert y_ref is not None
    return z_ref, check_binary_labels(loss, "y_ref", y_ref)
