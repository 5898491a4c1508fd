"""What a finished run is opened for: its model, its images, and how it decides."""

from __future__ import annotations

import csv
import json
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lopsided import files
from lopsided.data.images import FileImages
from lopsided.data.prepare import Sources, split_source, training_source
from lopsided.data.sources import SOURCE_NAMES, Source
from lopsided.data.splits import Splits
from lopsided.data.stored import is_address
from lopsided.errors import InputError, LopsidedError, RunError, sentence
from lopsided.evaluation.calibration import HeldBack
from lopsided.evaluation.decision import PROBABILITY
from lopsided.evaluation.typicality import LEVEL, check_level
from lopsided.facts import notes
from lopsided.inference.feature_cache import ReadableImages
from lopsided.inference.predict import Familiarity, Grouping, Use, choose_use
from lopsided.recipe import Recipe
from lopsided.recipe.rules import parse_rule, read_rule
from lopsided.recipe.views import name_views
from lopsided.runs.folder import CARD, PREDICTIONS, RECIPE, Run
from lopsided.runs.progress import Voice

if TYPE_CHECKING:
    from lopsided.data.images import Progress
    from lopsided.models.model import Model, ModelCard


def open_model(
    folder: str | os.PathLike[str], device: str = "auto", *, kinds: Sequence[str] = ("image",)
) -> tuple[Model, ModelCard]:
    """Load the model of a finished run, or of any folder with ``model.safetensors`` and ``model.json``.

    Raise if its inputs are not of one of these ``kinds``: "image" and "vector".
    """
    path = Path(folder)
    check_finished(path)
    from lopsided.models.machine import pick_device
    from lopsided.models.model import load_model

    model, card = load_model(path, pick_device(device))
    if card.kind not in kinds:
        what = "vectors, not images" if card.kind == "vector" else "images, not vectors"
        do = "`lopsided predict RUN TABLE` classifies vectors." if card.kind == "vector" else "Give image files."
        raise RunError(f"The model in {path} takes {what}. {do}")
    return model, card


