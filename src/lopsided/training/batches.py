"""Which rows of a batch each rank computes, in which chunks, and how its images are mixed.

Mixup (Zhang et al., 2018) and CutMix (Yun et al., 2019) train on mixtures of two images. Each image of a batch is mixed
with the image at the mirrored position: the first one with the last one, and so on. The order of a batch is random, so
the pairs are random too. One share lambda is drawn per batch, seeded by stage, epoch and step. The loss is lambda times
that of the image's own label plus 1 - lambda times that of its partner's label.

Mirrored positions of consecutive images are consecutive, and an image is augmented by its position in the batch. So a
rank or a chunk augments the partners of its images just as their own rank or chunk does, and the mixed batch depends on
neither. A rank also loads the partners that it does not have.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lopsided.recipe import Classifier, EncoderTraining
from lopsided.seeds import derive_seed

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of all ranks: ``rows`` of the data, cut into chunks, and each chunk cut into one share per rank.

    The chunks do not depend on the number of ranks, so neither do the rows behind synchronised batch statistics.
    """

    rows: Indices
    chunks: tuple[tuple[slice, ...], ...]
    """For each chunk and rank, the rank's share as a slice of ``rows``. A share may be empty."""

    def __len__(self) -> int:
        return len(self.rows)

    def shares(self, rank: int) -> list[slice]:
        """Return the shares of a rank, one per chunk."""
        return [shares[rank] for shares in self.chunks]

    def positions(self, rank: int) -> Indices:
        """Return the positions in ``rows`` of all rows of a rank."""
        return np.concatenate([np.arange(share.start, share.stop) for share in self.shares(rank)])

    @cached_property
    def sizes(self) -> list[int]:
        """The number of rows of each rank."""
        return [len(self.positions(rank)) for rank in range(len(self.chunks[0]))]

    @cached_property
    def order(self) -> Indices:
        """The positions in ``rows`` of the rows of all ranks, in the order in which they are gathered."""
        return np.concatenate([self.positions(rank) for rank in range(len(self.chunks[0]))])


def cut(rows: Indices, num_ranks: int = 1, *, chunk_size: int | None = None, least: int = 1) -> Batch:
    """Cut a batch into chunks of at most ``chunk_size`` rows, and each chunk into shares of 0 or >= ``least`` rows.

    The sizes of the chunks differ by at most one row. No chunk has a single row, because one row has no batch
    statistics: three rows in chunks of two become one chunk. If the shares of a chunk differ in size, the ranks with
    the larger shares change from chunk to chunk.
    """
    num_chunks = 1 if chunk_size is None else max(min(-(-len(rows) // chunk_size), len(rows) // 2), 1)
    chunks, favoured = [], 0
    for chunk in _split(slice(0, len(rows)), num_chunks, 1):
        num = chunk.stop - chunk.start
        chunks.append(tuple(_split(chunk, num_ranks, least, favoured)))
        filled = _filled(num, num_ranks, least)
        favoured += num % filled if filled == num_ranks else filled
    return Batch(rows, tuple(chunks))


def _filled(num: int, parts: int, least: int) -> int:
    """Return how many of the parts of ``num`` rows can have ``least`` rows, at least 1."""
    return max(min(parts, num // least), 1)


def _split(whole: slice, parts: int, least: int, favoured: int = 0) -> Sequence[slice]:
    """Split a slice into consecutive parts. The parts are filled in cyclic order, starting at ``favoured``: the first
    ones get one row more than the others, and the last ones stay empty if there is not enough for ``least`` rows each.

    >>> _split(slice(0, 5), 3, 2)
    [slice(0, 3, None), slice(3, 5, None), slice(5, 5, None)]
    >>> _split(slice(0, 5), 3, 2, favoured=1)
    [slice(0, 0, None), slice(0, 3, None), slice(3, 5, None)]
    """
    num = whole.stop - whole.start
    filled = _filled(num, parts, least)
    ends = [whole.start]
    for part in range(parts):
        turn = (part - favoured) % parts
        size = num // filled + (turn < num % filled) if turn < filled else 0
        ends.append(ends[-1] + size)
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]


Box = tuple[slice, slice]


@dataclass(frozen=True)
class Mix:
    """The mixture of one batch: the share of an image in its mixture, and the box of its partner for CutMix."""

    share: float
    box: Box | None = None

    def __call__(self, images: Tensor, partners: Tensor) -> Tensor:
        """Return the mixtures of images and their partners."""
        if self.box is None:
            return torch.lerp(partners, images, self.share)
        mixed = images.clone()
        mixed[..., self.box[0], self.box[1]] = partners[..., self.box[0], self.box[1]]
        return mixed


@dataclass(frozen=True)
class Mixer:
    """Draws the mixture of each batch. ``mixup`` and ``cutmix`` are the alphas of Beta(alpha, alpha); 0: not used."""

    mixup: float
    cutmix: float
    seed: int

    def draw(self, shape: Sequence[int], *names: str | int) -> Mix:
        """Return the mixture of the batch with these names. ``shape`` is the shape of its inputs."""
        generator = np.random.default_rng(derive_seed(self.seed, "mix", *names))
        cuts = generator.random() < 0.5 if self.mixup and self.cutmix else bool(self.cutmix)
        alpha = self.cutmix if cuts else self.mixup
        share = float(generator.beta(alpha, alpha))
        if not cuts:
            return Mix(share)
        height, width = shape[-2:]
        top, left = int(generator.integers(height)), int(generator.integers(width))
        return cut_box(share, (top, left), (height, width))


def cut_box(share: float, centre: tuple[int, int], size: tuple[int, int]) -> Mix:
    """Return the CutMix with a box around ``centre`` of 1 - ``share`` of the area, clipped to the image.

    The share of the mixture is that of the pixels outside the box, as in the authors' code.

    >>> cut_box(0.75, (0, 4), (8, 8))
    Mix(share=0.875, box=(slice(0, 2, None), slice(2, 6, None)))
    """
    sides = [int(side * (1.0 - share) ** 0.5) // 2 for side in size]
    box = [slice(max(at - half, 0), min(at + half, side)) for at, half, side in zip(centre, sides, size, strict=True)]
    area = (box[0].stop - box[0].start) * (box[1].stop - box[1].start)
    return Mix(1.0 - area / (size[0] * size[1]), (box[0], box[1]))


def make_mixer(settings: EncoderTraining | Classifier, seed: int) -> Mixer | None:
    """Return the mixer of a stage, or None if its images are not mixed."""
    if not isinstance(settings, EncoderTraining) or not (settings.mixup or settings.cutmix):
        return None
    return Mixer(settings.mixup, settings.cutmix, seed)


def loaded_positions(batch: Batch, rank: int) -> Indices:
    """Return the positions in a batch that a rank loads: its own, and then those of their partners that it lacks."""
    own = batch.positions(rank)
    return np.concatenate([own, np.setdiff1d(len(batch) - 1 - own, own)])


def partners_of(inputs: Tensor, batch: Batch, rank: int, share: slice) -> Tensor:
    """Return the inputs at the mirrored positions of a share, in the order of the batch."""
    place = np.full(len(batch), -1)
    loaded = loaded_positions(batch, rank)
    place[loaded] = np.arange(len(loaded))
    return inputs[torch.from_numpy(place[mirrored(share, len(batch))])]


def mirrored(share: slice, total: int) -> slice:
    """Return the mirrored positions of a share of a batch.

    >>> mirrored(slice(0, 3), 10)
    slice(7, 10, None)
    """
    return slice(total - share.stop, total - share.start)
