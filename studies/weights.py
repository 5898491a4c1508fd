"""Can the training images choose how much each block of features weighs?

    python studies/weights.py run DATA --features FOLDER    # the missing lines of studies/records/weights.jsonl
    python studies/weights.py table                         # every way against the fixed weights
    python studies/weights.py chosen                        # the weights that they choose, as factors

DATA is one of ``isic``, ``few`` and ``tops``, and the features are those of ``studies/layers.py features``. The
importance of the columns is that of the recipe times a factor for each ``block`` (the final layer, each stage, the
regions of each stage, the colours) or for each ``kind`` (final layer, stages, regions, colours). Each fold chooses the
factors on its own training images, with at most 300 of a class. ``--head recipe`` is the classifier of the recipes;
``--head ridge`` is one ridge regression with classes that count alike and no further calibration, which takes a second.

``evidence`` maximises the marginal likelihood of a Gaussian process on the indicators of the classes, with the sum of
the kernels of the blocks, and noise with which classes count alike. ``tempered`` counts this evidence as that of fewer
images, as many as count if classes count alike: 39 of 310 with 10 rare. ``folds`` minimises the squared
error of the images that ten inner folds leave out, which is known in closed form. The logarithm of each factor has a
normal prior around 0 (inertia), whose width follows the name. ``presets`` takes the one of six sets of factors with the
lowest such error, and the fixed weights unless another one has less than so many times their error. ``select`` keeps
columns as Head2Toe does: those with the largest weights in a linear layer with a group lasso over columns. Each inner
fold selects for itself, and the share of columns with the lowest error is taken, or all, by the same rule.

Ways were compared on repeats from 100 on, which the tables of the other studies do not have.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.linalg import cho_factor, cho_solve
from scipy.linalg.lapack import dpotri
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

import layers
import shared
import study
from lopsided.evaluation.intervals import mean_interval
from lopsided.models.blocks.block import Layout
from lopsided.training.averaged import fit_averaged
from lopsided.training.regression import balanced_log_loss, inner_folds, rarest, standardisation
from shared import Floats

RECORD = shared.RECORDS / "weights.jsonl"
FIXED = "fixed"
WAYS = (
    FIXED, "evidence, block, 1", "tempered, block, 1", "evidence, kind, 1", "folds, block, 1", "folds, kind, 1",
    "folds, kind, 0.5", "presets, kind, 0.98", "select, block, 0.98",
)  # fmt: skip
PRESETS = ({}, {"pixels": 3}, {"pixels": 0.3}, {"final": 3}, {"final": 0.3}, {"stages": 3, "regions": 3})
SHARES = (1.0, 0.3, 0.1, 0.03)
"""Shares of the columns that Head2Toe's selection may keep."""
LASSO, UPDATES, LEFT_OUT = 0.02, 150, 1e-3
"""The group lasso as a share of the one that makes all weights 0, its steps, and the factor of columns left out."""
CAP, FOLDS, STEPS = 300, 10, 25
POWERS = tuple(10.0 ** np.arange(-1, 3.1, 0.5))
"""Strengths of a ridge regression."""
HEADS = ("ridge", "recipe")
WIDE = 10.0
"""The prior variance of the bias."""


class Kernels:
    """The kernel of each block, or of each kind of blocks, on some of the rows, and targets with mean 0 over classes.

    Together the kernels have a mean diagonal of 1. ``ids`` is the place of the kernel of each column.
    """

    def __init__(self, x: Floats, labels: Floats, groups: Floats | None, layout: Layout, by: str) -> None:
        names = [group.block.name for group in layout.groups]
        self.names = list(dict.fromkeys(names)) if by == "kind" else [f"{name} {i}" for i, name in enumerate(names)]
        places = [self.names.index(name) for name in names] if by == "kind" else range(len(names))
        self.ids = np.repeat(places, [group.width for group in layout.groups])
        order = np.random.default_rng(0).permutation(len(labels))
        rows = np.sort(np.concatenate([order[labels[order] == label][:CAP] for label in np.unique(labels)]))
        self.rows = z = standardised(x, layout)[rows]
        own = (z[:, self.ids == place] for place in range(len(self.names)))
        self.each = np.stack([part @ part.T for part in own]) * (len(rows) / np.square(z).sum())
        self.labels, self.groups = labels[rows], None if groups is None else groups[rows]
        number = int(labels.max()) + 1
        self.targets, self.rank = 2 * (np.eye(number)[self.labels] - 1 / number), number - 1
        self.weights = balance(self.labels)

    def folds(self, seed: int) -> list[Floats]:
        """Return the rows that each inner fold leaves out."""
        number = min(FOLDS, rarest(self.labels, self.groups))
        return [rest for _, rest in inner_folds(self.labels, self.groups, number, seed)]


