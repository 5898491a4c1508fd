"""How many images must one look at to find half of the hidden rare images? `lopsided find` against other orders.

    python studies/find.py             both data sets; $LOPSIDED_DATA holds ISIC 2018
    python studies/find.py isic        or fashion, alone; adds to the record
    python studies/find.py --scratch 2 trains an encoder from scratch as well, in the first two draws of each

Each draw keeps about 35 of 115 rare images and 350 (ISIC) or 500 (Fashion-MNIST) others as labelled images, and hides
the other 80 rare images in a pool of unlabelled images. A run of the recipe ``quick`` on the labelled images then
orders the pool:

- isic: dermatofibromas (DF) among all classes of ISIC 2018 whose images are at hand. Labelled images and pool share no
  lesion. The record names the classes: with two of the seven at hand, the pool holds about 840 images.
- fashion: shirts among 9,900 images of the other nine classes of Fashion-MNIST, with all ten classes labelled.

The orders: the three of ``lopsided find``, the first with diversity, random (the expected number), and plain
classifiers without regard to the imbalance, which are asked for the probability of the class: a logistic regression on
16 x 16 pixels and, with --scratch, an encoder trained from scratch with cross-entropy (``from-scratch loss=ce`` at
32 pixels). The record, studies/records/find.json, is of ``quick`` as it was before it had stages.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.linear_model import LogisticRegression

import shared
from lopsided.data.decoding import decode_image
from lopsided.data.images import FileImages
from lopsided.data.listed import Listed
from lopsided.data.sources import open_source
from lopsided.data.sources.isic import CLASSES
from lopsided.errors import DataError
from lopsided.recipe import Recipe, named_recipe
from lopsided.runs.find import find_in_pool
from lopsided.runs.run import run_recipe

RECORD = shared.RECORDS / "find.json"
DRAWS = {"isic": 5, "fashion": 3}
KNOWN, HIDDEN = 35, 80
ORDERS: dict[str, dict[str, Any]] = {
    "find": {},
    "find --by neighbours": {"by": "neighbours"},
    "find --by both": {"by": "both"},
    "find --diverse 0.3": {"diverse": 0.3, "top": 2000},
}


@dataclass(frozen=True, eq=False)
class Labelled:
    """All images of a case with their true labels. Images of one group are on one side."""

    paths: list[Path]
    labels: list[str]
    groups: list[str]
    rare: str
    others: int
    """Labelled images of the other classes."""


def isic() -> Labelled:
    """Return the images of ISIC 2018 of all classes that are at hand."""
    source = None
    for classes in (list(CLASSES), shared.LESIONS):
        try:
            source = open_source("isic2018", classes=classes)
            break
        except DataError:
            continue
    if source is None or not isinstance(source.images, FileImages):
        raise SystemExit("The images of ISIC 2018 are missing: set LOPSIDED_DATA.")
    labels = [source.classes[label] for label in source.labels]
    groups = list(source.names) if source.groups is None else source.groups.tolist()
    return Labelled(list(source.images.paths), labels, groups, "DF", 350)


def fashion(folder: Path) -> Labelled:
    """Write 115 shirts and 10,400 other images of Fashion-MNIST as files."""
    source = open_source("fashion-mnist")
    pixels = source.images.load(np.arange(len(source)), None, 1).numpy()[:, 0]
    rng = np.random.default_rng(0)
    rare = next(name for name in source.classes if name.lower() == "shirt")
    shirts = rng.permutation(np.flatnonzero(source.labels == source.classes.index(rare)))[: KNOWN + HIDDEN]
    others = rng.permutation(np.flatnonzero(source.labels != source.classes.index(rare)))[:10_400]
    rows = np.concatenate([shirts, others])
    for row in rows:
        Image.fromarray(pixels[row]).save(folder / f"{row:05d}.png")
    names = [source.classes[source.labels[row]] for row in rows]
    return Labelled([folder / f"{row:05d}.png" for row in rows], names, [str(row) for row in rows], rare, 500)


def draw(case: Labelled, seed: int) -> tuple[list[int], list[int]]:
    """Return the rows of the labelled images and of the pool."""
    rng = np.random.default_rng(seed)
    mixed = {group for group, label in zip(case.groups, case.labels, strict=True) if label == case.rare}
    sides: tuple[list[int], list[int]] = ([], [])
    for is_rare, number in ((True, KNOWN), (False, case.others)):
        groups = sorted({group for group in case.groups if (group in mixed) == is_rare})
        members: dict[str, list[int]] = {group: [] for group in groups}
        for row, group in enumerate(case.groups):
            if group in members and (case.labels[row] == case.rare) == is_rare:
                members[group].append(row)
        taken = 0
        hidden: list[int] = []
        for group in rng.permutation(groups).tolist():
            side = sides[0] if taken < number else hidden
            side.extend(members[group])
            taken += len(members[group])
        sides[1].extend(hidden[:HIDDEN] if is_rare else hidden)
    return sides[0], rng.permutation(sides[1]).tolist()


def looks(order: Sequence[str], rare: set[str]) -> int | None:
    """Return how many images of an order hold half of the rare images; None if the order is too short."""
    found = np.cumsum([path in rare for path in order])
    half = int(np.searchsorted(found, (len(rare) + 1) // 2))
    return half + 1 if half < len(order) else None


def write(path: Path, case: Labelled, rows: Sequence[int], *, labelled: bool) -> Path:
    """Write a table of images, with their labels if wanted."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "label"] if labelled else ["path"])
        table.writerows([case.paths[row], *([case.labels[row]] if labelled else [])] for row in rows)
    return path


