"""Intervals that are valid even if a class has only six test images.

The bootstrap fails for such a class. If all of its images are recognised, or none, its recall is the same in every
resample, and the interval has no width. ``studies/coverage.py`` compares the intervals of this file with the
bootstrap, and its record is ``studies/records/coverage.json``. Over nine settings, a 95 % interval contains the true
value in 93.5 to 99.5 % of the trials for UWA (bootstrap: 53 to 94 %) and in 88 to 98.5 % for AUROC (bootstrap: 59.5 to
94 %). The lowest coverage of any metric is 87 %, for the calibration error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lopsided.errors import InputError, sentence
from lopsided.evaluation.metric_table import decimals

Floats = NDArray[np.float64]
CHUNK = 4_000_000
"""Largest number of values held in memory while drawing."""

SAME = 1e-9
"""Values that differ by at most this amount count as equal."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its interval. Undefined numbers are NaN."""

    value: float
    low: float
    high: float

    @property
    def leaves_out_0(self) -> bool:
        """Whether the whole interval is on one side of 0; False if the interval is undefined."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "not defined"
        if math.isnan(self.low):
            return f"{self.value:.3f}"
        digits = decimals(self.value, self.low, self.high)
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"

    def to_dict(self) -> dict[str, float | None]:
        """Return the three numbers for JSON, NaN as None."""
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        return {name: None if math.isnan(number) else number for name, number in numbers.items()}


UNDEFINED = Estimate(math.nan, math.nan, math.nan)


def around(value: float, low: float, high: float, bounds: tuple[float, float] = (0.0, 1.0)) -> Estimate:
    """Return an estimate whose interval is within `bounds` and contains the value."""
    if math.isnan(value):
        return UNDEFINED
    return Estimate(float(value), float(min(max(low, bounds[0]), value)), float(max(min(high, bounds[1]), value)))


def quantile(level: float) -> float:
    """Return z such that a standard normal variable is within +-z with probability `level`."""
    return NormalDist().inv_cdf((1 + level) / 2)


def share_interval(share: float, size: float, level: float) -> Estimate:
    """Return Wilson's interval for a share of `size` images."""
    if size == 0:
        return UNDEFINED
    z2 = quantile(level) ** 2
    centre = (share + z2 / (2 * size)) / (1 + z2 / size)
    half = math.sqrt(z2 * (share * (1 - share) / size + z2 / (4 * size**2))) / (1 + z2 / size)
    return around(share, centre - half, centre + half)


def mean_of_shares_interval(shares: Floats, sizes: Floats, level: float) -> Estimate:
    """Return the interval of Price and Bonett (2004) for the mean of m independent shares.

    2/m successes and 2/m failures are added to each share, then the usual normal interval is computed.
    """
    extra = 2 / len(shares)
    moved = (shares * sizes + extra) / (sizes + 2 * extra)
    half = quantile(level) * math.sqrt(np.sum(moved * (1 - moved) / (sizes + 2 * extra))) / len(shares)
    return around(float(shares.mean()), moved.mean() - half, moved.mean() + half)


def paired_shares_interval(won: Floats, lost: Floats, sizes: Floats, level: float) -> Estimate:
    """Return an interval for the mean over m classes of the difference of two shares of the same images.

    ``won`` and ``lost`` count the images of each class that only the first or only the second model has right. As
    Bonett and Price (2012) do for one class, one image is added to both counts; over m classes, 1/m. The variance of a
    class is the unbiased one, because five images of a class would otherwise give intervals that are too short.
    """
    extra = 1 / len(sizes)
    first, second, moved = won + extra, lost + extra, sizes + 2 * extra
    difference = (first - second) / moved
    variance = ((first + second) / moved - difference**2) / (moved - 1)
    half = quantile(level) * math.sqrt(variance.sum()) / len(sizes)
    centre = float(difference.mean())
    return around(float(((won - lost) / sizes).mean()), centre - half, centre + half, (-1.0, 1.0))


