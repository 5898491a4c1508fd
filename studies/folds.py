"""How much narrower are the intervals if folds test every image? `lopsided fit` with and without folds, on ISIC 2018.

    LOPSIDED_DATA=... python studies/folds.py --runs FOLDER      # melanoma against dermatofibroma, by lesion

The recipe is `quick`: once with a test split of 15 %, once with five folds. Both are computed for several seeds, and
the record studies/records/folds.json holds UWA, AUROC and the recall of dermatofibroma with their intervals. After an
interruption, the same command continues in FOLDER. The record is of `quick` as it was before it had stages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import shared
from lopsided.recipe import Recipe, named_recipe
from lopsided.runs.run import run_recipe

RECORD = shared.RECORDS / "folds.json"
RARE = "DF"


def recipes(seed: int) -> dict[str, Recipe]:
    """Return the recipe with a split, and the recipe with folds."""
    base = named_recipe("quick").override(
        **{"seed": seed, "data.source": "isic2018", "data.classes": ["MEL", RARE], "data.split": "group"}
    )
    return {"split": base, "folds": base.override(**{"data.folds": 5})}


def figures(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a run in percent, with their intervals."""
    test = metrics["test"]
    rare = next(row for row in test["per_class"] if row["label"] == RARE)
    named = {"uwa": test["figures"]["uwa"], "auroc": test["figures"]["auroc"], "recall": rare["recall"]}
    found: dict[str, Any] = {
        name: [round(100 * figure[part], 2) for part in ("value", "low", "high")] for name, figure in named.items()
    }
    return {"images": test["num_images"], "rare": rare["support"], **found, "seconds": round(metrics["seconds"], 1)}


def main() -> None:
    """Run both recipes for each seed and write the record."""
    parser = shared.parser(__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args()
    lines = []
    for seed in range(options.seeds):
        for name, recipe in recipes(seed).items():
            run = run_recipe(recipe, options.runs / f"{name}-{seed}", resume=True)
            assert run.metrics is not None
            lines.append({"seed": seed, "what": name, **figures(run.metrics)})
            print(json.dumps(lines[-1]), flush=True)
    widths = {
        name: round(sum(x["uwa"][2] - x["uwa"][1] for x in lines if x["what"] == name) / options.seeds, 2)
        for name in ("split", "folds")
    }
    print(f"mean width of the interval of UWA: {widths['split']} points with a split, {widths['folds']} with folds")
    command = f"python studies/folds.py --runs FOLDER --seeds {options.seeds}"
    shared.write_json(options.out, {"command": command, "mean_width_of_uwa": widths, "runs": lines})


if __name__ == "__main__":
    main()
