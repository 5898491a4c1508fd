"""Which views of an image should a frozen encoder average over? The choice by inner folds, against each set of views.

    python studies/views.py features [--features FOLDER]      # compute the features of all views once
    python studies/views.py run [--features FOLDER]           # the missing lines of studies/records/views.jsonl
    python studies/views.py summary                           # print its table
    python studies/views.py thresholds                        # what other values of the threshold would choose

The features are those of the recipe ``quick`` without pixels: one embedded encoder at 224 pixels, scaled. Data:

tops     Fashion-MNIST tops at 90:10 and 98:2: 700 training images, six draws; held-out images are evaluated.
isic     melanoma against dermatofibroma of ISIC 2018 ($LOPSIDED_DATA), five folds by lesion.
digits   the 1,797 handwritten digits of scikit-learn, 600 for training, three draws: turned by 180 degrees, a 6 is a 9.
up       drawn arrows that point up or down, 150 and 50 for training, three draws: only ``flip`` and ``none`` tell them.
left     drawn arrows that point left or right: only ``none`` tells them.

Each line has the log loss of inner folds and the UWA of each set of views. ``chosen`` is the set that
``encoder.views = "auto"`` takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from sklearn.datasets import load_digits
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import train_test_split

import shared
import study
from lopsided.inference.engine import Engine
from lopsided.models.blocks.block import scaled
from lopsided.models.model import look
from lopsided.models.pretrained import EMBEDDED_ENCODER
from lopsided.recipe.views import CANDIDATES, name_views
from lopsided.training.methods.frozen import UPRIGHT, choose_views
from lopsided.training.regression import fit_regression
from shared import Floats

RECORD = shared.RECORDS / "views.jsonl"
NAMES = [name_views(views) for views in CANDIDATES]
SIDE = 224
ARROWS = {"up": ("up", "down"), "left": ("left", "right")}


def draw_arrow(kind: str, generator: np.random.Generator) -> Image.Image:
    """Return a noisy image of 64 x 64 pixels with one arrow of a random place, size and colour."""
    image = Image.fromarray(generator.integers(60, 140, (64, 64, 3), dtype=np.uint8))
    x, y, size = (int(generator.integers(low, high)) for low, high in ((18, 46), (18, 46), (8, 14)))
    colour = tuple(int(value) for value in generator.integers(150, 255, 3))
    pen, way = ImageDraw.Draw(image), 1 if kind in ("down", "right") else -1
    tip, back = way * 1.3 * size, way * 0.3 * size
    points = [(0, -size), (0, size), (0, tip), (-6, back), (6, back)]
    points = [(x + a, y + b) if kind in ("up", "down") else (x + b, y + a) for a, b in points]
    pen.line(points[:2], fill=colour, width=3)
    pen.polygon(points[2:], fill=colour)
    return image


def images_of(data: str) -> tuple[Iterator[Image.Image], Floats, Floats]:
    """Return the images of a data set, their labels and their groups."""
    if data in ARROWS:
        generator, labels = np.random.default_rng(0), np.arange(1000) % 4 // 3
        return (draw_arrow(ARROWS[data][label], generator) for label in labels), labels, np.arange(1000)
    if data == "digits":
        found = load_digits()
        pixels = (found.images * 255 / 16).astype(np.uint8)
        return (Image.fromarray(each) for each in pixels), found.target, np.arange(len(pixels))
    source = study.open_data(data)
    groups = np.arange(len(source)) if source.groups is None else source.groups
    batches = (source.images.load(np.array([row]), SIDE, 3)[0].permute(1, 2, 0) for row in range(len(source)))
    return (Image.fromarray(each.numpy()) for each in batches), source.labels, groups


def compute(data: str, folder: Path) -> None:
    """Write the features of all views of a data set."""
    path = folder / f"views-{data}.npz"
    if path.exists():
        return
    model, card = shared.frozen_model(EMBEDDED_ENCODER, "embedded", SIDE)
    engine = Engine(model, card.shape)
    images, labels, groups = images_of(data)
    found: dict[str, list[Floats]] = {view: [] for view in CANDIDATES[0]}
    for image in images:
        large = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC))
        batch = torch.from_numpy(large.copy()).permute(2, 0, 1)[None]
        for view, parts in found.items():
            parts.append(engine.encode(look(batch, view)))
    arrays = {view: np.concatenate(parts) for view, parts in found.items()}
    np.savez(path, labels=labels, groups=groups.astype(str), **arrays)
    print(path, flush=True)


def cells(data: str, labels: Floats, groups: Floats) -> Iterator[tuple[str, int, Floats, Floats]]:
    """Yield setting, draw, and the rows to train on and to evaluate."""
    if data == "isic":
        folds = shared.folds_by_lesion(labels, groups, 0)
        yield from (("all", number, *pair) for number, pair in enumerate(folds))
    elif data == "tops":
        for cell in ("90:10", "98:2"):
            for seed in range(6):
                yield cell, seed, *shared.draw_tops(labels, cell, seed)
    else:
        number = 200 if data in ARROWS else 600
        for seed in range(3):
            rows = np.arange(len(labels))
            yield "all", seed, *train_test_split(rows, train_size=number, stratify=labels, random_state=seed)


def choose(losses: dict[str, float], least: float = UPRIGHT) -> str:
    """Return the set of views that ``encoder.views = "auto"`` takes."""
    return NAMES[choose_views([losses[name] for name in NAMES], least)]


def run(data: str, folder: Path) -> None:
    """Append the missing lines of a data set to the record."""
    found = np.load(folder / f"views-{data}.npz")
    labels, groups = found["labels"], found["groups"]
    done = {(line["data"], line["cell"], line["draw"]) for line in shared.read(RECORD)}
    sets = {
        name: scaled(torch.from_numpy(np.mean([found[view] for view in views], axis=0)), "root").numpy()
        for name, views in zip(NAMES, CANDIDATES, strict=True)
    }
    num = int(labels.max()) + 1
    for cell, draw, train, rest in cells(data, labels, groups):
        if (data, cell, draw) in done:
            continue
        losses, uwa = {}, {}
        prior = np.log(np.bincount(labels[train], minlength=num) / len(train))
        for name, x in sets.items():
            own = groups[train] if data == "isic" else None
            fitted = fit_regression(x[train], labels[train], num, groups=own, seed=draw)
            losses[name] = round(min(loss for _, loss in fitted.losses), 5)
            logits = x[rest] @ fitted.weight.T + fitted.bias - prior
            uwa[name] = round(100 * balanced_accuracy_score(labels[rest], logits.argmax(axis=1)), 2)
        line = {"data": data, "cell": cell, "draw": draw, "losses": losses, "uwa": uwa, "chosen": choose(losses)}
        shared.add(RECORD, line)


def grouped() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the lines of the record by data set and setting."""
    settings = shared.nested(shared.read(RECORD), ("data", "cell"), "draw")
    return {key: list(lines.values()) for key, lines in settings.items()}


