"""What the recipe few costs: the memory of a fit with 10,000 images, and the time of ``predict`` beside that of quick.

    python benchmarks/few.py     writes benchmarks/records/few.json

The features are random, as wide as those of the recipe. The memory of a fit is the growth of the largest resident size
while the distances and all regressions of the recipe are fitted to the features of 10,000 normal and 20 rare images, in
a process of its own. The rare images are no farther away than the others, so that the regressions of quick join.
Images are scored with the encoder and the classifier of each recipe, in turns, without a cache, in one thread. The
record holds the median CPU seconds per image of both, and their ratio.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import statistics
import tempfile
from pathlib import Path
from time import process_time

import numpy as np
import torch
from PIL import Image

from lopsided import files
from lopsided.inference.scorer import Scorer
from lopsided.models.blocks.positions import NUMBERS
from lopsided.models.blocks.positions import WIDTH as PLACES
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import DistanceShape, build_head
from lopsided.models.model import Model, ModelCard
from lopsided.recipe import named_recipe
from lopsided.training.distance import MOST_AXES, fit_distances, fit_mixed

RECORD = Path(__file__).parent / "records" / "few.json"
NORMAL, RARE, WIDTH, READ = 10_000, 20, 3_904, 1_024
IMAGES, TURNS, SIDE = 32, 5, 224


def fit_memory() -> dict[str, float]:
    """Return the size of the features, and how much the resident size grows while the classifier is fitted, in MB."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((NORMAL + RARE, WIDTH + PLACES), dtype=np.float32)
    labels = np.repeat([0, 1], [NORMAL, RARE])
    columns = [np.arange(READ)[None], np.arange(WIDTH, WIDTH + PLACES).reshape(-1, NUMBERS)]
    encoder, _ = build_encoder(named_recipe("few").encoder.name, image_size=SIDE, weights="embedded")
    layout = Model(encoder, build_head("linear", 1, 2), (0.0,) * 3, (1.0,) * 3).layout
    assert layout is not None
    assert layout.whole.width == WIDTH
    assert layout.width == WIDTH + PLACES
    fit_distances(x[:50], columns)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    distances = fit_distances(x[labels == 0], columns)  # A copy, as in training.
    fitted = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    column = np.concatenate([distances.left_out, distances.column(x[NORMAL:])])
    whole = layout.whole
    own = x[:, np.arange(WIDTH)]
    mixed = fit_mixed(own, column, labels, 0, 2, importance=whole.importance(), parts=whole.kinds())
    assert mixed.relied < 1
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kept = [array for part in distances.parts for array in (part.axes, part.gains, part.centre, part.scale)]
    model = sum(array.nbytes for array in kept) / 2
    return {"features_mb": x.nbytes / 1e6, "distance_mb": (fitted - before) * 1024 / 1e6,
            "all_mb": (after - before) * 1024 / 1e6, "model_mb": model / 1e6}  # fmt: skip


def scorer(recipe: str) -> Scorer:
    """Return a scorer with the encoder and the kind of classifier of a recipe."""
    name, kind = named_recipe(recipe).encoder.name, "distance" if recipe == "few" else "linear"
    encoder, width = build_encoder(name, image_size=SIDE, weights="embedded")
    card = ModelCard(
        kind="image", encoder=name, encoder_weights="embedded", channels=3, image_size=SIDE, shape=(3, SIDE, SIDE),
        mean=(0.0,) * 3, std=(1.0,) * 3, classes=("a", "b"), features=width, scaling="root", prior=(0.5, 0.5),
    )  # fmt: skip
    shapes = [
        DistanceShape(positions=1, columns=READ, axes=MOST_AXES),
        DistanceShape(positions=PLACES // NUMBERS, columns=NUMBERS, axes=NUMBERS),
    ]
    head = build_head(kind, width, 2, shapes=shapes)
    return Scorer(Model(encoder, head, card.mean, card.std, scaling="root").eval(), card, cached="none", workers=1)


def predict_seconds() -> dict[str, float]:
    """Return the CPU seconds per image of both recipes."""
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i}.jpg" for i in range(IMAGES)]
        for path in paths:
            Image.fromarray(generator.integers(0, 256, (300, 300, 3), dtype=np.uint8)).save(path)
        scorers = {recipe: scorer(recipe) for recipe in ("quick", "few")}
        seconds: dict[str, list[float]] = {name: [] for name in scorers}
        for turn in range(TURNS + 1):
            for name, of in scorers.items():
                begin = process_time()
                list(of.stream(paths))
                if turn:  # The first turn makes the engine.
                    seconds[name].append((process_time() - begin) / IMAGES)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def main() -> None:
    """Measure and write the record."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        memory = pool.apply(fit_memory)
    seconds = predict_seconds()
    record = {"normal": NORMAL, "rare": RARE, "memory": memory, "cpu_seconds": seconds,
              "ratio": seconds["few"] / seconds["quick"]}  # fmt: skip
    files.atomic_write(RECORD, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
