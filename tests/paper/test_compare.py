from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t

from lopsided.errors import InputError
from lopsided.evaluation.intervals import mean_interval
from lopsided.paper.compare import Comparison, Entry, Protocol, compare, select
from lopsided.paper.protocol import CL, CLASSES, Setting, base_recipe
from lopsided.runs.keys import LossTable
from lopsided.runs.records import Record, read_records
from synthetic_records import figures, make_records, record

FMNIST = Protocol.of(base_recipe("eta"))
ACL = Setting(300.0, 0.0)
RESULTS = Path(__file__).parents[2] / "results"


def of(records: list[Record], table: str = "eta") -> Comparison:
    return compare(records, table, Protocol.of(base_recipe(table)))


def at_90_10(setting: Setting, uwas: list[float], seeds: list[int] | None = None) -> list[Record]:
    pairs = zip(uwas, seeds or range(len(uwas)), strict=True)
    return [record("90:10", setting, seed, figures((u + 0.1, u - 0.1), 0.9)) for u, seed in pairs]


def test_an_entry_is_the_mean_of_its_runs_in_per_cent_with_students_interval() -> None:
    uwas = [0.60, 0.66, 0.63, 0.71]
    entry = of(at_90_10(ACL, uwas)).entry("90:10", ACL, "test", "uwa")
    assert entry is not None
    half = 100 * t.ppf(0.975, 3) * np.std(uwas, ddof=1) / 2
    assert entry.mean.value == pytest.approx(65.0)
    assert (entry.mean.low, entry.mean.high) == pytest.approx((65.0 - half, 65.0 + half))
    assert entry.runs == 4
    assert entry.published == 72.58
    assert entry.difference is None


def test_a_difference_is_taken_over_the_seeds_that_both_have() -> None:
    base = at_90_10(CL, [0.50, 0.60, 0.70], [0, 1, 2])
    more = at_90_10(ACL, [0.63, 0.71, 0.99], [1, 2, 7])
    entry = of([*more, *base]).entry("90:10", ACL, "test", "uwa")
    assert entry is not None
    assert entry.difference is not None
    assert (entry.runs, entry.pairs) == (3, 2)
    assert entry.difference.value == pytest.approx(2.0)
    assert of([*more, *base]).entry("90:10", CL, "test", "uwa").difference is None  # type: ignore[union-attr]


def test_a_difference_differs_when_its_interval_leaves_out_0() -> None:
    steady = [0.60, 0.65, 0.70, 0.62]
    up = of([*at_90_10(CL, steady), *at_90_10(ACL, [0.631, 0.679, 0.73, 0.651])])
    wild = of([*at_90_10(CL, steady), *at_90_10(ACL, [0.5, 0.8, 0.5, 0.9])])
    assert up.entry("90:10", ACL, "test", "uwa").differs  # type: ignore[union-attr]
    assert not wild.entry("90:10", ACL, "test", "uwa").differs  # type: ignore[union-attr]


def test_one_run_has_a_mean_and_no_interval() -> None:
    comparison = of([*at_90_10(CL, [0.6]), *at_90_10(ACL, [0.7])])
    entry = comparison.entry("90:10", ACL, "test", "uwa")
    assert entry is not None
    assert entry.mean.value == pytest.approx(70.0)
    assert math.isnan(entry.mean.low)
    assert entry.difference is not None
    assert not entry.differs
    assert entry.expects_published() is None
    assert {verdict.decision for verdict in comparison.verdicts} == {"cannot tell"}


def test_held_out_accuracy_is_weighted_by_the_scenarios_proportions() -> None:
    test, held_out = figures((0.9, 0.5), 0.9), figures((0.8, 0.4), 0.5)
    comparison = of([record("90:10", CL, 0, test, held_out)])
    found = {
        (split, figure): comparison.entry("90:10", CL, split, figure).mean.value  # type: ignore[union-attr]
        for split in ("test", "held_out")
        for figure in ("uwa", "accuracy")
    }
    assert found == pytest.approx(
        {
            ("test", "uwa"): 70.0,
            ("test", "accuracy"): 86.0,
            ("held_out", "uwa"): 60.0,
            ("held_out", "accuracy"): 0.9 * 80 + 0.1 * 40,
        }
    )


