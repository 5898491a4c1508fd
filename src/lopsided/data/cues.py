"""Cheap cues of images: brightness, colours, sharpness, border, and the size of the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lopsided.data.decoding import GLANCE as SIDE
from lopsided.data.images import FileImages, Images, ordered_map
from lopsided.recipe import Recipe

MOST_IMAGES, LEAST_PER_CLASS = 1_500, 20
"""Images whose cues are computed: at most this many, evenly over the classes, but at least so many of each."""
CENTRE, RIM, CORNERS = 22 / 32, 30 / 32, 36 / 32
"""Distances from the middle, relative to half a side. Between the first two lies the background, as a rule."""
Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]


def seeks_cues(recipe: Recipe) -> bool:
    """Return whether the images of a recipe are searched for cues.

    A fold leaves this to the model of all images, and the images of a scenario are drawn from one collection.
    """
    return recipe.data.fold is None and recipe.data.scenario is None


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
    workers = os.cpu_count() or 1
    sizes = np.array([images.size(int(row)) for row in rows], dtype=np.int64)
    files = {"size in pixels": np.array([f"{width} x {height}" for height, width in sizes.tolist()], dtype=np.str_)}
    if isinstance(images, FileImages):
        glances = list(ordered_map(images.glance, rows.tolist(), workers))
        pixels = np.stack([glance.pixels for glance in glances])
        files["camera or program in the file"] = np.array([glance.maker for glance in glances], dtype=np.str_)
        files["compression"] = np.array([glance.compression for glance in glances], dtype=np.str_)
    else:
        pixels = images.load(rows, SIDE, 3, workers=workers).numpy()
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
