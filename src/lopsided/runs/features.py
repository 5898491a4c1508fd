"""Fill the cache with the features of a source, so that later runs on it take seconds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from lopsided.data.images import FileImages, Images, Progress
from lopsided.data.inputs import StreamedInputs, prepare
from lopsided.data.prepare import Sources, split_source, training_source
from lopsided.data.sources import Source, source_from_arrays
from lopsided.data.splits import Splits
from lopsided.data.stored import ImagePath
from lopsided.errors import InputError, RunError
from lopsided.facts.log import Log
from lopsided.inference.feature_cache import ReadableImages
from lopsided.inference.pool import Mapper, packs
from lopsided.models.machine import pick_device
from lopsided.models.model import save_model
from lopsided.recipe import Recipe
from lopsided.runs.run import settle
from lopsided.training.checkpoint import Checkpoint
from lopsided.training.fit import pixels_of
from lopsided.training.methods import make_trainer

if TYPE_CHECKING:
    from lopsided.inference.scorer import Scorer

MEASURED = 16
"""Images whose features are timed before a run."""
Cluster = Callable[[Path], AbstractContextManager[Mapper]]
"""Gives the function that computes packs with features on other machines, given the folder of a model."""


def fill_cache(
    recipe: Recipe,
    data: str,
    *,
    cluster: Cluster | None = None,
    progress: Progress | None = None,
    sources: Sources | None = None,
) -> tuple[int, int]:
    """Compute the features that a recipe with a frozen encoder needs of a source, as far as they are not cached.

    Return the number of images, and of those that were computed. ``cluster`` computes them on other machines.
    """
    if recipe.spec.trains_encoder:
        do = "Use the recipe quick, thorough or adapter."
        raise InputError(f'Only features of a frozen encoder are cached, but the method is "{recipe.method}". {do}')
    recipe = settle(recipe, data)
    source, _ = (sources or Sources()).open(recipe, known=ReadableImages())
    source, splits = training_source(source, split_source(recipe, source))
    digests = source.images.digest(np.arange(len(source)))
    prepared, _ = prepare(recipe, source, splits, pixels=pixels_of(recipe), digests=digests)
    device = pick_device(recipe.device if cluster is None else "cpu")
    trainer = make_trainer(recipe, prepared, device, Log(None, None), Checkpoint(None))
    trainer.build()
    scorer, card = trainer.scorer, trainer.card
    if not scorer.shelves:
        raise InputError("The cache is disabled, because LOPSIDED_CACHE_GIB is 0 or there is no home folder.")
    if cluster is not None:
        scorer.complete()  # The nodes must compute with the libraries of this machine.
    images = source.images
    found = [shelf.fetch(digests)[1] for shelf in scorer.shelves]
    missing = np.flatnonzero(~np.all(found, axis=0))
    if cluster is None:
        inputs = StreamedInputs(images.take(missing), card.image_size, card.channels)
        scorer.features(inputs, [digests[row] for row in missing], progress)
        if scorer.problem is not None:
            raise RunError(scorer.problem)
        return len(source), len(missing)
    if not isinstance(images, FileImages):
        raise InputError(f"--engine ray needs images in files, but those of {source.name} are arrays.")
    with tempfile.TemporaryDirectory(prefix="lopsided-") as scratch:
        save_model(Path(scratch), trainer.model, card)
        with cluster(Path(scratch)) as mapper:
            _collect(scorer, mapper, [images.paths[row] for row in missing], progress)
    return len(source), len(missing)


def images_per_second(recipe: Recipe, images: int = 4) -> float:
    """Return how many images a second this machine turns into features with the frozen encoder of a recipe."""
    source = source_from_arrays(np.zeros((images, 64, 64, 3), dtype=np.uint8), np.arange(images) % 2)
    return 1 / _seconds(_scorer_of(recipe, source), source.images)


def feature_seconds(recipe: Recipe, source: Source) -> float:
    """Return how long the features of a source will take, as far as they are not cached; measured on a few images."""
    scorer = _scorer_of(recipe, source)
    missing = np.arange(len(source))
    if scorer.shelves:
        digests = source.images.digest(missing)
        missing = np.flatnonzero(~np.all([shelf.fetch(digests)[1] for shelf in scorer.shelves], axis=0))
    if not len(missing):
        return 0.0
    some = missing[np.linspace(0, len(missing) - 1, min(MEASURED, len(missing))).astype(np.int64)]
    return len(missing) * _seconds(scorer, source.images.take(some))


def _scorer_of(recipe: Recipe, source: Source) -> Scorer:
    """Return what computes the features of a recipe on a CPU, for images that are all trained on."""
    prepared, _ = prepare(recipe, source, Splits.of_all(len(source)), pixels=pixels_of(recipe))
    trainer = make_trainer(recipe, prepared, pick_device("cpu"), Log(None, None), Checkpoint(None))
    trainer.build()
    return trainer.scorer


def _seconds(scorer: Scorer, images: Images) -> float:
    """Return the seconds for the features of one image, with decoding by one thread."""
    inputs = StreamedInputs(images, scorer.card.image_size, scorer.card.channels, 1)
    scorer.features(inputs, None)  # Loads the encoder.
    begin = perf_counter()
    scorer.features(inputs, None)
    return (perf_counter() - begin) / len(images)


def _collect(scorer: Scorer, mapper: Mapper, paths: list[ImagePath], progress: Progress | None) -> None:
    """Store the features that nodes send. Raise if a node computes with other libraries than this machine."""
    done = 0
    for scores in mapper(packs(paths)):
        if scores.made_by != scorer.made_by:
            do = "Install the same versions on every node."
            raise RunError(f"Cached features must be made by {scorer.made_by}, but a node has {scores.made_by}. {do}")
        assert scores.features is not None
        good = [row for row, reason in enumerate(scores.reasons) if not reason]
        for shelf, features in zip(scorer.shelves, scorer.split_views(scores.features), strict=True):
            shelf.keep([scores.digests[row] for row in good], features[good])
            shelf.flush()
        if scorer.problem is not None:
            raise RunError(scorer.problem)
        done += len(scores.reasons)
        if progress is not None:
            progress(done, len(paths))
