from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from lopsided.data.sources import Source, source_from_arrays
from lopsided.recipe import Recipe

MakeSource = Callable[..., Source]

TINY: dict[str, Any] = {
    "encoder.name": "mlp-16",
    "head.out": 8,
    "encoder_training.epochs": 3,
    "encoder_training.batch_size": 16,
    "encoder_training.lr": 1e-2,
    "classifier.epochs": 2,
    "classifier.batch_size": 16,
    "threads": 1,
}


def tiny(**changes: Any) -> Recipe:
    """A recipe that trains in seconds. In argument names, a double underscore stands for the dot."""
    own = {name.replace("__", "."): value for name, value in changes.items()}
    one = own.get("method") == "end-to-end" and "classifier.kind" not in own  # Then there is no second stage.
    usual = {name: value for name, value in TINY.items() if not (one and name.startswith("classifier."))}
    return Recipe().override(**usual | own)


def stripes(counts: Mapping[str, int], *, size: int = 8, seed: int = 0) -> Source:
    """Noisy images with a bright stripe. The row of the stripe depends on the class."""
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), list(counts.values()))
    pixels = generator.integers(0, 100, (len(labels), size, size), dtype=np.uint8)
    for i, label in enumerate(labels):
        pixels[i, 2 * label + 1] += 120
    return source_from_arrays(pixels, labels, classes=list(counts), name="stripes")


@pytest.fixture
def source() -> Source:
    return stripes({"many": 60, "few": 12})