def fold_component(true: NDArray[np.int64], predicted: NDArray[np.int64], folds: NDArray[Any], sizes: Floats) -> Floats:
    """Return by how much the variance of each recall is larger than that of images alone, (K,), because models differ.

    The models of the folds, and the model that is used afterwards, put their thresholds in different places: few rare
    images determine them. A fold then finds 92 % of a frequent class and another one 51 %, each of many images. A
    threshold moves the recalls of all classes, by phi(z) per unit, where z is the normal quantile of the recall. So the
    variance t^2 of the thresholds is the larger one of two estimates: by the folds' recalls of this class, and by those
    of all classes. Each is what the folds differ by (chi-squared / (folds - 1)) beyond 1, its value by chance.

    The mean of k folds and the one model that is used differ by t^2 (1/k + 1/(k - 1)), as for the means of overlapping
    folds (Nadeau and Bengio, 2003). ``studies/coverage.py --folds`` measures the coverage.
    """
    from scipy.stats import norm

    names, places = np.unique(folds, return_inverse=True)
    num, num_classes = len(names), len(sizes)
    if num < 2:
        return np.ones(num_classes)
    support = np.bincount(true, minlength=num_classes)
    scale = np.divide(sizes, support, out=np.zeros(num_classes), where=support > 0)
    cells = true * num + places
    images = np.bincount(cells, minlength=num_classes * num).reshape(num_classes, num) * scale[:, None]
    hits = np.bincount(cells[true == predicted], minlength=num_classes * num).reshape(num_classes, num) * scale[:, None]
    recall = (hits.sum(axis=1) + 0.5) / (images.sum(axis=1) + 1)
    spread = recall * (1 - recall)
    beyond = np.square(hits - images * recall[:, None]).sum(axis=1) / np.maximum(images.mean(axis=1), 1e-12)
    beyond = np.where(support > 0, beyond / spread / (num - 1) - 1, 0.0)
    slope = images.mean(axis=1) * norm.pdf(norm.ppf(recall)) ** 2 / spread
    pooled = beyond.sum() / slope.sum()
    own = np.divide(beyond, slope, out=np.zeros(num_classes), where=slope > 0)
    factor: Floats = 1 + (1 + num / (num - 1)) * np.maximum(np.maximum(own, pooled), 0.0) * slope
    return factor


def auroc_interval(auroc: float, num_positive: float, num_negative: float, level: float) -> Estimate:
    """Return the interval of Newcombe (2006, method 5) for the area under the ROC curve.

    Its limits t solve (auroc - t)^2 = z^2 V(t). V is the variance of Hanley and McNeil, with both sizes replaced by
    their mean. The interval keeps a width at perfect separation.
    """
    mean_size = (num_positive + num_negative) / 2 - 1
    z = quantile(level)

    def is_outside(t: float) -> bool:
        variance = t * (1 - t) * (1 + mean_size * ((1 - t) / (2 - t) + t / (1 + t))) / (num_positive * num_negative)
        return abs(auroc - t) > z * math.sqrt(variance)

    return around(auroc, _boundary(is_outside, 0.0, auroc), _boundary(is_outside, 1.0, auroc))


def _boundary(is_outside: Callable[[float], bool], outside: float, inside: float) -> float:
    for _ in range(40):
        middle = (outside + inside) / 2
        outside, inside = (middle, inside) if is_outside(middle) else (outside, middle)
    return outside


def macro_interval(figures: Sequence[Estimate]) -> Estimate:
    """Return the mean of one-versus-rest figures, with an interval combined from their intervals.

    The errors of two classes are fully dependent, so their limits are averaged. Three or more classes are treated as
    independent: the squared distances to the limits are added (MOVER; Zou and Donner, 2008).
    """
    if not figures:
        return UNDEFINED
    value, low, high = np.array([(figure.value, figure.low, figure.high) for figure in figures]).T
    power = 1 if len(figures) <= 2 else 2
    down, up = (float(np.sum(gap**power) ** (1 / power) / len(figures)) for gap in (value - low, high - value))
    return around(float(value.mean()), value.mean() - down, value.mean() + up)


