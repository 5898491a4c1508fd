from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from scipy.stats import t

from lopsided.errors import InputError
from lopsided.runs.answer import answer
from lopsided.runs.comparison import Comparison, compare, name_methods, value_of
from lopsided.runs.keys import LossTable
from made_comparison import run, runs


def difference(comparison: Comparison, method: str, to: str | None = None, scenario: str | None = "90:10") -> Any:
    return comparison.difference(scenario, method, "test", "uwa", to=to)


def test_an_entry_holds_a_value_for_each_data_and_their_mean_with_students_interval() -> None:
    entry = compare(runs("ce", 0.60, 0.66, 0.63)).entry("90:10", "ce", "test", "uwa")
    assert entry is not None
    assert [(each.data, each.seed, each.value) for each in entry.runs] == [
        ("90:10-0", 0, 60.0),
        ("90:10-1", 1, 66.0),
        ("90:10-2", 2, 63.0),
    ]
    half = t.ppf(0.975, 2) * 3 / math.sqrt(3)
    assert (entry.mean.value, entry.mean.low) == pytest.approx((63.0, 63.0 - half))


def test_differences_are_of_pairs_that_saw_the_same_data_with_the_same_seed() -> None:
    base = runs("ce", 0.50, 0.60, 0.70)
    other = runs("cl", 0.52, 0.64, 0.99)
    other[2] = replace(other[2], data="other images")
    found = difference(compare([*base, *other]), "cl")
    assert found.pairs == 2
    assert found.estimate.value == pytest.approx(3.0)
    still = [replace(each, data="same") for each in (*runs("ce", 0.5, 0.6), *runs("cl", 0.52, 0.64))]
    assert difference(compare(still), "cl").pairs == 2  # Without a new draw, seeds tell runs on the same data apart.
    apart = [*runs("ce", 0.5, 0.6), *(replace(each, seed=each.seed + 7) for each in runs("cl", 0.5, 0.6))]
    assert difference(compare(apart), "cl") is None


def test_any_method_is_the_baseline() -> None:
    records = [*runs("ce", 0.50, 0.60), *runs("cl", 0.52, 0.64), *runs("afcl", 0.55, 0.64)]
    by_default, by_name = compare(records), compare(records, baseline="cl")
    assert (by_default.baseline, by_name.baseline) == ("ce", "cl")
    assert difference(by_name, "ce").estimate.value == pytest.approx(-3.0)
    assert difference(by_name, "cl") is None
    assert difference(by_default, "ce", to="cl") == difference(by_name, "ce")
    with pytest.raises(InputError, match=r"^the baseline must be one of the methods, ce, cl, afcl, got 'none'\.$"):
        compare(records, baseline="none")


def test_intervals_of_differences_are_widened_for_the_number_of_methods() -> None:
    two = [*runs("ce", 0.50, 0.60, 0.70), *runs("cl", 0.52, 0.64, 0.75)]
    three = [*two, *runs("afcl", 0.5, 0.6, 0.71)]
    alone, among = (difference(compare(records), "cl").estimate for records in (two, three))
    deviation = math.sqrt(((2 - 11 / 3) ** 2 + (4 - 11 / 3) ** 2 + (5 - 11 / 3) ** 2) / 2)
    assert alone.high - alone.value == pytest.approx(t.ppf(0.975, 2) * deviation / math.sqrt(3))
    assert among.high - among.value == pytest.approx(t.ppf(1 - 0.05 / 2 / 2, 2) * deviation / math.sqrt(3))


