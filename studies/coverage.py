"""How often does an interval of 95 % hold the truth when a class has few test images? Ours beside the bootstrap's.

    python studies/coverage.py            prints a table and writes records/coverage.json (about seven minutes)
    python studies/coverage.py --folds    the same for out-of-fold figures, in studies/records/coverage_folds.json

A setting is a list of test images per class and a model: the logit of the true class is drawn from N(skill, 1), the
others from N(0, 1), and all are divided by a temperature, so that the probabilities are too sure of themselves or not.
The truth of a figure is its value on 200,000 images in the same proportions. `evaluate` gives our intervals; 2.5 % and
97.5 % of the figures of 200 resamples, stratified by class, are the bootstrap's.

With `--folds`, a setting is a data set: images in groups, with features that are normal around the mean of their class,
and a share of their variance that the images of a group have in common. Five folds by group, as in `fit --folds 5`,
give a logistic regression for each image that was not trained on it, and out-of-fold figures. The truth is that of the
model of all images, which is the result of a run; for normal features it is known exactly. Ours is beside the cluster
bootstrap, which draws whole groups within each class, and beside the same intervals without knowledge of the groups.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression

import shared
from lopsided.data.sources import source_from_arrays
from lopsided.data.splits import fold_numbers
from lopsided.evaluation.metrics import confusion_figures, evaluate
from lopsided.seeds import derive_seed

RECORD = shared.RECORDS / "coverage.json"
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
FOLD_RECORD = RECORD.with_name("coverage_folds.json")
FOLD_SETTINGS: dict[str, tuple[list[int], float, float]] = {
    # name: images of each class, share of the variance within groups, distance of the class means
    "115 rare of 515, groups of 1 to 4, alike": ([400, 115], 0.9, 2.0),
    "115 rare of 515, groups of 1 to 4, half alike": ([400, 115], 0.5, 2.0),
    "115 rare of 515, no groups": ([400, 115], 0.0, 2.0),
    "30 rare of 330, groups of 1 to 4, alike": ([300, 30], 0.9, 3.0),
    "30 rare of 330, no groups": ([300, 30], 0.0, 3.0),
    "115 rare of 515, easy, groups of 1 to 4, alike": ([400, 115], 0.9, 4.0),
}
DIMENSIONS = 10
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
        areas.append(shared.rank_auroc(p[:, c], positive))
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


def draw_groups(
    sizes: list[int], share: float, distance: float, rng: np.random.Generator
) -> tuple[Labels, Labels, Array]:
    """Draw labels, groups of one class each, and features."""
    labels, groups = [], []
    for label, size in enumerate(sizes):
        left = size
        while left:
            number = 1 if share == 0 else min(left, int(rng.integers(1, 5)))
            labels += [label] * number
            groups += [groups[-1] + 1 if groups else 0] * number
            left -= number
    y, g = np.array(labels), np.array(groups)
    common = rng.normal(size=(g.max() + 1, DIMENSIONS))[g]
    x = np.sqrt(share) * common + np.sqrt(1 - share) * rng.normal(size=(len(y), DIMENSIONS))
    x[:, 0] += distance * y
    return y, g, x


def fitted(x: Array, y: Labels) -> LogisticRegression:
    """Fit the classifier of a fold."""
    return LogisticRegression(C=0.1, max_iter=500).fit(x, y)


def true_figures(model: LogisticRegression, share_of_rare: float, distance: float) -> tuple[float, float]:
    """Return UWA by the rule balanced, and AUROC, of a linear model on normal features: exactly."""
    w, b = model.coef_[0], float(model.intercept_[0])
    spread = float(np.linalg.norm(w))
    cut = np.log(share_of_rare / (1 - share_of_rare)) - b  # w x >= cut is decided for the rare class.
    rare = norm.sf((cut - w[0] * distance) / spread)
    common = norm.cdf(cut / spread)
    return float(rare + common) / 2, float(norm.cdf(w[0] * distance / (spread * np.sqrt(2))))


def simulate_folds(name: str, repeats: int) -> dict[str, dict[str, float]]:
    """Return coverage and mean width of each interval of the out-of-fold UWA and AUROC."""
    sizes, share, distance = FOLD_SETTINGS[name]
    rng = np.random.default_rng(derive_seed(0, "coverage", "folds", name))
    kinds = ("ours", "without groups", "cluster bootstrap")
    hits = {(kind, figure): 0 for kind in kinds for figure in ("uwa", "auroc")}
    widths = dict.fromkeys(hits, 0.0)
    truths, bias = np.zeros(2), np.zeros(2)
    for trial in range(repeats):
        y, g, x = draw_groups(sizes, share, distance, rng)
        source = source_from_arrays(np.zeros((len(y), 1, 1), dtype=np.uint8), y, groups=g)
        numbers = fold_numbers(source, how="group", folds=5, seed=trial)
        p = np.empty((len(y), 2))
        decided = np.empty_like(y)
        for fold in range(5):
            here, rest = numbers == fold, numbers != fold
            p[here] = fitted(x[rest], y[rest]).predict_proba(x[here])
            decided[here] = (p[here] / np.bincount(y[rest])).argmax(axis=1)
        rare = y.mean()
        truth = true_figures(fitted(x, y), rare, distance)
        ours = evaluate(y, p, decided, classes=[0, 1], bootstrap=100, groups=g, folds=numbers).figures
        # Neither groups nor folds. Only areas are means over folds, because scores of models do not rank together.
        plain = evaluate(y, y_pred=decided, classes=[0, 1], bootstrap=100).figures
        plain |= {"auroc": evaluate(y, p, decided, classes=[0, 1], bootstrap=100, folds=numbers).figures["auroc"]}
        limits = {
            (kind, figure): (found[figure].low, found[figure].high)
            for kind, found in (("ours", ours), ("without groups", plain))
            for figure in ("uwa", "auroc")
        }
        low, high = np.quantile(resampled(y, g, p, decided, rng), [0.025, 0.975], axis=0)
        for place, figure in enumerate(("uwa", "auroc")):
            limits["cluster bootstrap", figure] = (low[place], high[place])
            truths[place] += truth[place]
            bias[place] += ours[figure].value - truth[place]
            for kind in kinds:
                a, b = limits[kind, figure]
                hits[kind, figure] += a <= truth[place] <= b
                widths[kind, figure] += b - a
    return {
        figure: {
            "truth": round(truths[place] / repeats, 4),
            "bias": round(bias[place] / repeats, 4),
            **{f"{kind}, coverage": round(hits[kind, figure] / repeats, 4) for kind in kinds},
            **{f"{kind}, width": round(widths[kind, figure] / repeats, 4) for kind in kinds},
        }
        for place, figure in enumerate(("uwa", "auroc"))
    }


def resampled(y: Labels, g: Labels, p: Array, decided: Labels, rng: np.random.Generator) -> Array:
    """Return UWA and AUROC of each resample, (RESAMPLES, 2): whole groups, drawn with replacement within each class."""
    _, first = np.unique(g, return_index=True)
    counts = np.zeros((RESAMPLES, len(first)))
    for label in (0, 1):
        own = np.flatnonzero(y[first] == label)
        counts[:, own] = rng.multinomial(len(own), np.full(len(own), 1 / len(own)), RESAMPLES)
    order = np.argsort(p[:, 1], kind="stable")
    y, hit, weights = y[order], (decided == y)[order], counts[:, g[order]]
    rare, common = weights * (y == 1), weights * (y == 0)
    uwa = ((rare @ hit) / rare.sum(axis=1) + (common @ hit) / common.sum(axis=1)) / 2
    below = np.cumsum(common, axis=1)  # Scores of a regression do not tie.
    auroc = (rare * below).sum(axis=1) / (rare.sum(axis=1) * common.sum(axis=1))
    return np.stack([uwa, auroc], axis=1)


def main_folds(repeats: int, out: Path) -> None:
    """Simulate the settings of folds that the record lacks, print them, and write the record after each."""
    command = f"python studies/coverage.py --folds --repeats {repeats}"
    record = shared.read_json(out)
    results = record.get("settings", {}) if record.get("command") == command else {}
    for name in FOLD_SETTINGS:
        results[name] = results.get(name) or simulate_folds(name, repeats)
        print(f"\n{name}")
        for figure, row in results[name].items():
            print(f"{figure:8}" + ", ".join(f"{what} {value:.3f}" for what, value in row.items()), flush=True)
        shared.write_json(out, {"command": command, "level": 0.95, "settings": results})


def main() -> None:
    """Simulate all settings, print them, and write the record."""
    parser = shared.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=200, help="test sets for each setting (default: %(default)s)")
    parser.add_argument("--folds", action="store_true", help="out-of-fold figures instead of those of a test split")
    parser.add_argument("--out", type=Path, help="record to write (default: in records/)")
    options = parser.parse_args()
    if options.folds:
        main_folds(options.repeats, options.out or FOLD_RECORD)
        return
    check()
    results = {}
    for name in SETTINGS:
        results[name] = simulate(name, options.repeats)
        print(f"\n{name}\n{'':20}{'truth':>8}{'ours':>8}{'width':>8}{'boot':>8}{'width':>8}")
        for figure, row in results[name].items():
            print(f"{figure:20}" + "".join(f"{value:8.3f}" for value in row.values()), flush=True)
    command = f"python studies/coverage.py --repeats {options.repeats}"
    shared.write_json(options.out or RECORD, {"command": command, "level": 0.95, "settings": results})


if __name__ == "__main__":
    main()
