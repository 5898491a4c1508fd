"""Fashion-MNIST: the whole data set from IDX files, and the embedded T-shirts and shirts."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import tempfile
import zlib
from collections.abc import Iterator
from importlib.resources import files
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from lopsided.data.decoding import Pixels
from lopsided.data.images import ArrayImages
from lopsided.data.sources.listing import Listing
from lopsided.errors import DataError, sentence

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
ALIASES = {"t-shirt": "T-shirt/top", "top": "T-shirt/top", **{str(i): name for i, name in enumerate(CLASSES)}}
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""The folder in which Debian's package dataset-fashion-mnist installs the four files."""

TOPS_CLASSES = ("T-shirt/top", "Shirt")
TOPS_PER_CLASS = 2000
TOPS_COLUMNS = 80
TOPS_SHA256 = "39fdbac06e484e413f432b5a37a3504ee2d8fb2510143b625eeb36b2da8bb50f"
"""SHA-256 of the pixels of the embedded images, in order. It does not depend on the compression of the PNG."""

_FILES = {"train": "train", "test": "t10k"}
_SIDE = 28
_MAX_BYTES = 1 << 30


def list_tops() -> Listing:
    """List the embedded images: the first 2,000 T-shirts and the first 2,000 shirts of the training files."""
    packed = files("lopsided.data").joinpath("assets", "fashion-mnist-tops.png").read_bytes()
    with Image.open(BytesIO(packed), formats=("PNG",)) as sheet:
        pixels = from_sheet(np.asarray(sheet))
    if hashlib.sha256(pixels.tobytes()).hexdigest() != TOPS_SHA256:
        raise DataError("The embedded images do not match their checksum. Install the package again.")
    return Listing(
        name="fashion-mnist-tops",
        where="fashion-mnist-tops",
        images=ArrayImages(pixels[:, None]),
        labels=[name for name in TOPS_CLASSES for _ in range(TOPS_PER_CLASS)],
        names=[f"{name}/{i:04d}" for name in ("t-shirt", "shirt") for i in range(TOPS_PER_CLASS)],
        order=TOPS_CLASSES,
        aliases=ALIASES,
    )


def to_sheet(pixels: Pixels) -> Pixels:
    """Arrange images (n, 28, 28) on one sheet, row by row, as in the embedded PNG."""
    rows = len(pixels) // TOPS_COLUMNS
    grid = pixels.reshape(rows, TOPS_COLUMNS, _SIDE, _SIDE).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(grid).reshape(rows * _SIDE, TOPS_COLUMNS * _SIDE)


def from_sheet(sheet: Pixels) -> Pixels:
    """Return the images (n, 28, 28) of a sheet: the inverse of ``to_sheet``."""
    rows = sheet.shape[0] // _SIDE
    grid = sheet.reshape(rows, _SIDE, TOPS_COLUMNS, _SIDE).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(grid).reshape(-1, _SIDE, _SIDE)


def list_fashion(folder: Path | None = None, *, download: bool = True) -> Listing:
    """List the whole of Fashion-MNIST, 60,000 training and 10,000 test images, from ``folder`` or a known folder.

    If no known folder holds the files, they are downloaded, unless ``download`` is False.
    """
    folder = folder or find_folder()
    if folder is None and not download:
        raise DataError(f"fashion-mnist is not on this machine: {_cache()} does not hold its files. {_repair()}")
    folder = folder or _download()
    parts = {split: read_pair(folder, split) for split in _FILES}
    labels = np.concatenate([y for _, y in parts.values()])
    return Listing(
        name="fashion-mnist",
        where=str(folder),
        images=ArrayImages(np.concatenate([x for x, _ in parts.values()])[:, None]),
        labels=[CLASSES[i] for i in labels],
        names=[f"{split}/{i:05d}" for split, (x, _) in parts.items() for i in range(len(x))],
        order=CLASSES,
        splits=[split for split, (x, _) in parts.items() for _ in range(len(x))],
        aliases=ALIASES,
    )


def holds_fashion(folder: Path) -> bool:
    """Return whether a folder holds the four IDX files, compressed or not."""
    return all(
        any((folder / f"{prefix}-{kind}-ubyte{suffix}").is_file() for suffix in ("", ".gz"))
        for prefix in _FILES.values()
        for kind in ("images-idx3", "labels-idx1")
    )


def read_pair(folder: Path, split: str) -> tuple[Pixels, Pixels]:
    """Read images (n, 28, 28) and labels (n,) of the split ``train`` or ``test``."""
    prefix = _FILES[split]
    images = _file(folder, f"{prefix}-images-idx3-ubyte")
    labels = _file(folder, f"{prefix}-labels-idx1-ubyte")
    x, y = read_idx(images), read_idx(labels)
    if x.shape[1:] != (_SIDE, _SIDE) or y.shape != x.shape[:1] or (len(y) and y.max() >= len(CLASSES)):
        got = f"{x.shape} and {y.shape} in {images} and {labels}"
        raise DataError(sentence("images must be 28 x 28, each with one label below 10", got))
    return x, y


def read_idx(path: Path) -> Pixels:
    """Read an IDX file of unsigned bytes, plain or gzip. Its size must match its header."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            magic = file.read(4)
            if len(magic) < 4 or magic[:3] != b"\x00\x00\x08" or not 1 <= magic[3] <= 4:
                raise DataError(f"{path} is not an IDX file: an IDX file starts with 00 00 08 and its rank.")
            header = file.read(4 * magic[3])
            shape = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(0, len(header), 4))
            size = math.prod(shape)
            if size > _MAX_BYTES:
                raise DataError(sentence(f"an IDX file must hold at most {_MAX_BYTES:,} bytes", f"{size:,} in {path}"))
            content = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"Cannot read the IDX file {path} ({reason}). Download it again.") from error
    if len(header) != 4 * magic[3] or len(content) != size:
        what = "fewer" if len(content) <= size else "more"
        raise DataError(f"{path} has {what} bytes than its header declares. Download it again.")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _file(folder: Path, stem: str) -> Path:
    plain = folder / stem
    return plain if plain.is_file() else folder / f"{stem}.gz"


def _candidates() -> Iterator[Path]:
    root = os.environ.get("LOPSIDED_DATA")
    if root:
        yield from (Path(root) / below for below in ("", "fashion-mnist", "FashionMNIST/raw"))
    yield DEBIAN
    yield _cache()


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lopsided" / "fashion-mnist"


def find_folder() -> Path | None:
    """Return the first known folder that holds the files, or None."""
    return next((folder for folder in _candidates() if holds_fashion(folder)), None)


def _download() -> Path:
    """Download the files with torchvision, which verifies checksums. Move them to the cache when all are complete."""
    cache = _cache()
    try:
        from torchvision.datasets import FashionMNIST

        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            FashionMNIST(temporary, download=True)
            for path in sorted((Path(temporary) / "FashionMNIST" / "raw").glob("*.gz")):
                path.replace(cache / path.name)
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"fashion-mnist is not on this machine and cannot be downloaded ({reason}). {_repair()}"
        ) from error
    return cache


def _repair() -> str:
    return (
        f"Put the four IDX files (train-images-idx3-ubyte.gz and so on) in {_cache()} or below $LOPSIDED_DATA, "
        "or install Debian's dataset-fashion-mnist."
    )