def test_two_stage_and_end_to_end_methods_stand_in_one_table() -> None:
    end_to_end = runs("ce", 0.5, 0.6, method="end-to-end", family="fedcba9876543210", epochs=(4,))
    comparison = compare([*end_to_end, *runs("cl", 0.52, 0.64)])
    assert comparison.methods == ("ce", "cl")
    assert difference(comparison, "cl").pairs == 2
    assert comparison.about["ce"] == "CE, end-to-end, mlp at 28 px, 4 epochs"


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": LossTable("proxy", (("eta", 0.0), ("gamma", 0.0)))},
        {"loss": LossTable("cl", (("temperature", 0.5),))},
        {"classifier_loss": LossTable("focal")},
        {"family": "fedcba9876543210"},
        {"method": "end-to-end"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_runs_of_another_loss_or_recipe_are_never_pooled_whatever_their_method_is_called(
    changes: dict[str, Any],
) -> None:
    own, others = runs("cl", 0.5, 0.6), runs("cl", 0.1, 0.2, **changes)
    comparison = compare([*own, *others])
    assert len(comparison.methods) == len(set(comparison.methods)) == 2
    assert {len(entry.runs) for entry in comparison.entries.values()} == {2}


def test_methods_have_their_own_names_else_those_of_their_losses_and_more_where_these_are_the_same() -> None:
    named = [
        run("cl", 0, 0.5),
        replace(run("cl", 0, 0.5, loss=LossTable("cl", (("temperature", 0.5),))), compared_as=None),
        run("cl", 0, 0.5, family="fedcba9876543210"),
        run("cl", 0, 0.5, family="fedcba9876543210", loss=LossTable("cl", (("temperature", 0.5),))),
        run("ce", 0, 0.5),
    ]
    assert list(name_methods(named).values()) == [
        "cl (CL)",
        "CL(temperature=0.5)",
        "cl (CL) (2)",
        "cl (CL(temperature=0.5))",
        "ce",
    ]
    assert next(iter(name_methods(named, ["ce"]).values())) == "ce"


def test_methods_of_one_name_are_told_apart_by_what_differs() -> None:
    changed = {"family": "fedcba9876543210", "epochs": (5, 1), "encoder": "resnet18", "image_size": 64}
    records = [*runs("cl", 0.5, 0.6), *runs("cl", 0.5, 0.6, **changed), *runs("ce", 0.5)]
    assert list(name_methods(records).values()) == [
        "cl (mlp, 28 px, 3 + 1 epochs)",
        "cl (resnet18, 64 px, 5 + 1 epochs)",
        "ce",
    ]


def test_scenarios_of_one_method_with_other_totals_share_its_name_and_no_scenario_has_runs_of_both() -> None:
    other = {"family": "fedcba9876543210"}
    apart = [*runs("cl", 0.5, 0.6), *runs("cl", 0.7, scenario="50:50", **other)]
    assert compare(apart).methods == ("cl",)
    together = [*apart, run("cl", 5, 0.9, **other)]
    assert compare(together).methods == ("cl", "cl (2)")


def test_records_of_several_sources_are_not_one_comparison() -> None:
    with pytest.raises(InputError, match="The records are of several sources: 'photos', 'pictures'"):
        compare([*runs("ce", 0.5), *runs("cl", 0.5, source="pictures")])


def test_of_two_runs_of_one_method_data_and_seed_the_first_counts() -> None:
    comparison = compare([*runs("ce", 0.5, 0.6), run("ce", 1, 0.9, cell="again")])
    entry = comparison.entry("90:10", "ce", "test", "uwa")
    assert entry is not None
    assert [each.value for each in entry.runs] == [50.0, 60.0]
    assert comparison.passed_over == 1


def test_scenarios_are_columns_and_those_that_were_asked_for_are_kept_in_order() -> None:
    records = [*runs("ce", 0.5, scenario="98:2"), *runs("ce", 0.6, scenario="50:50"), *runs("ce", 0.7, scenario=None)]
    assert compare(records).scenarios == (None, "50:50", "98:2")
    asked = compare(records, scenarios=["98:2", "90:10"])
    assert asked.scenarios == ("98:2", "90:10")
    assert {key[0] for key in asked.entries} == {"98:2"}


def test_every_class_has_its_recall_and_a_class_without_images_none() -> None:
    figures = replace(run("ce", 0, 0.5).test, recalls=(0.6, math.nan), auroc=None)
    comparison = compare([run("ce", 0, 0.5, test=figures)])
    assert comparison.metrics == ("uwa", "accuracy", "recall:0", "seconds")
    assert comparison.word("recall:0") == "recall of cat"
    mixed = compare([run("ce", 0, 0.5), run("ce", 1, 0.5, classes=("cat", "wolf"))])
    assert mixed.word("recall:1") == "recall of class 2"


def test_held_out_accuracy_is_weighted_by_the_proportions_where_there_are_as_many_as_classes() -> None:
    held_out = replace(run("ce", 0, 0.5).test, recalls=(0.8, 0.4), accuracy=0.6)
    assert value_of(run("ce", 0, 0.5, held_out=held_out), "held_out", "accuracy") == pytest.approx(76.0)
    assert value_of(run("ce", 0, 0.5, None, held_out=held_out), "held_out", "accuracy") == pytest.approx(60.0)
    assert value_of(run("ce", 0, 0.5), "held_out", "accuracy") is None


def test_the_sentence_names_the_best_method_and_those_that_cannot_be_told_apart_from_it() -> None:
    level = (0.50, 0.55, 0.60, 0.52, 0.58)
    records = [
        *runs("low", *(value - 0.2 + i / 500 for i, value in enumerate(level))),
        *runs("best", *level),
        *runs("close", *(value - 0.002 * (-1) ** i for i, value in enumerate(level))),
        *runs("once", 0.4),
    ]
    assert answer(compare(records), "90:10").sentences()[0] == (
        "At 90:10, best has the highest balanced accuracy on test images, 55.0 per cent (5 runs); close and once are "
        "not reliably lower; low is reliably lower."
    )
    assert answer(compare(runs("ce", 0.5, scenario=None)), None).sentences()[0] == (
        "On all images, ce has the highest balanced accuracy on test images, 50.0 per cent (1 run)."
    )
    empty = compare([], methods={run("ce", 0, 0.5).treatment: "ce"}, scenarios=["90:10"])
    assert answer(empty, "90:10").sentences() == ["At 90:10, no method has a finished run."]


def test_that_the_best_method_was_not_known_before_widens_its_intervals() -> None:
    """Of three methods, a gap that is clear to a baseline named before may not be clear to the best found after."""
    base = (0.50, 0.55, 0.60)
    gain = (0.030, 0.040, 0.048)
    records = [*runs("a", *base), *runs("b", *(x + y for x, y in zip(base, gain, strict=True))), *runs("c", *base)]
    records[-1] = replace(records[-1], test=replace(records[-1].test, uwa=0.59))
    comparison = compare(records)
    gap = comparison.difference("90:10", "b", "test", "uwa", to="a")
    wider = comparison.difference("90:10", "b", "test", "uwa", to="a", comparisons=3)
    assert gap is not None
    assert wider is not None
    assert gap.differs
    assert wider.estimate.low < gap.estimate.low


def test_everything_goes_into_json() -> None:
    comparison = compare([*runs("ce", 0.5, 0.6), *runs("cl", 0.52)])
    content = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert [method["name"] for method in content["methods"]] == ["ce", "cl"]
    assert (content["baseline"], content["scenarios"], content["classes"]) == ("ce", ["90:10"], ["cat", "dog"])
    cl = next(entry for entry in content["entries"] if (entry["method"], entry["metric"]) == ("cl", "uwa"))
    assert cl["runs"] == [{"data": "90:10-0", "seed": 0, "value": 52.0}]
    assert (cl["pairs"], cl["difference"]["low"]) == (1, None)
    assert "eta" not in json.dumps(content)
    assert {entry["metric"] for entry in content["entries"]} >= {"recall of cat", "recall of dog", "seconds"}
