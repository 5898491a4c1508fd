"""Small images and a small model for tests of runs and of the command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = 12
CLASSES = ("cat", "dog")
LEVELS = {"cat": 190, "dog": 60, "fox": 120}
"""The classes differ in brightness, so that anything that learns at all tells them apart."""


def write_photos(folder: Path, counts: Mapping[str, int], *, start: int = 0) -> Path:
    """Write class folders of small colour images, no two of them alike; ``start`` numbers the first of each class."""
    for name, number in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(start, start + number):
            noise = np.random.default_rng([sum(map(ord, name)), i]).integers(-60, 60, (SIZE, SIZE, 3))
            Image.fromarray((LEVELS[name] + noise).astype(np.uint8)).save(folder / name / f"{i:03d}.png")
    return folder


def write_model(folder: Path, *, encoder: str = "mlp", image_size: int = SIZE, seed: int = 0) -> Path:
    """Write the two files of an untrained model of cats and dogs."""
    import torch

    from lopsided.models.encoders import build_encoder
    from lopsided.models.heads import ClassifierHead
    from lopsided.models.model import Model, ModelCard, save_model

    network, features = build_encoder(encoder, channels=3, image_size=image_size, seed=seed)
    card = ModelCard(
        kind="image", encoder=encoder, channels=3, image_size=image_size, shape=(3, image_size, image_size),
        mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3), classes=CLASSES, features=features, prior=(0.5, 0.5),
    )  # fmt: skip
    torch.manual_seed(seed)
    save_model(folder, Model(network, ClassifierHead(features, len(CLASSES)), card.mean, card.std), card)
    return folder
