"""What typicality adds to the time of ``predict``, with the embedded encoder of ``quick`` and a full bank.

    python benchmarks/typicality.py     adds to benchmarks/records/typicality.json

Images are scored without the bank, and then their typicality is computed, in turns, without a cache, in one thread. The
record holds the median CPU seconds per image of both, and their ratio. (The difference of predictions with and without
a bank is lost in the noise of the first.)
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from time import process_time

import numpy as np
import torch
from PIL import Image

from lopsided import files
from lopsided.evaluation.typicality import MOST_KNOWN, codes_of, make_bank
from lopsided.inference.scorer import Scorer
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ClassifierHead
from lopsided.models.model import Model, ModelCard

RECORD = Path(__file__).parent / "records" / "typicality.json"
IMAGES, TURNS, SIDE = 64, 5, 224


def main() -> None:
    """Measure and write the record."""
    torch.set_num_threads(1)
    name = "tf_efficientnet_lite0+pixels"
    encoder, width = build_encoder(name, image_size=SIDE, weights="embedded")
    card = ModelCard(
        kind="image", encoder=name, encoder_weights="embedded", channels=3, image_size=SIDE, shape=(3, SIDE, SIDE),
        mean=(0.0,) * 3, std=(1.0,) * 3, classes=("a", "b"), features=width, scaling="root", prior=(0.5, 0.5),
    )  # fmt: skip
    model = Model(encoder, ClassifierHead(width, 2), card.mean, card.std, scaling="root").eval()
    generator = np.random.default_rng(0)
    known = generator.normal(size=(MOST_KNOWN, width)).astype(np.float32)
    codes = codes_of(None, known)
    bank = make_bank(known, codes, known[:500], codes[:500], np.zeros(500, dtype=np.int64))
    assert bank is not None
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i}.jpg" for i in range(IMAGES)]
        for path in paths:
            Image.fromarray(generator.integers(0, 256, (450, 600, 3), dtype=np.uint8)).save(path)
        scorer = Scorer(model, card, cached="none", workers=1)
        features = generator.normal(size=(IMAGES, width)).astype(np.float32)
        runs = {"predict": lambda: list(scorer.stream(paths)), "typicality": lambda: bank.typicality(features)}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(TURNS + 1):
            for name, run in runs.items():
                begin = process_time()
                run()
                if turn:  # The first turn makes the engine.
                    seconds[name].append((process_time() - begin) / IMAGES)
    found = {name: statistics.median(taken) for name, taken in seconds.items()}
    record = {"images": IMAGES, "turns": TURNS, "known": MOST_KNOWN, "features": width, "cpu_seconds": found,
              "share": found["typicality"] / found["predict"]}  # fmt: skip
    files.atomic_write(RECORD, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
