"""Do prediction sets hold what they say? How often is each class in its set, with 5 to 200 rare images?

    python studies/sets.py simulated           200 simulated data sets per row; adds to studies/records/sets.json
    python studies/sets.py real PREDICTIONS    out-of-fold predictions of a run (predictions.csv), images held back
    python studies/sets.py                     prints the tables of the record

Simulated: scores of two classes are normal, 1.5 deviations apart on either side; images of one group share half of
their variance; the model that scores calibration images (those of a fold) and the one that scores new images (that of
all images) differ by noise, as cross-conformal prediction must endure. Real: half of the groups of a run with folds,
drawn 200 times, set the thresholds, and the other half measures them; only so many rare images are kept as the row
says.

Coverage is the mean over data sets of the share of images of a class whose set holds the class. It should be at least
the level. The interval is that of the mean. ``one`` is the share of sets with one class.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

import shared
from lopsided.evaluation.calibration import HeldBack
from lopsided.evaluation.sets import fit_sets, members

RECORD = shared.RECORDS / "sets.json"
LEVELS, RARE, REPEATS = (0.9, 0.95), (5, 10, 20, 50, 100, 200), 200
COMMON, NEW = 400, 2_000


def simulated(generator: np.random.Generator, rare: int, common: int, per_group: int, noise: float) -> HeldBack:
    """Return scored images of two classes, ``per_group`` images in a group."""
    labels = np.repeat([1, 0], [rare, common])
    groups = np.concatenate([np.arange(rare) // per_group, rare + np.arange(common) // per_group])
    shared_part = generator.normal(size=groups.max() + 1)[groups]
    share = 0.5 if per_group > 1 else 0.0
    odds = np.sqrt(share) * shared_part + np.sqrt(1 - share) * generator.normal(size=len(labels))
    odds = odds + 1.5 * (2 * labels - 1) + noise * generator.normal(size=len(labels))
    p = 1 / (1 + np.exp(-odds))
    return HeldBack(np.stack([1 - p, p], axis=1), labels, groups.astype(str) if per_group > 1 else None)


def measured(pairs: list[tuple[HeldBack, HeldBack]], level: float) -> dict[str, Any]:
    """Return the coverage of both classes over pairs of calibration and new images, and the share of single sets."""
    covered: dict[str, list[float]] = {"common": [], "rare": []}
    single, reached = [], []
    for known, new in pairs:
        fitted = fit_sets(known, level)
        sets = members(new.probabilities, fitted.thresholds)
        for c, name in enumerate(covered):
            covered[name].append(float(sets[new.labels == c, c].mean()))
        single.append(float((sets.sum(axis=1) == 1).mean()))
        reached.append(fitted.reached[1] >= level)
    found: dict[str, Any] = {"one": float(np.mean(single)), "enough": float(np.mean(reached))}
    for name, shares in covered.items():
        error = 1.96 * float(np.std(shares, ddof=1)) / len(shares) ** 0.5
        found[name] = [float(np.mean(shares)), float(np.mean(shares)) - error, float(np.mean(shares)) + error]
    return found


def simulate() -> list[dict[str, Any]]:
    """Measure simulated data sets."""
    rows = []
    for per_group in (1, 4):
        for rare in RARE:
            generator = np.random.default_rng([per_group, rare])
            pairs = []
            for _ in range(REPEATS):
                known = simulated(generator, rare, COMMON, per_group, 0.3)
                pairs.append((known, simulated(generator, NEW, NEW, per_group, 0.2)))
            for level in LEVELS:
                rows.append({"images": rare, "per_group": per_group, "level": level, **measured(pairs, level)})
                print(rows[-1], flush=True)
    return rows


def hold_back(path: Path) -> list[dict[str, Any]]:
    """Measure the out-of-fold predictions of a run: one half of the groups sets the thresholds, the other measures."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["split"] == "test"]
    names = [name.removeprefix("p:") for name in lines[0] if name.startswith("p:")]
    counts = {name: sum(line["label"] == name for line in lines) for name in names}
    rare = min(counts, key=lambda name: counts[name])
    p = np.array([float(line[f"p:{rare}"]) for line in lines])
    labels = np.array([int(line["label"] == rare) for line in lines])
    groups = np.unique([line["group"] or line["name"] for line in lines], return_inverse=True)[1]
    every = HeldBack(np.stack([1 - p, p], axis=1), labels, groups.astype(str))
    rows = []
    for number in (number for number in RARE if number <= counts[rare] // 2):
        generator, pairs = np.random.default_rng(number), []
        while len(pairs) < REPEATS:
            side = generator.random(groups.max() + 1) < 0.5
            known, new = np.flatnonzero(side[groups]), np.flatnonzero(~side[groups])
            own = generator.permutation(known[labels[known] == 1])[:number]
            known = np.concatenate([known[labels[known] == 0], own])
            if len(own) == number and labels[new].any():
                pairs.append((every.rows(known), every.rows(new)))
        for level in LEVELS:
            rows.append({"images": number, "level": level, **measured(pairs, level)})
            print(rows[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> None:
    """Print rows as a table."""
    print("\n| rare images | per group | level | rare class in its set | common class | sets of one class |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        told = "" if row["enough"] == 1 else " (in every set: too few)" if row["enough"] == 0 else " (often too few)"
        shares = [
            f"{100 * row[name][0]:.1f} [{100 * row[name][1]:.1f}, {100 * row[name][2]:.1f}]"
            for name in ("rare", "common")
        ]
        head = f"| {row['images']} | {row.get('per_group', 'lesions')} | {row['level']:g}"
        print(f"{head} | {shares[0]}{told} | {shares[1]} | {row['one']:.0%} |")


def main() -> None:
    """Measure what is asked for, and print the tables."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", nargs="?", choices=("simulated", "real"))
    parser.add_argument("predictions", nargs="?", type=Path)
    asked = parser.parse_args()
    record = shared.read_json(RECORD)
    if asked.what is not None:
        record[asked.what] = simulate() if asked.what == "simulated" else hold_back(asked.predictions)
        shared.write_json(RECORD, record)
    for rows in record.values():
        table(rows)


if __name__ == "__main__":
    main()
