from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Write class folders of small, pairwise different images: ``make_folder({"cat": 3, "dog": 2})``."""

    def make(counts: Mapping[str, int], *, root: str = "photos", mode: str = "RGB", size: int = 8) -> Path:
        folder = tmp_path / root
        for name, number in counts.items():
            (folder / name).mkdir(parents=True)
            for i in range(number):
                seed = sum(map(ord, name)) * 1000 + i
                shape = (size, size, 3) if mode == "RGB" else (size, size)
                pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / name / f"{i:03d}.png")
        return folder

    return make
