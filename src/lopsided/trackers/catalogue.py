"""The trackers by name: those of this package, and those that other packages add through entry points.

The group of the entry points is ``lopsided.trackers``. The name of an entry point is the name of the tracker, and its
object is a class derived from ``Tracker``. Reading the names imports no tracker.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from lopsided.errors import InputError, MissingDependencyError, sentence
from lopsided.trackers.tracker import Tracker

GROUP = "lopsided.trackers"
BUILT_IN = {
    "tensorboard": "lopsided.trackers.tensorboard:TensorBoard",
    "mlflow": "lopsided.trackers.mlflow:MLflow",
    "wandb": "lopsided.trackers.wandb:WandB",
}


def names() -> list[str]:
    """Return the names of all trackers: first those of this package, then those of other packages."""
    return [*BUILT_IN, *sorted({point.name for point in entry_points(group=GROUP)} - BUILT_IN.keys())]


def find(name: str) -> type[Tracker]:
    """Return the class of a tracker. Raise an error of one sentence if there is none or if it cannot be used."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        built_in: type[Tracker] = getattr(importlib.import_module(module), attribute)
        return built_in
    points = [point for point in entry_points(group=GROUP) if point.name == name]
    if not points:
        near = difflib.get_close_matches(name[:100], names(), n=1)
        do = f"Did you mean {near[0]}?" if near else ""
        raise InputError(sentence(f"a tracker must be one of {', '.join(names())}", repr(name[:80]), do))
    if len(points) > 1:
        packages = " and ".join(map(_package, points))
        raise InputError(f"{packages} both add a tracker {name!r}. Uninstall one of them.")
    try:
        found = points[0].load()
    except Exception as error:  # Other packages may raise anything; the user gets one sentence.
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError(f"The tracker {name!r} of {_package(points[0])} cannot be imported ({text}).") from error
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        where = f"The tracker {name!r} of {_package(points[0])}"
        raise InputError(sentence(f"{where} must be a class derived from lopsided.trackers.Tracker", repr(found)[:80]))
    return found


def _package(point: EntryPoint) -> str:
    return f"the module {point.module}" if point.dist is None else f"the package {point.dist.name}"


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
    settled = find(name).settle(place)
    return name if settled is None else f"{name}:{settled}"


def check(texts: Sequence[str]) -> None:
    """Raise an error of one sentence if a tracker is unknown or a package that it needs is not installed."""
    for text in texts:
        name = parse(text)[0]
        tracker = find(name)
        missing = [module for module in tracker.needs if find_spec(module) is None]
        if missing:
            do = f"Run pip install '{tracker.install}'." if tracker.install else f"Install {missing[0]}."
            raise MissingDependencyError(f"--track {name} needs the package {missing[0]}, which is not installed. {do}")


def make(text: str) -> Tracker:
    """Return the tracker for a text such as ``mlflow:FOLDER``."""
    name, place = parse(text)
    return find(name)(place)
