"""The samples of an estimator, as users pass them, and their training, as a whole or fold by fold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from lopsided.data.images import ArrayImages
from lopsided.data.inputs import Inputs, MemoryInputs, Prepared, StreamedInputs, prepare, prepare_vectors
from lopsided.data.sources import Source, source_from_arrays
from lopsided.data.splits import fold_numbers, split
from lopsided.errors import InputError, sentence
from lopsided.evaluation.calibration import at_prevalence
from lopsided.inference.engine import Engine
from lopsided.inference.scorer import Scorer
from lopsided.models.machine import pick_device
from lopsided.recipe import Recipe
from lopsided.runs.cell import Cell
from lopsided.runs.driver import drive
from lopsided.runs.engines import Here
from lopsided.runs.plan import Plan
from lopsided.training.checkpoint import Checkpoint, State
from lopsided.training.decide import check_rule, settle
from lopsided.training.fit import pixels_of
from lopsided.training.methods import Trainer, make_trainer
from lopsided.training.prior import settled_prior
from lopsided.training.reporter import Log, Reporter

PREDICT_BATCH = 256


@dataclass(frozen=True, eq=False)
class Samples:
    """Images or vectors with the number of their class, the names of the classes, and perhaps groups."""

    X: Any
    codes: npt.NDArray[np.int64]
    names: tuple[str, ...]
    groups: npt.NDArray[np.str_] | None
    images: bool

    def rows(self, rows: npt.NDArray[np.int64]) -> Samples:
        """Return some of the samples."""
        own = None if self.groups is None else self.groups[rows]
        return replace(self, X=self.X[rows], codes=self.codes[rows], groups=own)

    def source(self) -> Source:
        """Return a source of blank images, for splits and folds, which use only labels and groups."""
        blank = ArrayImages(np.zeros((len(self.codes), 1, 1, 1), dtype=np.uint8))
        return Source("samples", blank, self.codes, self.names, tuple(map(str, range(len(self.codes)))), self.groups)


def train(samples: Samples, recipe: Recipe, *, verbose: int) -> tuple[Trainer, State]:
    """Train a recipe on samples, calibrate the model and settle its rule."""
    prepared = _with_groups(_prepare(samples, recipe), samples.groups)
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
    codes, num_classes = samples.codes, len(samples.names)
    how: Literal["group", "stratified"] = "stratified" if samples.groups is None else "group"
    numbers = fold_numbers(samples.source(), how=how, folds=folds, seed=recipe.seed)
    prior, p = settled_prior(recipe, np.bincount(codes, minlength=num_classes)), np.empty((len(codes), num_classes))

    def score(cell: Cell) -> None:
        tested = numbers == int(cell.key)
        trainer, _ = train(samples.rows(np.flatnonzero(~tested)), recipe, verbose=verbose)
        scores = _probabilities(trainer, samples.X[np.flatnonzero(tested)], images=samples.images)
        p[tested] = at_prevalence(scores, trainer.card.prior, prior)

    drive(Plan(Path(), [Cell(str(fold), recipe) for fold in range(folds)]), Here(score))  # Nothing is written.
    return p, numbers


def _probabilities(trainer: Trainer, X: Any, *, images: bool) -> npt.NDArray[np.float64]:
    card = trainer.card
    inputs: Inputs = (
        MemoryInputs(torch.from_numpy(np.array(X)))
        if not images
        else (StreamedInputs(source_from_arrays(X).images, card.image_size, card.channels))
    )
    engine = trainer.engine if images else Engine(trainer.model, (), fast=False)
    return Scorer(trainer.model, card, engine=engine, cached="none", batch_size=PREDICT_BATCH).score(inputs)[0]


def _prepare(samples: Samples, recipe: Recipe) -> Prepared:
    images, codes, names = samples.images, samples.codes, samples.names
    source = source_from_arrays(samples.X, codes, classes=names) if images else replace(samples, groups=None).source()
    splits = split(source, how="stratified", val=recipe.data.val, test=0.0, seed=recipe.seed)
    if images:
        digests = source.images.digest(np.arange(len(source))) if recipe.spec.pretrained else None
        return prepare(recipe, source, splits, pixels=pixels_of(recipe), digests=digests)[0]
    return prepare_vectors(samples.X, codes, names, splits.train, splits.val)


def _with_groups(prepared: Prepared, groups: npt.NDArray[np.str_] | None) -> Prepared:
    """Return prepared data with the groups of the training rows. The estimator has no other rows with groups."""
    if groups is None:
        return prepared
    if len(groups) != len(prepared.train):
        must = f"groups must have one entry for each of the {len(prepared.train)} inputs"
        raise InputError(sentence(must, f"the shape {groups.shape}"))
    return replace(prepared, train=replace(prepared.train, groups=groups))


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


def are_images(X: Any) -> bool:
    """Return whether an array holds images, by its number of dimensions."""
    return getattr(X, "ndim", 0) in (3, 4)


def stacked(X: Any) -> Any:
    """Return a list of images as one array. Return anything else unchanged. Entries of different sizes are refused."""
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
