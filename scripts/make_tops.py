"""Make the embedded images: the first 2,000 T-shirts and the first 2,000 shirts of Fashion-MNIST's training files.

    python scripts/make_tops.py [FOLDER] [--out FILE.png]

FOLDER holds the four IDX files and is Debian's (package dataset-fashion-mnist) unless given. The images become one
sheet of 80 columns, T-shirts first, as a grey PNG: lossless, smaller than a compressed .npz, and anyone can look at
it. The last line printed is the SHA-256 of the pixels; ``lopsided.data.sources.fashion`` checks it on loading.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np
from PIL import Image

from lopsided.data.decoding import Pixels
from lopsided.data.sources.fashion import CLASSES, DEBIAN, TOPS_CLASSES, TOPS_PER_CLASS, read_pair, to_sheet

ASSET = Path(__file__).parents[1] / "src" / "lopsided" / "data" / "assets" / "fashion-mnist-tops.png"


def choose_tops(folder: Path) -> Pixels:
    """Take the first images of each class of tops, in the order of the training file."""
    x, y = read_pair(folder, "train")
    return np.concatenate([x[np.flatnonzero(y == CLASSES.index(name))[:TOPS_PER_CLASS]] for name in TOPS_CLASSES])


def main() -> None:
    """Write the asset and print the digest of its pixels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=DEBIAN)
    parser.add_argument("--out", type=Path, default=ASSET)
    arguments = parser.parse_args()
    tops = choose_tops(arguments.folder)
    Image.fromarray(to_sheet(tops)).save(arguments.out, "PNG", compress_level=9)
    print(f"{len(tops)} images in {arguments.out}, {arguments.out.stat().st_size:,} bytes")
    print(hashlib.sha256(tops.tobytes()).hexdigest())


if __name__ == "__main__":
    main()
