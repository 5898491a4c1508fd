"""The labelled images of a run: those that a search leaves out, and those that it compares with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lopsided.data.images import FileImages, Progress
from lopsided.data.listed import Listed
from lopsided.data.prepare import Sources, split_source, training_source
from lopsided.data.sources import Source
from lopsided.data.splits import Splits
from lopsided.errors import InputError, LopsidedError, RunError, sentence
from lopsided.inference.neighbours import MOST, Features, Known
from lopsided.inference.pool import find_images
from lopsided.runs.folder import RECIPE, Run

if TYPE_CHECKING:
    from lopsided.inference.scorer import Scorer


@dataclass(frozen=True, eq=False)
class Labelled:
    """The labelled images of a run that are files, with their digests. ``problem`` says why there are none."""

    images: FileImages
    labels: tuple[str, ...]
    digests: tuple[str, ...]
    problem: str = ""
    names: tuple[str, ...] = ()


def labelled_images(folder: Path, progress: Progress | None = None) -> Labelled:
    """Open the images of all splits of a run again, from where `fit` found them. Files that are gone are left out."""
    try:
        source = _source(folder)
    except LopsidedError as error:
        return Labelled(FileImages([], 3), (), (), str(error))
    images = source.images
    if not isinstance(images, FileImages):
        return Labelled(FileImages([], 3), (), (), f"The images of {source.name} are not files.")
    readable = images.hashed(progress=progress)
    places = {path: row for row, path in enumerate(images.paths)}
    rows = [places[path] for path in readable.paths]
    return Labelled(
        readable,
        tuple(source.classes[source.labels[row]] for row in rows),
        tuple(readable.digest(np.arange(len(readable)))),
        names=tuple(source.names[row] for row in rows),
    )


def trained_digests(folder: Path) -> set[str]:
    """Return the digests of the images that a model was trained on, as far as they are where `fit` found them."""
    try:
        recipe = Run.open(folder).recipe
        source = Sources().drawn(recipe, more=True)
        is_split = recipe.data.folds is None or recipe.data.fold is not None
        splits = split_source(recipe, source) if is_split else Splits.of_all(len(source))
        joined, splits = training_source(source, splits)
        images = joined.images.take(splits.train)
        images = images.hashed() if isinstance(images, FileImages) else images
        return set(images.digest(np.arange(len(images))))
    except (LopsidedError, OSError):
        return set()


def digests_of(named: Sequence[str], *, allow_outside: bool = False) -> set[str]:
    """Return the digests of the readable images in files, folders and tables."""
    if not named:
        return set()
    images = FileImages(list(find_images(named, Listed(allow_outside=allow_outside))[1])).hashed()
    return set(images.digest(np.arange(len(images))))


def known_features(
    scorer: Scorer,
    labelled: Labelled,
    label: str,
    like: Sequence[str] = (),
    progress: Progress | None = None,
    *,
    allow_outside: bool = False,
) -> Known:
    """Return the features of known images of a class, and of known images of the other classes.

    ``like`` are files, folders and tables of images of the class; they replace those of the run.
    """
    wanted = labelled.images.take(np.array([i for i, name in enumerate(labelled.labels) if name == label], dtype=int))
    if like:
        wanted = FileImages(list(find_images(like, Listed(allow_outside=allow_outside))[1]), 3)
    if not len(wanted):
        why = labelled.problem or f"The run has no image of {label}."
        raise InputError(f"{why} So there are no known images of {label} to compare with. Name some with --like.")
    others = labelled.images.take(np.array([i for i, name in enumerate(labelled.labels) if name != label], dtype=int))
    parts = [_features(scorer, each, progress) for each in (wanted, others)]
    if not len(parts[0]):
        raise InputError(sentence("the known images must be readable", f"none of {len(wanted):,}"))
    return Known(*parts)


def _source(folder: Path) -> Source:
    if not (folder / RECIPE).is_file():
        raise RunError(f"{folder} holds no {RECIPE}, so the images that it was trained on are not known.")
    recipe = Run.open(folder).recipe
    source = Sources().drawn(recipe, more=True)
    return training_source(source, Splits.of_all(len(source)))[0]


def _features(scorer: Scorer, images: FileImages, progress: Progress | None) -> Features:
    """Return the features of readable images, at most ``MOST`` of them, evenly over their order."""
    from lopsided.data.inputs import StreamedInputs

    rows = np.arange(len(images))
    if len(rows) > MOST:
        rows = np.linspace(0, len(rows) - 1, MOST).round().astype(np.int64)
    images = images.take(rows)
    broken = {index for index, _ in images.unreadable()}
    images = images.take(np.array([row for row in range(len(images)) if row not in broken], dtype=np.int64))
    inputs = StreamedInputs(images, scorer.card.image_size, scorer.card.channels)
    return scorer.engine.compared(scorer.features(inputs, images.digest(np.arange(len(images))), progress))
