"""The state of the ranks in the middle of an epoch, which a checkpoint holds beside the weights.

After a step, all ranks have the same weights. Each has its own sums over the epoch, its own random numbers, and, unless
they are synchronised, its own running statistics of batch norm. A checkpoint holds those of all ranks, one row each. If
another number of ranks continues, they begin with the sum of the sums and the mean of the statistics, and draw new
random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lopsided.ranks import Ranks

_PREFIX, _SUM, _RANDOM = "midway.", "sum.", "random."


class Midway:
    """What the ranks have after some steps of an epoch, by name. ``tensors`` are those of a checkpoint."""

    def __init__(self, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
        own = {key.removeprefix(_PREFIX): rows for key, rows in tensors.items() if key.startswith(_PREFIX)}
        self._rows = {key: rows for key, rows in own.items() if not key.startswith(_RANDOM)}
        self._states = {key.removeprefix(_RANDOM): rows for key, rows in own.items() if key.startswith(_RANDOM)}
        self.ranks = ranks

    @property
    def is_exact(self) -> bool:
        """Whether the ranks that continue are as many as those that stopped."""
        return all(len(rows) == self.ranks.size for rows in self._states.values())

    def check(self, values: Mapping[str, Tensor], device: torch.device) -> None:
        """Raise if these values cannot be restored."""
        for name, value in values.items():
            rows = self._rows[name]
            if not len(rows) or (rows.shape[1:], rows.dtype) != (value.shape, value.dtype):
                raise ValueError(f"{name} in the middle of the epoch has another shape or dtype")
        for kind in _random_states(device):
            generator = torch.Generator(device if kind == "cuda" else "cpu")
            for state in self._states[kind]:
                generator.set_state(state.clone())  # torch ignores where a part of a tensor begins.

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Copy the state of this rank into ``values``, and into the generators of random numbers."""
        for name, value in values.items():
            rows = self._rows[name].to(value.device)
            if self.is_exact:
                value.copy_(rows[self.ranks.rank])
            elif name.startswith(_SUM):
                value.copy_(rows.sum(0) * (1 if self.ranks.first else 0))
            else:
                value.copy_(rows.mean(0) if value.is_floating_point() else rows.amax(0))
        if self.is_exact:
            for kind, rows in self._states.items():
                _set_random_state(kind, rows[self.ranks.rank].clone())


def summed(name: str) -> str:
    """Return the name under which a sum over the epoch is kept, of which each rank has a part."""
    return f"{_SUM}{name}"


def midway_tensors(values: Mapping[str, Tensor], ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
    """Return ``values`` and the states of the generators on all ranks, for a checkpoint."""
    states = {f"{_RANDOM}{kind}": state for kind, state in _random_states(device).items()}
    everything = {**values, **states}
    sizes = [1] * ranks.size
    return {f"{_PREFIX}{name}": ranks.gather(value[None], sizes).clone() for name, value in everything.items()}


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.default_generator.get_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _set_random_state(kind: str, state: Tensor) -> None:
    if kind == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.default_generator.set_state(state)
