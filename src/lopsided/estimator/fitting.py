"""The samples of an estimator, as users pass them, and their training, as a whole or fold by fold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from lopsided.data.given import given_columns, given_images
from lopsided.data.images import ArrayImages, Images, Vectors
from lopsided.data.inputs import Inputs, Prepared, inputs_of, prepare, prepare_vectors
from lopsided.data.prepare import usual_side
from lopsided.data.sources import Source, source_from_arrays
from lopsided.data.splits import fold_numbers, split
from lopsided.errors import InputError, sentence
from lopsided.evaluation.calibration import at_prevalence, settled_prior
from lopsided.facts.log import Log, Reporter
from lopsided.inference.engine import Engine
from lopsided.inference.scorer import Scorer
from lopsided.models.machine import pick_device
from lopsided.models.model import ModelCard
from lopsided.recipe import Recipe
from lopsided.training.checkpoint import Checkpoint, State
from lopsided.training.decide import check_rule, settle
from lopsided.training.fit import pixels_of
from lopsided.training.methods import Trainer, make_trainer

PREDICT_BATCH = 256


@dataclass(frozen=True, eq=False)
class Samples:
    """Images or vectors with the number of their class, the names of the classes, and perhaps groups and weights.

    ``side`` is that to which images of different sizes are resized; None: they are not, or the encoder has its size.
    """

    X: Images | npt.NDArray[np.float64]
    codes: npt.NDArray[np.int64]
    names: tuple[str, ...]
    groups: npt.NDArray[np.str_] | None = None
    weights: npt.NDArray[np.float64] | None = None
    side: int | None = None

    def with_side(self, recipe: Recipe) -> Samples:
        """Return the samples with the side to which a recipe without ``image_size`` resizes images."""
        if not isinstance(self.X, Images) or recipe.data.image_size is not None or recipe.spec.pretrained:
            return self
        return replace(self, side=usual_side(self.X))

    def rows(self, rows: npt.NDArray[np.int64]) -> Samples:
        """Return some of the samples."""
        return replace(
            self,
            X=self.X.take(rows) if isinstance(self.X, Images) else self.X[rows],
            codes=self.codes[rows],
            groups=None if self.groups is None else self.groups[rows],
            weights=None if self.weights is None else self.weights[rows],
        )

    def counts(self) -> npt.NDArray[Any]:
        """Return the number of samples of each class, or the sum of their weights."""
        return np.bincount(self.codes, weights=self.weights, minlength=len(self.names))

    def source(self) -> Source:
        """Return the samples as a source. Vectors are blank images, for splits and folds, which use only labels."""
        blank = ArrayImages(np.zeros((len(self.codes), 1, 1, 1), dtype=np.uint8))
        images = self.X if isinstance(self.X, Images) else blank
        numbers = tuple(map(str, range(len(self.codes))))
        return Source("samples", images, self.codes, self.names, numbers, self.groups, resized=self.side)


def train(samples: Samples, recipe: Recipe, *, verbose: int) -> tuple[Trainer, State]:
    """Train a recipe on samples, calibrate the model and settle its rule."""
    prepared = _prepare(samples, recipe)
    check_rule(recipe, prepared)
    state = State(recipe="", data="", stage=next(iter(recipe.spec.stages(recipe))))
    log = Log(None, _Printer() if verbose else None)
    trainer = make_trainer(recipe, prepared, pick_device(recipe.device), log, Checkpoint(None))
    trainer.build()
    trainer.run(state, {})
    settle(trainer)
    return trainer, state


def out_of_fold(
    samples: Samples, recipe: Recipe, folds: int, *, verbose: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return the probabilities of each sample from a model without its fold, at one prior, and the folds."""
    num, num_classes = len(samples.codes), len(samples.names)
    how: Literal["group", "stratified"] = "stratified" if samples.groups is None else "group"
    numbers = fold_numbers(samples.source(), how=how, folds=folds, seed=recipe.seed)
    prior, p = settled_prior(recipe, samples.counts()), np.empty((num, num_classes))

    for fold in range(folds):
        tested = numbers == fold
        trainer, _ = train(samples.rows(np.flatnonzero(~tested)), recipe, verbose=verbose)
        X = samples.rows(np.flatnonzero(tested)).X
        engine = trainer.engine if isinstance(X, Images) else Engine(trainer.model, (), fast=False)
        scorer = Scorer(trainer.model, trainer.card, engine=engine, cached="none", batch_size=PREDICT_BATCH)
        p[tested] = at_prevalence(scorer.score(inputs_for(trainer.card, X)).probabilities, trainer.card.prior, prior)
    return p, numbers


