"""The exponential moving average of weights in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_PREFIX = "average."


class Average:
    """A moving average of the trained parameters of a module.

    After step t, counted from 0, the average is d average + (1 - d) weights, with d the smaller one of ``decay`` and
    (1 + t) / (10 + t). So the first weights do not dominate the average of a short training. Running statistics of
    batch norm are not averaged, because they are averages already.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        self._kept = {name: weight.detach().clone() for name, weight in self._weights.items()}

    def update(self, step: int) -> None:
        """Add the weights after a step to the average."""
        decay = min(self.decay, (1 + step) / (10 + step))
        weights = [weight.detach() for weight in self._weights.values()]
        torch._foreach_lerp_(list(self._kept.values()), weights, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the module inside the block."""
        with torch.no_grad():
            now = {name: weight.detach().clone() for name, weight in self._weights.items()}
            self.apply()
            try:
                yield
            finally:
                for name, weight in self._weights.items():
                    weight.copy_(now[name])

    def apply(self) -> None:
        """Put the average into the module."""
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(self._kept[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return the average by name, for a checkpoint."""
        return {f"{_PREFIX}{name}": value for name, value in self._kept.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of ``tensors``."""
        for name, value in self._kept.items():
            found = tensors[f"{_PREFIX}{name}"]
            if (found.shape, found.dtype) != (value.shape, value.dtype):
                raise ValueError(f"the average of {name} has another shape or dtype")
            value.copy_(found)
