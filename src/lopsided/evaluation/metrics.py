"""Metrics of predictions, with intervals.

UWA, macro F1, G-mean, AUROC and average precision are means over the classes that have images in the test set. A class
without images has no recall; ``Evaluation.notes`` lists such classes.

``metric_table`` lists the metrics with their meanings and the kinds of their intervals.

Posterior draws keep the class counts of the test set. With `groups`, the images of one group (a lesion, a patient) are
treated as copies of each other, which is the cautious choice. n images in groups of m_1, m_2, ... then count as
n^2 / sum(m_g^2) independent images, and the bootstrap resamples whole groups. With `folds`, AUROC and average precision
are means over the folds, because the scores of different models cannot be ranked together. The other metrics then get
wider intervals if the folds differ by more than chance (``fold_component``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lopsided.errors import InputError, sentence
from lopsided.evaluation.decision import decide
from lopsided.evaluation.intervals import (
    UNDEFINED,
    Estimate,
    Floats,
    around,
    auroc_interval,
    calibrated_sums,
    check_level,
    confusion_draws,
    cost_interval,
    fold_component,
    macro_interval,
    mean_of_shares_interval,
    resampled_sums,
    share_interval,
)
from lopsided.seeds import derive_seed

Codes = NDArray[np.int64]
NUM_BINS = 15
_BOUNDS = {"mcc": (-1.0, 1.0), "log_loss": (0.0, math.inf)}


@dataclass(frozen=True)
class ClassMetrics:
    """The metrics of one class against the others."""

    label: str
    support: int
    predicted: int
    precision: Estimate
    recall: Estimate
    f1: Estimate
    auroc: Estimate
    average_precision: Estimate


@dataclass(frozen=True)
class Majority:
    """The metrics of a model that always answers the most frequent class of the test set."""

    label: str
    accuracy: float
    uwa: float
    cost: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one test set. Rows of `confusion` are the true classes, columns the predicted classes."""

    num_images: int
    num_groups: int | None
    classes: tuple[str, ...]
    level: float
    bootstrap: int
    seed: int
    figures: dict[str, Estimate]
    per_class: tuple[ClassMetrics, ...]
    confusion: tuple[tuple[int, ...], ...]
    majority: Majority
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields for JSON, NaN as None."""
        rows = [
            {name: value.to_dict() if isinstance(value, Estimate) else value for name, value in vars(row).items()}
            for row in self.per_class
        ]
        return {
            **vars(self),
            "classes": list(self.classes),
            "figures": {name: figure.to_dict() for name, figure in self.figures.items()},
            "per_class": rows,
            "confusion": [list(row) for row in self.confusion],
            "majority": {name: value for name, value in vars(self.majority).items() if value is not None},
            "notes": list(self.notes),
        }


def accuracy(y_true: ArrayLike, y_pred: ArrayLike) -> float:
    """Return the share of correctly classified images, eq. (27)."""
    return confusion_figures(_confusion_of(y_true, y_pred))["accuracy"]


def balanced_accuracy(y_true: ArrayLike, y_pred: ArrayLike) -> float:
    """Return the mean of the recalls of the classes in `y_true`, eq. (28). The paper calls it unweighted accuracy, UWA.

    >>> balanced_accuracy(["shirt", "top", "top", "top"], ["top", "top", "top", "top"])
    0.5
    """
    return confusion_figures(_confusion_of(y_true, y_pred))["uwa"]


def confusion_figures(confusion: ArrayLike) -> dict[str, float]:
    """Return accuracy, uwa, macro_f1, g_mean and mcc of a confusion matrix (rows: true classes)."""
    matrix = np.asarray(confusion, dtype=np.float64)
    if matrix.ndim != 2 or len(matrix) != matrix.shape[1] or not matrix.sum() > 0:
        raise InputError(sentence("confusion must be a square matrix of counts, not all 0", f"shape {matrix.shape}"))
    figures = _count_figures(np.diagonal(matrix), matrix.sum(axis=0), matrix.sum(axis=1))
    return {name: float(value) for name, value in figures.items() if np.ndim(value) == 0}


def evaluate(
    y_true: ArrayLike,
    probabilities: ArrayLike | None = None,
    y_pred: ArrayLike | None = None,
    *,
    classes: Sequence[str] | Sequence[int],
    bootstrap: int = 2000,
    level: float = 0.95,
    seed: int = 0,
    groups: ArrayLike | None = None,
    folds: ArrayLike | None = None,
    costs: ArrayLike | None = None,
) -> Evaluation:
    """Evaluate predictions. ``metric_table`` lists the metrics and their intervals.

    Labels are elements of `classes`, or indices into `classes` if the labels are integers and the classes are strings.
    The columns of `probabilities` follow `classes`. Without `y_pred`, the most probable class is the prediction; the
    first one if classes tie. Without `probabilities`, the metrics that need them are omitted. `bootstrap` is the
    number of resamples and of posterior draws. `folds` numbers the model that each image was predicted with. `costs`
    (K, K) are those of deciding for a class (columns) if another one is true (rows), for the metric cost.

    >>> result = evaluate([0, 0, 0, 1], y_pred=[0, 0, 0, 0], classes=["top", "shirt"])
    >>> print(result.figures["uwa"], result.majority.uwa)
    0.500 [0.247, 0.886] 0.5
    """
    check_level(level)
    if bootstrap < 100:
        raise InputError(sentence("bootstrap must be >= 100", bootstrap, "2000 is the usual choice."))
    names = _class_names(classes)
    true = _encode(y_true, classes, "y_true")
    if true.size == 0:
        raise InputError(sentence("y_true must hold at least one label", 0))
    p = None if probabilities is None else _check_probabilities(probabilities, len(true), len(names))
    if y_pred is not None:
        predicted = _encode(y_pred, classes, "y_pred")
    elif p is not None:
        predicted = decide(p)
    else:
        raise InputError(sentence("probabilities or y_pred must be given", "neither"))
    _check_length(predicted, true, "y_pred")
    codes = _group_codes(groups, true)
    confusion = _count(true, predicted, len(names))
    support = confusion.sum(axis=1)
    sizes = independent_sizes(true, codes, len(names))
    rng = np.random.default_rng(derive_seed(seed, "metrics", "confusion"))
    models = np.zeros_like(true) if folds is None else np.asarray(folds)
    _check_length(models, true, "folds")
    decided = sizes / fold_component(true, predicted, models, sizes)
    figures, per_class = _confusion_intervals(confusion, decided, bootstrap, level, rng)
    vote = None
    if costs is not None:
        prices = np.asarray(costs, dtype=np.float64)
        figures["cost"] = cost_interval(confusion, decided, prices, bootstrap, level, rng)
        vote = float(support @ prices[:, support.argmax()] / len(true))
    together = independent_sizes(0 * true, codes, 1)[0] * _smaller(confusion, sizes, decided)
    figures["accuracy"] = share_interval(figures["accuracy"].value, together, level)
    per_class["auroc"] = per_class["average_precision"] = [UNDEFINED] * len(names)
    if p is not None:
        per_class |= _rank_figures(true, p, models, sizes, level)
        for name in ("auroc", "average_precision"):
            figures[name] = macro_interval([figure for figure in per_class[name] if figure is not UNDEFINED])
        rng = np.random.default_rng(derive_seed(seed, "metrics", "probabilities"))
        figures |= _probability_figures(true, p, codes, resamples=bootstrap, level=level, rng=rng)
    return Evaluation(
        num_images=len(true),
        num_groups=None if codes is None else int(codes.max()) + 1,
        classes=names,
        level=level,
        bootstrap=bootstrap,
        seed=seed,
        figures=figures,
        per_class=tuple(
            ClassMetrics(name, int(support[c]), int(confusion[:, c].sum()), **{k: v[c] for k, v in per_class.items()})
            for c, name in enumerate(names)
        ),
        confusion=tuple(tuple(int(count) for count in row) for row in confusion),
        majority=Majority(
            names[support.argmax()], float(support.max() / len(true)), 1 / np.count_nonzero(support), vote
        ),
        notes=_notes(names, support),
    )


def _smaller(confusion: Codes, sizes: Floats, decided: Floats) -> float:
    """Return by which factor the independent images of all classes together are fewer if those of each class are."""
    support = confusion.sum(axis=1)
    recall = (np.diagonal(confusion) + 0.5) / (support + 1)
    part = np.square(support) * recall * (1 - recall)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.nansum(part / sizes) / np.nansum(part / decided))


def _count_figures(hits: Floats, predicted: Floats, support: Floats) -> dict[str, Floats]:
    """Return the metrics of confusions, given their diagonals and column sums, (..., K), and their row sums, (K,)."""
    present = support > 0
    num = support.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        recall = (hits / support)[..., present]
        f1 = 2 * hits / (support + predicted)
        spread = (num**2 - np.sum(predicted**2, axis=-1)) * (num**2 - np.sum(support**2))
        covariance = hits.sum(axis=-1) * num - np.sum(support * predicted, axis=-1)
        return {
            "accuracy": hits.sum(axis=-1) / num,
            "uwa": recall.mean(axis=-1),
            "macro_f1": f1[..., present].mean(axis=-1),
            "g_mean": np.exp(np.log(recall).mean(axis=-1)),
            "mcc": np.where(spread > 0, covariance / np.sqrt(spread), 0.0),
            "f1": np.where(present, f1, math.nan),
            "precision": hits / predicted,
        }


def _confusion_intervals(
    confusion: Codes, sizes: Floats, draws: int, level: float, rng: np.random.Generator
) -> tuple[dict[str, Estimate], dict[str, list[Estimate]]]:
    """Return the metrics of the whole confusion, and the metrics of each class."""
    support = confusion.sum(axis=1).astype(np.float64)
    diagonal = np.diagonal(confusion).astype(np.float64)
    values = _count_figures(diagonal, confusion.sum(axis=0).astype(np.float64), support)
    drawn = [_count_figures(*chunk, support) for chunk in confusion_draws(confusion, sizes, draws, rng)]
    figures: dict[str, Estimate] = {}
    per_class: dict[str, list[Estimate]] = {}
    for name, value in values.items():
        both = np.concatenate([chunk[name] for chunk in drawn])
        low, high = np.quantile(both, [(1 - level) / 2, (1 + level) / 2], axis=0)
        if np.ndim(value) == 0:
            figures[name] = around(float(value), low, high, _BOUNDS.get(name, (0.0, 1.0)))
        else:
            per_class[name] = [around(*triple) for triple in zip(value, low, high, strict=True)]
    present = support > 0
    shares = np.divide(diagonal, support, out=np.full_like(diagonal, math.nan), where=present)
    figures["uwa"] = mean_of_shares_interval(shares[present], sizes[present], level)
    per_class["recall"] = [share_interval(*pair, level) for pair in zip(shares, sizes, strict=True)]
    return figures, per_class


def _rank_figures(
    true: Codes, p: Floats, folds: NDArray[Any], sizes: Floats, level: float
) -> dict[str, list[Estimate]]:
    """Return AUROC and average precision of each class against the rest; undefined if a class has no or all images.

    Both are means over the folds that hold images of the class and of others. AUROC is weighted by the pairs of an
    image of the class and another one, so that it is the same for both of two classes; average precision by the images
    of the class. If there is no such fold, all images are ranked together.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    aurocs: list[Estimate] = []
    average_precisions: list[Estimate] = []
    for c in range(p.shape[1]):
        positive = true == c
        if not 0 < positive.sum() < len(true):
            aurocs.append(UNDEFINED)
            average_precisions.append(UNDEFINED)
            continue
        parts = [np.flatnonzero(folds == fold) for fold in np.unique(folds)]
        parts = [rows for rows in parts if 0 < positive[rows].sum() < len(rows)] or [np.arange(len(true))]
        weights = np.array([positive[rows].sum() for rows in parts])
        pairs = weights * np.array([len(rows) for rows in parts]) - weights**2
        area = float(np.average([roc_auc_score(positive[rows], p[rows, c]) for rows in parts], weights=pairs))
        aurocs.append(auroc_interval(min(1.0, area), sizes[c], sizes.sum() - sizes[c], level))
        scores = [average_precision_score(positive[rows], p[rows, c]) for rows in parts]
        precision = float(np.average(scores, weights=weights))
        average_precisions.append(share_interval(min(1.0, precision), sizes[c], level))  # Rounding can exceed 1.
    return {"auroc": aurocs, "average_precision": average_precisions}


