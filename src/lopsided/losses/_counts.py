"""Class counts and parameters of the losses that use them, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

Counts = Tensor | Sequence[int]


def check_counts(counts: Counts) -> Tensor:
    """Return the number of training images of each class as float64, (K,). A class without images counts as 1 image."""
    numbers = counts if isinstance(counts, Tensor) else torch.as_tensor(counts)
    if numbers.ndim != 1 or len(numbers) < 2 or numbers.is_complex() or numbers.dtype == torch.bool:
        got = f"{numbers.dtype} of shape {tuple(numbers.shape)}"
        raise ValueError(f"counts must hold one number of images for each of at least 2 classes, got {got}.")
    if not torch.compiler.is_compiling():
        wrong = numbers[~((numbers >= 0) & numbers.isfinite())]
        if wrong.numel():
            raise ValueError(f"counts must be >= 0 and finite, got {wrong[0].item()}. Count the training images.")
    return numbers.detach().cpu().double().clamp(min=1)  # Some devices have no float64.


def check_range(name: str, value: float, least: float, most: float, *, advice: str, above: bool = False) -> float:
    """Return a finite number from ``least`` to ``most``; with ``above``, it must be larger than ``least``."""
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not least <= value <= most or (above and value == least):
        bound = f"> {least:g}" if above else f">= {least:g}"
        bound += "" if math.isinf(most) else f" and <= {most:g}"
        raise ValueError(f"{name} must be a finite number {bound}, got {value!r}. {advice}".rstrip())
    return float(value)
