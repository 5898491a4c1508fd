"""Distance: how far an image is from those of the frequent class, mixed with regressions on the features."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lopsided.facts import notes
from lopsided.models.heads import ClassifierHead, DistanceHead
from lopsided.recipe import LossSettings
from lopsided.training.checkpoint import State
from lopsided.training.distance import MOST_AXES, Distance, Mixed, fit_distance, fit_mixed
from lopsided.training.methods.frozen import tell_choice
from lopsided.training.methods.trainer import Features, FeatureTrainer

LATE = 2
"""How many of the last stages of an encoder the distance reads, if the features have stages."""


class DistanceTrainer(FeatureTrainer):
    """Fits the distance to the images of the frequent class, and the regressions to all."""

    def head(self, loss: LossSettings, features: int) -> ClassifierHead:
        """Return a classifier with as many axes as the training images of the frequent class can have."""
        return DistanceHead(features, self.num_classes, self._num_axes(features))

    def _num_axes(self, features: int) -> int:
        return min(MOST_AXES, features, int(self.prepared.counts().max()))

    def build(self, *, fresh: bool = True) -> None:
        """Build the model. Its card names the kind of its classifier."""
        super().build(fresh=fresh)
        axes = self._num_axes(self.model.classifier.in_features)
        self.card = self.card.model_copy(update={"head": "distance", "axes": axes})

    def train(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Fit the classifier. The first rank does it for all ranks."""
        (features,) = self.training_features([self.model.views])
        self.model.classifier.load_state_dict(self.ranks.spread(lambda: self._fitted(features)))
        state.seconds = perf_counter() - self.begin

    def _fitted(self, features: Features) -> dict[str, Tensor]:
        """Return the state of the classifier."""
        labels, settings, layout = self.prepared.train.labels, self.recipe.regression, self.model.layout
        normal = int(self.prepared.counts().argmax())
        distance = fit_distance(features[labels == normal], self._columns())
        column = distance.column(features)
        column[labels == normal] = distance.left_out
        mixed = fit_mixed(
            features,
            column,
            labels,
            normal,
            self.num_classes,
            groups=self.prepared.train.groups,
            weighted=self.recipe.classifier.loss.name == "weighted-ce",
            strength=settings.strength,
            folds=settings.folds,
            seed=self.recipe.seed,
            importance=self.importance,
            parts=[] if layout is None else layout.kinds(self.card.num_beside),
        )
        self._tell(normal, int((labels != normal).sum()), mixed)
        return _state(distance, mixed, self._num_axes(features.shape[1]))

    def _columns(self) -> npt.NDArray[np.bool_]:
        """Return the columns that the distance reads: those of late stages, or of final layers without stages."""
        layout = self.model.layout
        beside = np.zeros(self.card.num_beside, dtype=np.bool_)  # Columns of a table are no part of the distance.
        if layout is None:
            return np.concatenate([np.ones(self.card.features, dtype=np.bool_), beside])
        stages = [place for place, group in enumerate(layout.groups) if group.block.name == "stages"]
        members = {layout.groups[place].member for place in stages}
        late = {place for m in members for place in [p for p in stages if layout.groups[p].member == m][-LATE:]}
        read = late or {place for place, group in enumerate(layout.groups) if group.block.name == "final"}
        parts = [np.full(group.width, place in read) for place, group in enumerate(layout.groups)]
        return np.concatenate([*parts, beside])

    def _tell(self, normal: int, num_rare: int, mixed: Mixed) -> None:
        pull = float(np.delete(mixed.pull, normal).mean() - mixed.pull[normal])
        self.log.event("distance", normal=self.prepared.classes[normal], rare=num_rare, pull=pull)
        self.log.fact(notes.distance(self.prepared.classes[normal], num_rare, pull, mixed.relied))
        if mixed.regression is not None and mixed.relied > 0:
            tell_choice(self, mixed.regression)


def _state(distance: Distance, mixed: Mixed, num_axes: int) -> dict[str, Tensor]:
    """Return the state of a ``DistanceHead``. Axes that the images do not have are 0, and columns without an effect."""
    missing = num_axes - len(distance.axes)

    def spread(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        placed = np.zeros((*values.shape[:-1], len(distance.columns)))
        placed[..., distance.columns] = values
        return placed

    parts = {
        "weight": mixed.weight,
        "bias": mixed.bias,
        "pull": mixed.pull,
        "centre": spread(distance.centre),
        "scale": spread(distance.scale),
        "axes": spread(np.pad(distance.axes, ((0, missing), (0, 0)))),
        "gains": np.pad(distance.gains, (0, missing)),
        "level": np.array(distance.level),
    }
    return {name: torch.from_numpy(np.ascontiguousarray(value)).float() for name, value in parts.items()}