def summary() -> str:
    """Return the mean UWA of each set of views and of the choice, and how often each was chosen."""
    rows = []
    for key, lines in grouped().items():
        means = [statistics.mean(line["uwa"][name] for line in lines) for name in NAMES]
        means.append(statistics.mean(line["uwa"][line["chosen"]] for line in lines))
        times = {name: sum(line["chosen"] == name for line in lines) for name in NAMES}
        chosen = ", ".join(f"{name} {number}" for name, number in times.items() if number)
        rows.append((*key, len(lines), *(f"{mean:.1f}" for mean in means), chosen))
    return shared.table(f"data | setting | runs | {' | '.join(NAMES)} | auto | chosen", rows)


def thresholds() -> str:
    """Return the mean UWA of the choice by other thresholds."""
    tried = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
    rows = []
    for key, lines in grouped().items():
        means = [statistics.mean(line["uwa"][choose(line["losses"], least)] for line in lines) for least in tried]
        rows.append((*key, *(f"{mean:.1f}" for mean in means)))
    return shared.table(f"data | setting | {' | '.join(map(str, tried))}", rows)


def main() -> None:
    """Compute features or lines, or print a table."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", choices=["features", "run", "summary", "thresholds"])
    parser.add_argument("--data", default="up,left,digits,isic,tops", help="separated by commas")
    parser.add_argument("--features", type=Path, default=Path())
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what in ("summary", "thresholds"):
        print(summary() if given.what == "summary" else thresholds())
        return
    for data in given.data.split(","):
        (compute if given.what == "features" else run)(data, given.features)


if __name__ == "__main__":
    main()