def inputs_for(card: ModelCard, X: Images | npt.NDArray[np.float64]) -> Inputs:
    """Return images or vectors as inputs of a model."""
    return inputs_of(X if isinstance(X, Images) else Vectors(np.array(X)), card.image_size, card.channels)


def _prepare(samples: Samples, recipe: Recipe) -> Prepared:
    source = replace(samples.source(), groups=None)
    splits = split(source, how="stratified", val=recipe.data.val, test=0.0, seed=recipe.seed)
    if isinstance(samples.X, Images):
        digests = source.images.digest(np.arange(len(source))) if recipe.spec.pretrained else None
        prepared = prepare(recipe, source, splits, pixels=pixels_of(recipe), digests=digests)[0]
    else:
        prepared = prepare_vectors(samples.X, samples.codes, samples.names, splits.train, splits.val)
    rows, train = splits.train, prepared.train
    if samples.groups is not None:
        train = replace(train, groups=samples.groups[rows])
    if samples.weights is not None:
        train = replace(train, weights=samples.weights[rows])
    return replace(prepared, train=train)


class _Printer(Reporter):
    def epoch(self, index: int, facts: Mapping[str, Any]) -> None:
        shown = [f"{name} {value:.4g}" for name, value in facts.items() if isinstance(value, float)]
        print(f"{facts['stage']} {index}: {', '.join(shown)}")


def checked_groups(groups: Any, num: int) -> npt.NDArray[np.str_] | None:
    """Return the groups as strings. Raise if there is not one for each input."""
    if groups is None:
        return None
    found = np.asarray(on_cpu(groups)).astype(np.str_)
    if found.shape != (num,):
        must = f"groups must have one entry for each of the {num} inputs"
        raise InputError(sentence(must, f"the shape {found.shape}"))
    return found


def checked_weights(sample_weight: Any, num: int) -> npt.NDArray[np.float64] | None:
    """Return the weights of the samples. Raise unless there is a number >= 0 for each sample, and one > 0."""
    if sample_weight is None:
        return None
    weights = np.asarray(on_cpu(sample_weight), dtype=np.float64)
    if weights.shape != (num,):
        must = f"sample_weight must have one number for each of the {num} inputs"
        raise InputError(sentence(must, f"the shape {weights.shape}"))
    if not np.isfinite(weights).all() or weights.min() < 0 or weights.max() <= 0:
        raise InputError(
            sentence("sample_weight must hold numbers >= 0, not all zero", f"{weights.min()} to {weights.max()}")
        )
    return weights


def images_or_vectors(X: Any, columns: Sequence[str] = ()) -> Any:
    """Return images as ``Images``, with ``columns`` of their data frame, and anything else unchanged."""
    images = given_images(X)
    if images is not None:
        return given_columns(X, columns, images)
    X = stacked(X)
    return source_from_arrays(X).images if are_images(X) else X


def are_images(X: Any) -> bool:
    """Return whether an array holds images, by its number of dimensions."""
    return getattr(X, "ndim", 0) in (3, 4)


def stacked(X: Any) -> Any:
    """Return nested lists of images as one array. Return anything else unchanged. Ragged lists are refused."""
    if not isinstance(X, list | tuple) or not X:
        return X
    entries = []
    for i, entry in enumerate(X):
        try:
            entries.append(np.asarray(on_cpu(entry)))
        except ValueError:  # numpy refuses nested lists of different lengths.
            raise InputError(f"Entry {i} of X is ragged: its rows have different lengths. Make them equal.") from None
    other = next((i for i, entry in enumerate(entries) if entry.shape != entries[0].shape), None)
    if other is not None:
        what = "images" if max(entries[0].ndim, entries[other].ndim) > 1 else "rows"
        do = "Resize the images." if what == "images" else "Fill or cut the rows."
        got = f"the shape {entries[0].shape} in entry 0 and {entries[other].shape} in entry {other}"
        raise InputError(sentence(f"all {what} of X must have the same size", got, do))
    array = np.stack(entries)
    return array if are_images(array) else X


def on_cpu(values: Any) -> Any:
    """Return a tensor as an array. Return anything else unchanged."""
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values


def plain_numbers(value: Any) -> Any:
    """Convert numpy numbers, which parameter grids often hold, to Python numbers."""
    if isinstance(value, Mapping):
        return {name: plain_numbers(one) for name, one in value.items()}
    return value.item() if isinstance(value, np.generic) else value
