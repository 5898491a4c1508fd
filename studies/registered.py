"""Registered, then run once: data that no choice has seen. studies/registration.md was written before.

    python studies/registered.py features TASK METHOD [--minutes 7]    # fill the cache of features, in parts
    python studies/registered.py run TASK [--methods "quick;class weights"] [--minutes 7]
    python studies/registered.py table                                 # the metrics of all tasks
    python studies/registered.py predictions                           # what came of each prediction
    python studies/registered.py sources                               # HAM10000, one source left out at a time
    python studies/registered.py classes                               # recall of each class of HAM10000

TASK is one of the tasks of studies/registration.md: lesions, sources, cifar, shirts, fashion, cells. The data are below
$LOPSIDED_DATA (HAM10000, cifar10_lt100, elpv) and Debian's package dataset-fashion-mnist. A method that has answers is
not run again, so that nobody runs it twice. Everything is computed from studies/answers/registered.csv.gz.

Peers get the features of ``quick`` as in studies/peers.py: ``class weights`` is a class-weighted logistic regression,
``shrunk LDA`` has its shrinkage, and both their parameter, by the same inner folds and the same score as ``quick``;
``nearest mean`` has none.
"""

from __future__ import annotations

import csv
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from scipy.linalg import cho_factor, cho_solve
from scipy.special import log_softmax
from threadpoolctl import threadpool_limits

import answers
import peers
import shared
import study
from answers import Answers
from lopsided.data.images import FileImages
from lopsided.data.sources import Source, open_source
from lopsided.recipe import named_recipe
from lopsided.seeds import derive_seed
from lopsided.training.fit import fit
from lopsided.training.regression import balanced_log_loss, fit_regression, inner_folds, standardisation
from shared import Floats

ANSWERS = answers.FOLDER / "registered.csv.gz"
BASE = "quick"
SHRINKAGES = (0.01, 0.03, 0.1, 0.3, 0.6, 0.9, 0.99)
SCRATCH = {"CE": "ce", "CL": "cl", "AFCL": "afcl"}
METHODS = ("quick", "thorough", "class weights", "shrunk LDA", "nearest mean", "fine-tune", *SCRATCH)
PEERS = ("class weights", "shrunk LDA", "nearest mean")


def data_folder() -> Path:
    """Return the folder of the data sets."""
    return Path(os.environ["LOPSIDED_DATA"])


@dataclass(frozen=True, eq=False)
class Task:
    """Images, and which of them train and test: one pair of rows per setting, repeat and fold."""

    source: Source
    pairs: list[tuple[str, int, int, Floats, Floats]]


def lesions() -> Task:
    """Return the seven classes of HAM10000 in five folds by lesion."""
    source = open_source(data_folder() / "HAM10000" / "ham10000.csv", group="group")
    assert source.groups is not None
    folds = shared.folds_by_lesion(source.labels, source.groups, 0)
    return Task(source, [("five folds", 0, fold, *pair) for fold, pair in enumerate(folds)])


def sources() -> Task:
    """Return the same images, one of the four sources left out at a time."""
    source = lesions().source
    with (data_folder() / "HAM10000" / "ham10000.csv").open(encoding="utf-8", newline="") as table:
        origin = {Path(row["path"]).stem: row["source"] for row in csv.DictReader(table)}
    where = np.array([origin[Path(name).stem] for name in source.names])
    assert source.groups is not None
    pairs = []
    for name in sorted(set(where)):
        rest = np.flatnonzero(where == name)
        train = np.flatnonzero((where != name) & ~np.isin(source.groups, source.groups[rest]))
        pairs.append((name, 0, 0, train, rest))
    return Task(source, pairs)


def cifar() -> Task:
    """Return CIFAR-10-LT with its test set."""
    train, test = (open_source(data_folder() / "cifar10_lt100" / part) for part in ("train", "test"))
    assert train.classes == test.classes
    images = FileImages((*train.images.paths, *test.images.paths))  # type: ignore[attr-defined]
    names = (*(f"train/{name}" for name in train.names), *(f"test/{name}" for name in test.names))
    labels = np.concatenate([train.labels, test.labels])
    source = Source("cifar10_lt100", images, labels, train.classes, names)
    rows = np.arange(len(source))
    return Task(source, [("factor 100", 0, 0, rows[: len(train)], rows[len(train) :])])


