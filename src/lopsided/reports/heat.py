"""Maps of where a model looked, as transparent pictures that lie over thumbnails."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lopsided.reports.wording import clean
from lopsided.runs.maps import read_maps

SIDE = 48
"""Side of the squares in pixels, in which the picture has the shape of its image."""
STRONGEST = 0.75
RED, BLUE = (220, 30, 30), (30, 60, 220)


def heat_pictures(folder: Path) -> Mapping[str, str]:
    """Return the map of each image that has one, by name, as the URL of a picture with the shape of a thumbnail."""
    found = read_maps(folder)
    if found is None:
        return {}
    sizes = zip(found.names, found.maps.astype(np.float32), found.sizes.tolist(), strict=True)
    return {name: _url(values, width, height) for name, values, (width, height) in sizes}


def add_heat(folder: Path, data: dict[str, Any], tiles: Sequence[dict[str, Any]]) -> None:
    """Give the tiles of a page, and the images in the data of its script, their maps, if the run has any."""
    pictures = {clean(name): url for name, url in heat_pictures(folder).items()}
    for tile in tiles:
        tile["heat"] = pictures.get(tile["name"])
    if pictures:
        data["heat"] = {row: pictures[name] for row, name in enumerate(data["names"]) if name in pictures}


def _url(values: np.ndarray, width: int, height: int) -> str:
    pixels = np.zeros((*values.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.where(values[..., None] >= 0, RED, BLUE)
    pixels[..., 3] = np.round(255 * STRONGEST * np.clip(np.abs(values), 0, 1))
    scale = SIDE / max(width, height)
    size = max(round(width * scale), 1), max(round(height * scale), 1)
    square = Image.new("RGBA", (SIDE, SIDE))
    square.paste(
        Image.fromarray(pixels, "RGBA").resize(size, Image.Resampling.BILINEAR),
        ((SIDE - size[0]) // 2, (SIDE - size[1]) // 2),
    )
    content = io.BytesIO()
    square.save(content, "WEBP", quality=60)
    return f"data:image/webp;base64,{base64.b64encode(content.getvalue()).decode()}"
