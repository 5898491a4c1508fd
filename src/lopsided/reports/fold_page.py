"""The sections of a comparison over folds: curves of all arms, and images on which two arms disagree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from lopsided.recipe.words import amount
from lopsided.reports import svg
from lopsided.reports.fold_data import OutOfFold
from lopsided.reports.thresholds import curves
from lopsided.reports.thumbnails import Thumbnails, make_thumbnails
from lopsided.reports.wording import clean, quoted

SHOWN = 12
"""Number of images of a class that are shown for each side of a pair of arms."""
MOST_CLASSES = 8
"""With more classes, only the rarest ones are shown as pictures; the counts are those of all classes."""
MOST_ARMS = 7
"""Number of lines that a plot can tell apart by colour."""
PICTURE_LIMIT = 8_000_000
_SIDE = 360


@dataclass(frozen=True)
class Shown:
    """The pictures of all groups of a page. Each image is embedded once."""

    places: dict[str, int]
    thumbnails: Thumbnails

    def classes(self, name: str) -> str:
        """Return the CSS classes of the picture of an image."""
        return self.thumbnails.classes(self.places[name]) if name in self.places else ""


def shown_images(data: OutOfFold, budget: int = PICTURE_LIMIT, *, allow_outside: bool = False) -> Shown:
    """Make the pictures of the images on which arms disagree."""
    rows: dict[int, None] = {}
    for arm, other in combinations(data.arms, 2):
        for label in _labels(data):
            for first, second in ((arm, other), (other, arm)):
                rows.update(dict.fromkeys(data.only(first, second, label)[:SHOWN].tolist()))
    names = [data.names[row] for row in rows]
    recipe = data.recipe.override(**{"data.allow_outside": allow_outside})
    pictures = make_thumbnails(recipe, names, budget) if names else Thumbnails(0, (), ())
    return Shown({name: i for i, name in enumerate(names)}, pictures)


def _labels(data: OutOfFold) -> list[int]:
    """Return the classes whose images are shown, the rarest first."""
    counts = np.bincount(data.labels, minlength=len(data.classes))
    return [int(label) for label in np.argsort(counts, kind="stable")[:MOST_CLASSES]]


def curve_plots(data: OutOfFold) -> dict[str, Any]:
    """Return the ROC and precision-recall curves of the rarest class, with a line for each arm."""
    label = data.rarest
    name = data.classes[label]
    common: dict[str, Any] = {
        "x": (0.0, 1.0), "y": (0.0, 1.0), "width": _SIDE, "height": _SIDE, "y_ticks": svg.ticks(0, 1),
    }  # fmt: skip
    roc = svg.Plot(
        f"ROC curves of {quoted(name)}, one for each method", x_label="false positive rate", y_label="recall", **common
    )
    pr = svg.Plot(
        f"Precision-recall curves of {quoted(name)}, one for each method",
        x_label="recall",
        y_label="precision",
        **common,
    )
    share = float((data.labels == label).mean())
    roc.line([(0, 0), (1, 1)], "reference")
    pr.line([(0, share), (1, share)], "reference")
    legend = []
    for number, arm in enumerate(data.arms[:MOST_ARMS]):
        p = data.p[arm][:, label]
        known = ~np.isnan(p)
        first, second = curves(p[known].astype(np.float32), (data.labels == label)[known])
        roc.line(first, f"c{number}")
        pr.line(second, f"c{number}")
        legend.append((f"c{number}", clean(arm)))
    left = len(data.arms) - MOST_ARMS
    return {
        "class": clean(name),
        "roc": roc.render(),
        "pr": pr.render(),
        "legend": legend,
        "note": f"{amount(left, 'more method')} not drawn." if left > 0 else "",
    }


def disagreements(data: OutOfFold, shown: Shown) -> Iterator[dict[str, Any]]:
    """Yield, for each pair of arms, how many images only one of them recognises, and the clearest of these images."""
    for number, (arm, other) in enumerate(combinations(data.arms, 2), start=1):
        sides = [_side(data, shown, *pair) for pair in ((arm, other), (other, arm))]
        yield {
            "number": number,
            "arms": (clean(arm), clean(other)),
            "counts": [
                (clean(data.classes[label]), int((data.labels == label).sum()), *_counts(data, arm, other, label))
                for label in range(len(data.classes))
            ],
            "sides": sides,
        }


def _counts(data: OutOfFold, arm: str, other: str, label: int) -> tuple[int, int]:
    return len(data.only(arm, other, label)), len(data.only(other, arm, label))


def _side(data: OutOfFold, shown: Shown, arm: str, other: str) -> dict[str, Any]:
    """Return the images that ``arm`` recognises and ``other`` misses."""
    tiles = []
    total = 0
    for label in _labels(data):
        rows = data.only(arm, other, label)
        total += len(rows)
        tiles += [_tile(data, shown, int(row), arm, other) for row in rows[:SHOWN]]
    return {"finds": clean(arm), "misses": clean(other), "total": total, "tiles": tiles}


def _tile(data: OutOfFold, shown: Shown, row: int, arm: str, other: str) -> dict[str, Any]:
    label = data.labels[row]
    return {
        "name": clean(data.names[row]),
        "group": clean(data.groups[row]) if data.groups is not None else "",
        "true": clean(data.classes[label]),
        "own": float(data.p[arm][row, label]),
        "other": float(data.p[other][row, label]),
        "picture": shown.classes(data.names[row]),
    }
