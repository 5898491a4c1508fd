"""Averages of weights in training: a moving average over the steps (EMA), or an equal one over epochs (SWA)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lopsided.distributed import Ranks

_PREFIX = "average."


class Average:
    """An exponential moving average (EMA) of the trained parameters of a module.

    After step t, counted from 0, the average is d average + (1 - d) weights, with d the smaller one of ``decay`` and
    (1 + t) / (10 + t). So the first weights do not dominate the average of a short training.

    ``layers`` are batch norm layers whose running statistics are averaged in the same way, as those of timm's averaged
    models are: the statistics of the last weights do not fit averaged weights.
    """

    def __init__(self, module: nn.Module, decay: float, layers: Sequence[_BatchNorm] = ()) -> None:
        self.decay = decay
        self._weights: dict[str, Tensor] = {
            name: weight for name, weight in module.named_parameters() if weight.requires_grad
        }
        statistics = {id(value) for layer in layers for value in (layer.running_mean, layer.running_var)}
        self._statistics = [name for name, buffer in module.named_buffers() if id(buffer) in statistics]
        self._weights |= {name: module.get_buffer(name) for name in self._statistics}
        self._kept = {name: weight.detach().clone() for name, weight in self._weights.items()}

    def update(self, step: int) -> None:
        """Add the weights after a step to the average."""
        self._add(1 - min(self.decay, (1 + step) / (10 + step)))

    def _add(self, share: float) -> None:
        """Move the average by this share of the way to the weights."""
        weights = [weight.detach() for weight in self._weights.values()]
        torch._foreach_lerp_(list(self._kept.values()), weights, share)

    def join(self, ranks: Ranks) -> None:
        """Average the running statistics over the ranks, for ranks that compute their own."""
        if ranks.size > 1 and self._statistics:
            kept = [self._kept[name].div_(ranks.size) for name in self._statistics]
            ranks.sum_(kept)

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


class EqualAverage(Average):
    """The mean of the weights after several epochs: stochastic weight averaging, SWA (Izmailov et al., 2018).

    The running statistics of batch norm are not part of it. They are computed anew for the mean (see ``loop``).
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, 0.0)

    def update(self, step: int) -> None:
        """Add the weights after an epoch. ``step`` is the number of epochs that are in the mean already."""
        self._add(1 / (step + 1))
