"""What a stage of training minimises: the contract between a loss and the training loop. Needs torch alone."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

Reference = tuple[Tensor, Tensor]


class Objective(nn.Module):
    """A loss as training calls it.

    An objective is built once per stage, with ``counts`` (the number of training images of each class, shape (K,)),
    ``width`` (the length of a projection) and the parameters of its entry in the catalogue as keywords. It may own
    parameters and buffers: training optimises them together with the network, sums their gradients over ranks, and
    keeps them in checkpoints.
    """

    def __init__(self, counts: Tensor, width: int) -> None:
        super().__init__()
        self.num_classes, self.width = len(counts), width

    @abstractmethod
    def forward(
        self,
        y: Tensor,
        whole: Tensor,
        *,
        projections: Tensor | None = None,
        logits: Tensor | None = None,
        reference: Reference | None = None,
        epoch: int = 0,
        epochs: int = 1,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return each sample's part of the loss, (n,); the parts of a batch add up to its loss.

        A batch may be shared among ranks. ``y`` are the labels (n,) of the samples at hand and ``whole`` the labels of
        the whole batch, so that a mean divides by ``len(whole)``. ``projections`` are (n, width), or (n, views, width)
        with several views, and not normalised; ``logits`` are (n, K), or (n, views, K). The catalogue says which of
        them a loss needs; the other is None. ``reference`` holds further contrast samples and their labels, from other
        ranks or from a queue, (m, width) and (m,), or None. ``epoch`` counts from 0 to ``epochs`` - 1.

        A loss that finds the sum cheaper to differentiate than its parts may return ``(total, parts)``: the sum, with
        its graph, and the parts, without.
        """
