"""Adapter: contrastive heads on the features of an encoder as it is, joined into one linear classifier.

**Heads.** Each head is a small network on standardised features, trained with a contrastive loss. It leaves out one of
the inner folds of the training images: head k leaves out fold k, and after the last fold the folds are drawn again. So
the heads differ in their images as well as in their initial weights, and each image has heads that have not seen it.

**Linear part.** A head separates its own training images almost perfectly, so they cannot tell how large its logits
should be. A logistic regression of fixed strength gives the direction. The logits of the left-out images, averaged over
the heads that have not seen the image, then give the temperature and one bias per class.

**Average.** With ``adapter.blend``, a plain logistic regression on the features is calibrated in the same way, and the
logits are averaged: ``blend`` times its logits plus ``1 - blend`` times the mean logits of the heads. All of this is
one linear layer on the outputs of the module ``Adapter``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import softmax
from torch import Tensor

from lopsided.data.inputs import Indices, MemoryInputs, Part
from lopsided.data.samplers import BatchSampler
from lopsided.evaluation.calibration import Calibration, HeldBack, fit_calibration, prior_of
from lopsided.facts import notes
from lopsided.facts.log import Reporter
from lopsided.losses.objective import Objective
from lopsided.models.encoders import seeded_init
from lopsided.models.heads import Adapter
from lopsided.models.model import AdapterCard
from lopsided.recipe import EncoderTraining, Recipe
from lopsided.recipe.sections import TRAINING_FIELDS
from lopsided.seeds import derive_seed
from lopsided.training.checkpoint import Checkpoint, State
from lopsided.training.loop import Loop, Stage
from lopsided.training.methods.frozen import tell_choice
from lopsided.training.methods.trainer import FeatureTrainer
from lopsided.training.regression import Regression, fit_regression, inner_folds, rarest, standardisation
from lopsided.training.step import make_objective

Floats = npt.NDArray[np.float64]
Fold = tuple[Indices, Indices]

HEAD_STRENGTH = 0.01
"""The strength C of the regression on the outputs of a head."""
_UNUSED = {
    name: EncoderTraining.model_fields[name].default
    for name in ("views", "queue", "queue_balanced", "chunk_size", *(path.split(".")[1] for path in TRAINING_FIELDS))
}
"""Settings of the training of an encoder that heads do not use."""


@dataclass(frozen=True, eq=False)
class Linear:
    """Logits are ``inputs @ weight.T + bias``."""

    weight: Floats
    bias: Floats

    def __call__(self, inputs: npt.NDArray[np.floating[Any]]) -> Floats:
        """Return logits (n, K)."""
        return inputs @ self.weight.T + self.bias

    def calibrated(self, change: Calibration) -> Linear:
        """Return the layer with other logits: divided by the temperature, plus the bias."""
        return Linear(self.weight / change.temperature, self.bias / change.temperature + change.bias)


@dataclass(frozen=True, eq=False)
class Joined:
    """The calibrated linear layer of each head, that of the plain regression, and the mean facts of each epoch."""

    heads: list[Linear]
    plain: Linear | None
    blend: float
    history: list[dict[str, Any]]
    regression: Regression | None
    num_folds: int

    @property
    def linear(self) -> Linear:
        """The layer whose logits are ``blend`` times those of ``plain`` plus the rest times the mean of the heads.

        Its inputs are the features, if there is a plain layer, and the outputs of the heads.
        """
        blend = 0.0 if self.plain is None else self.blend
        parts = [] if self.plain is None else [(blend, self.plain)]
        parts += [((1.0 - blend) / len(self.heads), head) for head in self.heads]
        weight = np.concatenate([share * part.weight for share, part in parts], axis=1)
        return Linear(weight, np.sum([share * part.bias for share, part in parts], axis=0))


class Unseen:
    """The mean logits of each training image by the classifiers that have not seen it."""

    def __init__(self, labels: Indices, num_classes: int) -> None:
        self._labels = labels
        self._sums, self._numbers = np.zeros((len(labels), num_classes)), np.zeros(len(labels))

    def add(self, rows: Indices, logits: Floats) -> None:
        """Add the logits of a classifier for rows that it has not seen."""
        self._sums[rows] += logits
        self._numbers[rows] += 1

    def calibration(self, prior: Sequence[float]) -> Calibration:
        """Return the temperature and the biases that calibrate the logits; no change if there are no such rows."""
        rows = np.flatnonzero(self._numbers)
        if not len(rows):
            return Calibration(1.0, (0.0,) * self._sums.shape[1])
        p = softmax(self._sums[rows] / self._numbers[rows, None], axis=1)
        return fit_calibration(HeldBack(p, self._labels[rows]), prior)


@dataclass(frozen=True, eq=False)
class Rows:
    """The training rows: features of the encoder, labels, groups, the number of classes, and weights of the features.

    ``importance`` is how much a regression on the features weighs each of them; None: all the same.
    """

    features: npt.NDArray[np.float32]
    labels: Indices
    groups: npt.NDArray[np.str_] | None
    num_classes: int
    importance: Floats | None = None

    def num_folds(self, recipe: Recipe) -> int:
        """Return the number of inner folds; less than 2 if a class has too few rows or groups."""
        return min(recipe.regression.folds, rarest(self.labels, self.groups))

    def folds(self, recipe: Recipe, draw: int) -> list[Fold]:
        """Return the rows inside and outside of each inner fold of one draw."""
        number = self.num_folds(recipe)
        if number < 2:
            return []
        return list(inner_folds(self.labels, self.groups, number, derive_seed(recipe.seed, "adapter", draw)))

    def prior(self, recipe: Recipe) -> tuple[float, ...]:
        """Return the class shares that the logits of a regression carry."""
        counts = np.bincount(self.labels, minlength=self.num_classes)
        return prior_of(counts > 0 if _weighted(recipe) else counts)


def fit_adapter(
    adapter: Adapter,
    rows: Rows,
    recipe: Recipe,
    make_objective: Callable[[Indices], Objective],
    *,
    device: torch.device,
    count: Callable[[int, int], None] | None = None,
) -> Joined:
    """Train the heads of ``adapter`` in place, and return the linear layers on its outputs.

    ``make_objective`` returns the loss for training images with these labels. ``count`` is called with the number of
    finished heads and the number of all heads.
    """
    mean, scale = standardisation(rows.features.astype(np.float64))
    adapter.mean.copy_(torch.from_numpy(mean))
    adapter.scale.copy_(torch.from_numpy(scale))
    with torch.no_grad():
        x = adapter.standardised(torch.from_numpy(rows.features).to(device))
    layers, courses, unseen = [], [], Unseen(rows.labels, rows.num_classes)
    folds = head_folds(rows, recipe, len(adapter.heads))
    for index, (train, rest) in enumerate(folds):
        courses.append(_train(adapter, index, x, rows, train, recipe, make_objective, device))
        with torch.no_grad():
            outputs = adapter.heads[index].eval()(x).cpu().numpy().astype(np.float64)
        layers.append(_regression(outputs[train], rows.labels[train], rows, recipe, HEAD_STRENGTH))
        unseen.add(rest, layers[-1](outputs[rest]))
        if count is not None:
            count(index + 1, len(folds))
    change = unseen.calibration(rows.prior(recipe))
    heads = [layer.calibrated(change) for layer in layers]
    plain, regression = fit_plain(rows, recipe) if adapter.keep else (None, None)
    number = rows.num_folds(recipe)
    return Joined(heads, plain, recipe.adapter.blend, _mean_course(courses), regression, number if number >= 2 else 0)


def fit_plain(rows: Rows, recipe: Recipe) -> tuple[Linear, Regression]:
    """Return the logistic regression on the features, calibrated on left-out rows, and as it was fitted."""
    settings = recipe.regression
    fitted = fit_regression(
        rows.features, rows.labels, rows.num_classes, groups=rows.groups, weighted=_weighted(recipe),
        strength=settings.strength, folds=settings.folds, seed=recipe.seed, importance=rows.importance,
    )  # fmt: skip
    unseen = Unseen(rows.labels, rows.num_classes)
    for train, rest in rows.folds(recipe, 0):
        features, strength = rows.features[train], fitted.strength
        part = _regression(features, rows.labels[train], rows, recipe, strength, rows.importance)
        unseen.add(rest, part(rows.features[rest]))
    return Linear(fitted.weight, fitted.bias).calibrated(unseen.calibration(rows.prior(recipe))), fitted


def head_folds(rows: Rows, recipe: Recipe, heads: int) -> list[Fold]:
    """Return the training rows and the left-out rows of each head. No rows are left out if a class has too few."""
    # A draw by group may give no fold that has all classes.
    draws = (fold for draw in range(heads) for fold in rows.folds(recipe, draw))
    everything = (np.arange(len(rows.labels)), np.empty(0, dtype=np.int64))
    found = list(islice(draws, heads))
    return found + [everything] * (heads - len(found))


def _weighted(recipe: Recipe) -> bool:
    return recipe.classifier.loss.name == "weighted-ce"


def _regression(
    x: npt.NDArray[np.floating[Any]],
    labels: Indices,
    rows: Rows,
    recipe: Recipe,
    strength: float,
    importance: Floats | None = None,
) -> Linear:
    fitted = fit_regression(
        x, labels, rows.num_classes, weighted=_weighted(recipe), strength=strength, importance=importance
    )
    return Linear(fitted.weight, fitted.bias)


def _train(
    adapter: Adapter,
    index: int,
    x: Tensor,
    rows: Rows,
    train: Indices,
    recipe: Recipe,
    make_objective: Callable[[Indices], Objective],
    device: torch.device,
) -> list[dict[str, Any]]:
    """Train one head on the rows ``train`` and return the facts of its epochs."""
    settings: EncoderTraining = recipe.encoder_training.model_copy(update=_UNUSED)
    seed = derive_seed(recipe.seed, "adapter", "head", index)
    own, head = rows.labels[train], adapter.heads[index]
    stage = Stage(
        name="adapter",
        section="encoder_training",
        module=head,
        settings=settings,
        part=Part(MemoryInputs(x[torch.from_numpy(train).to(device)]), own),
        sampler=BatchSampler(
            own, settings.batch_size, kind=settings.sampler, m_per_class=settings.m_per_class,
            last=settings.last_batch, seed=derive_seed(seed, "order"),
        ),
        transform=lambda x, *_: x,
        output=head,
        objective=make_objective(own),
        projected=recipe.adapter.out,
        min_batch=2,
    )  # fmt: skip
    counts = np.bincount(rows.labels)
    minority = int(np.flatnonzero(counts)[counts[counts > 0].argmin()])
    loop = Loop(
        stage, device=device, seed=seed, num_classes=rows.num_classes, minority=minority, reporter=Reporter()
    )  # fmt: skip
    checkpoint = Checkpoint(None)
    return [loop.epoch(epoch, checkpoint) for epoch in range(settings.epochs)]


def _mean_course(courses: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the facts of each epoch as means over the heads; seconds are sums."""
    found = []
    for rows in zip(*courses, strict=True):
        facts = dict(rows[0])
        for key, value in rows[0].items():
            if isinstance(value, float):
                values = [row[key] for row in rows if row[key] is not None]
                facts[key] = float(np.sum(values) if key == "seconds" else np.mean(values))
        found.append(facts)
    return found


