"""How often do the 95 % intervals of out-of-fold decisions hold the truth: recall of every class, precision, accuracy?

    python studies/threshold_coverage.py                                    normal features, in a few minutes
    python studies/threshold_coverage.py --images cells.csv --sizes 600 12 --repeats 60

Both add to records/threshold_coverage.json. A trial is what ``lopsided fit --folds 5`` does with frozen features: five
regressions, their scores moved to one prior, calibration and the rule ``balanced`` of each fold settled on the scores
of the other folds, and a model of all images whose calibration and rule all scores settle. The truth is what this
model does to images that it has not seen: 20,000 drawn ones of each class, or those images of the table that the trial
left out. Few rare images set the threshold, so the recall of the frequent class varies with them, however many images
of it are counted. ``ours`` are the intervals of ``evaluate`` with folds, ``images alone`` those without.

``--images`` takes a table as ``lopsided fit`` reads it, or the name of a source, with two classes; the features are
those of the recipe quick. The truth of few images is noisy itself, which lowers the coverage that is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

import shared
from lopsided.data.sources import open_source, source_from_arrays
from lopsided.data.splits import fold_numbers
from lopsided.evaluation.calibration import HeldBack, at_prevalence, prior_of
from lopsided.evaluation.folds import settle_crossed, settle_scores
from lopsided.evaluation.metrics import Evaluation, evaluate
from lopsided.recipe import named_recipe
from lopsided.seeds import derive_seed
from lopsided.training.regression import fit_regression

RECORD = shared.RECORDS / "threshold_coverage.json"
CLASSES = ("frequent", "rare")
FIGURES = ("frequent recall", "rare recall", "rare precision", "uwa", "accuracy")
FOLDS, FRESH, DIM, STRENGTH = 5, 20_000, 20, 0.1
SETTINGS: dict[str, tuple[tuple[int, int], float]] = {
    # name: images of each class, distance of the class means
    "12 rare of 612": ((600, 12), 2.5),
    "12 rare of 612, easy": ((600, 12), 4.0),
    "30 rare of 630": ((600, 30), 2.5),
    "60 rare of 360": ((300, 60), 2.0),
    "115 rare of 1,228": ((1113, 115), 2.5),
}
Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
Score = Callable[[Floats], Floats]
Fit = Callable[[Floats, Codes], Score]


def regression(strength: float | None, importance: Floats | None, seed: int) -> Fit:
    """Return what fits a regression to features and labels, and returns what scores other features."""

    def fit(x: Floats, y: Codes) -> Score:
        found = fit_regression(x, y, 2, strength=strength, seed=seed, importance=importance)
        return lambda other: np.asarray(softmax(other @ found.weight.T + found.bias, axis=1))

    return fit


def trial(x: Floats, y: Codes, fit: Fit, seed: int) -> tuple[dict[str, Evaluation], Score]:
    """Return the evaluations of both kinds, and what decides for images by the model of all images."""
    source = source_from_arrays(np.zeros((len(y), 1, 1), dtype=np.uint8), y)
    folds = fold_numbers(source, how="random", folds=FOLDS, seed=seed)
    prior = prior_of(np.bincount(y))
    p = np.empty((len(y), 2))
    for fold in range(FOLDS):
        train, test = folds != fold, folds == fold
        p[test] = at_prevalence(fit(x[train], y[train])(x[test]), prior_of(np.bincount(y[train])), prior)
    held = HeldBack(p, y)
    q, decided = settle_crossed("balanced", "affine", CLASSES, prior, held, folds)
    change, decision = settle_scores("balanced", "affine", CLASSES, prior, held)
    score = fit(x, y)
    found = {
        kind: evaluate(y, q, decided, classes=CLASSES, bootstrap=1000, seed=seed, folds=numbers)
        for kind, numbers in (("ours", folds), ("images alone", None))
    }
    return found, lambda other: decision.decide(change(score(other)))


def truths(decided: Codes, y: Codes, shares: Floats) -> list[float]:
    """Return the figures of the model on new images, at the class shares of the trial."""
    frequent, rare = (float(np.mean(decided[y == c] == c)) for c in (0, 1))
    found, alarms = shares[1] * rare, shares[0] * (1 - frequent)
    return [frequent, rare, found / max(found + alarms, 1e-12), (frequent + rare) / 2, float(shares @ [frequent, rare])]


def limits(result: Evaluation) -> list[tuple[float, float]]:
    """Return the intervals of the figures."""
    frequent, rare = result.per_class
    figures = (frequent.recall, rare.recall, rare.precision, result.figures["uwa"], result.figures["accuracy"])
    return [(figure.low, figure.high) for figure in figures]


def measure(draw: Callable[[int], tuple[Floats, Codes, Floats, Codes, Fit]], repeats: int) -> dict[str, Any]:
    """Return coverage and mean width of both kinds of intervals for every figure."""
    rows: dict[str, list[Any]] = {"truth": [], "ours": [], "images alone": []}
    for seed in range(repeats):
        x, y, fresh, labels, fit = draw(seed)
        found, decide = trial(x, y, fit, seed)
        rows["truth"].append(truths(decide(fresh), labels, np.bincount(y) / len(y)))
        for kind, result in found.items():
            rows[kind].append(limits(result))
    truth = np.array(rows["truth"])
    table: dict[str, Any] = {"repeats": repeats}
    for place, figure in enumerate(FIGURES):
        cells = {"truth": float(truth[:, place].mean()), "deviation of the truth": float(truth[:, place].std())}
        for kind in ("ours", "images alone"):
            low, high = np.array(rows[kind])[:, place].T
            cells[f"{kind}, coverage"] = float(np.mean((low <= truth[:, place]) & (truth[:, place] <= high)))
            cells[f"{kind}, width"] = float(np.mean(high - low))
        table[figure] = {name: round(value, 4) for name, value in cells.items()}
        print(f"{figure:16}" + ", ".join(f"{name} {value:.3f}" for name, value in table[figure].items()), flush=True)
    return table


def simulated(name: str) -> Callable[[int], tuple[Floats, Codes, Floats, Codes, Fit]]:
    """Return what draws a trial of a setting, with its fresh images."""
    sizes, distance = SETTINGS[name]

    def features(labels: Codes, rng: np.random.Generator) -> Floats:
        x: Floats = rng.normal(size=(len(labels), DIM))
        x[:, 0] += distance * labels
        return x

    def draw(seed: int) -> tuple[Floats, Codes, Floats, Codes, Fit]:
        rng = np.random.default_rng(derive_seed(seed, "threshold-coverage", name))
        y, labels = (np.repeat(np.arange(2), counts) for counts in (sizes, (FRESH, FRESH)))
        return features(y, rng), y, features(labels, rng), labels, regression(STRENGTH, None, seed)

    return draw


def of_images(data: str, sizes: tuple[int, int]) -> Callable[[int], tuple[Floats, Codes, Floats, Codes, Fit]]:
    """Return what draws a trial from real images."""
    source = open_source(data, classes=shared.LESIONS if data == "isic2018" else None)
    encoder = named_recipe("quick").encoder
    model = shared.frozen_model(encoder.name, encoder.weights, None, source.classes, scaling=encoder.scaling)
    features = shared.features_of(source, *model).astype(np.float64)
    importance = shared.importance(encoder.name, features.shape[1])
    labels = (source.labels == np.bincount(source.labels).argmin()).astype(np.int64)

    def draw(seed: int) -> tuple[Floats, Codes, Floats, Codes, Fit]:
        rng = np.random.default_rng(seed)
        rows = [rng.permutation(np.flatnonzero(labels == c)) for c in (0, 1)]
        own = np.concatenate([part[:size] for part, size in zip(rows, sizes, strict=True)])
        rest = np.concatenate([part[size:] for part, size in zip(rows, sizes, strict=True)])
        return features[own], labels[own], features[rest], labels[rest], regression(None, importance, seed)

    return draw


def main() -> None:
    """Measure, print and add to the record."""
    parser = shared.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=200, help="data sets for each setting (default: %(default)s)")
    parser.add_argument("--images", help="table of two classes, or the name of a source")
    parser.add_argument("--sizes", type=int, nargs=2, default=(600, 12), help="frequent and rare images of a trial")
    parser.add_argument("--out", type=Path, default=RECORD, help="default: records/threshold_coverage.json")
    options = parser.parse_args()
    if options.images:
        sizes = (options.sizes[0], options.sizes[1])
        name = f"{Path(options.images).stem}: {sizes[1]} rare of {sum(sizes)} images"
        wanted = {name: of_images(options.images, sizes)}
    else:
        wanted = {name: simulated(name) for name in SETTINGS}
    for name, draw in wanted.items():
        print(f"\n{name}")
        table = measure(draw, options.repeats)
        record = shared.read_json(options.out)
        settings = record.get("settings", {}) | {name: table}
        shared.write_json(
            options.out, {"command": "python studies/threshold_coverage.py", "level": 0.95, "settings": settings}
        )


if __name__ == "__main__":
    main()