def standardised(x: Floats, layout: Layout) -> Floats:
    """Return the columns as a regression with the fixed weights has them."""
    mean, scale = standardisation(x.astype(np.float64))
    return (x - mean) / scale * layout.importance()


def balance(labels: Floats) -> Floats:
    """Return weights of rows with which classes count alike, 1 on average."""
    counts = np.bincount(labels)
    return (len(labels) / ((counts > 0).sum() * np.maximum(counts, 1)))[labels]


def surprise(kernels: Kernels, point: Floats) -> tuple[float, Floats]:
    """Return minus the log evidence and its gradient, by the log factors and the logs of amplitude and noise."""
    factors, (amplitude, noise) = np.exp(2 * point[:-2]), np.exp(2 * point[-2:])
    whole = amplitude * np.tensordot(factors, kernels.each, 1) + WIDE
    whole[np.diag_indices_from(whole)] += noise / kernels.weights
    lower = cho_factor(whole, lower=True)
    solved = cho_solve(lower, kernels.targets)
    half = np.tril(dpotri(lower[0], lower=1)[0])
    inverse = half + np.tril(half, -1).T
    value = 0.5 * (kernels.targets * solved).sum() + kernels.rank * np.log(np.diag(lower[0])).sum()
    slope = 0.5 * (kernels.rank * inverse - solved @ solved.T)
    blocks = (kernels.each.reshape(len(factors), -1) @ slope.ravel()) * 2 * amplitude * factors
    return value, np.concatenate([blocks, [blocks.sum(), 2 * noise * (np.diag(slope) / kernels.weights).sum()]])


def by_evidence(kernels: Kernels, width: float, share: float = 1.0) -> Floats:
    """Return the log factors of the highest posterior. The log evidence counts ``share`` times."""
    size = len(kernels.names)

    def cost(point: Floats) -> tuple[float, Floats]:
        value, slope = surprise(kernels, point)
        slope *= share
        slope[:size] += point[:size] / width**2
        return share * value + np.square(point[:size]).sum() / (2 * width**2), slope

    return minimised(cost, size, [0.0, -0.5])


def by_folds(kernels: Kernels, width: float, folds: Sequence[Floats]) -> Floats:
    """Return the log factors of the lowest error of rows left out, with the prior."""
    size, number = len(kernels.names), len(kernels.labels)
    each, targets, weights = (torch.from_numpy(part) for part in (kernels.each, kernels.targets, kernels.weights))
    counted = kernels.rank * number**2 / np.square(kernels.weights).sum() / 2

    def cost(start: Floats) -> tuple[float, Floats]:
        point = torch.tensor(start, requires_grad=True)
        whole = torch.exp(2 * point[size]) * torch.tensordot(torch.exp(2 * point[:size]), each, 1) + WIDE
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(whole + torch.diag(1 / weights)))
        solved = inverse @ targets
        errors = [torch.linalg.solve(inverse[rest][:, rest], solved[rest]).square().sum(1) for rest in folds]
        error = sum((own * weights[rest]).sum() for own, rest in zip(errors, folds, strict=True))
        value = counted * torch.log(error / number) + point[:size].square().sum() / (2 * width**2)
        value.backward()
        return value.item(), point.grad.numpy()

    return minimised(cost, size, [1.0])


