"""Pictures of where a model looked: an image, red where it speaks for the decided class and blue where against it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from lopsided import files
from lopsided.data.augment import to_float
from lopsided.data.decoding import Pixels, UnreadableImageError, decode_image, read_image
from lopsided.data.stored import cells_of
from lopsided.errors import InputError
from lopsided.models.blocks.columns import encode
from lopsided.models.maps import check_positions, class_maps

if TYPE_CHECKING:
    from lopsided.data.stored import ImagePath
    from lopsided.evaluation.decision import Decision
    from lopsided.inference.predict import Answer
    from lopsided.models.model import Model, ModelCard
    from lopsided.recipe.blocks import Cells

PICTURE = 320
"""Longer side of a picture in pixels."""
STRONGEST = 0.7
"""Opacity of the strongest position."""
Map = npt.NDArray[np.float32]


class Maps:
    """Computes maps of images with one model."""

    def __init__(self, model: Model, card: ModelCard) -> None:
        if card.kind != "image":
            raise InputError("Vectors have no positions, so there are no maps of them.")
        check_positions(card.spec.names)
        self.model, self.card = model, card

    def of(self, path: ImagePath, label: int) -> Map:
        """Return the map of an image for a class. Raise an ``UnreadableImageError`` if it cannot be decoded."""
        pixels = decode_image(path, self.card.image_size, self.card.channels)
        return self.of_pixels(pixels, label, cells_of(path))

    def of_pixels(self, pixels: Pixels, label: int, cells: Cells = ()) -> Map:
        """Return the map of a decoded image for a class, given the cells of a table beside it, if the model has any."""
        device = self.model.classifier.weight.device
        batch = to_float(torch.from_numpy(pixels)[None].to(device))
        labels = torch.tensor([label], device=device)
        found: Map = class_maps(self.model, batch, labels, self._beside(cells))[0].cpu().numpy()
        return found

    def _beside(self, cells: Cells) -> torch.Tensor | None:
        if not self.card.beside:
            return None
        return torch.from_numpy(encode(self.card.beside, [cells])).to(self.model.classifier.weight.device)


def write_maps(answers: Iterable[Answer], maps: Maps, decision: Decision, folder: Path) -> Iterator[Answer]:
    """Pass answers on, and write a picture for each readable image: ``00001-NAME.jpg``, numbered from 1."""
    files.make_folder(folder)
    for number, (path, answer, typicality) in enumerate(answers, start=1):
        if not isinstance(answer, UnreadableImageError):
            with files.disk_errors(folder):
                overlaid(path, maps.of(path, int(decision.decide(answer)))).save(
                    folder / f"{number:05d}-{PurePath(path).stem}.jpg"
                )
        yield path, answer, typicality


def overlaid(path: ImagePath, values: Map) -> Image.Image:
    """Return an image with its map over it."""
    image = read_image(path, PICTURE).convert("RGBA")
    image.thumbnail((PICTURE, PICTURE), Image.Resampling.BICUBIC)
    return Image.alpha_composite(image, heat(values, image.size)).convert("RGB")


def heat(values: Map, size: tuple[int, int]) -> Image.Image:
    """Return a map as a transparent picture: red speaks for the class, blue against it."""
    strongest = float(np.abs(values).max())
    share = np.abs(values) / strongest if strongest > 0 else np.zeros_like(values)
    pixels = np.zeros((*values.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.where(values[..., None] >= 0, (220, 30, 30), (30, 60, 220))
    pixels[..., 3] = np.round(255 * STRONGEST * share)
    return Image.fromarray(pixels, "RGBA").resize(size, Image.Resampling.BICUBIC)