def train(recipe: Recipe, table: Path, out: Path) -> Path:
    """Train on the images of a table."""
    changes = {"data.test": 0.0, "data.allow_outside": True, "compare_quick": False, "device": "cpu"}
    run_recipe(recipe.override(**changes), out, data=table)
    return out


def pixel_order(case: Labelled, labelled: Sequence[int], pool: Sequence[int]) -> list[str]:
    """Order the pool by a logistic regression on 16 x 16 pixels."""

    def pixels(rows: Sequence[int]) -> np.ndarray:
        return np.stack([decode_image(case.paths[row], 16, 3).ravel() / 255 for row in rows])

    labels = [case.labels[row] for row in labelled]
    model = LogisticRegression(max_iter=1000).fit(pixels(labelled), labels)
    p = model.predict_proba(pixels(pool))[:, model.classes_.tolist().index(case.rare)]
    return [str(case.paths[pool[i]]) for i in np.argsort(-p, kind="stable")]


def orders(case: Labelled, seed: int, folder: Path, scratch: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each order and the pool in that order."""
    labelled, pool = draw(case, seed)
    known, unknown = (
        write(folder / f"{name}.csv", case, rows, labelled=name == "known")
        for name, rows in (("known", labelled), ("pool", pool))
    )
    run = train(named_recipe("quick"), known, folder / "run")

    def found(run: Path, **options: Any) -> list[str]:
        options = {"top": len(pool), "listed": Listed(allow_outside=True), **options}
        result = find_in_pool(run, [str(unknown)], case.rare, folder / "found.csv", **options)
        result.result.journal.remove()
        return [row.path for row in result.result.rows]

    for name, options in ORDERS.items():
        yield name, found(run, **options)
    yield "logistic regression on pixels", pixel_order(case, labelled, pool)
    if scratch:
        recipe = Recipe().override(**{"encoder_training.loss": "ce", "data.image_size": 32, "data.val": 0.0})
        yield "cross-entropy from scratch", found(train(recipe, known, folder / "scratch"))


def measure(case: Labelled, draws: int, scratch: int) -> dict[str, Any]:
    """Return the record of one case."""
    found: dict[str, list[int | None]] = {}
    sizes = []
    for seed in range(draws):
        labelled, pool = draw(case, seed)
        rare = {str(case.paths[row]) for row in pool if case.labels[row] == case.rare}
        sizes.append([sum(case.labels[row] == case.rare for row in labelled), len(labelled), len(rare), len(pool)])
        with tempfile.TemporaryDirectory() as folder:
            for name, order in orders(case, seed, Path(folder), seed < scratch):
                found.setdefault(name, []).append(looks(order, rare))
                print(f"draw {seed}: {name}: {found[name][-1]}", flush=True)
    means = np.mean(sizes, axis=0)
    chance = [((hidden + 1) // 2) * (pool + 1) / (hidden + 1) for _, _, hidden, pool in sizes]
    return {
        "classes": sorted(set(case.labels)),
        "rare": case.rare,
        "draws": draws,
        "labelled": {"rare": means[0], "all": means[1]},
        "pool": {"rare": means[2], "all": means[3]},
        "random": round(float(np.mean(chance)), 1),
        "looks": {
            name: {"mean": None if None in values else round(float(np.mean(values)), 1), "each": values}  # type: ignore[arg-type]
            for name, values in found.items()
        },
    }


def main() -> None:
    """Measure the named cases and add them to the record."""
    parser = shared.parser(__doc__)
    parser.add_argument("cases", nargs="*", default=["isic", "fashion"], help="isic, fashion or both")
    parser.add_argument("--draws", type=int, default=None, help="by default 5 for isic and 3 for fashion")
    parser.add_argument("--scratch", type=int, default=0, help="draws for which an encoder is trained from scratch")
    arguments = parser.parse_args()
    for name in arguments.cases:
        with tempfile.TemporaryDirectory() as folder:
            case = isic() if name == "isic" else fashion(Path(folder))
            found = measure(case, arguments.draws or DRAWS[name], arguments.scratch)
        shared.write_json(RECORD, shared.read_json(RECORD) | {name: found})  # Another process may have added to it.


if __name__ == "__main__":
    main()
