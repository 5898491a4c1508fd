"""Splits prepared for training: their inputs, the shape of the inputs, and the normalisation."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lopsided.data.images import Images, Numbers, Vectors, decoding_threads, longest_side
from lopsided.data.sources import Source
from lopsided.data.splits import Splits
from lopsided.errors import DataError, sentence
from lopsided.facts import Fact, notes
from lopsided.ranks import ALONE, Ranks
from lopsided.recipe import Recipe
from lopsided.recipe.blocks import Cells

Indices = npt.NDArray[np.int64]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MEMORY_SHARE = 0.25
"""With ``cache = "auto"``, decoded images may use this share of the memory that is free at the start."""


class Inputs(ABC):
    """Inputs by row: uint8 images (b, c, h, w), or vectors (b, d)."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, rows: Indices) -> Tensor:
        """Return the inputs at ``rows``, in that order."""

    def cells(self) -> list[Cells]:
        """Return the cells of a table that stand beside each input; empty ones without a table."""
        return [()] * len(self)

    def batches(self, parts: Iterable[Indices]) -> Iterator[tuple[Indices, Tensor]]:
        """Yield each part with its inputs."""
        for rows in parts:
            yield rows, self.batch(rows)


class MemoryInputs(Inputs):
    """Inputs that are held in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def batch(self, rows: Indices) -> Tensor:
        """Return the inputs at ``rows``, in that order."""
        return self.tensor[torch.from_numpy(rows)]


class StreamedInputs(Inputs):
    """Images that are decoded on request. The next batch is decoded while the current batch is in use."""

    def __init__(self, images: Images, image_size: int | None, channels: int, workers: int = 0) -> None:
        self.images, self.image_size, self.channels, self.workers = images, image_size, channels, workers

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, rows: Indices) -> Tensor:
        """Return the images at ``rows``, in that order."""
        return self.images.load(rows, self.image_size, self.channels, workers=self.workers)

    def cells(self) -> list[Cells]:
        """Return the cells beside each image."""
        return self.images.cells()

    def batches(self, parts: Iterable[Indices]) -> Iterator[tuple[Indices, Tensor]]:
        """Yield each part with its images. The next batch is decoded ahead."""
        with decoding_threads(1) as pool:
            waiting = None
            for rows in parts:
                following = (rows, pool.submit(self.batch, rows))
                if waiting is not None:
                    yield waiting[0], waiting[1].result()
                waiting = following
            if waiting is not None:
                yield waiting[0], waiting[1].result()


class ChosenInputs(Inputs):
    """Some rows of other inputs."""

    def __init__(self, inputs: Inputs, rows: Indices) -> None:
        self.inputs, self.rows = inputs, rows

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: Indices) -> Tensor:
        """Return the inputs at ``rows``, in that order."""
        return self.inputs.batch(self.rows[rows])

    def cells(self) -> list[Cells]:
        """Return the cells beside each input."""
        cells = self.inputs.cells()
        return [cells[row] for row in self.rows]

    def batches(self, parts: Iterable[Indices]) -> Iterator[tuple[Indices, Tensor]]:
        """Yield each part with its inputs."""
        chosen = list(parts)
        for rows, (_, batch) in zip(chosen, self.inputs.batches(self.rows[rows] for rows in chosen), strict=True):
            yield rows, batch


def row_batches(num: int, size: int) -> Iterator[Indices]:
    """Yield the rows 0 to ``num`` - 1 in order, ``size`` at a time."""
    for start in range(0, num, size):
        yield np.arange(start, min(start + size, num))


@dataclass(frozen=True, eq=False)
class Part:
    """One split: inputs, and their labels as indices into the classes.

    ``groups`` are the groups of the inputs, if there are groups. ``digests`` are the SHA-256 of the images, if known.
    ``weights`` are those of the inputs, if they differ (estimators only).
    """

    inputs: Inputs
    labels: Indices
    groups: npt.NDArray[np.str_] | None = None
    digests: tuple[str, ...] | None = None
    weights: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Indices) -> Part:
        """Return some of the inputs."""
        groups = None if self.groups is None else self.groups[rows]
        digests = None if self.digests is None else tuple(self.digests[row] for row in rows)
        return Part(ChosenInputs(self.inputs, rows), self.labels[rows], groups, digests)


@dataclass(frozen=True, eq=False)
class Prepared:
    """The data of a training. ``val`` and ``test`` are None if the recipe has no such split.

    ``own`` is the number of training inputs that are of the source. Further images (``data.more``) follow them; without
    such images it is None.
    """

    kind: Literal["image", "vector"]
    shape: tuple[int, ...]
    image_size: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    train: Part
    val: Part | None = None
    test: Part | None = None
    own: int | None = None
    columns: tuple[str, ...] = ()
    """The names of the columns of vectors, if they have names."""

    def counts(self) -> npt.NDArray[Any]:
        """Return the number of training inputs of each class, or the sum of their weights."""
        return np.bincount(self.train.labels, weights=self.train.weights, minlength=len(self.classes))

    def own_counts(self) -> npt.NDArray[Any]:
        """Return the number of training inputs of each class without further images.

        A model chose the further images, so their class shares are not those of any images to come. If only they hold
        some class, its share is unknown without them, and all training inputs are counted.
        """
        if self.own is None:
            return self.counts()
        own, every = np.bincount(self.train.labels[: self.own], minlength=len(self.classes)), self.counts()
        return own if ((own > 0) == (every > 0)).all() else every

    @property
    def minority(self) -> int:
        """The class with the fewest training inputs; the first one if classes tie."""
        return int(self.counts().argmin())


class Pixels(Protocol):
    """The preprocessing that belongs to the weights of an encoder."""

    @property
    def mean(self) -> tuple[float, float, float]:
        """The mean of each channel, for pixels in [0, 1]."""

    @property
    def std(self) -> tuple[float, float, float]:
        """The deviation of each channel."""

    def side(self, longest: int) -> int:
        """Return the side to which images are resized whose longer side has ``longest`` pixels."""


def prepare(
    recipe: Recipe,
    source: Source,
    splits: Splits,
    ranks: Ranks = ALONE,
    *,
    pixels: Pixels | None = None,
    digests: Sequence[str] | None = None,
    own: int | None = None,
) -> tuple[Prepared, list[Fact]]:
    """Prepare the splits of a source. Also return notes on the choices for memory and pixels.

    ``pixels`` is the preprocessing of the encoder's weights, for recipes with the normalisation "weights". ``digests``
    are the SHA-256 of all images of the source, if they are known. ``own`` is the number of training images before
    further images.
    """
    if isinstance(source.images, Vectors):
        vectors = source.images
        prepared = prepare_vectors(
            vectors.values, source.labels, source.classes, splits.train, splits.val, splits.test, source.groups
        )
        return replace(prepared, columns=vectors.columns), [notes.vectors(len(vectors), vectors.width)]
    data, side = recipe.data, recipe.data.image_size or source.resized
    channels = data.channels or (3 if pixels is not None else source.images.channels)
    if data.image_size is None and pixels is not None:
        side = pixels.side(longest_side(source.images, splits.train))
    height, width = source.images.size(int(splits.train[0])) if side is None else (side, side)
    size = height if height == width else None
    inputs, read = _inputs(recipe, source, (channels, height, width), side, ranks.local_size)
    facts = [read]
    parts = {
        name: Part(
            inputs(rows),
            source.labels[rows],
            None if source.groups is None else source.groups[rows],
            None if digests is None else tuple(digests[row] for row in rows),
        )
        for name, rows in splits.parts()
        if len(rows) or name == "train"
    }
    if data.image_size is None and side is not None and pixels is None:
        facts.append(notes.resized(side))
    mean, std = _statistics(recipe.augment.normalisation, parts["train"].inputs, channels, pixels)
    if recipe.encoder.spec.is_joined:
        facts.append(notes.own_normalisation(len(recipe.encoder.spec.parts)))
    elif recipe.augment.normalisation in ("source", "weights") and pixels is None:
        facts.append(notes.fitted_normalisation(list(mean), list(std)))
    else:
        facts.append(notes.normalisation(list(mean), list(std)))
    prepared = Prepared(
        kind="image", shape=(channels, height, width), image_size=size, mean=mean, std=std, classes=source.classes,
        train=parts["train"], val=parts.get("val"), test=parts.get("test"), own=own,
    )  # fmt: skip
    return prepared, facts


def prepare_vectors(
    x: Numbers,
    labels: Indices,
    classes: tuple[str, ...],
    train: Indices,
    val: Indices,
    test: Indices | None = None,
    groups: npt.NDArray[np.str_] | None = None,
) -> Prepared:
    """Prepare vectors: columns are standardised by the training rows; constant columns are only centred."""
    mean, std = x[train].mean(axis=0, dtype=np.float64), x[train].std(axis=0, dtype=np.float64)
    std[std <= 10 * np.finfo(np.float64).eps * np.abs(mean)] = 1.0
    inputs = torch.from_numpy(np.array(x))

    def part(rows: Indices | None) -> Part | None:
        if rows is None or not len(rows):
            return None
        return Part(MemoryInputs(inputs[rows]), labels[rows], None if groups is None else groups[rows])

    trained = part(train)
    assert trained is not None
    return Prepared(
        kind="vector", shape=(x.shape[1],), image_size=None, mean=tuple(mean.tolist()), std=tuple(std.tolist()),
        classes=classes, train=trained, val=part(val), test=part(test),
    )  # fmt: skip


def inputs_of(images: Images, image_size: int | None, channels: int, workers: int = 0) -> Inputs:
    """Return the inputs of a model: images as they are decoded, or vectors."""
    if isinstance(images, Vectors):
        return MemoryInputs(torch.from_numpy(images.values))
    return StreamedInputs(images, image_size, channels, workers)


def _inputs(
    recipe: Recipe, source: Source, shape: tuple[int, int, int], size: int | None, num_processes: int
) -> tuple[Callable[[Indices], Inputs], Fact]:
    """How the inputs of a split are made, kept in memory or decoded batch by batch, and the note that says so."""
    need, free = len(source) * int(np.prod(shape)), free_memory()
    fits = free is None or need * num_processes <= MEMORY_SHARE * free  # Each process holds its own copy.
    keep = recipe.data.cache == "memory" or (recipe.data.cache == "auto" and fits)
    keep = keep and recipe.spec.trains_encoder  # Each image is used once.
    where = "memory" if keep else "decoded" if recipe.spec.trains_encoder else "once"
    room = None if free is None else free / 1e6
    note = notes.images_read(len(source), list(shape), need / 1e6, where, recipe.data.cache, room)
    workers = min(recipe.threads or max((os.cpu_count() or 1) // num_processes, 1), 16)
    images = source.images

    def make(rows: Indices) -> Inputs:
        if keep:
            return MemoryInputs(images.load(rows, size, shape[0], workers=workers))
        return StreamedInputs(images.take(rows), size, shape[0], workers)

    return make, note


def free_memory() -> int | None:
    """Return the bytes of memory that this process can still use in its container; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        left = left_in_container()
        return free if left is None else min(free, left)
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def left_in_container(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that the memory limit of the container leaves; None without a limit. Reads cgroup v2 and v1."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return max(int((root / limit).read_text()) - int((root / used).read_text()), 0)
        except (OSError, ValueError):  # The file is missing or contains "max".
            continue
    return None


def _statistics(
    rule: str, inputs: Inputs, channels: int, pixels: Pixels | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation per channel. One grey channel gets the average of the values of three channels."""
    if pixels is not None:
        return _for_channels(pixels.mean, channels), _for_channels(pixels.std, channels)
    if rule == "none":
        return (0.0,) * channels, (1.0,) * channels
    if rule == "half":
        return (0.5,) * channels, (0.5,) * channels
    if rule == "imagenet":
        return _for_channels(IMAGENET_MEAN, channels), _for_channels(IMAGENET_STD, channels)
    # Counts of the 256 values are exact, so the result does not depend on the order or the size of batches.
    counts = torch.zeros(channels, 256, dtype=torch.int64)
    for _, batch in inputs.batches(row_batches(len(inputs), 256)):
        for channel in range(channels):
            counts[channel] += torch.bincount(batch[:, channel].flatten().int(), minlength=256)
    values = np.arange(256) / 255
    shares = counts.numpy() / counts.sum(dim=1, keepdim=True).numpy()
    mean = shares @ values
    std = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(axis=1))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


def _for_channels(values: tuple[float, float, float], channels: int) -> tuple[float, ...]:
    return values if channels == 3 else (sum(values) / 3,)


_ONE_CLASS = "Use --recipe few, which needs one class only."


def check_trainable(prepared: Prepared, least: int = 2) -> None:
    """Raise unless the training split holds so many classes."""
    counts = prepared.counts()
    held = int((counts > 0).sum())
    if held < least:
        got = f"{held} with {len(prepared.train)} samples"
        raise DataError(sentence("train must hold at least 2 classes", got, _ONE_CLASS))
