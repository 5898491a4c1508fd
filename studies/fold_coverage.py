"""How often does an interval of 95 % hold the true difference of two methods that were compared over repeated folds?

    python studies/fold_coverage.py                    prints all settings, writes records/fold_coverage.json
    python studies/fold_coverage.py --only "30 rare"   only settings whose name has this text; adds to the record

The two methods are logistic regressions on Gaussian features, with the same weight for each class. In the settings
"equal", each method sees one half of the features, and both halves have the same distribution: the true difference is 0
by construction. In "half", one method sees all features. In "strength", the methods differ in the penalty. Their true
difference is the mean over all trials of the figures on 2,000 fresh images per class. In "grouped", three images share
a group, and folds do not divide groups.

A setting that the record holds with as many trials is not computed again. A trial draws the images and the folds, and
computes four intervals of the mean difference:

- naive: Student's t over the folds,
- corrected: the same with the variance of Nadeau and Bengio, which lopsided uses,
- images: Student's t over images, each with its mean difference over the repeats (UWA and recall only),
- bootstrap: 2.5 % and 97.5 % of the differences of 500 resamples of images (groups) within each class (UWA only).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax, stdtrit

import shared
from lopsided.evaluation.intervals import mean_interval
from lopsided.seeds import derive_seed

RECORD = shared.RECORDS / "fold_coverage.json"
FIGURES = ("uwa", "rare_recall", "auroc", "log_loss")
KINDS = ("naive", "corrected", "images", "bootstrap")
RESAMPLES = 500
FRESH = 2000
DIM = 20
Floats = NDArray[np.float64]
Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """Images of each class, the distance of the classes, the methods, the folds and the images per group."""

    sizes: tuple[int, ...]
    apart: float
    methods: str
    folds: int = 5
    repeats: int = 3
    group: int = 1


SETTINGS = {
    "equal, 300 and 30 rare, 5 folds": Setting((300, 30), 1.5, "equal", repeats=1),
    "equal, 300 and 30 rare, 5 folds x 3": Setting((300, 30), 1.5, "equal"),
    "strength, 300 and 30 rare, 5 folds x 3": Setting((300, 30), 1.5, "strength"),
    "half, 300 and 30 rare, 5 folds x 3": Setting((300, 30), 1.5, "half"),
    "equal, 200 and 12 rare, 5 folds x 3": Setting((200, 12), 2.0, "equal"),
    "strength, 200 and 12 rare, 5 folds x 3": Setting((200, 12), 2.0, "strength"),
    "equal, 1,113 and 115 rare, 5 folds x 3": Setting((1113, 115), 1.5, "equal"),
    "equal, 200, 100 and 20 rare, 5 folds x 3": Setting((200, 100, 20), 1.5, "equal"),
    "grouped, 300 and 36 rare, 5 folds x 3": Setting((300, 36), 1.5, "equal", group=3),
}


def methods(kind: str) -> tuple[tuple[slice, float], tuple[slice, float]]:
    """Return the features and the penalty of both methods."""
    first, second, every = slice(0, DIM // 2), slice(DIM // 2, DIM), slice(0, DIM)
    return {
        "equal": ((first, 1.0), (second, 1.0)),
        "half": ((every, 1.0), (first, 1.0)),
        "strength": ((every, 0.1), (every, 30.0)),
    }[kind]


def draw(sizes: tuple[int, ...], apart: float, group: int, rng: np.random.Generator) -> tuple[Floats, Codes, Codes]:
    """Draw features, labels and groups."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    groups = np.concatenate([10**6 * c + np.arange(size) // group for c, size in enumerate(sizes)])
    groups = np.unique(groups, return_inverse=True)[1]
    noise = rng.normal(size=(len(labels), DIM))
    if group > 1:
        noise = np.sqrt(0.3) * noise + np.sqrt(0.7) * rng.normal(size=(groups.max() + 1, DIM))[groups]
    centres = np.zeros((len(sizes), DIM))
    for c in range(1, len(sizes)):
        centres[c] = 1 if c == len(sizes) - 1 else np.where(np.arange(DIM) % 2, 1, -1)
    return noise + apart / np.sqrt(DIM / 2) * centres[labels], labels, groups


