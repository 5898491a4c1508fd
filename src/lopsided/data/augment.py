"""Random rotation, flips, crop and colour for a whole batch at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lopsided.errors import InputError, sentence

_LUMA = (0.299, 0.587, 0.114)
_DRAWS = 9


@dataclass(frozen=True)
class Augment:
    """Augment a batch. The random changes depend only on the state of the generator.

    - ``rotation``: degrees. Each image is rotated about its centre by an angle from [-rotation, rotation], bilinear,
      and filled with zeros.
    - ``horizontal_flip``, ``vertical_flip``: each with probability one half, without interpolation.
    - ``crop``: the smallest share of the area to keep. A random crop with the aspect ratio of the image is scaled up,
      in the same resampling as the rotation. None keeps the whole image.
    - ``colour``: the strength s. Brightness, contrast and, for three channels, saturation are multiplied in this order
      by factors from [1 - s, 1 + s]. None keeps the colours.

    Every image uses the same number of random numbers for any options, so enabling the colour does not change the
    rotations. Disabled options leave pixels exactly as they are.
    """

    rotation: float = 0.0
    horizontal_flip: bool = False
    vertical_flip: bool = False
    crop: float | None = None
    colour: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rotation <= 180:
            raise InputError(sentence("rotation must be in [0, 180] degrees", self.rotation))
        if self.crop is not None and not 0 < self.crop <= 1:
            raise InputError(sentence("crop must be in (0, 1]", self.crop, "Use None for the whole image."))
        if self.colour is not None and not 0 <= self.colour <= 1:
            raise InputError(sentence("colour must be in [0, 1]", self.colour, "Use None to keep the colours."))

    def __call__(
        self, batch: Tensor, generator: torch.Generator, *, start: int = 0, total: int | None = None
    ) -> Tensor:
        """Return a new float32 batch (b, c, h, w) in [0, 1]. uint8 is divided by 255; floats must be in [0, 1].

        ``batch`` may be a part of a batch of ``total`` images that begins at image ``start``. Its images are then the
        same as if the whole batch were augmented.
        """
        images = to_float(batch)
        total = start + len(images) if total is None else total
        draws = torch.rand((total, _DRAWS), generator=generator, device=generator.device)
        draws = draws[start : start + len(images)].to(images.device)
        flips = (draws[:, :2] < 0.5) & torch.tensor([self.horizontal_flip, self.vertical_flip], device=draws.device)
        if self.rotation > 0 or (self.crop is not None and self.crop < 1):
            images = self._resample(images, flips, draws[:, 2:6])
        else:
            for axis, flipped in ((3, flips[:, 0]), (2, flips[:, 1])):
                images[flipped] = images[flipped].flip(axis)
        if self.colour:
            images = _jitter(images, 1 + self.colour * (2 * draws[:, 6:9] - 1))
        return images

    def _resample(self, images: Tensor, flips: Tensor, draws: Tensor) -> Tensor:
        angle = (2 * draws[:, 0] - 1) * math.radians(self.rotation)
        side = torch.ones_like(angle)
        if self.crop is not None:
            side = (self.crop + (1 - self.crop) * draws[:, 1]).sqrt()
        # Output coordinates in [-1, 1] are mapped to the crop, then rotated about the centre of the image. The rotation
        # is in pixels, hence the ratio of the sides.
        shift_x, shift_y = ((1 - side) * (2 * draws[:, i] - 1) for i in (2, 3))
        cos, sin = angle.cos(), angle.sin()
        ratio = images.shape[2] / images.shape[3]
        row_x = torch.stack([cos * side, -sin * ratio * side, cos * shift_x - sin * ratio * shift_y], dim=1)
        row_y = torch.stack([sin / ratio * side, cos * side, sin / ratio * shift_x + cos * shift_y], dim=1)
        # The image is flipped before crop and rotation: one sign per input axis, without another pass over the pixels.
        transform = torch.stack([row_x, row_y], dim=1) * (1 - 2 * flips.float())[:, :, None]
        grid = functional.affine_grid(transform, list(images.shape), align_corners=False)
        return functional.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def to_float(batch: Tensor) -> Tensor:
    """Copy a batch to float32; uint8 is divided by 255."""
    if batch.ndim != 4:
        raise InputError(sentence("a batch must have the shape (b, c, h, w)", tuple(batch.shape)))
    if batch.dtype == torch.uint8:
        return batch.to(torch.float32).div_(255)
    if not batch.is_floating_point():
        raise InputError(sentence("a batch must be uint8 or float", batch.dtype))
    return batch.to(torch.float32, copy=True)


def _jitter(images: Tensor, factors: Tensor) -> Tensor:
    brightness, contrast, saturation = (factors[:, i, None, None, None] for i in range(3))
    images = (images * brightness).clamp_(0, 1)
    mean = _grey(images).mean(dim=(1, 2, 3), keepdim=True)
    images = torch.lerp(mean, images, contrast).clamp_(0, 1)
    if images.shape[1] == 3:
        images = torch.lerp(_grey(images), images, saturation).clamp_(0, 1)
    return images


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] != 3:
        return images.mean(dim=1, keepdim=True)
    return (images * images.new_tensor(_LUMA).view(1, 3, 1, 1)).sum(dim=1, keepdim=True)
