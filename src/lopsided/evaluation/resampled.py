"""Metrics of repeated folds: how sure a difference is, which method to use, and what would make it surer.

``studies/fold_coverage.py`` measures how often the intervals contain the truth. Its record is
``studies/records/fold_coverage.json``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lopsided.errors import InputError, sentence
from lopsided.evaluation.intervals import SAME, Floats, check_level

POWER = 0.8
"""The chance to tell two methods apart that a number of repeats or images is computed for."""
SAME_COST = 0.2
"""Two methods whose costs differ by at most this share count as equally cheap: their times vary by as much."""
MOST_REPEATS = 100
MOST_TIMES = 1000.0
"""Numbers of repeats, and multiples of the images, above which an answer is None: it would help nobody."""


def fold_overlap(test: Sequence[float] | NDArray[Any], train: Sequence[float] | NDArray[Any]) -> float:
    """Return the mean over folds of test images divided by training images, for ``mean_interval``.

    Five equal folds give 1/4. Folds of groups are unequal, so the mean of their ratios is taken.

    >>> fold_overlap([20, 20, 20], [80, 80, 80])
    0.25
    """
    tested, trained = np.asarray(test, dtype=np.float64), np.asarray(train, dtype=np.float64)
    if tested.shape != trained.shape or tested.ndim != 1 or not tested.size or (trained <= 0).any():
        got = f"shapes {tested.shape} and {trained.shape}"
        raise InputError(sentence("test and train must be positive numbers of images of the same folds", got))
    return float((tested / trained).mean())


def standard_error(values: Sequence[float] | NDArray[Any], overlap: float = 0.0) -> float:
    """Return the standard error of a mean over runs, or over folds that overlap; NaN for a single run."""
    array = np.asarray(values, dtype=np.float64)
    return math.nan if array.size < 2 else float(array.std(ddof=1) * math.sqrt(1 / array.size + overlap))


def cheapest_near_best(
    best: str, below: Mapping[str, float], errors: Mapping[str, float], costs: Mapping[str, float]
) -> str:
    """Return the cheapest method that lies at most one standard error below the best method (Breiman et al., 1984).

    ``below`` is how far each method lies below the best method, and ``errors`` is the standard error of this paired
    difference. A method without a standard error counts only if it equals the best method. The highest of the methods
    that cost at most ``1 + SAME_COST`` times as much as the cheapest wins, because measured times vary.

    >>> costs = {"big": 9, "small": 3, "tiny": 1}
    >>> cheapest_near_best("big", {"small": 0.4, "tiny": 2.0}, {"small": 0.5, "tiny": 0.5}, costs)
    'small'
    """
    near = {best: 0.0}
    for method, gap in below.items():
        error = errors[method]
        if method != best and gap <= (SAME if math.isnan(error) else max(error, SAME)):
            near[method] = gap
    least = min(costs[method] for method in near)
    cheap = [method for method in near if costs[method] <= (1 + SAME_COST) * least]
    return min(cheap, key=lambda method: (near[method], costs[method]))


def repeats_needed(
    differences: Sequence[float] | NDArray[Any], folds: int, overlap: float, level: float = 0.95, power: float = POWER
) -> int | None:
    """Return the number of repeats of the folds that would tell two methods apart, or None if no number would.

    ``differences`` are those of the folds that exist, ordered by repeat. The computation takes their mean for the true
    difference and their deviation for that of further folds. More repeats divide only a part of the variance, because
    they use the same images: the half width of the interval has a limit above 0.
    """
    array = _checked(differences, level, power)
    there = -(-array.size // folds)
    for repeats in range(there, MOST_REPEATS + 1):
        if _is_enough(array, repeats * folds, overlap, level, power):
            return repeats
    return None


def images_needed(
    differences: Sequence[float] | NDArray[Any],
    images: int,
    overlap: float,
    level: float = 0.95,
    power: float = POWER,
) -> int | None:
    """Return the number of rare images that would tell two methods apart with the same folds and repeats.

    ``images`` is the number of rare images now. The computation takes the mean of the differences for the true
    difference, and assumes that their variance falls as 1 / images. None: more than ``MOST_TIMES`` as many.
    """
    array = _checked(differences, level, power)
    gap = abs(float(array.mean()))
    if array.size < 2 or gap <= SAME:
        return None
    times = (_reach(array.size, level, power) * standard_error(array, overlap) / gap) ** 2
    return None if times > MOST_TIMES else max(images, math.ceil(images * times))


def _checked(differences: Sequence[float] | NDArray[Any], level: float, power: float) -> Floats:
    check_level(level)
    if not 0 < power < 1:
        raise InputError(sentence("power must be between 0 and 1", power, f"{POWER} is the usual choice."))
    array = np.asarray(differences, dtype=np.float64)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise InputError(sentence("differences must be a list of finite numbers", f"shape {array.shape}"))
    return array


def _reach(runs: int, level: float, power: float) -> float:
    """Return how many standard errors a difference must have, to be told from 0 with this chance."""
    from scipy.special import stdtrit

    return float(stdtrit(runs - 1, (1 + level) / 2)) + NormalDist().inv_cdf(power)


def _is_enough(array: Floats, runs: int, overlap: float, level: float, power: float) -> bool:
    gap = abs(float(array.mean()))
    if array.size < 2 or gap <= SAME:
        return False
    return _reach(runs, level, power) * float(array.std(ddof=1)) * math.sqrt(1 / runs + overlap) <= gap
