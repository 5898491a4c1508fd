"""The sections of a comparison over folds: curves of all methods, and images on which two methods disagree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lopsided.errors import LopsidedError
from lopsided.recipe import Recipe
from lopsided.recipe.words import amount
from lopsided.reports import run_figures
from lopsided.reports.run_data import Judged, open_finished, read_judged
from lopsided.reports.sweep_data import is_key
from lopsided.reports.thresholds import curves
from lopsided.reports.thumbnails import Thumbnails, make_thumbnails
from lopsided.reports.wording import clean, quoted
from lopsided.runs.keys import Treatment
from lopsided.runs.plan import CELLS
from lopsided.runs.records import Record

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]

SHOWN = 12
"""Number of images of a class that are shown for each side of a pair of methods."""
MOST_CLASSES = 8
"""With more classes, only the rarest ones are shown as pictures; the counts are those of all classes."""
MOST_METHODS = 7
"""Number of lines that a plot can tell apart by colour."""
PICTURE_LIMIT = 8_000_000
_SIDE = 360


@dataclass(frozen=True, eq=False)
class OutOfFold:
    """The images of a comparison, and for each method the mean over repeats of its out-of-fold predictions.

    ``p`` is the mean probability (images, classes), ``hits`` the share of repeats in which the method recognises an
    image, and ``times`` the number of repeats in which it was tested. An image without a prediction has NaN in both.
    """

    recipe: Recipe
    classes: tuple[str, ...]
    names: tuple[str, ...]
    groups: tuple[str, ...] | None
    labels: Codes
    p: Mapping[str, Floats]
    hits: Mapping[str, Floats]
    times: Mapping[str, Codes]

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that have predictions."""
        return tuple(self.p)

    @property
    def rarest(self) -> int:
        """The class with the fewest images; the last one if several tie."""
        counts = np.bincount(self.labels, minlength=len(self.classes))
        return int(np.flatnonzero(counts == counts.min())[-1])

    def uwa(self, method: str) -> float:
        """Return the UWA over all images: the mean over classes of the mean hits; NaN if a class has none."""
        hits = self.hits[method]
        parts = [hits[(self.labels == label) & ~np.isnan(hits)] for label in range(len(self.classes))]
        return float(np.mean([part.mean() for part in parts])) if all(map(len, parts)) else math.nan

    def only(self, method: str, other: str, label: int) -> Codes:
        """Return the images of a class that ``method`` recognises and ``other`` misses, the clearest first.

        A method recognises an image if it does so in more than half of the repeats.
        """
        own, theirs = self.hits[method], self.hits[other]
        rows = np.flatnonzero((self.labels == label) & (own > 0.5) & (theirs <= 0.5))
        clear = own[rows] - theirs[rows] + (self.p[method][rows, label] - self.p[other][rows, label])
        return rows[np.argsort(-clear, kind="stable")]


def read_out_of_fold(
    folder: Path, records: Iterable[Record], methods: Mapping[Treatment, str]
) -> tuple[OutOfFold | None, list[str]]:
    """Read the predictions of the folds of one source and scenario. Return them, and notes on runs that are missing.

    None: no run folder could be read. A run whose images have other labels than those read before is left out.
    """
    first: tuple[Recipe, tuple[str, ...]] | None = None
    facts: dict[str, tuple[str, str]] = {}
    found: dict[str, list[Judged]] = {method: [] for method in dict.fromkeys(methods.values())}
    missing, odd = 0, 0
    for record in records:
        if record.fold is None or record.treatment not in methods or not is_key(record.cell):
            continue
        try:
            run, metrics = open_finished(folder / CELLS / record.cell)
            judged = read_judged(run, metrics)["test"]
        except (LopsidedError, KeyError):
            missing += 1
            continue
        first = first or (run.recipe, tuple(metrics.classes))
        groups = judged.groups or ("",) * len(judged)
        names = [metrics.classes[label] for label in judged.y_true]
        own = dict(zip(judged.names, zip(names, groups, strict=True), strict=True))
        if tuple(metrics.classes) != first[1] or any(facts.get(name, fact) != fact for name, fact in own.items()):
            odd += 1
            continue
        facts |= own
        found[methods[record.treatment]].append(judged)
    notes = []
    if missing:
        notes.append(f"{amount(missing, 'run folder')} missing or unreadable: the views of images lack these folds.")
    if odd:
        notes.append(f"{amount(odd, 'run')} with other labels of the images: the views of images lack these folds.")
    if first is None or not facts:
        return None, notes
    return _gathered(*first, facts, {method: parts for method, parts in found.items() if parts}), notes


