"""How often does an interval of 95 % hold the truth when a class has few test images? Ours beside the bootstrap's.

    python benchmarks/coverage.py            prints a table and writes docs/records/coverage.json (about seven minutes)

A setting is a list of test images per class and a model: the logit of the true class is drawn from N(skill, 1), the
others from N(0, 1), and all are divided by a temperature, so that the probabilities are too sure of themselves or not.
The truth of a figure is its value on 200,000 images in the same proportions. `evaluate` gives our intervals; 2.5 % and
97.5 % of the figures of 200 resamples, stratified by class, are the bootstrap's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from lopsided.evaluation.metrics import confusion_figures, evaluate
from lopsided.seeds import derive_seed

RECORD = Path(__file__).parents[1] / "docs" / "records" / "coverage.json"
SETTINGS: dict[str, tuple[list[int], list[float], float]] = {
    # name: images of each class in the test set, skill for each class, temperature
    "98:2 of 300, minority hard": ([294, 6], [2.5, 0.0], 1.0),
    "98:2 of 300, minority easy": ([294, 6], [2.5, 3.0], 1.0),
    "95:5 of 300, minority hard": ([285, 15], [2.5, 0.5], 1.0),
    "90:10 of 300": ([270, 30], [2.0, 1.0], 0.5),
    "50:50 of 300": ([150, 150], [1.5, 1.5], 1.0),
    "90:10 of 368 (ISIC)": ([334, 34], [3.0, 1.0], 0.5),
    "three classes, 100, 50 and 3": ([100, 50, 3], [2.5, 2.0, 1.5], 1.0),
    "ten classes of 6": ([6] * 10, [2.0] * 10, 1.0),
    "ten classes, 100 to 5": ([100, 72, 52, 37, 26, 19, 14, 10, 7, 5], [3.0] * 10, 1.0),
}
FIGURES = ("accuracy", "uwa", "macro_f1", "g_mean", "mcc", "auroc", "average_precision", "brier", "log_loss")
ALL = (*FIGURES, "calibration_error")
RESAMPLES = 200
Array = NDArray[np.float64]
Labels = NDArray[np.int64]


def draw(sizes: list[int], skills: list[float], temperature: float, rng: np.random.Generator) -> tuple[Labels, Array]:
    """Draw labels and the model's probabilities."""
    y = np.repeat(np.arange(len(sizes)), sizes)
    logits = rng.normal(size=(len(y), len(sizes)))
    logits[np.arange(len(y)), y] += np.array(skills)[y]
    p = np.exp(logits / temperature)
    return y, p / p.sum(axis=1, keepdims=True)


def point(y: Labels, p: Array) -> list[float]:
    """Compute all figures quickly; tests hold `evaluate` to scikit-learn, and `check` holds this to `evaluate`."""
    num, num_classes = p.shape
    confusion = np.bincount(y * num_classes + p.argmax(axis=1), minlength=num_classes**2).reshape(num_classes, -1)
    counts = confusion_figures(confusion)
    areas, precisions = [], []
    for c in range(num_classes):
        positive = y == c
        size = positive.sum()
        areas.append((rankdata(p[:, c])[positive].sum() - size * (size + 1) / 2) / (size * (num - size)))
        values, inverse, ties = np.unique(-p[:, c], return_inverse=True, return_counts=True)
        hits = np.bincount(inverse[positive], minlength=len(values))
        precisions.append(np.sum(hits * np.cumsum(hits) / np.cumsum(ties)) / size)
    truth = p[np.arange(num), y]
    brier = np.mean(np.sum(p**2, axis=1) - 2 * truth + 1) / 2
    confidence = p.max(axis=1)
    bins = np.clip(np.ceil(confidence * 15).astype(int) - 1, 0, 14)
    error = np.abs(np.bincount(bins, weights=confidence - (p.argmax(axis=1) == y))).sum() / num
    return [*counts.values(), np.mean(areas), np.mean(precisions), brier, -np.mean(np.log(truth)), error]


def check() -> None:
    """Refuse to simulate with figures that are not the library's."""
    y, p = draw([30, 9, 4], [1.0, 1.0, 1.0], 1.0, np.random.default_rng(0))
    theirs = evaluate(y, p, classes=[0, 1, 2], bootstrap=100).figures
    np.testing.assert_allclose(point(y, p), [theirs[name].value for name in ALL], rtol=1e-9)


def simulate(name: str, repeats: int) -> dict[str, dict[str, float]]:
    """Return coverage and mean width of both intervals for every figure."""
    sizes, skills, temperature = SETTINGS[name]
    rng = np.random.default_rng(derive_seed(0, "coverage", name))
    times = 200_000 // sum(sizes)
    true = np.array(point(*draw([size * times for size in sizes], skills, temperature, rng)))
    limits = np.empty((2, repeats, 2, len(ALL)))
    for i in range(repeats):
        y, p = draw(sizes, skills, temperature, rng)
        ours = evaluate(y, p, classes=list(range(len(sizes))), bootstrap=1000, seed=i).figures
        limits[0, i] = [[ours[f].low for f in ALL], [ours[f].high for f in ALL]]
        starts = np.cumsum([0, *sizes[:-1]])
        picks = [
            np.concatenate([start + rng.integers(0, n, n) for start, n in zip(starts, sizes, strict=True)])
            for _ in range(RESAMPLES)
        ]
        limits[1, i] = np.quantile([point(y[pick], p[pick]) for pick in picks], [0.025, 0.975], axis=0)
    hit = (limits[:, :, 0] <= true) & (true <= limits[:, :, 1])
    width = (limits[:, :, 1] - limits[:, :, 0]).mean(axis=1)
    return {
        figure: {
            "truth": round(float(true[f]), 4),
            "coverage": round(float(hit[0, :, f].mean()), 4),
            "width": round(float(width[0, f]), 4),
            "bootstrap_coverage": round(float(hit[1, :, f].mean()), 4),
            "bootstrap_width": round(float(width[1, f]), 4),
        }
        for f, figure in enumerate(ALL)
    }


def main() -> None:
    """Simulate all settings, print them, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200, help="test sets for each setting (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=RECORD, help="record to write (default: docs/records/coverage.json)"
    )
    options = parser.parse_args()
    check()
    results = {}
    for name in SETTINGS:
        results[name] = simulate(name, options.repeats)
        print(f"\n{name}\n{'':20}{'truth':>8}{'ours':>8}{'width':>8}{'boot':>8}{'width':>8}")
        for figure, row in results[name].items():
            print(f"{figure:20}" + "".join(f"{value:8.3f}" for value in row.values()), flush=True)
    record = {
        "command": f"python benchmarks/coverage.py --repeats {options.repeats}",
        "level": 0.95,
        "settings": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
