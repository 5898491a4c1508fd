"""Do the recipes beat losses from scratch on ISIC 2018? All images, by models that have not seen them, by lesion.

    python studies/lesions.py ISIC      # a comparison over folds that `lopsided compare` made; writes the record
    python studies/lesions.py           # print the table of studies/records/lesions.json

ISIC is the comparison of ``studies/from_scratch.py --isic`` with the methods ``quick`` and ``thorough``, and two
repeats. An image counts by the share of its decisions that are right, one decision per repeat. The difference of two
methods in UWA has a 95 % interval by a bootstrap of lesions, so it says what other lesions of this kind would give to
these models. It does not contain how models of other training images would differ, except as far as ten folds show
that; the interval of ``studies/evidence.py against`` does, and is wider. ``adjusted`` is the interval for the number of
rows (Bonferroni).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import shared
from shared import Floats

RECORD = shared.RECORDS / "lesions.json"
RECIPES = ("thorough", "quick")
LOSSES = ("weighted-ce", "cl", "afcl")
DRAWS = 10_000


def read_answers(folder: Path) -> tuple[dict[str, dict[str, list[bool]]], dict[str, tuple[str, str]]]:
    """Return, by method and image, whether each decision is right, and the label and the lesion of each image."""
    right: dict[str, dict[str, list[bool]]] = {}
    facts: dict[str, tuple[str, str]] = {}
    for record, rows in shared.finished_cells(folder):
        for row in rows:
            facts[row["name"]] = row["label"], row["group"]
            answers = right.setdefault(record["compared_as"], {}).setdefault(row["name"], [])
            answers.append(row["label"] == row["predicted"])
    return right, facts


def compute(folder: Path) -> dict[str, Any]:
    """Return the difference of each recipe to each loss, with both intervals, in points."""
    right, facts = read_answers(folder)
    names = sorted(facts)
    labels = np.array([facts[name][0] for name in names])
    _, lesions = np.unique([facts[name][1] for name in names], return_inverse=True)
    number = int(lesions.max()) + 1
    generator = np.random.default_rng(0)
    draws = [np.bincount(generator.integers(0, number, number), minlength=number)[lesions] for _ in range(DRAWS)]
    weights = np.stack([np.ones(len(names)), *draws])
    share = {
        method: np.array([np.mean(own[name]) for name in names])
        for method, own in right.items()
        if len(own) == len(names)
    }
    pairs = [(recipe, loss) for recipe in RECIPES for loss in LOSSES]
    rows = []
    for recipe, loss in pairs:
        gain = share[recipe] - share[loss]
        found = 100 * np.mean([_means(gain, weights, labels == label) for label in np.unique(labels)], axis=0)
        limits = {
            name: np.round(np.quantile(found[1:], (tail, 1 - tail)), 2).tolist()
            for name, tail in (("interval", 0.025), ("adjusted", 0.025 / len(pairs)))
        }
        rows.append({"recipe": recipe, "minus": loss, "uwa": round(float(found[0]), 2), **limits})
    repeats = {method: len(own[names[0]]) for method, own in right.items() if method in share}
    return {"images": len(names), "lesions": number, "draws": DRAWS, "repeats": repeats, "rows": rows}


def _means(values: Floats, weights: Floats, chosen: Floats) -> Floats:
    """Return the mean of the chosen values for each row of weights."""
    own = weights[:, chosen]
    found: Floats = own @ values[chosen] / own.sum(axis=1)
    return found


def table() -> str:
    """Return the record as a table."""
    rows = []
    for row in shared.read_json(RECORD)["rows"]:
        limits = [f"[{low:+.1f}, {high:+.1f}]" for low, high in (row["interval"], row["adjusted"])]
        rows.append((row["recipe"], row["minus"], f"{row['uwa']:+.1f}", *limits))
    return shared.table("recipe | minus | balanced accuracy | 95 % | adjusted", rows)


def main() -> None:
    """Write the record of a comparison, if one is given, and print the table."""
    parser = shared.parser(__doc__)
    parser.add_argument("comparison", type=Path, nargs="?", help="the folder of a comparison over folds")
    given = parser.parse_args()
    if given.comparison is not None:
        shared.write_json(RECORD, compute(given.comparison))
    print(table())


if __name__ == "__main__":
    main()
