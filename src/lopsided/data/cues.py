"""Cheap cues of images: brightness, colours, sharpness, border, and the size of the file.

If one of them separates the classes by itself, they were perhaps photographed differently, and a model may know the
camera instead of the object.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lopsided.data.decoding import GLANCE as SIDE
from lopsided.data.images import FileImages, Images, Vectors, ordered_map
from lopsided.data.parts import Codes, Floats, auroc, odd_parts
from lopsided.evaluation.intervals import Estimate, auroc_interval
from lopsided.facts import Fact, cautions
from lopsided.recipe import Recipe

if TYPE_CHECKING:
    from lopsided.data.sources import Source

MOST_IMAGES, LEAST_PER_CLASS = 1_500, 20
"""Images whose cues are computed: at most this many, evenly over the classes, but at least so many of each."""
CENTRE, RIM, CORNERS = 22 / 32, 30 / 32, 36 / 32
"""Distances from the middle, relative to half a side. Between the first two lies the background, as a rule."""
_LEAST_CUES = 20
"""With fewer images, cues are not compared."""
_EXAMPLES = 5
"""Images of a part that are named."""
TELLING = 0.75
"""A cue is named if its AUROC is above this, and the lower end of the interval above ``LEAST``."""
LEAST = 0.6
TOGETHER = "all simple cues together"
_FOLDS, _RIDGE = 5, 1.0


def seeks_cues(recipe: Recipe) -> bool:
    """Return whether the images of a recipe are searched for cues.

    A fold leaves this to the model of all images, and the images of a scenario are drawn from one collection.
    """
    return recipe.data.fold is None and recipe.data.scenario is None


def cue_cautions(source: Source, train: Codes, recipe: Recipe) -> Iterator[Fact]:
    """Yield a caution for each class that something simple, such as brightness, separates from the others.

    Another caution is for a class of which another camera seems to have taken a part.

    Only training images are looked at.
    """
    if not seeks_cues(recipe) or len(train) < _LEAST_CUES or isinstance(source.images, Vectors):
        return
    rows = train[cue_rows(source.labels[train], recipe.seed)]
    groups = None if source.groups is None else source.groups[rows]
    cues, labels, num_classes = measure_cues(source.images, rows), source.labels[rows], len(source.classes)
    found = telling_cues(cues.plain, labels, num_classes, groups)
    for label in dict.fromkeys(cue.label for cue in found):
        named = {cue.name: round(cue.auroc.value, 3) for cue in found if cue.label == label}
        yield cautions.cheap_cues(source.classes[label], named)
    for part in odd_parts(cues.camera, cues.files, labels, num_classes, groups, recipe.seed):
        names = [source.names[row] for row in rows[part.rows[:_EXAMPLES]]]
        yield cautions.odd_part(
            source.classes[part.label], part.inside, part.total, part.higher, part.lower, part.kind or (), names
        )


def cue_rows(labels: Codes, seed: int) -> Codes:
    """Return the images whose cues are computed: as many of each class as far as it has them."""
    order = np.random.default_rng(seed).permutation(len(labels))
    counts = np.bincount(labels)
    counts = counts[counts > 0]
    most = LEAST_PER_CLASS
    while most < counts.max() and np.minimum(counts, most + 1).sum() <= MOST_IMAGES:
        most += 1
    return np.sort(np.concatenate([order[labels[order] == label][:most] for label in np.unique(labels)]))


@dataclass(frozen=True)
class Cues:
    """What is cheap to know of images: ``plain`` cues, those that depend on the ``camera``, and facts of the files."""

    plain: Mapping[str, Floats]
    camera: Mapping[str, Floats]
    files: Mapping[str, npt.NDArray[np.str_]]


def measure_cues(images: Images, rows: Codes) -> Cues:
    """Return the cues of some images by name."""
    sizes = np.array([images.size(int(row)) for row in rows], dtype=np.int64)
    files = {"size in pixels": np.array([f"{width} x {height}" for height, width in sizes.tolist()], dtype=np.str_)}
    if isinstance(images, FileImages):
        glances = list(ordered_map(images.glance, rows.tolist()))
        pixels = np.stack([glance.pixels for glance in glances])
        files["camera or program in the file"] = np.array([glance.maker for glance in glances], dtype=np.str_)
        files["compression"] = np.array([glance.compression for glance in glances], dtype=np.str_)
    else:
        pixels = images.load(rows, SIDE, 3).numpy()
    plain = _plain_cues(pixels.astype(np.float64), sizes.astype(np.float64))
    if isinstance(images, FileImages):
        with suppress(OSError):
            paths = [images.paths[row] for row in rows]
            plain["the size of the file"] = np.array([float(os.path.getsize(path)) for path in paths])
    return Cues(plain, _camera_cues(pixels.astype(np.float32)), files)


def _plain_cues(pixels: Floats, sizes: Floats) -> dict[str, Floats]:
    grey, total = pixels.mean(axis=1), pixels.sum(axis=1).mean(axis=(1, 2)) + 1e-6
    edges = np.abs(_edges(grey))
    inner = grey[:, SIDE // 4 : -SIDE // 4, SIDE // 4 : -SIDE // 4].mean(axis=(1, 2))
    ring = np.concatenate([grey[:, 0], grey[:, -1], grey[:, :, 0], grey[:, :, -1]], axis=1).mean(axis=1)
    return {
        "brightness": grey.mean(axis=(1, 2)),
        "contrast": grey.std(axis=(1, 2)),
        "sharpness": edges.mean(axis=(1, 2)),
        **{
            f"the share of {name}": pixels[:, i].mean(axis=(1, 2)) / total
            for i, name in enumerate(("red", "green", "blue"))
        },
        "the border": ring - inner,
        "the number of pixels": sizes.prod(axis=1),
        "the aspect ratio": sizes[:, 1] / sizes[:, 0],
    }


def _camera_cues(pixels: npt.NDArray[np.float32]) -> dict[str, Floats]:
    """Return what depends on the camera, its light and its processing, more than on the object in the middle."""
    across = np.abs(np.linspace(-1, 1, SIDE + 1)[1:] - 1 / SIDE)
    distance = np.hypot(*np.meshgrid(across, across))
    background, corners = (distance > CENTRE) & (distance < RIM), distance > CORNERS
    x = pixels + 1
    grey = x.mean(axis=1)
    red, green, blue = np.moveaxis(np.median(x[:, :, background], axis=2), 1, 0)
    edges = np.abs(_edges(grey))[:, (background | corners)[1:-1, 1:-1]]
    colours = x[:, :, distance < RIM]
    colours = colours - colours.mean(axis=2, keepdims=True)
    found = {
        "red": np.log(red / green),
        "blue": np.log(blue / green),
        "corners": np.log(np.median(grey[:, corners], axis=1) / ((red + green + blue) / 3)),
        "sharpness": np.log(np.median(edges, axis=1) + 0.5),
        "blue contrast": (colours[:, 1] * colours[:, 2]).sum(axis=1) / (np.square(colours[:, 1]).sum(axis=1) + 1),
    }
    return {name: np.asarray(values, dtype=np.float64) for name, values in found.items()}


def _edges(grey: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asarray(
        4 * grey[:, 1:-1, 1:-1] - grey[:, :-2, 1:-1] - grey[:, 2:, 1:-1] - grey[:, 1:-1, :-2] - grey[:, 1:-1, 2:]
    )


@dataclass(frozen=True)
class Cue:
    """A cue that separates a class from all others by itself."""

    label: int
    name: str
    auroc: Estimate


def telling_cues(
    cues: Mapping[str, Floats], labels: Codes, num_classes: int, groups: npt.NDArray[np.str_] | None = None
) -> list[Cue]:
    """Return the cues that separate some class from the others, the best first, one list of all classes.

    With two classes, only the rarer one is listed. The last cue of a class is that of all cues together, by a linear
    classifier whose folds did not see the image.
    """
    counts = np.bincount(labels, minlength=num_classes)
    targets = [int(counts.argmin())] if num_classes == 2 else [c for c in range(num_classes) if counts[c]]
    units = np.arange(len(labels)) if groups is None else np.unique(groups, return_inverse=True)[1]
    found: list[Cue] = []
    for label in targets:
        own = labels == label
        if own.sum() < 2 or (~own).sum() < 2:
            continue
        several = {name: values for name, values in cues.items() if np.ptp(values) > 0}
        both = {**several, TOGETHER: _together(np.stack(list(several.values()), axis=1), own, units)} if several else {}
        alone = [Cue(label, name, _auroc(values, own, two_sided=name != TOGETHER)) for name, values in both.items()]
        named = [cue for cue in alone if cue.auroc.value > TELLING and cue.auroc.low > LEAST]
        if any(cue.name != TOGETHER for cue in named):
            found += sorted(named, key=lambda cue: (cue.name == TOGETHER, -cue.auroc.value))
    return found


def _auroc(values: Floats, own: npt.NDArray[np.bool_], *, two_sided: bool) -> Estimate:
    """Return the AUROC of values, or of their negatives if that is higher."""
    area = auroc(values, own)
    return auroc_interval(max(area, 1 - area) if two_sided else area, int(own.sum()), int((~own).sum()), 0.95)


def _together(values: Floats, own: npt.NDArray[np.bool_], units: Codes) -> Floats:
    """Return the score of each image by a linear classifier of cues and their squares, fitted to other groups."""
    x = (values - values.mean(axis=0)) / values.std(axis=0)
    x = np.concatenate([np.ones((len(x), 1)), x, np.square(x)], axis=1)
    fold = np.random.default_rng(0).permutation(int(units.max()) + 1)[units] % _FOLDS
    scores = np.zeros(len(x))
    for number in range(_FOLDS):
        train, test = fold != number, fold == number
        shares = own[train].mean()
        if not 0 < shares < 1:
            continue
        weights = np.where(own[train], 0.5 / shares, 0.5 / (1 - shares))
        weighted = x[train] * weights[:, None]
        normal = weighted.T @ x[train] + _RIDGE * np.eye(x.shape[1])
        scores[test] = x[test] @ np.linalg.solve(normal, weighted.T @ (2.0 * own[train] - 1))
    return scores
