"""The interface between a loss and the training loop. It needs only torch."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

Reference = tuple[Tensor, Tensor]


class Objective(nn.Module):
    """The function that a stage of training minimises.

    An objective is built once per stage. Its arguments are ``counts`` (the number of training images of each class,
    shape (K,)), ``width`` (the length of a projection) and, as keywords, the parameters of its catalogue entry. It may
    have parameters and buffers. Training optimises them together with the network, sums their gradients over ranks, and
    saves them in checkpoints.
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
        """Return each sample's part of the loss, (n,). The parts of a batch sum to its loss.

        A batch may be shared among ranks:

        - ``y``: labels (n,) of this rank's samples.
        - ``whole``: labels of the whole batch. A mean must divide by ``len(whole)``.
        - ``projections``: (n, width), or (n, views, width) with several views, not normalised.
        - ``logits``: (n, K), or (n, views, K). An input that the loss does not need, by its catalogue entry, is None.
        - ``reference``: more contrast samples (m, width) and their labels (m,), from other ranks or a queue, or None.
        - ``epoch``: counts from 0 to ``epochs`` - 1.

        If the sum is cheaper to differentiate than its parts, a loss may return ``(total, parts)``: the sum with its
        graph, and the parts detached.
        """
