"""What typicality adds to the time of ``predict``, with the embedded encoder of ``quick`` and a full bank.

    python benchmarks/typicality.py          writes benchmarks/records/typicality.json
    python benchmarks/typicality.py many     writes the part of many images alone

Images are scored without the bank, and then their typicality is computed, in turns, without a cache, in one thread. The
record holds the median CPU seconds per image of both, and their ratio. (The difference of predictions with and without
a bank is lost in the noise of the first.)

Then a bank is made of ``MANY`` rows of random features of two classes, one in a hundred rare, half of them in groups of
four, and calibrated. The record holds its seconds of processor, the peak of memory above that
of the features themselves, the size of the bank, and the share of new images of each class that it marks at 1 %.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from PIL import Image

from lopsided import files
from lopsided.evaluation.typicality import MOST_KNOWN, codes_of, make_bank, sample_rows
from lopsided.inference.scorer import Scorer
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ClassifierHead
from lopsided.models.model import Model, ModelCard

RECORD = Path(__file__).parent / "records" / "typicality.json"
IMAGES, TURNS, SIDE = 64, 5, 224
MANY, WIDTH = 100_000, 1_280


def many() -> dict[str, float]:
    """Make and calibrate a bank of many images, and mark new ones."""
    generator = np.random.default_rng(0)
    features = generator.standard_normal((MANY, WIDTH), dtype=np.float32)
    labels = (np.arange(MANY) % 100 == 0).astype(np.int64)
    features[labels == 1, :40] += 1
    groups = np.array([f"g{i // 4}" if i < MANY // 2 else f"s{i}" for i in range(MANY)])
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, process_time()
    rows, judged = sample_rows(labels, 0)
    both = np.union1d(rows, judged)
    codes = np.zeros((MANY, 2), dtype=np.int64)
    codes[both] = codes_of(groups[both], features[both])
    bank = make_bank(features[rows], codes[rows], features[judged], codes[judged], labels[judged])
    assert bank is not None
    seconds, peak = process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    new = generator.standard_normal((2_000, WIDTH), dtype=np.float32)
    new[1_000:, :40] += 1
    marked = bank.is_unfamiliar(bank.typicality(new))
    return {
        "images": MANY, "features": WIDTH, "cpu_seconds": seconds, "peak_mb": peak / 1024,
        "features_mb": features.nbytes / 2**20, "known": len(bank.known), "scores": len(bank.scores),
        "bank_mb": sum(part.nbytes for part in (bank.known, bank.scores, bank.units, bank.centre, bank.spread)) / 2**20,
        "marked_common": float(marked[:1_000].mean()), "marked_rare": float(marked[1_000:].mean()),
    }  # fmt: skip


def main() -> None:
    """Measure and write the record."""
    if sys.argv[1:] == ["many"]:
        _write({**json.loads(RECORD.read_text(encoding="utf-8")), "many": many()})
        return
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
    _write(record)
    subprocess.run([sys.executable, __file__, "many"], check=True)  # In a process of its own: its peak of memory.


def _write(record: dict[str, Any]) -> None:
    files.atomic_write(RECORD, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