def _gathered(
    recipe: Recipe, classes: tuple[str, ...], facts: Mapping[str, tuple[str, str]], found: Mapping[str, list[Judged]]
) -> OutOfFold:
    names = tuple(sorted(facts))
    places = {name: i for i, name in enumerate(names)}
    codes = {name: i for i, name in enumerate(classes)}
    sums, hits, times = {}, {}, {}
    for method, parts in found.items():
        total, right = np.zeros((len(names), len(classes))), np.zeros(len(names))
        number = np.zeros(len(names), dtype=np.int64)
        for part in parts:
            rows = np.array([places[name] for name in part.names], dtype=np.int64)
            np.add.at(total, rows, part.p.astype(np.float64))
            np.add.at(right, rows, ~part.wrong)
            np.add.at(number, rows, 1)
        with np.errstate(invalid="ignore"):
            sums[method], hits[method], times[method] = total / number[:, None], right / number, number
    groups = tuple(facts[name][1] for name in names)
    return OutOfFold(
        recipe=recipe,
        classes=classes,
        names=names,
        groups=groups if any(groups) else None,
        labels=np.array([codes[facts[name][0]] for name in names], dtype=np.int64),
        p=sums,
        hits=hits,
        times=times,
    )


def shown_images(data: OutOfFold, budget: int = PICTURE_LIMIT, *, allow_outside: bool = False) -> Thumbnails:
    """Make the pictures of the images on which methods disagree."""
    rows: dict[int, None] = {}
    for method, other in combinations(data.methods, 2):
        for label in _labels(data):
            for first, second in ((method, other), (other, method)):
                rows.update(dict.fromkeys(data.only(first, second, label)[:SHOWN].tolist()))
    names = [data.names[row] for row in rows]
    recipe = data.recipe.override(**{"data.allow_outside": allow_outside})
    return make_thumbnails(recipe, names, budget) if names else Thumbnails(0, (), ())


def _labels(data: OutOfFold) -> list[int]:
    """Return the classes whose images are shown, the rarest first."""
    counts = np.bincount(data.labels, minlength=len(data.classes))
    return [int(label) for label in np.argsort(counts, kind="stable")[:MOST_CLASSES]]


def curve_plots(data: OutOfFold) -> dict[str, Any]:
    """Return the ROC and precision-recall curves of the rarest class, with a line for each method."""
    label = data.rarest
    name = data.classes[label]
    roc, pr = run_figures.curve_plots(
        f"ROC curves of {quoted(name)}, one for each method",
        f"Precision-recall curves of {quoted(name)}, one for each method",
        float((data.labels == label).mean()),
        _SIDE,
    )
    legend = []
    for number, method in enumerate(data.methods[:MOST_METHODS]):
        p = data.p[method][:, label]
        known = ~np.isnan(p)
        first, second = curves(p[known].astype(np.float32), (data.labels == label)[known])
        roc.line(first, f"c{number}")
        pr.line(second, f"c{number}")
        legend.append((f"c{number}", clean(method)))
    left = len(data.methods) - MOST_METHODS
    return {
        "class": clean(name),
        "roc": roc.render(),
        "pr": pr.render(),
        "legend": legend,
        "note": f"{amount(left, 'more method')} not drawn." if left > 0 else "",
    }


def disagreements(data: OutOfFold, pictures: Thumbnails) -> Iterator[dict[str, Any]]:
    """Yield, for each pair of methods, how many images only one of them recognises, and the clearest of them."""
    for number, (method, other) in enumerate(combinations(data.methods, 2), start=1):
        only = [(len(data.only(method, other, c)), len(data.only(other, method, c))) for c in range(len(data.classes))]
        yield {
            "number": number,
            "methods": (clean(method), clean(other)),
            "counts": [
                (clean(name), int((data.labels == label).sum()), *only[label])
                for label, name in enumerate(data.classes)
            ],
            "sides": [_side(data, pictures, *pair) for pair in ((method, other), (other, method))],
        }


def _side(data: OutOfFold, pictures: Thumbnails, method: str, other: str) -> dict[str, Any]:
    """Return the images that ``method`` recognises and ``other`` misses."""
    tiles = []
    total = 0
    for label in _labels(data):
        rows = data.only(method, other, label)
        total += len(rows)
        tiles += [_tile(data, pictures, int(row), method, other) for row in rows[:SHOWN]]
    return {"finds": clean(method), "misses": clean(other), "total": total, "tiles": tiles}


def _tile(data: OutOfFold, pictures: Thumbnails, row: int, method: str, other: str) -> dict[str, Any]:
    label = data.labels[row]
    return {
        "name": clean(data.names[row]),
        "group": clean(data.groups[row]) if data.groups is not None else "",
        "true": clean(data.classes[label]),
        "own": float(data.p[method][row, label]),
        "other": float(data.p[other][row, label]),
        "picture": pictures.of(data.names[row]),
    }
