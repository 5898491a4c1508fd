"""How much should the colours of regions weigh beside the features of encoders? The share, chosen on draws from 100 on.

    python studies/pixels.py run --features FOLDER     # FOLDER: `python studies/study.py features DATA`
    python studies/pixels.py summary                   # the table of studies/records/pixels.jsonl
    python studies/pixels.py gains                     # what the pixels are worth, from studies/records/study.jsonl

The methods are the recipes ``quick`` and ``thorough`` with several weights of the block ``pixels``; 0
is without pixels. The data are those of ``studies/study.py``, with draws that no other record uses. A line that
exists is not computed again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import shared
import study
from lopsided.models.blocks.pixels import WIDTH
from lopsided.training.regression import fit_regression

RECORD = shared.RECORDS / "pixels.jsonl"
SHARES = (0.0, 0.1, 0.3, 1.0)
CELLS = (("isic", "all", 3), ("few", "10 rare", 3), ("few", "40 rare", 3), ("tops", "98:2", 6), ("tops", "90:10", 6))
"""Data, setting and number of draws."""
FIRST = 100


def run_cell(data: str, cell: str, seed: int, recipe: str, share: float, found: study.Features) -> dict[str, Any]:
    """Return the figures of a recipe with a share on one draw."""
    x = found.of(recipe)
    assert x is not None
    weights = np.ones(x.shape[1])
    weights[-WIDTH:] = np.sqrt(share * (x.shape[1] - WIDTH) / WIDTH)
    if not share:
        x, weights = x[:, :-WIDTH], weights[:-WIDTH]
    folds, grouped = study.pairs(data, cell, seed, found)
    scores, plain = [], []
    for train, rest in folds:
        labels = found.labels[train].astype(np.int64)
        groups = found.groups[train] if grouped else None
        num = int(labels.max()) + 1
        fitted = fit_regression(x[train], labels, num, groups=groups, seed=seed, importance=weights)
        plain.append(x[rest] @ fitted.weight.T + fitted.bias)
        scores.append(plain[-1] - np.log(np.bincount(labels, minlength=num) / len(labels)))
    tested = np.concatenate([found.labels[rest] for _, rest in folds])
    return shared.figures(np.concatenate(scores), tested, np.concatenate(plain))


def summary() -> str:
    """Return a row for each recipe and setting: the UWA without pixels, and the difference of each share to it."""
    rows = []
    for key, shares in shared.nested(shared.read(RECORD), ("recipe", "data", "cell"), "share", "seed").items():
        cells: list[str] = []
        for name in ("uwa", "auroc"):
            cells.append(shared.mean_of(shares[0.0], name))
            cells += [shared.minus(shares.get(share, {}), shares[0.0], name) for share in SHARES[1:]]
        rows.append((*key, len(shares[0.0]), *cells))
    names = [f"{figure}, {share:g}" for figure in ("balanced accuracy", "AUROC") for share in SHARES]
    return shared.table(f"recipe | data | setting | repeats | {' | '.join(names)}", rows)


def gains() -> str:
    """Return a row for each recipe and setting of the study: with pixels less without, paired by draw."""
    settings = shared.nested(shared.read(study.RECORD), ("data", "cell"), "method", "seed")
    rows = [
        (
            recipe,
            *key,
            len(methods[recipe]),
            *shared.compared(methods[recipe], methods[recipe + study.WITHOUT], "uwa", "auroc"),
        )
        for recipe in ("quick", "thorough")
        for key, methods in sorted(settings.items(), key=study.place)
    ]
    return shared.table("recipe | data | setting | repeats | balanced accuracy | gain | AUROC | gain", rows)


def main() -> None:
    """Compute the missing lines, if asked for, and print the table."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", choices=["run", "summary", "gains"])
    parser.add_argument("--features", type=Path, default=Path(), help="the folder with the features")
    given = parser.parse_args()
    if given.what == "run":
        known = {name: study.Features(name, given.features) for name in ("isic", "tops")}
        wanted = (
            {"recipe": recipe, "data": data, "cell": cell, "seed": seed, "share": share}
            for recipe in ("quick", "thorough")
            for data, cell, number in CELLS
            for seed in range(FIRST, FIRST + number)
            for share in SHARES
        )
        shared.compute_missing(
            RECORD,
            wanted,
            lambda cell: run_cell(**cell, found=known["isic" if cell["data"] == "few" else cell["data"]]),
        )
    print(gains() if given.what == "gains" else summary())


if __name__ == "__main__":
    main()
