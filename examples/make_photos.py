"""Write a folder of small pictures to try the commands on: 300 T-shirts and 24 shirts of Fashion-MNIST.

    python examples/make_photos.py photos [--rare 24] [--common 300] [--skip 0]

The pictures are part of the package, so nothing is downloaded. The folder has one sub-folder per class, as
``lopsided fit`` reads it. ``--skip`` leaves out the first pictures of each class, which gives a second folder of other
pictures.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from lopsided.data.sources import open_source

FOLDERS = {"T-shirt/top": "t-shirt", "Shirt": "shirt"}


def make_photos(folder: Path, *, common: int = 300, rare: int = 24, skip: int = 0) -> None:
    """Write the pictures ``skip`` to ``skip + common`` of the T-shirts, and as many of the shirts as ``rare`` says."""
    tops = open_source("fashion-mnist-tops")
    for label, number in enumerate((common, rare)):
        below = folder / FOLDERS[tops.classes[label]]
        below.mkdir(parents=True, exist_ok=True)
        for place in np.flatnonzero(tops.labels == label)[skip : skip + number]:
            pixels = tops.images.load([int(place)], None, 1)[0, 0].numpy()
            Image.fromarray(pixels).resize((84, 84), Image.Resampling.BICUBIC).save(below / f"{place:04d}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in (("common", 300), ("rare", 24), ("skip", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    make_photos(arguments.folder, common=arguments.common, rare=arguments.rare, skip=arguments.skip)
    print(f"{arguments.common} T-shirts and {arguments.rare} shirts are in {arguments.folder}")
