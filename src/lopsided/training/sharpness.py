"""Sharpness-aware minimisation, SAM (Foret et al., 2021).

SAM minimises the largest loss within a radius rho of the weights w. A step has two passes:

1. The gradient g of the loss at w. The weights climb to w + e with e = rho g / |g|, where |g| is the norm over all
   weights.
2. The gradient at w + e. The weights return to w, and the optimizer takes its step with this gradient.

Both passes use the same batch, augmentation, mixture, dropout masks and queue. Only the first pass changes the running
statistics of batch norm and the queue. Gradients are summed over the ranks before the climb, so all ranks climb to the
same weights. A scale of the gradients, as float16 needs it, cancels in e. If they overflow, there is no climb, the
second pass overflows as well, and the step is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lopsided.distributed import Ranks
from lopsided.models.machine import seeded
from lopsided.training.shares import Batch
from lopsided.training.step import Found, Step


class Sharpness:
    """Computes the gradients of SAM, batch by batch."""

    def __init__(self, step: Step, rho: float) -> None:
        self.step, self.rho = step, rho

    def gradients(self, batch: Batch, inputs: Tensor, epoch: int, index: int) -> Found:
        """Store the gradients at the climbed weights in the parameters. Return the loss before the climb."""
        step, names = self.step, ("dropout", self.step.stage.name, epoch, index, "rank", self.step.ranks.rank)
        with seeded(step.device, step.seed, *names):
            found = step.gradients(batch, inputs, epoch, index)
        weights = [weight for weight in step.parameters if weight.grad is not None]
        before = [weight.detach().clone() for weight in weights]
        climb(weights, self.rho, step.ranks)
        for weight in weights:
            weight.grad = None
        try:
            with step.statistics.kept(), seeded(step.device, step.seed, *names):
                step.gradients(batch, inputs, epoch, index, again=True)
        finally:
            with torch.no_grad():
                for weight, value in zip(weights, before, strict=True):
                    weight.copy_(value)
        return found


def climb(weights: Sequence[Tensor], rho: float, ranks: Ranks) -> None:
    """Add rho g / |g| to the weights, in place. Without a gradient, or if it is not finite, they stay as they are."""
    grads = [weight.grad for weight in weights if weight.grad is not None]
    if not grads:
        return
    with torch.no_grad():
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if ranks.size > 1:  # Gradients in another memory layout have another rounding of the norm.
            norm = ranks.gather(norm[None], [1] * ranks.size)[0]
        scale = rho / (norm + 1e-12)  # The authors' code adds the same number.
        finite = norm.isfinite()  # A tensor: the host does not wait for the device.
        for weight, grad in zip(weights, grads, strict=True):
            weight.add_(torch.where(finite, grad * scale, 0.0))
