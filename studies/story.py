"""What does a user see with 0, 1, 3, 10 and 30 rare images? ``fit`` on solar cells, and its model on other cells.

    python studies/story.py run FOLDER [--splits 0-2]     # adds what records/story.jsonl lacks
    python studies/story.py table                         # print the table of docs/few.md

FOLDER is ``elpv_dataset/data`` of the PyPI package elpv-dataset 1.0.0.post1: label 0 is intact, label 1 broken. In each
split, 400 intact cells and the first k of the shuffled broken ones are fitted; 300 others of each are for testing.
``first`` is the number of broken cells among the first 20 of a pool of these 300 intact and 60 of the broken ones.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import lopsided
import shared
from few import ALARMS, listed
from lopsided.recipe import Recipe, named_recipe
from lopsided.runs.metrics import headlines, judged_split
from shared import Line

RECORD = shared.RECORDS / "story.jsonl"
RARE, INTACT, TESTED = (0, 1, 3, 10, 30), 400, 300
FIRST, BROKEN = 20, 60


def photos(folder: Path, images: list[Path], labels: list[str]) -> Path:
    """Return a folder with a folder of links for each class."""
    for image, label in zip(images, labels, strict=True):
        (folder / label).mkdir(parents=True, exist_ok=True)
        (folder / label / image.name).symlink_to(image.resolve())
    return folder


def measure(cells: Path, cell: Line) -> Line:
    """Fit what a user with so many rare images has, and test the model on other images."""
    paths, rare, _ = listed("cells", cells)
    order = np.random.default_rng(cell["split"]).permutation(len(paths))
    intact, broken = ([paths[i] for i in order if rare[i] == label] for label in (0, 1))
    known, tested = intact[:INTACT] + broken[: cell["rare"]], intact[-TESTED:] + broken[-TESTED:]
    labels = ["intact"] * INTACT + ["broken"] * cell["rare"]
    with tempfile.TemporaryDirectory() as folder:
        images = photos(Path(folder) / "photos", known, labels)
        recipe = None if cell["recipe"] == "fit" else cell["recipe"]
        run = lopsided.fit(images, out=Path(folder) / "run", recipe=recipe, quiet=True)
        found = run.predict(tested, quiet=True)
        assert run.metrics is not None
        split = judged_split(run.metrics)
        assert split is not None
        said = headlines(run.metrics[split], None)[0].words()
    other = next(i for i, name in enumerate(found.classes) if name != "intact")
    scores, positive = found.probabilities[:, other], np.arange(2 * TESTED) >= TESTED
    above = scores[positive] > np.quantile(scores[~positive], 1 - ALARMS)
    auroc = shared.rank_auroc(scores, positive)
    first = int(positive[np.argsort(-scores[: TESTED + BROKEN], kind="stable")[:FIRST]].sum())
    measured = {"auroc": round(auroc, 4), "recall": round(float(above.mean()), 4), "first": first}
    return {"says": said, "took": named(run.recipe), **measured}


def named(recipe: Recipe) -> str:
    """Return the name of the recipe that ``fit`` took."""
    same = (recipe.method, recipe.encoder)
    named = {name: named_recipe(name) for name in ("few", "quick", "thorough")}
    return next(name for name, one in named.items() if (one.method, one.encoder) == same)


def table() -> str:
    """Return a row for each number of rare images: what the first split says, and the means over splits."""
    groups = shared.nested(shared.read(RECORD), ("rare", "recipe"), "split")
    rows = []
    for (number, recipe), splits in groups.items():
        first = splits[min(splits)]
        took = f"`{first['took']}`" if recipe == "fit" else f"`--recipe {recipe}`"
        means = [float(np.mean([line[name] for line in splits.values()])) for name in ("auroc", "recall", "first")]
        area, recall = f"{means[0]:.3f}", f"{100 * means[1]:.0f} %"
        rows.append((number, first["says"], took, len(splits), area, recall, f"{means[2]:.1f}"))
    head = "rare images | `fit` says | recipe | splits | AUROC | recall at 5 % false alarms"
    return shared.table(f"{head} | broken among the first {FIRST} of a pool", rows)


def main() -> None:
    """Fit what the record lacks, or print the table."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--splits", default="0-2")
    given = parser.parse_args()
    if given.what == "table":
        print(table())
        return
    cells: list[Line] = [
        {"rare": number, "recipe": recipe, "split": split}
        for split in shared.seeds_of(given.splits)
        for number in RARE
        for recipe in (("fit", "quick") if number >= 10 else ("fit",))
    ]
    shared.compute_missing(RECORD, cells, lambda cell: measure(given.folder, cell))


if __name__ == "__main__":
    main()
