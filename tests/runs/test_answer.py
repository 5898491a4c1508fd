"""Comparisons over folds, and their answer in words."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t

from lopsided.runs.answer import answer, blocks, notes, to_dict
from lopsided.runs.comparison import FOLD_RULE, Comparison, compare
from lopsided.runs.records import Record
from made_comparison import folds, runs

BEST = (0.80, 0.84, 0.82, 0.86, 0.78)


def shifted(*points: float) -> tuple[float, ...]:
    return tuple(value - point / 100 for value, point in zip(BEST, points, strict=True))


def compared(*records: list[Record]) -> Comparison:
    return compare([record for part in records for record in part])


def test_the_interval_of_folds_is_the_corrected_one() -> None:
    comparison = compared(folds("ce", *BEST), folds("cl", *shifted(1, 2, 3, 4, 5)))
    found = comparison.difference(None, "cl", "test", "uwa")
    assert found is not None
    half = t.ppf(0.975, 4) * math.sqrt(2.5) * math.sqrt(1 / 5 + 20 / 100)
    assert (found.estimate.value, found.estimate.high) == pytest.approx((-3.0, -3.0 + half))
    entry = comparison.entry(None, "ce", "test", "uwa")
    assert entry is not None
    assert [run.fold for run in entry.runs] == [1, 2, 3, 4, 5]
    own = t.ppf(0.975, 4) * 100 * np.std(BEST, ddof=1) * math.sqrt(1 / 5 + 20 / 100)
    assert entry.mean.high - entry.mean.value == pytest.approx(own)


def test_runs_of_seeds_keep_students_interval_and_sentence() -> None:
    comparison = compared(runs("ce", 0.6, 0.7, 0.8), runs("cl", 0.5, 0.6, 0.7))
    assert comparison.folds is None
    assert answer(comparison, "90:10").sentences() == [
        "At 90:10, ce has the highest balanced accuracy on test images, 70.0 per cent (3 runs); cl is not "
        "reliably lower."
    ]


def test_the_ratio_of_the_rare_class_counts_if_it_is_larger() -> None:
    comparison = compared(folds("ce", *BEST))
    entry = comparison.entry(None, "ce", "test", "uwa")
    assert entry is not None
    assert entry.overlap == pytest.approx(0.2)
    uneven = [replace(record, test=replace(record.test, minority=10)) for record in folds("ce", *BEST)]
    found = compare(uneven).entry(None, "ce", "test", "uwa")
    assert found is not None
    assert found.overlap == pytest.approx(10 / 20)


def test_folds_of_a_second_repeat_are_further_pairs() -> None:
    ten = (*BEST, *BEST)
    comparison = compared(folds("ce", *ten), folds("cl", *(value - 0.01 for value in ten)))
    found = comparison.difference(None, "cl", "test", "uwa")
    assert found is not None
    assert found.pairs == 10
    assert answer(comparison, None).repeats == 2


def test_the_answer_names_the_best_the_close_and_the_lower_methods() -> None:
    comparison = compared(
        folds("big", *BEST, seconds=600.0),
        folds("small", *shifted(1, -1, 1, -1, 0.5), seconds=60.0),
        folds("poor", *shifted(20, 21, 20, 19, 20), seconds=6.0),
    )
    found = answer(comparison, None)
    assert (found.best, [each.method for each in found.close], found.lower) == ("big", ["small"], ("poor",))
    assert found.chosen == "small"
    use, first, second, third = found.sentences()
    assert use == f"Use small: nothing is reliably better on your {comparison.tested} images."
    assert comparison.tested > comparison.rare > 0
    assert first == (
        "On all images, big has the highest balanced accuracy, 82.0 per cent (5 folds); small is not "
        "reliably lower; poor is reliably lower."
    )
    assert second == (
        "small is the cheapest method within one standard error of the best (60 s per fold; big needs 10.0 minutes)."
    )
    assert third.startswith("big and small differ by 0.1 points. It would take ")
    assert third.endswith(" to show that. More repeats of the same images would not be enough.")


def test_a_cheaper_method_that_is_more_than_one_standard_error_below_is_not_taken() -> None:
    comparison = compared(folds("big", *BEST, seconds=600.0), folds("small", *shifted(4, 6, 1, 8, 3), seconds=60.0))
    found = answer(comparison, None)
    assert (found.best, found.chosen) == ("big", "big")
    assert found.sentences()[0] == f"Use big: nothing is reliably better on your {comparison.tested} images."
    assert found.sentences()[2] == (
        "No method within one standard error of big is clearly cheaper (10.0 minutes per fold)."
    )


def test_a_method_above_all_others_is_said_to_be_reliably_better() -> None:
    comparison = compared(folds("big", *BEST), folds("poor", *shifted(20, 21, 20, 19, 20)))
    told = f"Use big: it is reliably better than poor on your {comparison.tested} images"
    assert answer(comparison, None).use() == told
    assert answer(compared(folds("big", *BEST)), None).use() == ""


def test_the_answer_says_how_many_repeats_or_rare_images_would_be_enough() -> None:
    comparison = compared(folds("big", *BEST), folds("small", *shifted(3, 5, 1, 6, 1)))
    found = answer(comparison, None)
    (needed,) = found.close
    gaps = np.array([3.0, 5.0, 1.0, 6.0, 1.0])
    reach = float(t.ppf(0.975, 4)) + 0.8416212
    times = (reach * gaps.std(ddof=1) * math.sqrt(1 / 5 + 0.2) / gaps.mean()) ** 2
    assert needed.images == math.ceil(24 * times)
    assert needed.repeats is not None
    assert found.sentences()[-1] == (
        f"big and small differ by 3.2 points. It would take about {needed.repeats} repeats instead of 1 or about "
        f"{needed.images} rare images instead of 24 to show that."
    )


def test_equal_methods_cannot_be_told_apart_by_more_images() -> None:
    found = answer(compared(folds("big", *BEST, seconds=9.0), folds("small", *BEST, seconds=6.0)), None)
    assert (found.best, found.chosen) == ("small", "small")  # Of equals the cheaper method is the best.
    assert found.sentences()[-1] == (
        "small and big do not differ in balanced accuracy, so more repeats or images would not show a difference."
    )


def test_an_method_without_all_folds_is_not_ranked() -> None:
    found = answer(compared(folds("ce", *BEST), folds("cl", 0.99, 0.99)), None)
    assert found.best == "ce"
    assert found.sentences()[-1] == "cl is not ranked, because it has 2 of 5 folds."


def test_methods_without_common_folds_are_said_to_have_none() -> None:
    others = [replace(record, data=f"other-{record.data}") for record in folds("cl", *BEST)]
    found = answer(compared(folds("ce", *BEST), others), None)
    assert found.sentences()[-1] == "ce and cl have no fold in common."


def test_a_comparison_without_a_finished_fold_says_so() -> None:
    comparison = compare([], scenarios=[None])
    assert answer(replace(comparison, folds=5), None).sentences() == ["On all images, no method has a finished fold."]


def test_json_has_the_answer_and_the_rule_of_folds() -> None:
    comparison = compared(folds("ce", *BEST), folds("cl", *shifted(20, 21, 20, 19, 20)))
    content = json.loads(json.dumps(to_dict(comparison), allow_nan=False))
    assert (content["folds"], content["rare"], content["rule"]) == (5, 24, FOLD_RULE)
    (found,) = content["answers"]
    assert (found["best"], found["chosen"], found["lower"]) == ("ce", "ce", ["cl"])
    assert content["sentences"] == found["sentences"]
    assert {entry["metric"] for entry in content["entries"]} == {
        *("uwa", "accuracy", "auroc", "log_loss", "recall of cat", "recall of dog", "seconds"),
    }


def test_the_table_has_log_loss_with_three_digits_and_minutes_of_a_fold() -> None:
    comparison = compared(folds("ce", *BEST), folds("cl", *shifted(20, 21, 20, 19, 20)))
    (block,) = blocks(comparison)
    assert block.title == "photos: out-of-fold images, per cent"
    place = [column[0] for column in block.columns].index("log loss") + 1
    rows = list(block.rows(comparison))
    assert rows[0][place].startswith("0.295 ±")
    assert rows[2][place].startswith("+0.050 ±")
    assert notes(comparison)[0] == "Time of a fold: ce 60 s, cl 60 s."
