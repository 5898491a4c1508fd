"""Do a frozen encoder and one from scratch make different mistakes? The mean of their log probabilities, fold by fold.

    python studies/blend.py ISIC [--first thorough]     # a comparison over folds that `lopsided compare` made
    python studies/blend.py                             # print the table of studies/records/blend.jsonl

The arms of the comparison are averaged with the first one: the mean of the logarithms of their probabilities for the
images of each fold, which no model of this fold has seen. Decisions are by the rule ``balanced``. Differences to the
first arm are paired by fold, with the interval that is corrected for the overlap of folds. ISIC is the comparison of
``studies/arms.py --isic`` with the arm ``thorough``.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from lopsided import files
from lopsided.evaluation.intervals import mean_interval
from lopsided.evaluation.resampled import fold_overlap

RECORD = Path(__file__).parent / "records" / "blend.jsonl"
Scores = dict[str, tuple[str, np.ndarray]]


def read_scores(folder: Path, cell: str, classes: list[str]) -> Scores:
    """Return label and log probabilities of each test image of a cell."""
    with (folder / "cells" / cell / "predictions.csv").open(encoding="utf-8", newline="") as table:
        rows = [row for row in csv.DictReader(table) if row["split"] == "test"]
    found = {row["name"]: np.array([float(row[f"p:{name}"]) for name in classes]) for row in rows}
    return {row["name"]: (row["label"], np.log(np.maximum(found[row["name"]], 1e-12))) for row in rows}


def figures(logits: np.ndarray, labels: np.ndarray, prior: np.ndarray) -> dict[str, float]:
    """Return UWA by the rule ``balanced`` and the AUROC of two classes, in percent."""
    scores = logits - np.log(prior)
    uwa = balanced_accuracy_score(labels, scores.argmax(axis=1))
    auroc = roc_auc_score(labels, scores[:, 1] - scores[:, 0])
    return {"uwa": round(100 * uwa, 2), "auroc": round(100 * auroc, 2)}


def blend(folder: Path, first: str) -> list[dict[str, Any]]:
    """Return the figures of each arm, and of its mean with the first arm, on each fold."""
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    there = [record for record in records if (folder / "cells" / record["cell"] / "predictions.csv").exists()]
    lines = []
    for fold in sorted({record["fold"]["fold"] for record in there}):
        own = {record["arm"]: record for record in there if record["fold"]["fold"] == fold}
        classes = list(own[first]["classes"])
        scores = {arm: read_scores(folder, record["cell"], classes) for arm, record in own.items()}
        names = sorted(scores[first])
        labels = np.array([classes.index(scores[first][name][0]) for name in names])
        logits = {arm: np.stack([found[name][1] for name in names]) for arm, found in scores.items()}
        metrics = json.loads((folder / "cells" / own[first]["cell"] / "metrics.json").read_text())
        prior = np.array(metrics["decision"]["prior"])
        size = {"fold": fold, "images": len(names), "rest": own[first]["fold"]["rest"]}
        for arm, found in logits.items():
            lines.append({**size, "arm": arm, **figures(found, labels, prior)})
            if arm != first:
                both = (found + logits[first]) / 2
                lines.append({**size, "arm": f"{first} + {arm}", **figures(both, labels, prior)})
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """Return a row for each arm, with its paired difference to the first one."""
    arms: dict[str, dict[int, dict[str, Any]]] = {}
    for line in lines:
        arms.setdefault(line["arm"], {})[line["fold"]] = line
    first = next(arm for arm in arms if any(other.startswith(f"{arm} + ") for other in arms))
    overlap = fold_overlap([line["images"] for line in lines], [line["rest"] for line in lines])
    rows = [f"| model | folds | UWA | minus {first} | AUROC | minus {first} |", "|---" * 6 + "|"]
    means = {arm: statistics.mean(line["uwa"] for line in own.values()) for arm, own in arms.items()}
    for arm in sorted(arms, key=lambda arm: -means[arm]):
        cells = [arm, str(len(arms[arm]))]
        for name in ("uwa", "auroc"):
            cells.append(f"{statistics.mean(line[name] for line in arms[arm].values()):.1f}")
            gains = [line[name] - arms[first][fold][name] for fold, line in arms[arm].items()]
            found = mean_interval(gains, overlap=overlap)
            cells.append("" if arm == first else f"{found.value:+.1f} ± {found.high - found.value:.1f}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def read() -> list[dict[str, Any]]:
    """Return the lines of the record."""
    return [json.loads(line) for line in RECORD.read_text().splitlines()]


def main() -> None:
    """Write the record of a comparison, if one is given, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path, nargs="?", help="the folder of a comparison over folds")
    parser.add_argument("--first", default="thorough", help="the arm that the others are averaged with")
    given = parser.parse_args()
    if given.comparison is not None:
        found = blend(given.comparison, given.first)
        files.atomic_write(RECORD, "".join(json.dumps(line) + "\n" for line in found))
    print(table(read()))


if __name__ == "__main__":
    main()
