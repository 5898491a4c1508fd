"""Mixup (Zhang et al., 2018) and CutMix (Yun et al., 2019): training images that are mixtures of two images.

Each image of a batch is mixed with the image at the mirrored position: the first one with the last one, and so on. The
order of a batch is random, so the pairs are random too. One share lambda is drawn per batch, seeded by stage, epoch and
step. The loss is lambda times that of the image's own label plus 1 - lambda times that of its partner's label.

Mirrored positions of consecutive images are consecutive, and an image is augmented by its position in the batch. So a
rank or a chunk augments the partners of its images just as their own rank or chunk does, and the mixed batch depends on
neither. A rank also loads the partners that it does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lopsided.recipe import Classifier, EncoderTraining
from lopsided.seeds import derive_seed
from lopsided.training.shares import Batch, Indices

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
