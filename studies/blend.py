"""Do a frozen encoder and one from scratch make different mistakes? The mean of their log probabilities, fold by fold.

    python studies/blend.py ISIC [--first thorough]     # a comparison over folds that `lopsided compare` made
    python studies/blend.py                             # print the table of studies/records/blend.jsonl

The methods of the comparison are averaged with the first one: the mean of the logarithms of their probabilities for the
images of each fold, which no model of this fold has seen. Decisions are by the rule ``balanced``. Differences to the
first method are paired by fold, with the interval that is corrected for the overlap of folds. ISIC is the comparison of
``studies/from_scratch.py --isic`` with the method ``thorough``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import shared
from lopsided.evaluation.resampled import fold_overlap

RECORD = shared.RECORDS / "blend.jsonl"


def blend(folder: Path, first: str) -> list[dict[str, Any]]:
    """Return the figures of each method, and of its mean with the first method, on each fold."""
    folds: dict[int, dict[str, Any]] = {}
    for record, rows in shared.finished_cells(folder):
        folds.setdefault(record["fold"]["fold"], {})[record["compared_as"]] = (
            record,
            sorted(rows, key=lambda row: row["name"]),
        )
    lines = []
    for fold, methods in sorted(folds.items()):
        record, rows = methods[first]
        classes = list(record["classes"])
        labels = np.array([classes.index(row["label"]) for row in rows])
        metrics = shared.read_json(folder / "cells" / record["cell"] / "metrics.json")
        size = {"fold": fold, "images": len(rows), "rest": record["fold"]["rest"]}
        scores = {
            method: np.log(np.maximum([[float(row[f"p:{name}"]) for name in classes] for row in own], 1e-12))
            - np.log(metrics["decision"]["prior"])
            for method, (_, own) in methods.items()
        }
        for method, found in scores.items():
            lines.append({**size, "method": method, **shared.figures(found, labels)})
            if method != first:
                both = (found + scores[first]) / 2
                lines.append({**size, "method": f"{first} + {method}", **shared.figures(both, labels)})
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """Return a row for each method, with its paired difference to the first one."""
    methods = shared.nested(lines, "method", "fold")
    first = next(method for method in methods if any(other.startswith(f"{method} + ") for other in methods))
    overlap = fold_overlap([line["images"] for line in lines], [line["rest"] for line in lines])
    means = {method: np.mean([line["uwa"] for line in runs.values()]) for method, runs in methods.items()}
    rows = (
        (
            method,
            len(methods[method]),
            *shared.compared(methods[method], methods[first], "uwa", "auroc", overlap=overlap),
        )
        for method in sorted(methods, key=lambda method: -means[method])
    )
    return shared.table(f"model | folds | balanced accuracy | minus {first} | AUROC | minus {first}", rows)


def main() -> None:
    """Write the record of a comparison, if one is given, and print the table."""
    parser = shared.parser(__doc__)
    parser.add_argument("comparison", type=Path, nargs="?", help="the folder of a comparison over folds")
    parser.add_argument("--first", default="thorough", help="the method that the others are averaged with")
    given = parser.parse_args()
    if given.comparison is not None:
        shared.write_lines(RECORD, blend(given.comparison, given.first))
    print(table(shared.read(RECORD)))


if __name__ == "__main__":
    main()
