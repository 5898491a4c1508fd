"""How much should the colours of regions weigh beside the features of encoders? The share, chosen on draws from 100 on.

    python studies/pixels.py run --features FOLDER     # FOLDER: `python studies/study.py features DATA`
    python studies/pixels.py summary                   # the table of studies/records/pixels.jsonl
    python studies/pixels.py gains                     # what the pixels are worth, from studies/records/study.jsonl

The arms are the recipes ``default`` and ``thorough`` with several values of ``SHARE`` of ``lopsided.models.pixels``; 0
is without pixels. The data are those of ``studies/study.py``, with draws that no other record uses. A line that
exists is not computed again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

import study
from adapters import _interval
from lopsided import files
from lopsided.models.pixels import WIDTH
from lopsided.training.regression import fit_regression

RECORD = Path(__file__).parent / "records" / "pixels.jsonl"
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
    return study.figures(np.concatenate(scores), np.concatenate(plain), tested)


def summary() -> str:
    """Return a row for each recipe and setting: the UWA without pixels, and the difference of each share to it."""
    groups: dict[tuple[str, str, str], dict[float, dict[int, dict[str, Any]]]] = {}
    for line in study.read(RECORD):
        key = line["recipe"], line["data"], line["cell"]
        groups.setdefault(key, {}).setdefault(line["share"], {})[line["seed"]] = line
    names = [f"{figure}, {share:g}" for figure in ("UWA", "AUROC") for share in SHARES]
    rows = [f"| recipe | data | setting | draws | {' | '.join(names)} |", "|---" * (len(names) + 4) + "|"]
    for (recipe, data, cell), shares in groups.items():
        parts = [recipe, data, cell, str(len(shares[0.0]))]
        for name in ("uwa", "auroc"):
            parts.append(f"{statistics.mean(line[name] for line in shares[0.0].values()):.1f}")
            for share in SHARES[1:]:
                own = shares.get(share, {})
                parts.append(_interval([line[name] - shares[0.0][seed][name] for seed, line in own.items()]))
        rows.append(f"| {' | '.join(parts)} |")
    return "\n".join(rows)


def gains() -> str:
    """Return a row for each recipe and setting of the study: with pixels less without, paired by draw."""
    lines: dict[tuple[str, str], dict[str, dict[int, dict[str, Any]]]] = {}
    for line in study.read(study.RECORD):
        lines.setdefault((line["data"], line["cell"]), {}).setdefault(line["arm"], {})[line["seed"]] = line
    rows = ["| recipe | data | setting | draws | UWA | gain | AUROC | gain |", "|---" * 8 + "|"]
    for recipe in ("default", "thorough"):
        for (data, cell), arms in sorted(lines.items(), key=study.place):
            own, bare = arms[recipe], arms[f"{recipe}{study.WITHOUT}"]
            parts = [recipe, data, cell, str(len(own))]
            for name in ("uwa", "auroc"):
                parts.append(f"{statistics.mean(line[name] for line in own.values()):.1f}")
                parts.append(_interval([line[name] - bare[seed][name] for seed, line in own.items()]))
            rows.append(f"| {' | '.join(parts)} |")
    return "\n".join(rows)


def main() -> None:
    """Compute the missing lines, if asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "summary", "gains"])
    parser.add_argument("--features", type=Path, default=Path(), help="the folder with the features")
    given = parser.parse_args()
    if given.what == "run":
        known = {name: study.Features(name, given.features) for name in ("isic", "tops")}
        done = [tuple(line[key] for key in ("recipe", "data", "cell", "seed", "share")) for line in study.read(RECORD)]
        for recipe in ("default", "thorough"):
            for data, cell, number in CELLS:
                for seed in range(FIRST, FIRST + number):
                    for share in SHARES:
                        if (recipe, data, cell, seed, share) not in done:
                            found = run_cell(data, cell, seed, recipe, share, known["isic" if data == "few" else data])
                            line = {"recipe": recipe, "data": data, "cell": cell, "seed": seed, "share": share, **found}
                            files.append_line(RECORD, json.dumps(line))
    print(gains() if given.what == "gains" else summary())


if __name__ == "__main__":
    main()
