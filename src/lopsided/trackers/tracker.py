"""The interface of a tracker, and the trackers by name: those of this package, and those of entry points.

The group of the entry points is ``lopsided.trackers``. The name of an entry point is the name of the tracker, and its
object is a class derived from ``Tracker``. Reading the names imports no tracker.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from lopsided.errors import MissingDependencyError
from lopsided.recipe.entries import Entries

TENSORBOARD = "tensorboard"
"""The folder of TensorBoard's files in that of a run."""

Status = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True)
class TrackedRun:
    """A run, a run with folds, or a sweep, as a tracker sees it when it starts or continues.

    ``parent`` is what ``Tracker.start`` returned for the run with folds or the sweep that this run belongs to, and
    ``parent_folder`` is the folder of that run. ``key`` is what ``start`` returned when this run began; None if the run
    is new to the tracker. ``history`` holds the epochs that are done: step, stage and figures of each.
    """

    name: str
    folder: Path
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the recipe by their dotted names, or facts about a sweep."""
    recipe: str = ""
    """The recipe as TOML; empty for a sweep."""
    parent: str | None = None
    parent_folder: Path | None = None
    key: str | None = None
    history: Sequence[Epoch] = ()


@dataclass(frozen=True)
class Epoch:
    """The figures of an epoch. ``step`` counts the epochs of all stages from 1."""

    step: int
    stage: str
    figures: Mapping[str, float]
    recall: Mapping[str, float] = field(default_factory=dict)
    """The recall of each class that has validation images."""


class Tracker:
    """Base class of trackers. It receives the events of one run and passes them on to another program.

    ``place`` is the text after the colon in ``--track NAME:PLACE``, as ``settle`` returned it. A tracker is built in
    the process that trains: under torchrun in the first rank, in a sweep in each worker. An exception in any method
    ends the tracker with a warning; it never ends the run.
    """

    needs: ClassVar[Sequence[str]] = ()
    """Modules that must be installed. They are looked up before training and imported by ``start``."""
    install: ClassVar[str] = ""
    """What to install if a module is missing, such as ``lopsided[mlflow]``."""

    def __init__(self, place: str | None = None) -> None:
        self.place = place

    @classmethod
    def settle(cls, place: str | None) -> str | None:
        """Return the place in a form that is valid in any working folder. By default it is a path."""
        return None if place is None else os.path.abspath(place)

    def start(self, run: TrackedRun) -> str:
        """Begin a run, or continue it if ``run.key`` is set. Return a text by which ``start`` finds it again.

        A killed run continues after the epochs in ``run.history``, so later points that are already there must not
        appear twice. A run that is new to the tracker may have a history, because the tracker was added later.
        """
        raise NotImplementedError

    def epoch(self, step: int, stage: str, figures: Mapping[str, float]) -> None:
        """Record the figures of an epoch, such as loss, learning rate and, with validation images, val_uwa."""
        self.log(step, {f"{stage}/{name}": value for name, value in figures.items()})

    def recall(self, step: int, split: str, recall: Mapping[str, float]) -> None:
        """Record the recall of each class on a split: of validation images per epoch, and of the results at the end."""
        self.log(step, {f"{split}_recall/{name}": value for name, value in recall.items()})

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Record figures by their full names, which ``epoch`` and ``recall`` make."""

    def repeat(self, history: Sequence[Epoch]) -> None:
        """Record epochs that are done, for ``start``."""
        for past in history:
            self.epoch(past.step, past.stage, past.figures)
            if past.recall:
                self.recall(past.step, "val", past.recall)

    def artifacts(self, paths: Sequence[Path]) -> None:
        """Keep files of the run."""

    def end(self, step: int, status: Status, figures: Mapping[str, float]) -> None:
        """End the run. ``figures`` are its results, such as ``test/uwa``; empty if it did not finish."""


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress what another program says about its own parts, which a user of lopsided cannot act on."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


TRACKERS: Entries[type[Tracker]] = Entries(
    "lopsided.trackers",
    "tracker",
    Tracker,
    {
        "tensorboard": "lopsided.trackers.tensorboard:TensorBoard",
        "mlflow": "lopsided.trackers.mlflow:MLflow",
        "wandb": "lopsided.trackers.wandb:WandB",
    },
    classes=True,
)


def parse(text: str) -> tuple[str, str | None]:
    """Split the text of a tracker into name and place.

    >>> parse("tensorboard"), parse("mlflow:runs/mlflow")
    (('tensorboard', None), ('mlflow', 'runs/mlflow'))
    """
    name, _, place = text.partition(":")
    return name, place or None


def settle(text: str) -> str:
    """Return the text of a tracker with a place that is valid in any working folder."""
    name, place = parse(text)
    settled = TRACKERS.find(name).settle(place)
    return name if settled is None else f"{name}:{settled}"


def check(texts: Sequence[str]) -> None:
    """Raise an error of one sentence if a tracker is unknown or a package that it needs is not installed."""
    for text in texts:
        name = parse(text)[0]
        tracker = TRACKERS.find(name)
        missing = [module for module in tracker.needs if find_spec(module) is None]
        if missing:
            do = f"Run pip install '{tracker.install}'." if tracker.install else f"Install {missing[0]}."
            raise MissingDependencyError(f"--track {name} needs the package {missing[0]}, which is not installed. {do}")


def make(text: str) -> Tracker:
    """Return the tracker for a text such as ``mlflow:FOLDER``."""
    name, place = parse(text)
    return TRACKERS.find(name)(place)
