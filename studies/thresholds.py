"""What does a decision rule lose if it is fitted to few rare images? A simulation with known posteriors.

Run as ``python studies/thresholds.py --record studies/records/thresholds.json``. Scores of two classes are normal with
unit variance, 2.1 apart, so that the best UWA is 85.3 %. The probabilities of the model are the posteriors at 90:10,
distorted in three ways: not at all, too sure (logits times 2), and shifted (logits plus 1). The rules are fitted to
validation images with 5, 10, 20, 30 or 100 rare ones, nine times as many others. "loses" is the best UWA less the UWA
of the fitted rule on new images; "flatters" is the UWA on the validation images less the UWA on new images. Both
are in points. ``tuned`` is tried with several widths of its penalty.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

import shared
from lopsided.evaluation import decision
from lopsided.evaluation.calibration import Calibration, HeldBack, fit_calibration
from lopsided.evaluation.decision import resolve

APART, SHARE = 2.1, 0.1
RARE = (5, 10, 20, 30, 100)
DISTORTIONS = {"calibrated": (1.0, 0.0), "too sure": (2.0, 0.0), "shifted": (1.0, 1.0)}
WIDTHS = tuple(itertools.product((0.25, 0.5, 1.0), (0.25, 0.5, 1.0, 2.0)))
PRIOR = (1 - SHARE, SHARE)
WIDTHS_OF_THE_PACKAGE = (decision.SCALE_SPREAD, decision.OFFSET_SPREAD)


def main() -> None:
    """Simulate, print and record."""
    parser = shared.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--record", type=Path, default=None)
    given = parser.parse_args()
    rows = [
        row
        for (name, distortion), rare in itertools.product(DISTORTIONS.items(), RARE)
        for row in simulate(name, *distortion, rare, given.repeats)
    ]
    means: dict[str, float] = {}
    for row in rows:
        print("{distortion:<11} {rare:>4} {rule:<20} loses {loses:5.2f}  flatters {flatters:5.2f}".format(**row))
        means[row["rule"]] = means.get(row["rule"], 0.0) + row["loses"] / (len(DISTORTIONS) * len(RARE))
    for rule, mean in sorted(means.items(), key=lambda item: item[1]):
        print(f"{rule:<20} loses {mean:.3f} on average")
    print(table(rows))
    if given.record is not None:
        shared.write_json(given.record, {"repeats": given.repeats, "rows": rows, "mean_loss": means})


def table(rows: list[dict[str, Any]]) -> str:
    """Return the mean loss over the distortions as a table of Markdown."""
    chosen = f"tuned {WIDTHS_OF_THE_PACKAGE[0]:g} {WIDTHS_OF_THE_PACKAGE[1]:g}"
    shown = {"plain": "`plain`", "best threshold": "highest validation balanced accuracy", "balanced": "`balanced`",
             "balanced, calibrated": "`balanced`, calibrated", chosen: "`tuned`"}  # fmt: skip
    lines = []
    for rule, words in shown.items():
        means = [np.mean([r["loses"] for r in rows if (r["rule"], r["rare"]) == (rule, rare)]) for rare in RARE]
        lines.append((words, *(f"{mean:.1f}" for mean in means)))
    return shared.table(f"rare validation images | {' | '.join(map(str, RARE))}", lines)


def simulate(name: str, scale: float, shift: float, rare: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row per rule with the mean over the repeats."""
    rng = np.random.default_rng(0)
    lost: dict[str, list[float]] = {}
    flattered: dict[str, list[float]] = {}
    best = uwa_of_cut(APART / 2)
    for _ in range(repeats):
        labels = np.repeat([0, 1], [9 * rare, rare])
        x = rng.normal(size=10 * rare) + APART * labels
        p = probabilities(x, scale, shift)
        held = HeldBack(p, labels)
        cuts = {"best threshold": highest_uwa(x, labels)}
        cuts |= {rule: cut_of(rule, held, scale, shift) for rule in ("plain", "balanced")}
        cuts["balanced, calibrated"] = cut_of("balanced", held, scale, shift, fit_calibration(held, PRIOR))
        for a, b in WIDTHS:
            decision.SCALE_SPREAD, decision.OFFSET_SPREAD = a, b
            cuts[f"tuned {a:g} {b:g}"] = cut_of("tuned", held, scale, shift)
        for rule, cut in cuts.items():
            uwa = uwa_of_cut(cut)
            own = (np.mean(x[labels == 0] < cut) + np.mean(x[labels == 1] >= cut)) / 2
            lost.setdefault(rule, []).append(100 * (best - uwa))
            flattered.setdefault(rule, []).append(100 * (own - uwa))
    return [
        {
            "distortion": name,
            "rare": rare,
            "rule": rule,
            "loses": round(float(np.mean(values)), 3),
            "flatters": round(float(np.mean(flattered[rule])), 3),
        }
        for rule, values in lost.items()
    ]


def probabilities(x: np.ndarray, scale: float, shift: float) -> np.ndarray:
    """Return the distorted posteriors of scores, (n, 2)."""
    logit = APART * x - APART**2 / 2 + np.log(SHARE / (1 - SHARE))
    rare = 1 / (1 + np.exp(-(scale * logit + shift)))
    return np.stack([1 - rare, rare], axis=1)


def cut_of(rule: str, held: HeldBack, scale: float, shift: float, change: Calibration | None = None) -> float:
    """Return the score from which on a rule decides for the rare class. All rules are monotonic in the score."""
    found = resolve(rule, ("common", "rare"), PRIOR, held)
    grid = np.linspace(-8, 10, 3601)
    p = probabilities(grid, scale, shift)
    return float(grid[np.argmax(found.decide(p if change is None else change(p)) == 1)])


def highest_uwa(x: np.ndarray, labels: np.ndarray) -> float:
    """Return the threshold with the highest UWA on these images, in the middle of the gap."""
    order = np.argsort(x)
    values, rare = x[order], labels[order]
    below = np.concatenate([[0], np.cumsum(rare == 0)]) / np.sum(rare == 0)
    above = 1 - np.concatenate([[0], np.cumsum(rare == 1)]) / np.sum(rare == 1)
    place = int(np.argmax(below + above))
    left = values[place - 1] if place else values[0] - 1
    right = values[place] if place < len(values) else values[-1] + 1
    return float((left + right) / 2)


def uwa_of_cut(cut: float) -> float:
    """Return the UWA on new images of deciding for the rare class from a score on."""
    return float((norm.cdf(cut) + norm.sf(cut - APART)) / 2)


if __name__ == "__main__":
    main()
