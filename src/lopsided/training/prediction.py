"""From a model and images to probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lopsided.data.augment import to_float
from lopsided.data.images import Images, Progress
from lopsided.errors import DataError, sentence
from lopsided.training.inputs import Inputs, StreamedInputs, row_batches
from lopsided.training.model import Model, ModelCard

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Predictions:
    """Probabilities (n, K) of named images; ``y_true`` are indices into ``classes``, None without labels."""

    names: tuple[str, ...]
    classes: tuple[str, ...]
    probabilities: Floats
    y_true: npt.NDArray[np.int64] | None = None
    groups: npt.NDArray[np.str_] | None = None
    features: npt.NDArray[np.float32] | None = None

    @property
    def y_pred(self) -> npt.NDArray[np.int64]:
        """The most probable class of each image, the first of equals."""
        best: npt.NDArray[np.int64] = self.probabilities.argmax(axis=1)
        return best


@overload
def predict(
    model: Model,
    card: ModelCard,
    images: Images,
    *,
    batch_size: int = ...,
    device: str | torch.device | None = ...,
    features: Literal[False] = ...,
    workers: int = ...,
    progress: Progress | None = ...,
) -> Floats: ...


@overload
def predict(
    model: Model,
    card: ModelCard,
    images: Images,
    *,
    batch_size: int = ...,
    device: str | torch.device | None = ...,
    features: Literal[True],
    workers: int = ...,
    progress: Progress | None = ...,
) -> tuple[Floats, npt.NDArray[np.float32]]: ...


def predict(
    model: Model,
    card: ModelCard,
    images: Images,
    *,
    batch_size: int = 256,
    device: str | torch.device | None = None,
    features: bool = False,
    workers: int = 0,
    progress: Progress | None = None,
) -> Floats | tuple[Floats, npt.NDArray[np.float32]]:
    """Return the probabilities (n, K) of images in the order of ``card.classes``; with ``features`` also these, (n, f).

    Images are loaded batch by batch, so that their number is not bounded by memory; the first unreadable one raises.
    """
    if device is not None:
        model = model.to(device)
    num, parts, vectors = len(images), [], []
    inputs = StreamedInputs(images, card.image_size, card.channels, workers)
    for rows, batch in inputs.batches(row_batches(num, batch_size)):
        check_shape(batch, card)
        probabilities, found = predict_batch(model, batch)
        parts.append(probabilities)
        if features:
            vectors.append(found)
        if progress is not None:
            progress(int(rows[-1]) + 1, num)
    together = np.concatenate(parts) if parts else np.empty((0, len(card.classes)))
    if not features:
        return together
    return together, np.concatenate(vectors) if vectors else np.empty((0, card.features), dtype=np.float32)


def predict_inputs(model: Model, inputs: Inputs, batch_size: int) -> tuple[Floats, npt.NDArray[np.float32]]:
    """Probabilities (n, K) and features (n, f) of prepared inputs."""
    batches = inputs.batches(row_batches(len(inputs), batch_size))
    probabilities, features = zip(*(predict_batch(model, batch) for _, batch in batches), strict=True)
    return np.concatenate(probabilities), np.concatenate(features)


def predict_batch(model: Model, batch: Tensor) -> tuple[Floats, npt.NDArray[np.float32]]:
    """Probabilities (n, K) and features (n, f) of one batch: uint8 images, float images in [0, 1], or vectors."""
    with evaluating(model):
        x = batch.to(model.classifier.weight.device)
        features = model.features(to_float(x) if x.ndim == 4 else x)
        logits = model.classifier(features)
        return logits.double().softmax(dim=1).cpu().numpy(), features.float().cpu().numpy()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode without gradients inside the block, and back into the mode that it was in."""
    mode = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(mode)


def check_shape(batch: Tensor, card: ModelCard) -> None:
    """Raise unless a batch has the shape that a model was trained on."""
    if tuple(batch.shape[1:]) != card.shape:
        must = f"inputs must have the shape {card.shape}, as those that the model was trained on"
        raise DataError(sentence(must, tuple(batch.shape[1:])))
