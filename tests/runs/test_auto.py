"""The choice of a method within a time budget, with an engine that only pretends to train."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lopsided.errors import RunError
from lopsided.recipe import Recipe, named_recipe
from lopsided.runs import auto
from lopsided.runs.auto import Choice, cheapest_first, choose, usual_candidates, work_of
from lopsided.runs.comparison_plan import ComparisonPlan, check_candidates, parse_candidates
from lopsided.runs.engines import Ended
from lopsided.runs.plan import Cell
from lopsided.runs.records import Fold
from tiny_sweep import Heard, Scripted, record_of, write_run

UWA = {"ce": 0.70, "cl": 0.90, "weighted-ce": 0.70}
SECONDS = {"ce": 60.0, "weighted-ce": 120.0, "cl": 600.0}


class Pretending(Scripted):
    """An engine whose folds have the UWA and seconds of their method; a ``wrong`` method fails."""

    trained: ClassVar[list[tuple[str, int]]] = []
    wrong: ClassVar[tuple[str, ...]] = ()

    def _end(self, cell: Cell) -> Ended:
        fold = cell.recipe.data.fold or 0
        method = str(cell.compared_as)
        Pretending.trained.append((method, fold))
        if method in Pretending.wrong:
            return Ended(cell, error="it broke.")
        write_run(self.folder / "cells" / cell.key)
        record = record_of(cell.recipe, UWA[method] + fold / 100)
        found = Fold(fold, cell.recipe.data.folds or 0, 80, 8)
        return Ended(
            cell, replace(record, fold=found, seconds=SECONDS[method], data=f"fold {fold}", compared_as=method)
        )


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pretending, "trained", [])
    monkeypatch.setattr(Pretending, "wrong", ())


def chosen(folder: Path, methods: str = "ce,weighted-ce,cl", **changes: Any) -> Choice:
    base = Recipe().override(**{"data.source": "photos", "data.folds": 3})
    return choose(plan(folder, methods, base), engine=lambda: Pretending(slots=1), clock=lambda: 0.0, **changes)


def plan(folder: Path, methods: str, base: Recipe, sets: dict[str, Any] | None = None) -> ComparisonPlan:
    return ComparisonPlan(folder, parse_candidates([methods], sets), base)


def by_cost(methods: str, base: Recipe) -> list[str]:
    return cheapest_first(check_candidates(parse_candidates([methods]), base))


def test_methods_are_tried_in_the_order_of_their_estimated_cost() -> None:
    base = named_recipe("from-scratch").override(**{"data.source": "photos", "data.folds": 3})
    order = by_cost("afcl encoder_training.views=2,ce,thorough,quick", base)
    assert order == ["quick", "thorough", "ce", "afcl encoder_training.views=2"]
    assert work_of(base.override(**{"data.image_size": 112})) == pytest.approx(work_of(base) / 4)
    assert {"quick", "thorough", "ce", "cl", "afcl"} <= set(usual_candidates())


def test_with_enough_time_all_methods_are_compared_and_the_best_is_taken(tmp_path: Path) -> None:
    choice = chosen(tmp_path / "CMP", minutes=60.0)
    assert len(Pretending.trained) == 9
    assert (choice.answer.best, choice.answer.chosen, choice.left_out) == ("cl", "cl", {})
    assert choice.recipe.encoder_training.loss.name == "cl"
    assert choice.recipe.data.folds == 3


def test_an_method_whose_folds_do_not_fit_is_left_out_after_its_first_fold(tmp_path: Path) -> None:
    # ce takes 3 minutes, weighted-ce 6, and the other two folds of cl would take 20, and its model 10.
    choice = chosen(tmp_path / "CMP", minutes=40.0)
    assert Pretending.trained.count(("cl", 1)) == 1
    assert ("cl", 2) not in Pretending.trained
    assert choice.answer.chosen == "ce"  # Both methods are equal, and ce is cheaper.
    took = "its other folds and the model would take about 30.0 minutes"
    assert choice.left_out == {"cl": f"{took}, and 21.0 of the 40 minutes were left"}
    assert choice.sentences()[-1] == f"cl was left out: {choice.left_out['cl']}."


def test_minutes_for_the_results_of_the_run_are_kept_free(tmp_path: Path) -> None:
    # The first folds take 19 minutes, the others of cl and its model 30.
    assert not chosen(tmp_path / "all", minutes=50.0).left_out
    assert list(chosen(tmp_path / "free", minutes=50.0, afterwards=1.5).left_out) == ["cl"]


def test_time_that_was_spent_before_the_comparison_counts(tmp_path: Path) -> None:
    assert list(chosen(tmp_path / "late", minutes=50.0, begin=-30 * 60.0).left_out) == ["cl"]


def test_without_time_only_the_cheapest_method_is_trained(tmp_path: Path) -> None:
    choice = chosen(tmp_path / "CMP", minutes=0.0)
    first = by_cost("ce,weighted-ce,cl", Recipe().override(**{"data.source": "photos"}))[0]
    assert {method for method, _ in Pretending.trained} == {first}
    assert choice.answer.chosen == first
    assert set(choice.left_out.values()) == {"the 0 minutes were over"}
    assert f"Use {first}: no other method has all folds." in choice.sentences()


def test_a_second_call_trains_nothing_again_and_counts_the_time_of_the_first(tmp_path: Path) -> None:
    first = chosen(tmp_path / "CMP", minutes=30.0)
    number = len(Pretending.trained)
    second = chosen(tmp_path / "CMP", minutes=30.0)
    assert len(Pretending.trained) == number
    assert (second.answer.chosen, second.left_out) == (first.answer.chosen, first.left_out)


def test_an_method_that_fails_is_named_and_the_others_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pretending, "wrong", ("ce",))
    choice = chosen(tmp_path / "CMP", minutes=60.0)
    assert choice.answer.best == "cl"
    assert choice.sentences()[-1] == "ce failed: it broke."
    monkeypatch.setattr(Pretending, "wrong", ("ce", "weighted-ce", "cl"))
    with pytest.raises(RunError, match=r"^No method could be compared: it broke\.$"):
        chosen(tmp_path / "other", minutes=60.0)


def test_without_time_the_cheapest_method_that_does_not_fail_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = by_cost("ce,weighted-ce,cl", Recipe().override(**{"data.source": "photos"}))
    monkeypatch.setattr(Pretending, "wrong", (order[0],))
    choice = chosen(tmp_path / "CMP", minutes=0.0)
    assert choice.answer.chosen == order[1]
    assert set(choice.left_out) == {order[2]}
    assert choice.failed == {order[0]: "it broke."}


def test_an_method_that_cannot_have_a_setting_of_all_methods_is_named_before_training(tmp_path: Path) -> None:
    base = Recipe().override(**{"data.source": "photos", "data.folds": 3, "encoder.name": "mlp"})
    made = plan(tmp_path / "CMP", "quick,ce", base, {"encoder.name": "mlp"})
    choice = choose(made, engine=lambda: Pretending(slots=1), clock=lambda: 0.0, minutes=0.0)
    assert {method for method, _ in Pretending.trained} == {"ce"}
    assert choice.answer.chosen == "ce"
    assert choice.sentences()[-1].startswith("quick failed: encoder.name must be one of tf_efficientnet_lite0, ")


def test_a_scenario_is_compared_like_all_images(tmp_path: Path) -> None:
    base = Recipe().override(**{"data.source": "photos", "data.folds": 3, "data.scenario": "90:10,total=100"})
    choice = choose(
        plan(tmp_path / "CMP", "ce,cl", base),
        engine=lambda: Pretending(slots=1),
        clock=lambda: 0.0,
        minutes=60.0,
    )
    assert (choice.answer.best, choice.answer.where) == ("cl", "At 90:10")


def test_each_part_has_its_own_view_so_that_its_numbers_are_those_of_the_part(tmp_path: Path) -> None:
    views: list[Heard] = []

    def made() -> Any:
        views.append(Heard())
        return nullcontext(views[-1])

    chosen(tmp_path / "CMP", "ce,cl", minutes=60.0, view=made)
    assert [view.numbers for view in views] == [(1, 0), (2, 0), (1, 0), (2, 0)]
    assert [len(view.uwas) for view in views] == [1, 2, 1, 2]


def test_after_a_method_that_does_not_fit_the_next_one_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SECONDS, "weighted-ce", 900.0)
    monkeypatch.setitem(SECONDS, "cl", 60.0)
    monkeypatch.setattr(auto, "cheapest_first", lambda recipes: ["ce", "weighted-ce", "cl"])
    choice = chosen(tmp_path / "CMP", minutes=30.0)
    assert (choice.answer.chosen, list(choice.left_out)) == ("cl", ["weighted-ce"])


def test_a_fold_is_stopped_when_the_time_is_over(tmp_path: Path) -> None:
    class Endless(Pretending):
        def wait(self, seconds: float) -> list[Ended]:
            return [] if any(cell.compared_as == "cl" for cell in self.running) else super().wait(seconds)

    base = Recipe().override(**{"data.source": "photos", "data.folds": 3})
    made = plan(tmp_path / "CMP", "ce,cl", base)
    # The three folds of ce are said to take three minutes, and its model one: a tenth of a second is left for cl.
    choice = choose(made, engine=lambda: Endless(slots=1), clock=lambda: 0.0, minutes=4 + 0.1 / 60)
    assert choice.left_out == {
        "cl": f"its first fold was not finished, and 1.0 of the {4 + 0.1 / 60:g} minutes were left"
    }