def _probability_figures(
    true: Codes, p: Floats, groups: Codes | None, *, resamples: int, level: float, rng: np.random.Generator
) -> dict[str, Estimate]:
    """Return Brier score, log loss and calibration error, which are functions of sums over images."""
    num = np.arange(len(true))
    confidence, hit = p.max(axis=1), p.argmax(axis=1) == true
    rows = np.zeros((len(true), 3 + NUM_BINS))
    rows[:, 0] = 1
    truth = np.zeros_like(p)
    truth[num, true] = 1
    rows[:, 1] = np.sum((p - truth) ** 2, axis=1) / 2
    rows[:, 2] = -np.log(np.clip(p[num, true], np.finfo(np.float64).eps, None))
    bins = np.clip(np.ceil(confidence * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
    rows[num, 3 + bins] = confidence - hit
    one_hot, units = np.eye(NUM_BINS)[bins], num if groups is None else groups
    if groups is not None:
        sums = np.zeros((groups.max() + 1, rows.shape[1]))
        np.add.at(sums, groups, rows)
        rows = sums

    def summarise(sums: Floats) -> Floats:
        error = np.abs(sums[:, 3:]).sum(axis=1)
        return np.stack([sums[:, 1], sums[:, 2], error], axis=1) / sums[:, :1]

    value = summarise(rows.sum(axis=0, keepdims=True))[0]
    drawn = summarise(resampled_sums(rows, resamples, rng))
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0)
    # ECE is biased upwards: it is never 0. The basic interval removes the bias, but not completely near 0.
    low[2], high[2] = 2 * value[2] - high[2], 2 * value[2] - low[2]
    by_chance = np.abs(calibrated_sums(confidence, units, one_hot, resamples, rng)).sum(axis=1) / len(true)
    if value[2] <= np.quantile(by_chance, level):
        low[2] = 0.0
    if hit.all():
        high = np.maximum(high, _unseen_mistakes(p, len(np.unique(units)), level))
    names = ("brier", "log_loss", "calibration_error")
    triples = zip(names, value, low, high, strict=True)
    return {name: around(v, a, b, _BOUNDS.get(name, (0.0, 1.0))) for name, v, a, b in triples}


def _unseen_mistakes(p: Floats, size: int, level: float) -> Floats:
    """Return Brier score, log loss and calibration error if as many images were mistaken as `size` right ones allow.

    A bootstrap of right answers never draws a mistake, however few they are. Then the second most probable class would
    be the right one.
    """
    share = share_interval(0.0, size, level).high
    second, first = np.sort(p, axis=1)[:, -2:].T
    squares = np.sum(p**2, axis=1)
    likely = np.clip(np.stack([first, second]), np.finfo(np.float64).eps, None)
    both = np.mean([(squares - 2 * each + 1) / 2 for each in (first, second)], axis=1), -np.log(likely).mean(axis=1)
    return np.array([*((1 - share) * right + share * wrong for right, wrong in both), first.mean() - (1 - share)])


def independent_sizes(true: Codes, groups: ArrayLike | None, num_classes: int) -> Floats:
    """Return the number of independent images of each class: Kish's effective size, a group counting as copies."""
    support = np.bincount(true, minlength=num_classes).astype(np.float64)
    codes = _group_codes(groups, true)
    if codes is None:
        return support
    pairs, counts = np.unique(np.stack([true, codes]), axis=1, return_counts=True)
    squares = np.bincount(pairs[0], weights=counts.astype(np.float64) ** 2, minlength=num_classes)
    return np.divide(support**2, squares, out=np.zeros_like(support), where=squares > 0)


def _count(true: Codes, predicted: Codes, num_classes: int) -> Codes:
    return np.bincount(true * num_classes + predicted, minlength=num_classes**2).reshape(num_classes, num_classes)


def _notes(names: tuple[str, ...], support: Codes) -> tuple[str, ...]:
    absent = [name for name, count in zip(names, support, strict=True) if count == 0]
    notes = []
    if absent:
        notes.append(f"The test set has no image of {', '.join(absent)}: means over classes omit such classes.")
    if np.count_nonzero(support) == 1:
        notes.append("The test set has only one class: AUROC and average precision are not defined.")
    return tuple(notes)


def _confusion_of(y_true: ArrayLike, y_pred: ArrayLike) -> Codes:
    true, predicted = _labels(y_true, "y_true"), _labels(y_pred, "y_pred")
    _check_length(predicted, true, "y_pred")
    if true.size == 0:
        raise InputError(sentence("y_true must hold at least one label", 0))
    if true.dtype.kind != predicted.dtype.kind:
        got = f"{true.dtype} and {predicted.dtype}"
        raise InputError(sentence("y_true and y_pred must both be integers or both be strings", got))
    values, codes = np.unique(np.concatenate([true, predicted]), return_inverse=True)
    return _count(codes[: len(true)], codes[len(true) :], len(values))


def _labels(labels: ArrayLike, name: str) -> NDArray[Any]:
    """Return labels as a vector of integers or of strings."""
    array = np.asarray(labels)
    if array.ndim != 1:
        raise InputError(sentence(f"{name} must be one label per image", f"an array of shape {array.shape}"))
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind == "O" and all(isinstance(label, str) for label in array):
        return array.astype(np.str_)
    if array.dtype.kind in "iub":
        return array.astype(np.int64)
    if array.dtype.kind not in "U":
        raise InputError(sentence(f"{name} must hold integers or strings", f"an array of {array.dtype}"))
    return array


def _class_names(classes: Sequence[str] | Sequence[int]) -> tuple[str, ...]:
    names = tuple(str(name) for name in classes)
    if len(names) < 2 or len(set(names)) < len(names):
        raise InputError(sentence("classes must be at least two different names", list(classes)))
    return names


def _encode(labels: ArrayLike, classes: Sequence[str] | Sequence[int], name: str) -> Codes:
    """Return the index of each label in `classes`."""
    array = _labels(labels, name)
    known: dict[Any, int] = {label: code for code, label in enumerate(_labels(np.asarray(classes), "classes").tolist())}
    if array.dtype.kind == "i" and any(isinstance(label, str) for label in known):
        known = {code: code for code in known.values()}
    values, inverse = np.unique(array, return_inverse=True)
    for value in values.tolist():
        if value not in known:
            raise InputError(sentence(f"{name} must hold only labels from {list(known)}", repr(value)))
    return np.array([known[value] for value in values.tolist()], dtype=np.int64)[inverse]


def _check_length(array: NDArray[Any], true: NDArray[Any], name: str) -> None:
    if len(array) != len(true):
        raise InputError(sentence(f"{name} must be as long as y_true ({len(true)})", len(array)))


def _check_probabilities(probabilities: ArrayLike, num: int, num_classes: int) -> Floats:
    p = np.asarray(probabilities, dtype=np.float64)
    if p.shape != (num, num_classes):
        must = f"probabilities must have one row per image and one column per class, ({num}, {num_classes})"
        raise InputError(sentence(must, p.shape))
    if not np.isfinite(p).all() or p.min() < 0 or p.max() > 1 + 1e-3:
        got = "NaN or an infinity" if not np.isfinite(p).all() else f"values from {p.min():.4g} to {p.max():.4g}"
        raise InputError(sentence("probabilities must be finite and between 0 and 1", got, "Apply softmax to logits."))
    off = np.abs(p.sum(axis=1) - 1)
    if off.max() > 1e-3:
        got = f"{p[off.argmax()].sum():.4g} in row {off.argmax()}"
        raise InputError(sentence("probabilities must sum to 1 in each row", got, "Apply softmax to logits."))
    return np.minimum(p, 1.0)


def _group_codes(groups: ArrayLike | None, true: Codes) -> Codes | None:
    if groups is None:
        return None
    array = np.asarray(groups)
    if array.ndim != 1:
        raise InputError(sentence("groups must be one name per image", f"an array of shape {array.shape}"))
    _check_length(array, true, "groups")
    return np.unique(array.astype(np.str_), return_inverse=True)[1]