def by_presets(kernels: Kernels, least: float, folds: Sequence[Floats]) -> Floats:
    """Return the factors of the preset whose error of rows left out is lowest."""
    sets = [np.array([preset.get(name, 1.0) for name in kernels.names]) for preset in PRESETS]
    errors = []
    for factors in sets:
        whole = np.tensordot(np.square(factors), kernels.each, 1)
        whole *= len(whole) / np.trace(whole)
        errors.append(min(error(whole * power, kernels.targets, kernels.weights, folds) for power in POWERS))
    return sets[settled(errors, least)]


def settled(errors: Sequence[float], least: float) -> int:
    """Return the place of the lowest error, or the first one unless the lowest is below ``least`` times of it."""
    place = int(np.argmin(errors))
    return place if errors[place] < least * errors[0] else 0


def by_selection(kernels: Kernels, least: float, folds: Sequence[Floats]) -> tuple[Floats, float]:
    """Return the factors of the columns by Head2Toe's selection, and the share that is kept."""
    errors = np.zeros((len(SHARES), len(POWERS)))
    for rest in folds:
        train = np.setdiff1d(np.arange(len(kernels.labels)), rest)
        z, targets, weights = kernels.rows[train], kernels.targets[train], kernels.weights[train]
        relevance = group_lasso(z, targets, weights)
        for place, share in enumerate(SHARES):
            kept = selected(relevance, share)
            own, others = z[:, kept], kernels.rows[rest][:, kept]
            size = len(train) / np.square(own).sum()
            inner, outer = own @ own.T * size, others @ own.T * size
            for column, power in enumerate(POWERS):
                solved = np.linalg.solve(power * inner + WIDE + np.diag(1 / weights), targets)
                left = kernels.targets[rest] - (power * outer + WIDE) @ solved
                errors[place, column] += (np.square(left).sum(1) * kernels.weights[rest]).sum()
    share = SHARES[settled(errors.min(axis=1).tolist(), least)]
    factors = np.full(kernels.rows.shape[1], LEFT_OUT)
    factors[selected(group_lasso(kernels.rows, kernels.targets, kernels.weights), share)] = 1
    return factors, share


def selected(relevance: Floats, share: float) -> Floats:
    """Return the columns of the largest relevance; all with a share of 1, and else none without relevance."""
    if share == 1:
        return np.arange(len(relevance))
    order = np.argsort(-relevance, kind="stable")[: round(share * len(relevance))]
    return order[relevance[order] > 0]


def group_lasso(z: Floats, targets: Floats, weights: Floats) -> Floats:
    """Return the length of the weights of each column in a linear layer with a squared error and a group lasso."""
    z = z * np.sqrt(weights)[:, None]
    targets = targets * np.sqrt(weights)[:, None]
    step = 1 / float(np.linalg.eigvalsh(z @ z.T)[-1])
    lasso = LASSO * float(np.linalg.norm(z.T @ targets, axis=1).max())
    layer = ahead = np.zeros((z.shape[1], targets.shape[1]))
    pace = 1.0
    for _ in range(UPDATES):
        moved = ahead - step * (z.T @ (z @ ahead - targets))
        lengths = np.linalg.norm(moved, axis=1, keepdims=True)
        new = moved * np.maximum(1 - step * lasso / np.maximum(lengths, 1e-30), 0)
        faster = (1 + np.sqrt(1 + 4 * pace**2)) / 2
        ahead = new + (pace - 1) / faster * (new - layer)
        layer, pace = new, faster
    return np.asarray(np.linalg.norm(layer, axis=1))