def shirts() -> Task:
    """Return the draws of the embedded T-shirts and shirts, judged by those of the official test set."""
    whole = study.open_data("fashion")
    assert whole.splits is not None
    tops = [whole.classes.index(name) for name in shared.TOPS]
    drawn = [np.flatnonzero((whole.splits == "train") & (whole.labels == label))[:2000] for label in tops]
    tested = np.flatnonzero((whole.splits == "test") & np.isin(whole.labels, tops))
    rows = np.concatenate([*drawn, tested])
    labels = (whole.labels[rows] == tops[1]).astype(np.int64)
    source = replace(whole.subset(rows), labels=labels, classes=shared.TOPS, splits=None)
    place, rest = np.arange(4000), np.arange(4000, len(rows))
    pairs = [
        (scenario, seed, 0, place[shared.draw_tops(labels[:4000], scenario, seed)[0]], rest)
        for scenario in study.SCENARIOS[1:]
        for seed in range(3)
    ]
    return Task(source, pairs)


def fashion() -> Task:
    """Return the long tails of ten classes, judged by the 7,500 test images that no study has used."""
    whole = study.open_data("fashion")
    assert whole.splits is not None
    rest = np.flatnonzero(whole.splits == "test")[study.TAIL_TEST :]
    drawn = [study.long_tail(whole, seed)[0] for seed in range(3)]
    rows = np.unique(np.concatenate([*drawn, rest]))
    pairs = [
        (f"long tail {study.TAIL}", seed, 0, np.searchsorted(rows, train), np.searchsorted(rows, rest))
        for seed, train in enumerate(drawn)
    ]
    return Task(replace(whole.subset(rows), splits=None), pairs)


def cells() -> Task:
    """Return the solar cells: defective if the probability is above one half, five random splits of 75 to 25."""
    from sklearn.model_selection import StratifiedShuffleSplit

    folder = data_folder() / "elpv" / "elpv_dataset" / "data"
    lines = [line.split() for line in (folder / "labels.csv").read_text(encoding="utf-8").splitlines()]
    labels = np.array([float(line[1]) > 0.5 for line in lines]).astype(np.int64)
    images = FileImages([folder / line[0] for line in lines])
    source = Source("elpv", images, labels, ("functional", "defective"), tuple(line[0] for line in lines))
    splits = StratifiedShuffleSplit(5, test_size=0.25, random_state=0).split(labels, labels)
    return Task(source, [("75:25", repeat, 0, *pair) for repeat, pair in enumerate(splits)])


TASKS = {
    "lesions": lesions, "sources": sources, "cifar": cifar, "shirts": shirts, "fashion": fashion, "cells": cells,
}  # fmt: skip
SHARES = {"lesions": 0.25, "cells": 1 / 3}
"""Test images for each training image, where folds or splits share training images."""
SEEN = {
    "lesions": "two of seven classes seen",
    "cells": "seen by a prototype",
    "shirts": "test images never seen",
    "fashion": "test images never seen",
}
"""What choices have seen, as the registration says it. All other images were never seen."""


@cache
def quick_features(task: str) -> tuple[Floats, Floats | None]:
    """Return the features of ``quick`` for all images of a task."""
    return peers.recipe_features(TASKS[task]().source, "quick")