class AdapterTrainer(FeatureTrainer):
    """Trains the heads, and joins them into one linear classifier."""

    def adapter(self, features: int) -> tuple[AdapterCard, Adapter]:
        """Return the heads, not trained."""
        section = self.recipe.adapter
        heads = AdapterCard(heads=section.heads, hidden=section.hidden, out=section.out, keep=section.blend > 0)
        with seeded_init(self.recipe.seed, "adapter"):
            adapter = Adapter(
                features, **heads.model_dump(), input_dropout=section.input_dropout, dropout=section.dropout
            )
        return heads, adapter

    def train(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Train the heads and fit the classifier. The first rank does it for all ranks."""
        recipe, train = self.recipe, self.prepared.train
        (features,) = self.training_features([self.model.views])
        adapter, steps = self.model.adapter, -(-len(train) // recipe.encoder_training.batch_size)
        assert adapter is not None
        found: list[Joined] = []

        def objective(labels: Indices) -> Objective:
            counts = torch.from_numpy(np.bincount(labels, minlength=self.num_classes))
            return make_objective(recipe.encoder_training.loss, counts, recipe.adapter.out, recipe.seed)

        def fit() -> dict[str, Tensor]:
            self.log.stage("adapter", recipe.encoder_training.epochs, steps)
            joined = fit_adapter(
                adapter,
                Rows(features, train.labels, train.groups, self.num_classes, self.importance),
                recipe,
                objective,
                device=self.device,
                count=lambda done, total: self.log.count("heads", done, total),
            )
            found.append(joined)
            linear = {"weight": joined.linear.weight, "bias": joined.linear.bias}
            weights = {f"classifier.{name}": torch.from_numpy(value).float() for name, value in linear.items()}
            return weights | {f"adapter.{name}": value for name, value in adapter.state_dict().items()}

        weights = self.ranks.spread(fit)
        for name in ("adapter", "classifier"):
            own = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
            self.model.get_submodule(name).load_state_dict(own)
        state.history = self.ranks.told(lambda: found[0].history)
        for index, facts in enumerate(state.history, start=1):
            self.log.epoch(index, facts)
        for joined in found:
            if joined.regression is not None:
                tell_choice(self, joined.regression)
            self.log.fact(notes.heads(recipe.adapter.heads, joined.num_folds, recipe.adapter.blend))
        state.epoch, state.seconds = len(state.history), perf_counter() - self.begin
