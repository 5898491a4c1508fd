"""Distance: how far an image is from those of the frequent class, mixed with regressions on the features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lopsided.facts import notes
from lopsided.models.blocks.positions import NUMBERS, SIDE
from lopsided.models.encoders import seeded_init
from lopsided.models.heads import DistanceHead, DistanceShape
from lopsided.training.checkpoint import State
from lopsided.training.distance import MOST_AXES, Distances, Mixed, fit_distances, fit_mixed
from lopsided.training.methods.frozen import tell_choice
from lopsided.training.methods.trainer import Features, FeatureTrainer

LATE = 2
"""How many of the last stages of an encoder the distance reads, if the features have stages."""


class DistanceTrainer(FeatureTrainer):
    """Fits the distance to the images of the frequent class, and the regressions to all."""

    def build(self, *, fresh: bool = True) -> None:
        """Build the model. Its card names the kind of its classifier, and the shapes of its distances."""
        super().build(fresh=fresh)
        number = int(self.prepared.counts().max())
        shapes = tuple(
            DistanceShape(positions=len(each), columns=each.shape[1], axes=min(MOST_AXES, each.shape[1], number))
            for each in self._columns()
        )
        features = self.model.classifier.in_features
        with seeded_init(self.recipe.seed, "classifier"):
            self.model.classifier = DistanceHead(features, self.num_classes, shapes).to(self.device)
        self.card = self.card.model_copy(update={"head": "distance", "distances": shapes})

    def train(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Fit the classifier. The first rank does it for all ranks."""
        (features,) = self.training_features([self.model.views])
        self.model.classifier.load_state_dict(self.ranks.spread(lambda: self._fitted(features)))
        state.seconds = perf_counter() - self.begin

    def _fitted(self, features: Features) -> dict[str, Tensor]:
        """Return the state of the classifier."""
        labels, settings, layout = self.prepared.train.labels, self.recipe.regression, self.model.layout
        normal = int(self.prepared.counts().argmax())
        groups = self.prepared.train.groups
        own = None if groups is None else groups[labels == normal]
        distances = fit_distances(features[labels == normal], self._columns(), groups=own, seed=self.recipe.seed)
        column = distances.column(features)
        column[labels == normal] = distances.left_out
        whole = np.setdiff1d(np.arange(features.shape[1]), self.model.local)
        mixed = fit_mixed(
            features[:, whole],
            column,
            labels,
            normal,
            self.num_classes,
            groups=groups,
            weighted=self.recipe.classifier.loss.name == "weighted-ce",
            strength=settings.strength,
            folds=settings.folds,
            seed=self.recipe.seed,
            importance=self.importance,
            parts=[] if layout is None else layout.whole.kinds(self.card.num_beside),
        )
        self._tell(normal, int((labels != normal).sum()), mixed)
        for part, share, aligned in zip(distances.parts, distances.shares, distances.aligned, strict=True):
            if len(part.columns) > 1:
                self.log.fact(notes.aligned(aligned, bool(share > 0)))
        weight = np.zeros((self.num_classes, features.shape[1]))
        weight[:, whole] = mixed.weight
        return _state(distances, replace(mixed, weight=weight), self.card.distances)

    def _columns(self) -> list[npt.NDArray[np.int64]]:
        """Return the columns that each distance reads, one row per position. Those of a table are not among them.

        The first one reads late stages, or final layers without stages, and has one position. Each encoder whose
        positions are read has one more.
        """
        layout = self.model.layout
        if layout is None:
            return [np.arange(self.card.features)[None]]
        stages = [place for place, group in enumerate(layout.groups) if group.block.name == "stages"]
        members = {layout.groups[place].member for place in stages}
        late = {place for m in members for place in [p for p in stages if layout.groups[p].member == m][-LATE:]}
        read = late or {place for place, group in enumerate(layout.groups) if group.block.name == "final"}
        parts = [np.full(group.width, place in read) for place, group in enumerate(layout.groups)]
        return [np.flatnonzero(np.concatenate(parts))[None], *layout.local.reshape(-1, SIDE * SIDE, NUMBERS)]

    def _tell(self, normal: int, num_rare: int, mixed: Mixed) -> None:
        pull = float(np.delete(mixed.pull, normal).mean() - mixed.pull[normal])
        self.log.event("distance", normal=self.prepared.classes[normal], rare=num_rare, pull=pull)
        self.log.fact(notes.distance(self.prepared.classes[normal], num_rare, pull, mixed.relied))
        if mixed.regression is not None and mixed.relied > 0:
            tell_choice(self, mixed.regression)


def _state(distances: Distances, mixed: Mixed, shapes: Sequence[DistanceShape]) -> dict[str, Tensor]:
    """Return the state of a ``DistanceHead``. Axes that the images do not have are 0, and have no effect."""
    state = {"weight": mixed.weight, "bias": mixed.bias, "pull": mixed.pull, "shares": distances.shares}
    for place, (part, shape) in enumerate(zip(distances.parts, shapes, strict=True)):
        missing = shape.axes - part.axes.shape[1]
        own = {
            "centre": part.centre,
            "scale": part.scale,
            "axes": np.pad(part.axes, ((0, 0), (0, missing), (0, 0))),
            "gains": np.pad(part.gains, ((0, 0), (0, missing))),
            "level": np.array(part.level),
        }
        state |= {f"distances.{place}.{name}": value for name, value in own.items()}
    found = {name: torch.from_numpy(np.ascontiguousarray(value)).float() for name, value in state.items()}
    columns = {f"distances.{i}.columns": torch.from_numpy(part.columns) for i, part in enumerate(distances.parts)}
    return found | columns
