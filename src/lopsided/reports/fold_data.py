"""Read the folds of a comparison: for each arm, the out-of-fold predictions of every image. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lopsided.errors import LopsidedError
from lopsided.recipe import Recipe
from lopsided.recipe.words import amount
from lopsided.reports.run_data import Judged, open_finished, read_judged
from lopsided.reports.sweep_data import is_key
from lopsided.runs.cell import CELLS
from lopsided.runs.keys import Treatment
from lopsided.runs.records import Record

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class OutOfFold:
    """The images of a comparison, and for each arm the mean over repeats of its out-of-fold predictions.

    ``p`` is the mean probability (images, classes), ``hits`` the share of repeats in which the arm recognises an image,
    and ``times`` the number of repeats in which it was tested. An image without a prediction has NaN in both.
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
    def arms(self) -> tuple[str, ...]:
        """The arms that have predictions."""
        return tuple(self.p)

    @property
    def rarest(self) -> int:
        """The class with the fewest images; the last one if several tie."""
        counts = np.bincount(self.labels, minlength=len(self.classes))
        return int(np.flatnonzero(counts == counts.min())[-1])

    def uwa(self, arm: str) -> float:
        """Return the UWA over all images: the mean over classes of the mean hits; NaN if a class has none."""
        hits = self.hits[arm]
        parts = [hits[(self.labels == label) & ~np.isnan(hits)] for label in range(len(self.classes))]
        return float(np.mean([part.mean() for part in parts])) if all(map(len, parts)) else math.nan

    def only(self, arm: str, other: str, label: int) -> Codes:
        """Return the images of a class that ``arm`` recognises and ``other`` misses, the clearest first.

        An arm recognises an image if it does so in more than half of the repeats.
        """
        own, theirs = self.hits[arm], self.hits[other]
        rows = np.flatnonzero((self.labels == label) & (own > 0.5) & (theirs <= 0.5))
        clear = own[rows] - theirs[rows] + (self.p[arm][rows, label] - self.p[other][rows, label])
        return rows[np.argsort(-clear, kind="stable")]


def read_out_of_fold(
    folder: Path, records: Iterable[Record], arms: Mapping[Treatment, str]
) -> tuple[OutOfFold | None, list[str]]:
    """Read the predictions of the folds of one source and scenario. Return them, and notes on runs that are missing.

    None: no run folder could be read. A run whose images have other labels than those read before is left out.
    """
    first: tuple[Recipe, tuple[str, ...]] | None = None
    facts: dict[str, tuple[str, str]] = {}
    found: dict[str, list[Judged]] = {arm: [] for arm in dict.fromkeys(arms.values())}
    missing, odd = 0, 0
    for record in records:
        if record.fold is None or record.treatment not in arms or not is_key(record.cell):
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
        found[arms[record.treatment]].append(judged)
    notes = []
    if missing:
        notes.append(f"{amount(missing, 'run folder')} missing or unreadable: the views of images lack these folds.")
    if odd:
        notes.append(f"{amount(odd, 'run')} with other labels of the images: the views of images lack these folds.")
    if first is None or not facts:
        return None, notes
    return _gathered(*first, facts, {arm: parts for arm, parts in found.items() if parts}), notes


def _gathered(
    recipe: Recipe, classes: tuple[str, ...], facts: Mapping[str, tuple[str, str]], found: Mapping[str, list[Judged]]
) -> OutOfFold:
    names = tuple(sorted(facts))
    places = {name: i for i, name in enumerate(names)}
    codes = {name: i for i, name in enumerate(classes)}
    sums, hits, times = {}, {}, {}
    for arm, parts in found.items():
        total, right = np.zeros((len(names), len(classes))), np.zeros(len(names))
        number = np.zeros(len(names), dtype=np.int64)
        for part in parts:
            rows = np.array([places[name] for name in part.names], dtype=np.int64)
            np.add.at(total, rows, part.p.astype(np.float64))
            np.add.at(right, rows, ~part.wrong)
            np.add.at(number, rows, 1)
        with np.errstate(invalid="ignore"):
            sums[arm], hits[arm], times[arm] = total / number[:, None], right / number, number
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
