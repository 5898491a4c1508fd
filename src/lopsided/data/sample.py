"""Pictures to try the commands on: T-shirts and shirts of Fashion-MNIST, which are part of the package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from lopsided import files
from lopsided.data.sources import open_source
from lopsided.errors import InputError

FOLDERS = {"T-shirt/top": "t-shirt", "Shirt": "shirt"}
COMMON, RARE = 300, 24
"""T-shirts and shirts of the folder to train on."""
SKIP, MORE_COMMON, MORE_RARE = 400, 60, 12
"""First picture, T-shirts and shirts of the folder of other pictures."""
SIDE = 84


def write_sample(folder: Path) -> dict[str, dict[str, int]]:
    """Write a folder with one sub-folder per class, and a second one, FOLDER-more, of other pictures.

    Return the number of pictures of each class in each folder. Both must not exist, or be empty.
    """
    more = folder.with_name(f"{folder.name}-more")
    for path in (folder, more):
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise InputError(f"{path} is not an empty folder. Choose another folder.")
    return {
        str(folder): _write(folder, COMMON, RARE, 0),
        str(more): _write(more, MORE_COMMON, MORE_RARE, SKIP),
    }


def _write(folder: Path, common: int, rare: int, skip: int) -> dict[str, int]:
    """Write the pictures from number ``skip`` on, so many of each class."""
    tops = open_source("fashion-mnist-tops")
    counts = {}
    for label, number in enumerate((common, rare)):
        name = FOLDERS[tops.classes[label]]
        below = files.make_folder(folder / name)
        places = np.flatnonzero(tops.labels == label)[skip : skip + number]
        for place, pixels in zip(places.tolist(), tops.images.load(places, None, 1).numpy(), strict=True):
            picture = Image.fromarray(pixels[0]).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            picture.save(below / f"{place:04d}.png")
        counts[name] = len(places)
    return counts