def confusion_draws(
    confusion: NDArray[np.int64], sizes: Floats, draws: int, rng: np.random.Generator
) -> Iterator[tuple[Floats, Floats]]:
    """Yield (hits, predicted) per class of confusions drawn from the posterior, in chunks of draws.

    The prior of each row is 1/m right and 1/m wrong answers, where m is the number of classes with images. A recall
    then follows Beta(k + 1/m, n - k + 1/m), which is Jeffreys' prior for m = 2. A fixed prior of 1/2 would shift the
    mean over many small classes. The wrong answers of the prior are divided evenly over the other classes. `sizes` are
    the numbers of independent images; the class counts of the test set are fixed.
    """
    num_classes = len(confusion)
    support = confusion.sum(axis=1)
    present = np.flatnonzero(support)
    seen = confusion[present]
    rows, columns = np.nonzero(seen)
    shapes = seen[rows, columns] * (sizes[present] / support[present])[rows]
    starts = np.searchsorted(rows, np.arange(len(present)))
    by_column = np.argsort(columns, kind="stable")
    used, column_starts = np.unique(columns[by_column], return_index=True)
    diagonal = np.flatnonzero(present[rows] == columns)
    while draws > 0:
        num = min(draws, max(1, CHUNK // (len(rows) + 4 * num_classes)))
        draws -= num
        cells = rng.standard_gamma(shapes, (num, len(rows)))
        right, wrong = rng.standard_gamma(1 / len(present), (2, num, len(present)))
        scale = support[present] / (np.add.reduceat(cells, starts, axis=1) + right + wrong)
        cells *= scale[:, rows]
        right, wrong = right * scale, wrong * scale / (num_classes - 1)
        hits = np.zeros((num, num_classes))
        hits[:, present] = right
        hits[:, columns[diagonal]] += cells[:, diagonal]
        predicted = np.repeat(wrong.sum(axis=1, keepdims=True), num_classes, axis=1)
        predicted[:, present] += right - wrong
        predicted[:, used] += np.add.reduceat(cells[:, by_column], column_starts, axis=1)
        yield hits, predicted


def cost_interval(
    confusion: NDArray[np.int64], sizes: Floats, costs: Floats, draws: int, level: float, rng: np.random.Generator
) -> Estimate:
    """Return the mean cost of a decision with an interval from the posterior of ``confusion_draws``, row by row."""
    num_classes, support = len(confusion), confusion.sum(axis=1)
    present = np.flatnonzero(support)
    total = np.zeros(draws)
    for c in present:
        prior = np.full(num_classes, 1 / len(present) / (num_classes - 1))
        prior[c] = 1 / len(present)
        answers = rng.standard_gamma(confusion[c] * (sizes[c] / support[c]) + prior, (draws, num_classes))
        total += support[c] * (answers @ costs[c]) / answers.sum(axis=1)
    low, high = np.quantile(total / support.sum(), [(1 - level) / 2, (1 + level) / 2])
    return around(float((confusion * costs).sum() / support.sum()), low, high, (0.0, float(costs.max())))


def resampled_sums(rows: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Return the sum of the rows of each bootstrap resample: len(rows) rows, drawn with replacement."""
    size = len(rows)
    sums = np.empty((resamples, rows.shape[1]))
    step = max(1, CHUNK // size)
    for start in range(0, resamples, step):
        num = min(step, resamples - start)
        picks = rng.integers(0, size, (num, size)) + size * np.arange(num)[:, None]
        counts = np.bincount(picks.ravel(), minlength=num * size).reshape(num, size)
        sums[start : start + num] = counts.astype(np.float64) @ rows
    return sums


def calibrated_sums(
    confidence: Floats, units: NDArray[np.int64], bins: Floats, draws: int, rng: np.random.Generator
) -> Floats:
    """Return the sum of confidence - hit in each bin for each draw, if the model were perfectly calibrated.

    Images with the same number in `units` are hit or missed together. `bins` is one-hot, (images, bins).
    """
    sums = np.empty((draws, bins.shape[1]))
    step = max(1, CHUNK // len(confidence))
    for start in range(0, draws, step):
        num = min(step, draws - start)
        hits = rng.random((num, units.max() + 1))[:, units] < confidence
        sums[start : start + num] = confidence @ bins - hits.astype(np.float64) @ bins
    return sums


def mean_interval(
    values: Sequence[float] | NDArray[Any], level: float = 0.95, *, same: float = SAME, overlap: float = 0.0
) -> Estimate:
    """Return the mean over runs with Student's interval.

    There is no interval for a single run, or if all runs are equal within ``same``. Values of few images are coarse
    and can be equal by chance, so equal figures do not determine a width.

    Runs that are folds of the same images depend on each other, because their training images overlap. ``overlap`` is
    then the number of test images divided by the number of training images, and the variance of the mean is that of
    Nadeau and Bengio (2003): s^2 (1/n + overlap) in place of s^2 / n.

    >>> print(mean_interval([0.70, 0.74, 0.72, 0.76]))
    0.730 [0.689, 0.771]
    """
    from scipy.special import stdtrit

    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise InputError(sentence("values must be a list of at least one number", f"shape {array.shape}"))
    if not 0 <= overlap < math.inf:
        raise InputError(sentence("overlap must be >= 0 and finite", overlap, "Use 0 for independent runs."))
    check_level(level)
    mean = float(array.mean())
    if not np.isfinite(array).all() or np.ptp(array) <= same:
        return Estimate(mean, math.nan, math.nan)
    error = array.std(ddof=1) * math.sqrt(1 / array.size + overlap)
    half = float(stdtrit(array.size - 1, (1 + level) / 2) * error)
    return Estimate(mean, mean - half, mean + half)


def paired_difference(
    x: Sequence[float] | NDArray[Any],
    y: Sequence[float] | NDArray[Any],
    level: float = 0.95,
    *,
    same: float = SAME,
    overlap: float = 0.0,
) -> Estimate:
    """Return the mean of x - y over runs with the same seeds, with the interval of ``mean_interval``.

    >>> print(paired_difference([0.72, 0.75, 0.71], [0.70, 0.72, 0.70]))
    0.020 [-0.005, 0.045]
    """
    first, second = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if first.shape != second.shape:
        got = f"{first.shape} and {second.shape}"
        raise InputError(sentence("x and y must hold one value for each of the same runs", got))
    return mean_interval(first - second, level, same=same, overlap=overlap)


def check_level(level: float) -> None:
    """Raise unless a level is between 0 and 1."""
    if not 0 < level < 1:
        raise InputError(sentence("level must be between 0 and 1", level, "0.95 is the usual choice."))
