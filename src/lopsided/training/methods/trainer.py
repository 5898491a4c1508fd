"""What the trainers of all methods have in common: build the model, train it, and score images with it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lopsided.data.inputs import Part, Prepared
from lopsided.entries import load
from lopsided.errors import InputError
from lopsided.facts import Fact
from lopsided.recipe import Recipe
from lopsided.training.built import Built
from lopsided.training.checkpoint import Checkpoint, State
from lopsided.training.reporter import Log

Floats = npt.NDArray[np.float64]
Features = npt.NDArray[np.float32]


class Trainer(Built):
    """Trains the model of one recipe on prepared data. A method overrides ``train``, and what else is different."""

    begin = 0.0
    """When the training began, by ``perf_counter``, as if it had never been interrupted."""

    def notes(self) -> Iterator[Fact]:
        """Yield a note for each setting that changes how the method computes."""
        yield from ()

    def epochs(self, state: State) -> dict[str, int]:
        """Return the epochs of each stage of a run in this state."""
        return {name: number or 0 for name, number in self.recipe.spec.stages(self.recipe).items()}

    def run(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Train what is left, starting at ``state``, which is updated in place."""
        self.begin = perf_counter() - state.seconds
        self.train(state, tensors)
        self.model.eval()

    @abstractmethod
    def train(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Train what is left. ``tensors`` are those of the checkpoint, if there is one."""

    def expect(self) -> None:
        """Give the model the form of the finished one, for weights that come from another rank."""

    def score(self, part: Part) -> tuple[Floats, Features]:
        """Return the probabilities and the features of images by the finished model."""
        return self.scorer.score(part.inputs)


class FeatureTrainer(Trainer):
    """Fits a linear classifier to the features of an encoder that is not trained. A method overrides ``fit``."""

    def fit(self, features: Features) -> tuple[Floats, Floats]:
        """Return weight (classes, width) and bias (classes,) of the classifier, given the training images' features.

        The probabilities must carry the class shares of the training images (``self.prepared.counts()``).
        """
        raise NotImplementedError

    def train(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Fit the classifier. The first rank does it for all ranks."""
        (features,) = self.training_features([self.model.views])

        def fitted() -> dict[str, Tensor]:
            weight, bias = self.fit(features)
            return {"weight": torch.from_numpy(weight).float(), "bias": torch.from_numpy(bias).float()}

        self.model.classifier.load_state_dict(self.ranks.spread(fitted))
        state.seconds = perf_counter() - self.begin

    def score(self, part: Part) -> tuple[Floats, Features]:
        """Return the probabilities and the features of images, whose features may be cached."""
        features = self.engine.adapt(self.frozen_features(part, "features of test images"))
        return self.engine.probabilities(features), features


def make_trainer(
    recipe: Recipe, prepared: Prepared, device: torch.device, log: Log, checkpoint: Checkpoint, *arguments: Any
) -> Trainer:
    """Return the trainer of a recipe's method. The further arguments are those of ``Built``."""
    place = recipe.spec.trainer
    try:
        kind: type[Trainer] = load(place)
    except (ImportError, AttributeError) as error:
        raise InputError(f'The trainer of method "{recipe.method}", {place}, cannot be imported ({error}).') from error
    return kind(recipe, prepared, device, log, checkpoint, *arguments)