def minimised(cost: Any, size: int, others: list[float]) -> Floats:
    """Return the log factors at the minimum of a cost, begun at 0."""
    bounds = [(-4.0, 3.0)] * size + [(-5.0, 6.0)] * len(others)
    start = np.concatenate([np.zeros(size), others])
    return minimize(cost, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": STEPS}).x[:size]


def error(kernel: Floats, targets: Floats, weights: Floats, folds: Sequence[Floats]) -> float:
    """Return the squared error of rows that folds leave out of a ridge regression, in closed form."""
    inverse = np.linalg.inv(kernel + WIDE + np.diag(1 / weights))
    solved = inverse @ targets
    left = [(np.linalg.solve(inverse[np.ix_(rest, rest)], solved[rest]), rest) for rest in folds]
    return sum(float((np.square(own).sum(1) * weights[rest]).sum()) for own, rest in left)


def fit_ridge(
    x: Floats, rest: Floats, labels: Floats, groups: Floats | None, layout: Layout, factors: Floats, seed: int
) -> Floats:
    """Return the scores of other rows by one ridge regression, whose strength inner folds choose."""
    mean, scale = standardisation(x.astype(np.float64))
    scale = scale / (layout.importance() * factors)
    z = (x - mean) / scale
    kernel, number, weights = z @ z.T, int(labels.max()) + 1, balance(labels)
    kernel *= len(kernel) / np.trace(kernel)
    targets = 2 * (np.eye(number)[labels] - 1 / number)
    folds = [fold for _, fold in inner_folds(labels, groups, min(FOLDS, rarest(labels, groups)), seed)]
    errors = {power: error(kernel * power, targets, weights, folds) for power in POWERS}
    power = min(errors, key=errors.__getitem__)
    solved = np.linalg.solve(power * kernel + WIDE + np.diag(1 / weights), targets)
    layer = power * len(z) / np.square(z).sum() * (z.T @ solved) / scale[:, None]
    return rest @ layer - mean @ layer + WIDE * solved.sum(axis=0)


def factors_of(
    way: str, x: Floats, labels: Floats, groups: Floats | None, layout: Layout, seed: int
) -> tuple[Floats, dict[str, float]]:
    """Return the factor of each column, and those of the blocks by name."""
    if way == FIXED:
        return np.ones(x.shape[1]), {}
    kind, by, number = way.split(", ")
    kernels = Kernels(x, labels, groups, layout, by)
    if kind == "select":
        columns, share = by_selection(kernels, float(number), kernels.folds(seed))
        return columns, {"kept": share}
    if kind == "presets":
        factors = by_presets(kernels, float(number), kernels.folds(seed))
        return factors[kernels.ids], {name: float(one) for name, one in zip(kernels.names, factors, strict=True)}
    if kind in ("evidence", "tempered"):
        share = 1 if kind == "evidence" else len(kernels.labels) / np.square(kernels.weights).sum()
        logs = by_evidence(kernels, float(number), share)
    else:
        logs = by_folds(kernels, float(number), kernels.folds(seed))
    factors = np.exp(logs)
    return factors[kernels.ids], {name: round(float(one), 2) for name, one in zip(kernels.names, factors, strict=True)}


def run_cell(
    data: str, cell: str, seed: int, recipe: str, head: str, way: str, found: layers.Features
) -> dict[str, Any]:
    """Return the metrics of a way on one repeat, the seconds of the choice, and the median factors over the folds."""
    x, layout = features_of(found, recipe)
    folds, grouped = study.pairs(data, cell, seed, found)
    scores, chosen, seconds = [], [], 0.0
    for train, rest in folds:
        labels = found.labels[train].astype(np.int64)
        num, groups = int(labels.max()) + 1, found.groups[train] if grouped else None
        begin = time.process_time()
        with threadpool_limits(1, "blas"):
            factors, told = factors_of(way, x[train], labels, groups, layout, seed)
        seconds += time.process_time() - begin
        chosen.append(told)
        if head == "ridge":
            scores.append(fit_ridge(x[train], x[rest], labels, groups, layout, factors, seed))
        else:
            weights, parts = layout.importance() * factors, layout.kinds()
            fitted = fit_averaged(x[train], labels, num, groups=groups, seed=seed, importance=weights, parts=parts)
            shares = np.log(np.bincount(labels, minlength=num) / len(labels))
            scores.append(x[rest] @ fitted.weight.T + fitted.bias - shares)
    tested = np.concatenate([found.labels[rest] for _, rest in folds])
    balanced = np.concatenate(scores)
    metrics = shared.figures(balanced, tested)
    loss = balanced_log_loss(balanced, tested.astype(np.int64))
    medians = {name: round(statistics.median(told[name] for told in chosen), 2) for name in chosen[0]}
    return {**metrics, "fair_loss": round(loss, 4), "seconds": round(seconds / len(folds), 2), "factors": medians}


@cache
def features_of(found: layers.Features, recipe: str) -> tuple[Floats, Layout]:
    """Return the features of a recipe, which are read once."""
    return found.of(layers.METHODS[recipe])


def table() -> str:
    """Return a row for each recipe, classifier and way: balanced accuracy / AUROC in each setting, and the repeats.

    The row of the fixed weights has means, the others have differences to it, paired by repeat.
    """
    settings = shared.nested(shared.read(RECORD), ("data", "cell"), ("recipe", "head", "way"), "seed")
    rows: dict[tuple[str, ...], list[str]] = {}
    for key in sorted({key for ways in settings.values() for key in ways}, key=lambda key: (*key[:2], place(key[2]))):
        for _, ways in sorted(settings.items(), key=study.place):
            base, runs = ways.get((*key[:2], FIXED), {}), ways.get(key, {})
            rows.setdefault(key, []).append(against(runs, base))
    heads = [f"{shared.DATA[data]}, {cell}" for (data, cell), _ in sorted(settings.items(), key=study.place)]
    return shared.table(
        " | ".join(["recipe", "classifier", "weights", *heads]), ((*key, *cells) for key, cells in rows.items())
    )


def place(way: str) -> int:
    """Return the place of a way in tables."""
    return WAYS.index(way)


def against(runs: shared.Runs, base: shared.Runs) -> str:
    """Return means, or mean differences to ``base`` over the repeats that both have, with their number.

    With three or more repeats, differences have Student's 95 % interval.
    """
    both = [seed for seed in runs if seed in base]
    if not both:
        return ""
    if runs is base:
        return f"{shared.mean_of(runs, 'uwa')} / {shared.mean_of(runs, 'auroc')} ({len(both)})"
    gains = ([runs[seed][name] - base[seed][name] for seed in both] for name in ("uwa", "auroc"))
    if len(both) < 3:
        return f"{' / '.join(f'{statistics.mean(each):+.1f}' for each in gains)} ({len(both)})"
    return f"{' / '.join(shared.shown(mean_interval(each), sign=True) for each in gains)} ({len(both)})"


def chosen() -> str:
    """Return a row for each setting and way: the median factor of each block over the repeats, from the first block."""
    rows = []
    settings = shared.nested(shared.read(RECORD), ("recipe", "head"), ("data", "cell"), "way", "seed")
    for which, cells in settings.items():
        for key, ways in sorted(cells.items(), key=study.place):
            for way, lines in ways.items():
                told = [line["factors"] for line in lines.values() if line["factors"]]
                if told:
                    medians = (f"{name} {statistics.median(one[name] for one in told):.2g}" for name in told[0])
                    rows.append((*which, *key, way, ", ".join(medians)))
    return shared.table("recipe | classifier | data | setting | way | factors", rows)


TABLES = {"table": table, "chosen": chosen}


def main() -> None:
    """Compute the missing lines of the record, or print a table."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", choices=["run", *TABLES])
    parser.add_argument("data", choices=["tops", "isic", "few"], nargs="?")
    parser.add_argument("--features", type=Path, default=Path(), help="the folder with the features")
    parser.add_argument("--seeds", default="100-103", help="such as 100-111")
    parser.add_argument("--recipe", choices=layers.RECIPES, default="quick")
    parser.add_argument("--head", choices=HEADS, default=HEADS[0])
    parser.add_argument("--ways", default=";".join(WAYS), help="separated by semicolons")
    parser.add_argument("--only", help="one setting, such as 98:2")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what in TABLES:
        print(TABLES[given.what]())
        return
    if given.data is None:
        parser.error("DATA is missing")
    found = layers.Features("isic" if given.data == "few" else given.data, given.features)
    settings = {"tops": study.SCENARIOS[1:], "few": ("10 rare",)}.get(given.data) or study.cells_of(given.data)
    wanted = (
        {"data": given.data, "cell": cell, "seed": seed, "recipe": given.recipe, "head": given.head, "way": way}
        for seed in shared.seeds_of(given.seeds)
        for cell in settings
        if given.only in (None, cell)
        for way in given.ways.split(";")
    )
    shared.compute_missing(RECORD, wanted, lambda cell: run_cell(**cell, found=found))


if __name__ == "__main__":
    main()
