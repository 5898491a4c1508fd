"""Probabilities of named images, and the rows that ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lopsided.data.inputs import Indices
from lopsided.distributed import Ranks
from lopsided.errors import DataError, RunError, sentence
from lopsided.evaluation.decision import PLAIN, Decision
from lopsided.models.model import ModelCard

Floats = npt.NDArray[np.float64]
_Number = TypeVar("_Number", np.float32, np.float64)


@dataclass(frozen=True, eq=False)
class Predictions:
    """Probabilities (n, K) of named images. ``y_true`` holds indices into ``classes``; None without labels."""

    names: tuple[str, ...]
    classes: tuple[str, ...]
    probabilities: Floats
    y_true: npt.NDArray[np.int64] | None = None
    groups: npt.NDArray[np.str_] | None = None
    features: npt.NDArray[np.float32] | None = None
    decision: Decision = PLAIN

    @property
    def y_pred(self) -> npt.NDArray[np.int64]:
        """The class that the rule of the model decides for."""
        return self.decision.decide(self.probabilities)


def share_rows(num: int, ranks: Ranks | None) -> tuple[Indices, list[int]]:
    """Divide the rows 0 to ``num`` - 1 among the ranks. Return the rows of this rank and the number of each rank."""
    ranks = ranks or Ranks()
    shares = np.array_split(np.arange(num), ranks.size)
    return shares[ranks.rank], [len(share) for share in shares]


def gather_rows(rows: npt.NDArray[_Number], sizes: list[int], ranks: Ranks | None) -> npt.NDArray[_Number]:
    """Return the rows of all ranks, in the order of ``share_rows``."""
    if ranks is None or ranks.size == 1:
        return rows
    gathered: npt.NDArray[_Number] = ranks.gather(torch.from_numpy(rows), sizes).numpy()
    return gathered


def check_shape(batch: Tensor, card: ModelCard) -> None:
    """Raise unless a batch has the shape of the training inputs of the model."""
    if tuple(batch.shape[1:]) != card.shape:
        must = f"inputs must have the shape {card.shape} that the model was trained on"
        raise DataError(sentence(must, tuple(batch.shape[1:])))


def check_finite(probabilities: Floats) -> None:
    """Raise if probabilities are not finite: the numbers of the model have left the range of float32."""
    if not np.isfinite(probabilities).all():
        do = "Its weights, mean or std are far too large or too small; train the model again."
        raise RunError(f"The model returned NaN instead of probabilities. {do}")