def fill(task: str, method: str, minutes: float) -> None:
    """Compute features that the cache does not hold, in parts of some hundred images."""
    from lopsided.data.inputs import StreamedInputs
    from lopsided.inference.scorer import Scorer
    from lopsided.recipe.views import parse_views

    begin, source = time.monotonic(), TASKS[task]().source
    recipe = named_recipe(method)
    views = parse_views("flips" if recipe.encoder.views == "auto" else recipe.encoder.views)
    assert recipe.encoder.weights is not None
    model, card = shared.frozen_model(
        recipe.encoder.name, recipe.encoder.weights, recipe.data.image_size, scaling=recipe.encoder.scaling, views=views
    )
    scorer = Scorer(model, card)
    for rows in np.array_split(np.arange(len(source)), len(source) // 400 + 1):
        part = source.images.take(rows)
        digests = part.digest(np.arange(len(rows)))
        start = time.process_time()
        scorer.features(StreamedInputs(part, card.image_size, 3, 1), digests)
        if time.process_time() - start > 2:
            print(f"{task} {method}: {rows[-1] + 1} of {len(source)}", flush=True)
        if time.monotonic() - begin > 60 * minutes:
            return


def by_recipe(method: str, source: Source, train: Floats, rest: Floats, seed: int) -> tuple[Floats, Floats]:
    """Return log probabilities and decisions of a recipe, or of a loss from scratch."""
    fields = {"seed": seed, "data.test": 0.0, "threads": 1, "compare_quick": False}
    if method in SCRATCH:
        recipe = named_recipe("from-scratch").override(**scratch_fields(SCRATCH[method]))
    else:
        recipe = named_recipe(method)
    found = fit(recipe.override(**fields), source.subset(train), held_out=source.subset(rest)).held_out
    assert found is not None
    return np.log(np.clip(found.probabilities, 1e-12, 1)), found.y_pred


def scratch_fields(loss: str) -> dict[str, object]:
    """Return the changes of ``from-scratch`` for a loss: 20 epochs in all, as in studies/from_scratch.py."""
    if loss == "ce":
        return {"method": "end-to-end", "encoder_training.loss": "ce", "encoder_training.epochs": 20}
    return {"encoder_training.loss": loss, "encoder_training.epochs": 16, "classifier.epochs": 4}


def by_peer(
    method: str, x: Floats, labels: Floats, groups: Floats | None, tested: Floats, weights: Floats | None, seed: int
) -> tuple[Floats, Floats]:
    """Return log probabilities of a peer for balanced classes, and its decisions."""
    num = int(labels.max()) + 1
    if method == "class weights":
        fitted = fit_regression(x, labels, num, groups=groups, seed=seed, importance=weights, weighted=True)
        logits = tested @ fitted.weight.T + fitted.bias
        return log_softmax(logits, axis=1), logits.argmax(axis=1)
    mean, scale = standardisation(x.astype(np.float64))
    scale = scale if weights is None else scale / weights
    train, test = (x - mean) / scale, (tested - mean) / scale
    if method == "nearest mean":
        means = class_means(train, labels)
        logits = test @ means.T - (means**2).sum(1) / 2
        logits = logits / float(np.abs(logits).mean())
        return log_softmax(logits, axis=1), logits.argmax(axis=1)
    folds = list(inner_folds(labels, groups, 5, derive_seed(seed, "folds", 0)))
    losses = np.mean([discriminant_losses(train, labels, own, rest) for own, rest in folds], axis=0)
    weight, bias = next(discriminants(train, labels, [SHRINKAGES[int(losses.argmin())]]))
    logits = test @ weight.T + bias
    return log_softmax(logits, axis=1), logits.argmax(axis=1)


def class_means(x: Floats, labels: Floats) -> Floats:
    """Return the mean of the rows of each class."""
    return np.stack([x[labels == label].mean(axis=0) for label in range(int(labels.max()) + 1)])


def discriminants(x: Floats, labels: Floats, shrinkages: Sequence[float]) -> Iterator[tuple[Floats, Floats]]:
    """Yield weights and biases of linear discriminants with equal priors, one for each shrinkage."""
    means = class_means(x, labels)
    within = x - means[labels]
    covariance = within.T @ within / len(x)
    level = np.trace(covariance) / len(covariance)
    for shrinkage in shrinkages:
        shrunk = (1 - shrinkage) * covariance + shrinkage * level * np.eye(len(covariance))
        weight = cho_solve(cho_factor(shrunk), means.T).T
        yield weight, -(weight * means).sum(axis=1) / 2


def discriminant_losses(x: Floats, labels: Floats, own: Floats, rest: Floats) -> list[float]:
    """Return the class-weighted log loss outside of an inner fold, for each shrinkage."""
    found = discriminants(x[own], labels[own], SHRINKAGES)
    return [balanced_log_loss(x[rest] @ weight.T + bias, labels[rest]) for weight, bias in found]


def run_task(name: str, method: str, known: set[tuple[object, ...]], minutes: float) -> None:
    """Run a method on each pair of rows that has no answers yet."""
    begin, task = time.monotonic(), TASKS[name]()
    source = task.source
    for cell, repeat, fold, train, rest in task.pairs:
        if (name, cell, repeat, fold, method) in known or time.monotonic() - begin > 60 * minutes:
            continue
        start = time.process_time()
        groups = None if source.groups is None else source.groups[train]
        if method in PEERS:
            x, weights = quick_features(name)
            with threadpool_limits(1):
                found = by_peer(method, x[train], source.labels[train], groups, x[rest], weights, repeat)
        else:
            found = by_recipe(method, source, train, rest, repeat)
        odds, decided = found
        score = odds[:, 1] - odds[:, 0] if odds.shape[1] == 2 else odds
        names = [source.names[row] for row in rest]
        clusters = None if source.groups is None else list(source.groups[rest])
        one = Answers(name, cell, repeat, fold, method, names, source.labels[rest], decided, score, clusters)
        answers.add(ANSWERS, one)
        print(f"{name} {cell} {repeat} {fold} {method}: {time.process_time() - start:.0f} s", flush=True)


def metrics(one: Answers) -> dict[str, float]:
    """Return the metrics of one fold, in percent; classes without images do not count."""
    from sklearn.metrics import roc_auc_score

    if one.scores.ndim == 1:
        area = roc_auc_score(one.labels, one.scores)
    else:
        present = [label for label in range(one.scores.shape[1]) if 0 < (one.labels == label).sum() < len(one.labels)]
        area = float(np.mean([roc_auc_score(one.labels == label, one.scores[:, label]) for label in present]))
    return {
        "uwa": answers.balanced_accuracy([one]),
        "accuracy": 100 * float((one.labels == one.decided).mean()),
        "auroc": 100 * float(area),
    }


def table(found: Sequence[Answers]) -> str:
    """Return a row for each task and method, with two kinds of intervals."""
    rows = []
    for (data, cell), methods in peers.gathered(one for one in found if one.data != "sources").items():
        order = sorted(methods, key=METHODS.index)
        for method in order:
            parts = [one for folds in methods[method].values() for one in folds]
            own = [metrics(one) for one in parts]
            whole = answers.bootstrap(parts, rounds=500)
            cells_ = [f"{whole.value:.1f} [{whole.low:.1f}, {whole.high:.1f}]"]
            alone = method == BASE or BASE not in methods
            cells_ += ["", ""] if alone else peers.differences(methods, method, BASE, SHARES.get(data))
            cells_ += [f"{statistics.mean(line[name] for line in own):.1f}" for name in ("auroc", "accuracy")]
            rows.append((data, SEEN.get(data, "never seen"), cell, method, len(parts), *cells_))
    head = "task | images | setting | method | tests | balanced accuracy [other images] | minus quick [other images]"
    return shared.table(f"{head} | minus quick, other training images too | AUROC | accuracy", rows)


def sources_table(found: Sequence[Answers]) -> str:
    """Return a row for each method: balanced accuracy on each source that training did not see."""
    tables = {cell: methods for (data, cell), methods in peers.gathered(found).items() if data == "sources"}
    rows = []
    for method in METHODS:
        values = {cell: metrics(methods[method][0][0])["uwa"] for cell, methods in tables.items() if method in methods}
        if len(values) == len(tables) and tables:
            rows.append(
                (method, *(f"{values[cell]:.1f}" for cell in tables), f"{statistics.mean(values.values()):.1f}")
            )
    return shared.table(f"method | {' | '.join(tables)} | mean", rows)


def classes_table(found: Sequence[Answers]) -> str:
    """Return the recall of each class of HAM10000 in five folds."""
    parts = {}
    for one in found:
        if one.data == "lesions":
            parts.setdefault(one.method, []).append(one)
    names = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
    rows = []
    for method in (name for name in METHODS if name in parts):
        labels, decided = (
            np.concatenate([getattr(one, key) for one in parts[method]]) for key in ("labels", "decided")
        )
        recalls = [100 * float((decided[labels == label] == label).mean()) for label in range(len(names))]
        rows.append((method, *(f"{value:.1f}" for value in recalls)))
    return shared.table(f"method | {' | '.join(names)}", rows)


def score_of(
    found: Sequence[Answers], data: str, method: str, cell: str | None = None, name: str = "uwa"
) -> float | None:
    """Return a metric over all tests of a task; for sources the mean over them; None if a test has not run."""
    tests = [one for one in found if one.data == data and cell in (None, one.cell)]
    parts = [one for one in tests if one.method == method]
    if not parts or len(parts) < len([one for one in tests if one.method == BASE]):
        return None
    if data == "sources" or name != "uwa":
        return statistics.mean(metrics(one)[name] for one in parts)
    return answers.balanced_accuracy(parts)


def within(value: float | None, low: float, high: float, shown: str = "{:.1f}") -> str:
    """Return a value, and whether it is within the limits of a prediction."""
    if value is None:
        return "open"
    return f"{shown.format(value)}, {'as predicted' if low <= value <= high else '**not as predicted**'}"


def predictions(found: Sequence[Answers]) -> str:
    """Return a row for each prediction of the registration, and what came of it."""

    def minus(data: str, method: str, other: str = BASE, task: str | None = None) -> float | None:
        one, base = score_of(found, data, method), score_of(found, task or data, other)
        return None if one is None or base is None else one - base

    names = [f"`{name}`" if name in ("quick", "thorough") else name for name in METHODS[:5]]
    gaps = (
        f"{told} {within(minus('sources', name, name, 'lesions'), -100, -10, '{:+.1f}')}"
        for told, name in zip(names, METHODS[:5], strict=True)
    )
    shirts = zip(("90:10", "95:5", "98:2"), (86.2, 84.8, 82.6), strict=True)
    rows = [
        ("1. lesions: `quick` between 68 and 76", within(score_of(found, "lesions", BASE), 68, 76)),
        ("1. lesions: `thorough` above it by 1 to 4", within(minus("lesions", "thorough"), 1, 4, "{:+.1f}")),
        *(
            (f"2. lesions: {name} within 2 of `quick`", within(minus("lesions", name), -2, 2, "{:+.1f}"))
            for name in PEERS[:2]
        ),
        ("2. lesions: nearest mean at least 5 below", within(minus("lesions", "nearest mean"), -100, -5, "{:+.1f}")),
        ("3. sources: the mean of the four at least 10 below the five folds, for every method", "; ".join(gaps)),
        (
            "4. cifar: `quick` between 74 and 82, above cross-entropy from scratch (70.4), below BCL (84.3)",
            within(score_of(found, "cifar", BASE), 74, 82),
        ),
        ("4. cifar: `thorough` above `quick`", within(minus("cifar", "thorough"), 1e-9, 100, "{:+.1f}")),
        *(
            (
                f"5. shirts at {cell}: `quick` within 1.5 of {held}",
                within(score_of(found, "shirts", BASE, cell), held - 1.5, held + 1.5),
            )
            for cell, held in shirts
        ),
        ("6. fashion: `quick` within 1 of 87.1", within(score_of(found, "fashion", BASE), 86.1, 88.1)),
        (
            "7. cells: accuracy of `quick` between 82.4 and 88.4",
            within(score_of(found, "cells", BASE, name="accuracy"), 82.4, 88.4),
        ),
        ("7. cells: `thorough` within a point of `quick`", within(minus("cells", "thorough"), -1, 1, "{:+.1f}")),
    ]
    return shared.table("prediction | outcome", rows)


TABLES: dict[str, Callable[[Sequence[Answers]], str]] = {
    "table": table,
    "predictions": predictions,
    "sources": sources_table,
    "classes": classes_table,
}
"""What prints a table of the answers."""


def main() -> None:
    """Fill the cache, run what has no answers yet, or print a table."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", choices=["features", "run", *TABLES])
    parser.add_argument("task", choices=TASKS, nargs="?")
    parser.add_argument("method", nargs="?", default="quick", help="with features: quick or thorough")
    parser.add_argument("--methods", default="quick;class weights;shrunk LDA;nearest mean")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing later than this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what in TABLES:
        print(TABLES[given.what](answers.read(ANSWERS)))
    elif given.task is None:
        parser.error("TASK is missing")
    elif given.what == "features":
        fill(given.task, given.method, given.minutes)
    else:
        begin = time.monotonic()
        for method in given.methods.split(";"):
            known = {(one.data, one.cell, one.repeat, one.fold, one.method) for one in answers.read(ANSWERS)}
            run_task(given.task, method, known, given.minutes - (time.monotonic() - begin) / 60)


if __name__ == "__main__":
    main()
