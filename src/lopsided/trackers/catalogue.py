"""The trackers by name: those of this package, and those that other packages add through entry points.

The group of the entry points is ``lopsided.trackers``. The name of an entry point is the name of the tracker, and its
object is a class derived from ``Tracker``. Reading the names imports no tracker.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from lopsided.entries import Entries
from lopsided.errors import MissingDependencyError
from lopsided.trackers.tracker import Tracker

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
