"""The precision in which an encoder is trained. Its weights, batch statistics and losses are always float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

_TYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SCALE, _GROWTH = "scaler.scale", "scaler.growth"


class Precision:
    """torch's autocast and, for "fp16", its gradient scaler.

    float16 gradients below 6e-8 become 0. So the gradients are multiplied by a large scale and divided by it at the
    end. A step in which a gradient overflows is skipped, and the scale is halved. All ranks skip the same steps,
    because they have the same sums of gradients.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.dtype, self.device = _TYPES[name], device
        self.scaler = torch.amp.GradScaler(device.type) if self.dtype == torch.float16 else None

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute in this precision inside the block, for the operations that torch considers safe."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            yield

    def scaled(self, grad: Tensor) -> Tensor:
        """Return a gradient times the current scale, to send back through the encoder."""
        if self.scaler is None:
            return grad
        scaled: Tensor = self.scaler.scale(grad)
        return scaled

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the weights from gradients that ``scaled`` returned."""
        if self.scaler is None:
            optimizer.step()
            return
        self.scaler.unscale_(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()

    def tensors(self) -> dict[str, Tensor]:
        """Return the scaler's state for a checkpoint."""
        if self.scaler is None:
            return {}
        state = self.scaler.state_dict()
        return {
            _SCALE: torch.tensor(state["scale"], dtype=torch.float64),
            _GROWTH: torch.tensor(state["_growth_tracker"]),
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of ``tensors``."""
        if self.scaler is not None and _SCALE in tensors and _GROWTH in tensors:
            found = {"scale": float(tensors[_SCALE]), "_growth_tracker": int(tensors[_GROWTH])}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **found})
