"""Selection of the epoch whose weights are kept. It uses the validation split, never the test split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.nn.functional import normalize

from lopsided.evaluation.metrics import confusion_figures

Judged = dict[str, float | list[float | None]]
"""Metrics of validation images after an epoch."""
MAX_PROBE = 100
"""The largest number of training inputs per class in the probe of the first stage."""


@dataclass
class Selection:
    """The best epoch so far. If two epochs tie, the later one wins, because it was trained longer."""

    patience: int | None = None
    best: float | None = None
    chosen: int = -1
    rose: int = -1
    """The epoch in which the figure last improved."""

    def update(self, epoch: int, figure: float | None) -> bool:
        """Record an epoch and return whether to keep its weights. Without a figure, the last epoch is kept."""
        if figure is None or self.best is None or figure > self.best:
            self.best, self.rose = figure, epoch
        elif figure < self.best:
            return False
        self.chosen = epoch
        return True

    def exhausted(self, epochs_done: int) -> bool:
        """Return whether the figure has not improved for ``patience`` epochs."""
        return self.patience is not None and self.best is not None and epochs_done - 1 - self.rose >= self.patience

    def to_dict(self) -> dict[str, float | int | None]:
        """Return all fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], patience: int | None, epochs_done: int) -> Selection:
        """Read the result of ``to_dict`` after ``epochs_done`` epochs."""
        try:
            found = TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            where = ".".join(map(str, error.errors(include_url=False)[0]["loc"]))
            raise ValueError(f"the selection has no usable {where}") from None
        if not (-1 <= found.chosen < epochs_done and -1 <= found.rose < epochs_done):
            raise ValueError(f"the selection names an epoch that is not done ({epochs_done} done)")
        return replace(found, patience=patience)


def figures(predicted: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], num_classes: int) -> Judged:
    """Return accuracy, UWA, macro F1, G-mean and MCC of predicted classes, and the recall of each class.

    The recall of a class without images is None.
    """
    codes = labels * num_classes + predicted
    confusion = np.bincount(codes, minlength=num_classes**2).reshape(num_classes, num_classes)
    support = confusion.sum(axis=1)
    pairs = zip(np.diagonal(confusion).tolist(), support.tolist(), strict=True)
    return {**confusion_figures(confusion), "recall": [hits / number if number else None for hits, number in pairs]}


def tempered_log_loss(logits: npt.NDArray[np.float64], labels: npt.NDArray[np.int64]) -> float:
    """Return the balanced log loss (``regression``) at the temperature at which it is lowest, which selects epochs.

    ``logits`` must carry a uniform prior. The temperature is free because the model is calibrated after training.
    Few rare images carry this figure better than UWA, because it changes little if one image changes.
    """
    from scipy.optimize import minimize_scalar

    rows = np.arange(len(labels))
    weights = 1 / np.bincount(labels)[labels] / len(np.unique(labels))

    def loss(log_scale: float) -> float:
        z = logits * np.exp(log_scale)
        return float(weights @ (np.logaddexp.reduce(z, axis=1) - z[rows, labels]))

    return float(minimize_scalar(loss, bounds=(-6.0, 6.0), method="bounded").fun)


def probe_rows(labels: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int64]:
    """Return up to ``MAX_PROBE`` training rows of each class, drawn with this seed."""
    generator = np.random.default_rng(seed)
    drawn = [generator.permutation(np.flatnonzero(labels == c))[:MAX_PROBE] for c in np.unique(labels)]
    return np.sort(np.concatenate(drawn))


def centroid_logits(features: Tensor, labels: Tensor, queries: Tensor, num_classes: int) -> npt.NDArray[np.float64]:
    """Return minus the squared distances of queries to the class means, with all features normalised to length 1.

    The first stage has no classifier, so this function evaluates its epochs. It needs no training. It measures whether
    the classes are separate in feature space, which is what the second stage needs.
    """
    unit = normalize(features.double(), dim=1)
    sums = unit.new_zeros(num_classes, unit.shape[1]).index_add_(0, labels, unit)
    counts = labels.bincount(minlength=num_classes)
    centroids = sums / counts.clamp(min=1)[:, None]
    # The squared distance without the query's squared length, which is 1 for every query.
    distances = centroids.square().sum(dim=1) - 2 * normalize(queries.double(), dim=1) @ centroids.T
    distances[:, counts == 0] = 1e6  # Far beyond the largest distance, which is 4.
    logits: npt.NDArray[np.float64] = distances.neg().cpu().numpy()
    return logits
