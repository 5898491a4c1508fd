"""Cheap cues of images: brightness, colours, sharpness, border, and the size of the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from lopsided.data.images import FileImages, Images

SIDE = 64
"""Side of the images in pixels, of which cues are computed."""
MOST_IMAGES, LEAST_PER_CLASS = 600, 20
"""Images whose cues are computed: at most this many, evenly over the classes, but at least so many of each."""
Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]


def cue_rows(labels: Codes, seed: int) -> Codes:
    """Return the images whose cues are computed: as many of each class as far as it has them."""
    order = np.random.default_rng(seed).permutation(len(labels))
    names = np.unique(labels)
    most = max(MOST_IMAGES // max(len(names), 1), LEAST_PER_CLASS)
    return np.sort(np.concatenate([order[labels[order] == label][:most] for label in names]))


def measure_cues(images: Images, rows: Codes) -> Mapping[str, Floats]:
    """Return the cues of some images by name."""
    pixels = images.load(rows, SIDE, 3, workers=os.cpu_count() or 1).numpy().astype(np.float64)
    grey, total = pixels.mean(axis=1), pixels.sum(axis=1).mean(axis=(1, 2)) + 1e-6
    edges = np.abs(
        4 * grey[:, 1:-1, 1:-1] - grey[:, :-2, 1:-1] - grey[:, 2:, 1:-1] - grey[:, 1:-1, :-2] - grey[:, 1:-1, 2:]
    )
    inner = grey[:, SIDE // 4 : -SIDE // 4, SIDE // 4 : -SIDE // 4].mean(axis=(1, 2))
    ring = np.concatenate([grey[:, 0], grey[:, -1], grey[:, :, 0], grey[:, :, -1]], axis=1).mean(axis=1)
    sizes = np.array([images.size(int(row)) for row in rows], dtype=np.float64)
    cues = {
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
    if isinstance(images, FileImages):
        with suppress(OSError):
            cues["the size of the file"] = np.array([float(os.path.getsize(images.paths[row])) for row in rows])
    return cues
