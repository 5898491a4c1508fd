from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import t

from lopsided.errors import InputError
from lopsided.evaluation.intervals import mean_interval, paired_difference
from lopsided.evaluation.resampled import (
    cheapest_near_best,
    fold_overlap,
    images_needed,
    repeats_needed,
    standard_error,
)


def test_the_interval_of_folds_has_the_variance_of_nadeau_and_bengio() -> None:
    values = [0.70, 0.74, 0.72, 0.76, 0.68]
    half = t.ppf(0.975, 4) * np.std(values, ddof=1) * math.sqrt(1 / 5 + 20 / 80)
    found = mean_interval(values, overlap=0.25)
    assert (found.value, found.low, found.high) == pytest.approx((0.72, 0.72 - half, 0.72 + half))
    same = paired_difference(values, [0.0] * 5, overlap=0.25)
    assert same == found


def test_an_overlap_of_0_is_students_interval() -> None:
    values = [1.0, 2.0, 4.0]
    assert mean_interval(values, overlap=0.0) == mean_interval(values)
    with pytest.raises(InputError, match=r"^overlap must be >= 0 and finite, got -0.1\. Use 0 for independent runs\.$"):
        mean_interval(values, overlap=-0.1)


def test_the_overlap_is_the_mean_ratio_of_unequal_folds() -> None:
    assert fold_overlap([10, 30], [90, 70]) == pytest.approx((10 / 90 + 30 / 70) / 2)
    with pytest.raises(InputError, match="test and train must be positive numbers of images of the same folds"):
        fold_overlap([10], [0])


def test_one_run_has_no_standard_error() -> None:
    assert math.isnan(standard_error([1.0], 0.25))
    assert standard_error([1.0, 3.0], 0.25) == pytest.approx(math.sqrt(2) * math.sqrt(0.75))


COSTS = {"big": 9.0, "small": 3.0, "tiny": 1.0}


@pytest.mark.parametrize(
    ("below", "chosen"),
    [
        ({"small": 0.4, "tiny": 0.6}, "small"),  # tiny is more than one standard error below.
        ({"small": 0.4, "tiny": 0.5}, "tiny"),
        ({"small": 0.6, "tiny": 0.6}, "big"),
    ],
)
def test_the_cheapest_method_within_one_standard_error_is_chosen(below: dict[str, float], chosen: str) -> None:
    assert cheapest_near_best("big", below, {"small": 0.5, "tiny": 0.5}, COSTS) == chosen


def test_an_method_without_a_standard_error_must_equal_the_best() -> None:
    errors = {"small": math.nan, "tiny": math.nan}
    assert cheapest_near_best("big", {"small": 0.0, "tiny": 0.1}, errors, COSTS) == "small"


def test_of_methods_of_one_cost_the_higher_is_chosen() -> None:
    costs = dict.fromkeys(COSTS, 1.0)
    assert cheapest_near_best("big", {"small": 0.1, "tiny": 0.1}, {"small": 1.0, "tiny": 1.0}, costs) == "big"


def test_a_cost_that_differs_by_less_than_times_vary_does_not_decide() -> None:
    below, errors = {"small": 0.1, "tiny": 0.2}, {"small": 1.0, "tiny": 1.0}
    assert cheapest_near_best("big", below, errors, {"big": 1.19, "small": 1.0, "tiny": 1.1}) == "big"
    assert cheapest_near_best("big", below, errors, {"big": 1.21, "small": 1.1, "tiny": 1.0}) == "small"


def _half(deviation: float, folds: int, repeats: int) -> float:
    """The half width of the interval, and the margin for a chance of 80 per cent."""
    runs = folds * repeats
    return float((t.ppf(0.975, runs - 1) + 0.8416212) * deviation * math.sqrt(1 / runs + 0.25))


def test_the_repeats_are_the_fewest_that_tell_the_methods_apart() -> None:
    differences = np.array([2.0, 2.5, 1.5, 2.0, 2.6])
    gap, deviation = differences.mean(), differences.std(ddof=1)
    scale = gap / 1.9 / deviation  # One repeat is too few, and many repeats are enough.
    spread = gap + (differences - gap) * scale
    found = repeats_needed(spread, 5, 0.25)
    assert found is not None
    assert found > 1
    assert _half(deviation * scale, 5, found) <= gap < _half(deviation * scale, 5, found - 1)


def test_repeats_of_the_same_images_do_not_remove_all_noise() -> None:
    assert repeats_needed([1.0, -1.0, 1.5, -1.2, 0.3], 5, 0.25) is None
    assert repeats_needed([0.0] * 5, 5, 0.25) is None


def test_more_rare_images_narrow_the_interval_by_their_root() -> None:
    differences = np.array([3.0, -1.0, 2.0, 1.0, 0.0])
    found = images_needed(differences, 100, 0.25)
    assert found is not None
    gap, deviation = differences.mean(), differences.std(ddof=1)
    at = [_half(deviation * math.sqrt(100 / n), 5, 1) for n in (found, found - 1)]
    assert at[0] <= gap < at[1]


def test_methods_that_are_told_apart_need_no_more_images_and_equal_methods_would_need_too_many() -> None:
    assert images_needed([2.0, 2.1, 1.9, 2.0, 2.0], 100, 0.25) == 100
    assert images_needed([0.0] * 5, 100, 0.25) is None
    assert images_needed([1.0, -1.0, 1.0, -1.0, 0.001], 100, 0.25) is None


def test_bad_input_is_refused() -> None:
    with pytest.raises(InputError, match="differences must be a list of finite numbers"):
        images_needed([1.0, math.nan], 10, 0.25)
    with pytest.raises(InputError, match=r"power must be between 0 and 1, got 1\.0"):
        repeats_needed([1.0, 2.0], 2, 0.25, power=1.0)