def test_the_misprinted_row_is_compared_with_nothing() -> None:
    comparison = of(make_records("gamma"), "gamma")
    row = [comparison.entry("60:40", setting, "test", "uwa") for setting in comparison.settings]
    assert all(entry is not None and entry.published is None for entry in row)
    assert all(comparison.is_misprint("60:40", setting, "uwa") for setting in comparison.settings)
    assert (comparison.misprints("uwa"), comparison.misprints("accuracy")) == (["60:40"], [])
    assert comparison.agreement("uwa")[1] == 60
    assert comparison.agreement("accuracy")[1] == 66


def test_rows_and_columns_without_a_run_are_left_out_and_cells_between_them_are_missing() -> None:
    records = [
        r
        for r in make_records("eta", scenarios=["50:50", "90:10"])
        if Setting.of(r) in (CL, ACL) and (r.scenario, Setting.of(r)) != ("50:50", ACL)
    ]
    comparison = of(records)
    assert comparison.scenarios == ("50:50", "90:10")
    assert comparison.settings == (CL, ACL)
    assert comparison.entry("50:50", ACL, "test", "uwa") is None
    assert comparison.published("50:50", ACL, "uwa") == 79.42
    assert comparison.splits == ("test", "held_out")
    assert comparison.runs == (4, 4)


def test_no_records_make_an_empty_table() -> None:
    comparison = of([])
    assert (comparison.scenarios, comparison.settings, comparison.splits, comparison.runs) == ((), (), (), (0, 0))
    assert {verdict.decision for verdict in comparison.verdicts} == {"cannot tell"}


def test_a_published_figure_is_expected_as_often_as_a_prediction_interval_holds() -> None:
    """The mean of four further runs of the same kind lies within, 95 times of 100."""
    rng = np.random.default_rng(5)
    number = 2000
    held = 0
    for _ in range(number):
        runs = rng.normal(70, 3, 4)
        entry = Entry(mean_interval(runs), dict(enumerate(runs)), None, 0, float(rng.normal(70, 3, 4).mean()))
        held += entry.expects_published() is True
    assert 0.935 < held / number < 0.965


def test_runs_of_another_protocol_are_not_mixed_in() -> None:
    own = make_records("eta", runs=1, scenarios=["90:10"])
    others = [
        *make_records("eta", runs=1, scenarios=["90:10"], normalization="released"),
        *make_records("eta", runs=1, scenarios=["90:10"], encoder="resnet50"),
        *make_records("eta", runs=1, scenarios=["90:10"], method="end-to-end"),
        *make_records("isic", runs=1),
    ]
    assert select([*others, *own], "eta", FMNIST) == own
    isic = Protocol.of(base_recipe("isic"))
    assert len(select([*others, *own], "isic", isic)) == 5
    lesion = Protocol.of(base_recipe("isic", split="lesion"))
    assert select(others, "isic", lesion) == []
    assert "split by group" in str(lesion)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": LossTable("proxy", (("eta", 0.0), ("gamma", 0.0)))},
        {"loss": LossTable("proxy")},
        {"loss": LossTable("ce"), "method": "end-to-end"},
        {"loss": LossTable("acl", (("eta", 0.5), ("eta_unit", "parity")))},
    ],
    ids=["eta and gamma are 0", "no parameters", "end to end", "eta in another unit"],
)
def test_a_loss_that_is_none_of_the_papers_is_never_taken_for_one(changes: dict[str, Any]) -> None:
    own = at_90_10(CL, [0.6, 0.7])
    others = [replace(run, cell=f"{run.cell[:-1]}x", **changes) for run in at_90_10(CL, [0.1, 0.2])]
    assert {Setting.of(run) for run in others} == {None}
    assert select([*others, *own], "eta", FMNIST) == own
    assert of([*others, *own]).entries == of(own).entries


def test_another_temperature_is_another_protocol() -> None:
    own = at_90_10(CL, [0.6])
    other = replace(own[0], loss=LossTable("cl", (("normalization", "paper"), ("temperature", 0.5))))
    assert select([other, *own], "eta", FMNIST) == own
    warm = Protocol.of(base_recipe("eta").override(**{"encoder_training.loss.temperature": 0.5}))
    assert select([other, *own], "eta", warm) == [other]
    assert ", temperature 0.5, 20 + 10 epochs" in str(warm)