def deal(labels: Codes, groups: Codes, folds: int, rng: np.random.Generator) -> Codes:
    """Deal the groups of each class to the folds."""
    found = np.empty(len(labels), dtype=np.int64)
    for c in np.unique(labels):
        own, places = np.unique(groups[labels == c], return_inverse=True)
        order = (rng.permutation(len(own)) + rng.integers(folds)) % folds
        found[labels == c] = order[places]
    return found


def regression(x: Floats, labels: Codes, num_classes: int, penalty: float) -> Floats:
    """Fit one class against the others, all classes (two classes: the second) with equal weight, by Newton's steps."""
    extended = np.c_[x, np.ones(len(x))]
    ridge = np.diag([penalty] * x.shape[1] + [1e-6])
    found = []
    for c in range(num_classes) if num_classes > 2 else (1,):
        truth = (labels == c).astype(np.float64)
        weight = np.where(truth > 0, 0.5 / truth.mean(), 0.5 / (1 - truth.mean()))
        beta = np.zeros(extended.shape[1])
        for _ in range(7):
            p = 1 / (1 + np.exp(-extended @ beta))
            slope = extended.T @ (weight * (p - truth)) + ridge @ beta
            beta = beta - np.linalg.solve((extended * (weight * p * (1 - p))[:, None]).T @ extended + ridge, slope)
        found.append(beta)
    return np.array(found)


def probabilities(beta: Floats, x: Floats) -> Floats:
    """Return the probabilities of a regression."""
    logits = x @ beta[:, :-1].T + beta[:, -1]
    if len(beta) == 1:
        logits = np.c_[np.zeros(len(logits)), logits[:, 0]]
    return np.asarray(softmax(logits, axis=1))


def figures(labels: Codes, p: Floats, shares: Floats) -> Floats:
    """Return UWA, recall of the last class, AUROC, and the log loss at these class shares."""
    num_classes = p.shape[1]
    hits = p.argmax(axis=1) == labels
    own = -np.log(np.maximum(p[np.arange(len(p)), labels], 1e-12))
    recalls = [hits[labels == c].mean() for c in range(num_classes)]
    losses = [own[labels == c].mean() for c in range(num_classes)]
    areas = [shared.rank_auroc(p[:, c], labels == c) for c in range(1 if num_classes == 2 else 0, num_classes)]
    return np.array([np.mean(recalls), recalls[-1], np.mean(areas), np.dot(shares, losses)])


def by_images(d: Floats, labels: Codes, groups: Codes) -> list[tuple[float, float, float]]:
    """Return value, variance and degrees of freedom of UWA and of the last recall, over groups within classes."""
    parts = []
    num_classes = int(labels.max()) + 1
    for c in range(num_classes):
        own, places = d[labels == c], np.unique(groups[labels == c], return_inverse=True)[1]
        sums = np.bincount(places, own - own.mean())
        number = len(sums)
        parts.append((own.mean(), number / (number - 1) * (sums**2).sum() / len(own) ** 2, number - 1))
    value, variance = np.mean([p[0] for p in parts]), sum(p[1] for p in parts) / num_classes**2
    rest = sum((p[1] / num_classes**2) ** 2 / p[2] for p in parts)
    return [(float(value), float(variance), float(variance**2 / rest) if rest > 0 else 1.0), parts[-1]]


def by_bootstrap(d: Floats, labels: Codes, groups: Codes, rng: np.random.Generator) -> tuple[float, float]:
    """Return the limits of the bootstrap interval of UWA."""
    total = np.zeros(RESAMPLES)
    num_classes = int(labels.max()) + 1
    for c in range(num_classes):
        places = np.unique(groups[labels == c], return_inverse=True)[1]
        sums, sizes = np.bincount(places, d[labels == c]), np.bincount(places)
        picks = rng.integers(0, len(sums), (RESAMPLES, len(sums)))
        total += sums[picks].sum(axis=1) / sizes[picks].sum(axis=1) / num_classes
    low, high = np.quantile(total, [0.025, 0.975])
    return float(low), float(high)


