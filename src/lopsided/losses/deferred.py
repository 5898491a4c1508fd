"""Deferred re-weighting (Cao et al., 2019): classes are weighted in the last epochs of training only.

Weights from the start hurt the features, because few images of the rare classes then steer every step. So the first
epochs train with equal weights, and the last ones with :func:`~lopsided.losses.class_balanced_weights`.
"""

from __future__ import annotations

import math

from torch import Tensor

from lopsided.losses._counts import check_range
from lopsided.losses.class_balanced import class_balanced_weights
from lopsided.losses.objective import Objective, Samples

__all__ = ["ReweightedObjective", "first_epoch", "weighted_parts"]


def first_epoch(share: float, epochs: int) -> int:
    """Return the first epoch, counted from 0, after the share of the epochs; ``epochs`` if the share is 1.

    >>> first_epoch(0.8, 200), first_epoch(0.8, 1), first_epoch(1.0, 200)
    (160, 0, 200)
    """
    return math.floor(share * epochs)


def weighted_parts(parts: Tensor, weights: Tensor, samples: Samples) -> Tensor:
    """Return the parts of a weighted mean, given the parts of a mean over the batch, both (n,).

    With v_i the loss of sample i in a batch of n samples, the parts are v_i / n before, and w_i v_i / sum_j w_j after.
    The sum is over the whole batch, as in torch's ``cross_entropy`` with weights and in the authors' code.
    """
    return parts * (weights[samples.y] * (len(samples.whole) / weights[samples.whole].sum()))


class ReweightedObjective(Objective):
    """Another objective whose samples have class weights once the share ``defer`` of the epochs is over.

    The weights are :func:`~lopsided.losses.class_balanced_weights` with ``beta``. The last epoch always has them.
    """

    weights: Tensor

    def __init__(
        self, objective: Objective, counts: Tensor, width: int, *, defer: float = 0.8, beta: float = 0.9999
    ) -> None:
        super().__init__(counts, width)
        self.defer = check_range("defer", defer, 0.0, 1.0, advice="The paper uses 0.8; 1 never re-weights.")
        self.objective = objective
        self.register_buffer("weights", class_balanced_weights(counts, beta).float())

    def forward(self, samples: Samples) -> Tensor | tuple[Tensor, Tensor]:
        """Return what the other objective returns, and later each sample's part of the weighted mean."""
        if samples.epoch < first_epoch(self.defer, samples.epochs):
            found: Tensor | tuple[Tensor, Tensor] = self.objective(samples)
            return found
        return weighted_parts(self.objective.apart(samples), self.weights, samples)
