"""Compute the probabilities of images with a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lopsided.data.images import Images, Progress
from lopsided.data.inputs import Indices, Inputs, StreamedInputs, row_batches
from lopsided.distributed import Ranks
from lopsided.errors import DataError, RunError, sentence
from lopsided.evaluation.decision import PLAIN, Decision
from lopsided.inference.engine import Engine
from lopsided.models.model import Model, ModelCard

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


def predict(
    model: Model,
    card: ModelCard,
    images: Images,
    *,
    batch_size: int = 256,
    workers: int = 0,
    progress: Progress | None = None,
    engine: Engine | None = None,
) -> Floats:
    """Return the probabilities (n, K) of images in the order of ``card.classes``.

    Columns follow ``card.classes``. Images are loaded batch by batch, so memory does not limit their number. An
    unreadable image raises an error, and so do probabilities that are not finite. ``engine`` computes the features; a
    caller with many small batches makes it once.
    """
    engine = engine or Engine(model, card.shape)
    parts = [np.empty((0, len(card.classes)))]
    inputs = StreamedInputs(images, card.image_size, card.channels, workers)
    for rows, batch in inputs.batches(row_batches(len(images), batch_size)):
        check_shape(batch, card)
        parts.append(engine.probabilities(engine.features(batch)))
        check_finite(parts[-1])
        if progress is not None:
            progress(int(rows[-1]) + 1, len(images))
    return np.concatenate(parts)


def predict_inputs(
    model: Model, inputs: Inputs, batch_size: int, ranks: Ranks | None = None, engine: Engine | None = None
) -> tuple[Floats, npt.NDArray[np.float32]]:
    """Return probabilities (n, K) and features (n, f) of prepared inputs. Ranks share the work; all get all rows.

    ``engine`` computes the features; None: torch.
    """
    engine = engine or Engine(model, (), fast=False)
    own, sizes = share_rows(len(inputs), ranks)
    classifier = model.classifier
    probabilities = [np.empty((0, classifier.out_features))]
    features = [np.empty((0, classifier.in_features), dtype=np.float32)]
    for _, batch in inputs.batches(own[part] for part in row_batches(len(own), batch_size)):
        features.append(engine.features(batch))
        probabilities.append(engine.probabilities(features[-1]))
    return (
        gather_rows(np.concatenate(probabilities), sizes, ranks),
        gather_rows(np.concatenate(features), sizes, ranks),
    )


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


def predict_batch(model: Model, batch: Tensor) -> tuple[Floats, npt.NDArray[np.float32]]:
    """Return probabilities (n, K) and features (n, f) of a batch: uint8 images, float images in [0, 1], or vectors.

    torch computes them, which is best for a single batch.
    """
    engine = Engine(model, (), fast=False)
    features = engine.features(batch)
    return engine.probabilities(features), features


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