def columns_of(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the columns of a table that the model of a folder takes beside each image, without loading the model.

    What is wrong with a model is said when it is opened.
    """
    with suppress(OSError, ValueError, LookupError, TypeError):
        content = json.loads((Path(folder) / CARD).read_bytes())
        return tuple(str(column["name"]) for column in content["beside"])
    return ()


def check_finished(folder: Path) -> None:
    """Raise if a folder has no model."""
    if (folder / RECIPE).is_file() and not (folder / CARD).is_file():
        do = f"Continue it with lopsided fit --out {shlex.quote(str(folder))} --resume."
        raise RunError(f"The run in {folder} is not finished. {do}")
    if not (folder / CARD).is_file():
        raise RunError(f"{folder} holds no {CARD}. Give the folder of a finished run.")


def use_views(model: Model, card: ModelCard, views: tuple[str, ...] | None, *, quiet: bool) -> ModelCard:
    """Let a model use other views, and say what they do to its probabilities. Return its card."""
    if views is None or views == card.views:
        return card
    from lopsided.models.model import with_views

    if not quiet and card.calibrated_on:
        Voice().say(
            f"The model was calibrated with the views {name_views(card.views)}, so its probabilities with --tta "
            f"{name_views(views)} may be less well calibrated. fit tta={name_views(views)} calibrates with them."
        )
    return with_views(model, card, views)


def open_own_split(
    folder: str | os.PathLike[str], split: str, progress: Progress | None = None
) -> tuple[Source, Recipe]:
    """Open the images of one split of a finished run again, with the recipe of the run.

    Raise if the images, their labels or the split differ from those of the run.
    """
    from lopsided.training.fit import fingerprint

    run = Run.open(folder)
    do = f"Name the data: lopsided evaluate {shlex.quote(str(folder))} DATA."
    known = None if run.metrics is None else run.metrics.get("fingerprint")
    if run.metrics is None:
        again = f"Continue it with lopsided fit --out {shlex.quote(str(folder))} --resume."
        raise RunError(f"The run in {folder} is not finished. {again}")
    if not isinstance(known, str):
        raise RunError(f"The run in {folder} does not record its images, so its splits cannot be found again. {do}")
    if split not in ("train", "val", "test"):
        raise InputError(sentence("--split must be train, val or test", split))
    if run.recipe.data.folds is not None and run.recipe.data.fold is None:
        what = f"The model in {folder} has seen all images of its run: its folds tested them with other models"
        raise RunError(f"{what}. metrics.json holds these metrics. For other images: lopsided evaluate RUN DATA.")
    source, _ = Sources().open(run.recipe, progress, ReadableImages())
    source, splits = training_source(source, split_source(run.recipe, source))
    if fingerprint(source, splits, source.images.digest(np.arange(len(source)))) != known:
        what = f"The images or labels of {run.recipe.data.source} have changed since the run was trained"
        raise RunError(f"{what}, so its {split} split cannot be found again. Restore them, or name the data.")
    rows = dict(splits.parts())[split]
    if not len(rows):
        raise RunError(f"The run in {folder} has no {split} split. {do}")
    return source.subset(rows), run.recipe


def open_use(
    folder: str | os.PathLike[str], card: ModelCard, rule: str | None = None, prevalence: str | None = None
) -> Use:
    """Return how to use the model of a run: by its rule or another one, at its prior or at another prevalence.

    Rules that are fitted use the validation images in the ``predictions.csv`` of the run, or the out-of-fold images of
    a run with folds.
    """
    rule = read_rule(rule)
    asked = rule or (card.decision.rule if prevalence is not None else None)
    if asked is None or not parse_rule(asked).fitted:
        return choose_use(card, rule, prevalence)
    return choose_use(card, rule, prevalence, held_back(Path(folder), card))


def open_familiarity(
    folder: str | os.PathLike[str],
    card: ModelCard,
    place: str | None = None,
    level: float | None = None,
    *,
    usual: str = "mark",
    group_of: Grouping | None = None,
) -> Familiarity | None:
    """Return how the model of a run recognises unfamiliar images, and what becomes of them; None if it does not.

    That is an error if ``place`` or ``level`` asks for it. ``group_of`` tells the groups of the images.
    """
    from lopsided.inference.familiar import load_bank

    level, asked = check_level(LEVEL if level is None else level), place is not None or level is not None
    bank = load_bank(Path(folder), card)
    if bank is None and asked:
        raise InputError(f"{notes.no_bank()} Leave out --unfamiliar and --level to use it as it is.")
    return None if bank is None else Familiarity(bank, level, place=place or usual, group_of=group_of)


def held_back(folder: Path, card: ModelCard) -> HeldBack | None:
    """Return the validation images in the ``predictions.csv`` of a run, or None if there are none.

    In a run with folds these are the out-of-fold predictions of all images.
    """
    path = folder / PREDICTIONS
    if not path.is_file() or not (folder / RECIPE).is_file():
        return None
    try:
        run = Run.open(folder)
        is_single = run.recipe.data.folds is None or run.recipe.data.fold is not None
        split, kind = ("val", "validation") if is_single else ("test", "out-of-fold")
        rows = [row for row in run.predictions() if row["split"] == split]
        places = {name: i for i, name in enumerate(card.classes)}
        p = np.array([[float(row[f"{PROBABILITY}{name}"]) for name in card.classes] for row in rows])
        labels = np.array([places[row["label"]] for row in rows], dtype=np.int64)
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        text = f"{path} is not a valid table of predictions ({files.reason(error)})."
        raise RunError(f"{text} Restore the file, or train the run again.") from None
    groups = np.array([row["group"] for row in rows])
    return HeldBack(p, labels, groups if any(groups) else None, kind) if rows else None


def trained_on(folder: str | os.PathLike[str], data: str | os.PathLike[str]) -> bool:
    """Return whether a model was trained on this source, or on a folder inside or around it, as far as known."""
    path = Path(folder) / RECIPE
    try:
        source = Recipe.load(path).data.source if path.is_file() else None
    except InputError:
        source = None
    if source is None:
        return False
    if any(name in SOURCE_NAMES or is_address(name) for name in (source, os.fspath(data))):
        return source == os.fspath(data)
    then, now = Path(os.path.realpath(source)), Path(os.path.realpath(data))
    return then.is_relative_to(now) or now.is_relative_to(then)


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