def test_records_of_version_0_1_belong_to_the_recipes_of_today() -> None:
    for file, table, options, runs in (
        ("fmnist", "eta", {}, 484),
        ("isic-small", "isic", {"preset": "small"}, 20),
        ("isic-small", "isic", {"preset": "small", "split": "lesion"}, 20),
        ("isic-paper", "isic", {"weights": "resnet50_imagenet.safetensors"}, 1),
    ):
        records, _ = read_records(RESULTS / f"{file}.jsonl")
        assert len(select(records, table, Protocol.of(base_recipe(table, **options)))) == runs


def test_the_protocol_of_a_record_is_that_of_its_recipe() -> None:
    assert Protocol.of(make_records("gamma", runs=1)[0]) == FMNIST
    assert str(FMNIST) == (
        "resnet18 at 28 px from scratch, split by image, paper normalization, 20 + 10 epochs, recipe paper-fmnist"
    )


def test_a_protocol_names_its_recipe_as_far_as_it_is_known() -> None:
    small = Protocol.of(base_recipe("isic", preset="small", split="lesion"))
    assert str(small).endswith("recipe paper-isic (small)")
    other = Protocol.of(base_recipe("eta").override(**{"encoder_training.epochs": 3}))
    assert str(other).endswith(f"normalization, 3 + 10 epochs, recipe {str(other.family)[:8]}")


def test_runs_of_another_recipe_are_not_mixed_in() -> None:
    own = make_records("eta", runs=1, scenarios=["90:10"])
    short = make_records("eta", runs=1, scenarios=["90:10"], family="0123456789abcdef", epochs=(1, 1))
    assert select([*short, *own], "eta", FMNIST) == own
    assert select(short, "eta", FMNIST) == []
    assert select([*short, *own], "eta", Protocol.of(short[0])) == short


def test_a_protocol_with_weights_names_the_recipe_that_it_changes() -> None:
    paper = Protocol.of(base_recipe("isic", weights="some.safetensors"))
    assert "from weights of a file" in str(paper)
    assert str(paper).endswith("recipe paper-isic")


def test_other_data_have_nothing_published_and_nothing_claimed_of_them() -> None:
    """Of a recipe that differs from the paper's in its images alone, so that the family is the same."""
    other = of(make_records("gamma", source="photos"), "gamma")
    assert other.source == "photos"
    assert other.verdicts == ()
    assert {entry.published for entry in other.entries.values()} == {None}
    assert other.published("90:10", CL, "uwa") is None
    assert other.misprints("uwa") == []
    assert other.coverage() is None
    assert all(entry.difference is not None for key, entry in other.entries.items() if key[1] != CL)
    whole = of(make_records("gamma", source="fashion-mnist"), "gamma")
    assert whole.verdicts
    assert whole.misprints("uwa")


def test_the_papers_data_for_another_of_its_tables_are_other_data() -> None:
    assert of(make_records("eta", source="isic2018")).verdicts == ()


@pytest.mark.parametrize(
    "classes", [("Shirt", "T-shirt/top"), ("T-shirt/top", "Coat"), ("T-shirt/top", "Shirt", "Coat")]
)
def test_other_classes_of_the_papers_source_are_other_data(classes: tuple[str, ...]) -> None:
    assert not of(make_records("eta", runs=1, classes=classes)).is_of_paper
    assert of(make_records("eta", runs=1, classes=("T-shirt/top", "Shirt"))).is_of_paper


def test_the_papers_classes_on_isic_are_those_of_its_recipe() -> None:
    assert CLASSES["isic"] == tuple(base_recipe("isic").data.classes or ())
    assert of(make_records("isic", runs=1, classes=("MEL", "DF")), "isic").is_of_paper


def test_figures_that_were_rounded_may_still_all_differ_by_the_same_number() -> None:
    """Of 300 images, one more is answered rightly in every run."""
    base = [round(k / 300, 5) for k in (251, 254, 260, 271)]
    more = [round((k + 1) / 300, 5) for k in (251, 254, 260, 271)]
    assert len({round(a - b, 9) for a, b in zip(more, base, strict=True)}) > 1
    entry = of([*at_90_10(CL, base), *at_90_10(ACL, more)]).entry("90:10", ACL, "test", "uwa")
    assert entry is not None
    assert not entry.differs