def trial(
    setting: Setting, fresh: tuple[Floats, Codes], rng: np.random.Generator
) -> tuple[NDArray[Any], NDArray[Any], Floats]:
    """Return the limits of each kind and figure, (kinds, figures, 2), the estimates, and the true difference."""
    x, labels, groups = draw(setting.sizes, setting.apart, setting.group, rng)
    num_classes, folds, repeats = len(setting.sizes), setting.folds, setting.repeats
    shares = np.array(setting.sizes) / sum(setting.sizes)
    gaps, truths, hits = [], [], np.zeros((2, len(labels)))
    for _ in range(repeats):
        fold_of = deal(labels, groups, folds, rng)
        for fold in range(folds):
            test, found, true = fold_of == fold, [], []
            for method, (columns, penalty) in enumerate(methods(setting.methods)):
                beta = regression(x[~test][:, columns], labels[~test], num_classes, penalty)
                p = probabilities(beta, x[test][:, columns])
                found.append(figures(labels[test], p, shares))
                hits[method, test] += (p.argmax(axis=1) == labels[test]) / repeats
                if setting.methods != "equal":
                    true.append(figures(fresh[1], probabilities(beta, fresh[0][:, columns]), shares))
            gaps.append(found[0] - found[1])
            truths.append(true[0] - true[1] if true else np.zeros(len(FIGURES)))
    table = np.array(gaps)
    limits = np.full((len(KINDS), len(FIGURES), 2), np.nan)
    for i in range(len(FIGURES)):
        for kind, overlap in enumerate((0.0, 1 / (folds - 1))):
            figure = mean_interval(table[:, i], overlap=overlap)
            limits[kind, i] = (figure.low, figure.high) if np.isfinite(figure.low) else (figure.value, figure.value)
    d = hits[0] - hits[1]
    for i, (value, variance, freedom) in enumerate(by_images(d, labels, groups)):
        half = stdtrit(max(freedom, 1.0), 0.975) * np.sqrt(variance)
        limits[2, i] = value - half, value + half
    limits[3, 0] = by_bootstrap(d, labels, groups, rng)
    return limits, table.mean(axis=0), np.mean(truths, axis=0)


def simulate(name: str, trials: int) -> dict[str, Any]:
    """Return coverage and mean width of each kind of interval for every figure."""
    setting = SETTINGS[name]
    rng = np.random.default_rng(derive_seed(0, "fold-coverage", name))
    fresh = draw((FRESH,) * len(setting.sizes), setting.apart, setting.group, rng)[:2]
    found = [trial(setting, fresh, rng) for _ in range(trials)]
    limits = np.array([each[0] for each in found])
    truth = np.mean([each[2] for each in found], axis=0)
    hit = (limits[..., 0] <= truth) & (truth <= limits[..., 1])
    width = (limits[..., 1] - limits[..., 0]).mean(axis=0)
    rows: dict[str, Any] = {"trials": trials}
    for i, figure in enumerate(FIGURES):
        rows[figure] = {"truth": round(float(truth[i]), 4)}
        for k, kind in enumerate(KINDS):
            if np.isfinite(width[k, i]):
                rows[figure][kind] = round(float(hit[:, k, i].mean()), 4)
                rows[figure][f"{kind}_width"] = round(float(width[k, i]), 4)
    return rows


def main() -> None:
    """Simulate the settings, print them, and write the record."""
    parser = shared.parser(__doc__)
    parser.add_argument("--trials", type=int, default=200, help="data sets for each setting (default: %(default)s)")
    parser.add_argument("--only", default="", help="text that the name of a setting must contain")
    parser.add_argument("--out", type=Path, default=RECORD, help="default: records/fold_coverage.json")
    options = parser.parse_args()
    there = shared.read_json(options.out).get("settings", {})
    for name in SETTINGS:
        if options.only not in name or there.get(name, {"trials": 0})["trials"] >= options.trials:
            continue
        there[name] = simulate(name, options.trials)
        print(f"\n{name}\n{'':14}" + "".join(f"{kind:>11}{'width':>8}" for kind in KINDS))
        for figure in FIGURES:
            row = there[name][figure]
            cells = [f"{row[kind]:11.3f}{row[f'{kind}_width']:8.3f}" for kind in KINDS if kind in row]
            print(f"{figure:14}{''.join(cells)}", flush=True)
        settings = {each: there[each] for each in SETTINGS if each in there}
        record = {"command": "python studies/fold_coverage.py", "level": 0.95, "settings": settings}
        shared.write_json(options.out, record)


if __name__ == "__main__":
    main()
