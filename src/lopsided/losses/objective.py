"""The interface between a loss and the training loop. It needs only torch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Samples:
    """What an objective gets in each step. The samples may be a share of a batch, as each of several ranks has one."""

    y: Tensor
    """Labels of the samples, (n,)."""
    whole: Tensor
    """Labels of the whole batch, over all ranks. A mean over the batch divides by ``len(whole)``."""
    projections: Tensor | None = None
    """(n, width), or (n, views, width) with several views, not normalised; None if the loss does not need them."""
    logits: Tensor | None = None
    """(n, K), or (n, views, K); None if the loss does not need them."""
    reference: tuple[Tensor, Tensor] | None = None
    """Further contrast samples and their labels, (m, width) and (m,), from other ranks or from a queue."""
    epoch: int = 0
    """Counts from 0 to ``epochs`` - 1."""
    epochs: int = 1


class Objective(nn.Module):
    """The function that a stage of training minimises.

    An objective is built once per stage, with ``counts`` (the number of training images of each class, shape (K,)),
    ``width`` (the length of a projection) and the parameters of its entry in the catalogue as keywords. It may own
    parameters and buffers: training optimises them together with the network, sums their gradients over ranks, and
    saves them in checkpoints.
    """

    def __init__(self, counts: Tensor, width: int) -> None:
        super().__init__()
        self.num_classes, self.width = len(counts), width

    @abstractmethod
    def forward(self, samples: Samples) -> Tensor | tuple[Tensor, Tensor]:
        """Return each sample's part of the loss, (n,). The parts of a whole batch add up to its loss.

        If the sum is cheaper to differentiate than the parts, return ``(total, parts)`` instead: the sum with its
        graph, and the parts without a graph.
        """

    def apart(self, samples: Samples) -> Tensor:
        """Return each sample's part of the loss with its graph, so that the parts can be weighted.

        An objective that returns a sum in ``forward`` must define this method if its entry has ``class_weights``.
        """
        found = self(samples)
        if isinstance(found, tuple):
            raise TypeError(f"{type(self).__name__} has no graph for each part; define its method apart")
        parts: Tensor = found
        return parts


class AnchorObjective(Objective):
    """The mean over all anchors of a contrastive ``loss``. The part of a sample is the mean over its views."""

    loss: Any
    """A module with ``total_and_values``: the sum with its graph, and the values of the anchors without one."""

    def forward(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """Return the sum, with its graph, and each sample's part of it."""
        total, values = self.loss.total_and_values(samples.projections, samples.y, reference=samples.reference)
        values, num = values.reshape(len(samples.y), -1), len(samples.whole)
        return total / (values.shape[1] * num), values.mean(dim=1) / num
