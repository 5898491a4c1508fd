"""Does the memory of ``lopsided predict`` grow with the number of images?

    python benchmarks/predict_memory.py     writes benchmarks/records/predict_memory.json

A table names the same fifty small images again and again. Each prediction is a process of its own, with a small model
and without a cache. The record holds its peak memory in MB.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from lopsided import files
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ClassifierHead
from lopsided.models.model import Model, ModelCard, save_model

RECORD = Path(__file__).parent / "records" / "predict_memory.json"
NUMBERS = (5_000, 20_000, 80_000, 200_000)
DIFFERENT, SIDE = 50, 16


def peak(folder: Path, number: int) -> float:
    """Return the peak memory in MB of predicting so many images."""
    table = folder / f"{number}.csv"
    table.write_text("path\n" + "".join(f"{i % DIFFERENT}.png\n" for i in range(number)))
    command = [sys.executable, "-m", "lopsided", "predict", folder / "model", table, "--out", folder / "answers.csv"]
    environment = {**os.environ, "LOPSIDED_CACHE_GIB": "0", "OMP_NUM_THREADS": "1"}
    child = os.spawnve(os.P_NOWAIT, sys.executable, [*map(str, command), "--quiet"], environment)
    _, status, used = os.wait4(child, 0)
    rows = sum(1 for _ in (folder / "answers.csv").open()) - 1
    assert (status, rows) == (0, number)
    return used.ru_maxrss / 1e3


def main() -> None:
    """Measure and write the record."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, pixels = Path(scratch), np.random.default_rng(0).integers(0, 256, (DIFFERENT, SIDE, SIDE, 3), np.uint8)
        for i, each in enumerate(pixels):
            Image.fromarray(each).save(folder / f"{i}.png")
        encoder, width = build_encoder("mlp", channels=3, image_size=SIDE)
        card = ModelCard(
            kind="image", encoder="mlp", channels=3, image_size=SIDE, shape=(3, SIDE, SIDE), mean=(0.0,) * 3,
            std=(1.0,) * 3, classes=("cat", "dog"), features=width, prior=(0.5, 0.5),
        )  # fmt: skip
        save_model(folder / "model", Model(encoder, ClassifierHead(width, 2), card.mean, card.std), card)
        found = {f"{number}": round(peak(folder, number)) for number in NUMBERS}
    print(found)
    record = {"command": "python benchmarks/predict_memory.py", "peak_mb": found}
    files.atomic_write(RECORD, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