def test_runs_on_several_sources_are_not_put_into_one_table() -> None:
    mixed = [*make_records("eta", runs=2), *make_records("eta", runs=2, seed=9, source="photos")]
    told = r"^The records are of several sources: 'fashion-mnist-tops', 'photos'\. Keep the records of one"
    with pytest.raises(InputError, match=told):
        of(mixed)


def test_a_table_without_records_is_of_the_source_that_was_asked_for() -> None:
    protocol = Protocol.of(base_recipe("eta"))
    assert compare([], "eta", protocol).is_of_paper
    assert not compare([], "eta", protocol, source="photos").is_of_paper


def test_held_out_images_without_a_class_have_no_weighted_accuracy() -> None:
    half = figures((0.8, math.nan), 0.9)
    run = record("90:10", CL, 0, figures((0.9, 0.7), 0.9), replace(half, uwa=0.8, accuracy=0.8))
    assert of([run]).entry("90:10", CL, "held_out", "accuracy") is None
    assert of([run]).entry("90:10", CL, "held_out", "uwa") is not None


def test_runs_that_all_differ_by_the_same_number_get_no_star() -> None:
    pair = [*at_90_10(CL, [0.6, 0.7]), *at_90_10(ACL, [0.625, 0.725])]
    entry = of(pair).entry("90:10", ACL, "test", "uwa")
    assert entry is not None
    assert entry.difference is not None
    assert entry.difference.value == pytest.approx(2.5)
    assert not entry.differs
    same = of(at_90_10(ACL, [0.6, 0.6])).entry("90:10", ACL, "test", "uwa")
    assert same is not None
    assert same.expects_published() is None


def test_the_cells_of_the_papers_table_that_have_a_run_are_counted() -> None:
    part = make_records("eta", runs=2, scenarios=["60:40", "90:10"], settings=[CL, ACL])
    assert of(part).coverage() == (4, 66)
    assert of(make_records("isic", runs=1), "isic").coverage() == (5, 5)
    mixed = [CL, Setting(300.0, 7.0)]
    records = make_records("eta", runs=1, settings=mixed)
    assert compare(records, "eta", FMNIST, settings=mixed).coverage() is None


def test_two_runs_for_one_place_are_refused() -> None:
    twice = [*at_90_10(ACL, [0.6]), record("90:10", ACL, 0, figures((0.9, 0.5), 0.9), cell="0123456789abcdef")]
    with pytest.raises(InputError, match=r"There are two runs of 90:10 ACL\(eta=300, .*\) seed 0, in the cells "):
        of(twice)


def test_the_majoritys_accuracy_is_told_where_there_is_one_scenario() -> None:
    assert of(make_records("isic"), "isic").majority == pytest.approx(90.0)
    assert of(make_records("eta", runs=1)).majority is None


def test_verdicts_see_more_than_what_is_shown() -> None:
    records = make_records("gamma", lambda c, s: 5.0 * (s.gamma == 4))
    whole, part = (compare(records, "gamma", FMNIST, scenarios=scenarios) for scenarios in (None, ["50:50"]))
    assert part.scenarios == ("50:50",)
    assert part.verdicts == whole.verdicts


def test_everything_goes_into_json() -> None:
    import json

    comparison = of([*at_90_10(CL, [0.6, 0.7]), *at_90_10(ACL, [0.7])])
    content = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert content["table"] == "eta"
    assert len(content["entries"]) == 4
    acl = next(entry for entry in content["entries"] if entry["eta"] == 300 and entry["figure"] == "uwa")
    assert acl["mean"] == {"value": 70.0, "low": None, "high": None}
    assert acl["published"] == 72.58
    assert len(content["verdicts"]) == len(comparison.verdicts)


def test_losses_of_both_tables_stand_side_by_side_when_they_are_asked_for() -> None:
    settings = [CL, ACL, Setting(0.0, 7.0), Setting(300.0, 7.0)]
    records = make_records("eta", runs=2, scenarios=["90:10"], settings=settings)
    comparison = compare(records, "eta", FMNIST, settings=settings)
    assert comparison.settings == tuple(settings)
    assert [comparison.published("90:10", setting, "uwa") for setting in settings] == [64.91, 72.58, 80.54, None]
