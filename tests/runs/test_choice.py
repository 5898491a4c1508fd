"""Which recipe ``fit`` takes if none is named. No encoder runs here: only the choice is tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lopsided import cli
from lopsided.data.prepare import Sources
from lopsided.data.sources import Source, open_source
from lopsided.errors import InputError
from lopsided.facts import Fact, notes
from lopsided.facts.log import Reporter
from lopsided.recipe import Recipe, named_recipe
from lopsided.runs import duration, features, fitting, run
from lopsided.runs.duration import Expected, distance_seconds, expect, fold_seconds
from lopsided.runs.fitting import choose_recipe
from lopsided.training import regression


def write_photographs(folder: Path, side: int) -> Path:
    for name, level in (("cat", 190), ("dog", 60)):
        (folder / name).mkdir(parents=True)
        for i in range(4):
            pixels = np.full((side, side // 2, 3), level + i, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photographs(tmp_path_factory.mktemp("photographs"), 48)


@pytest.mark.parametrize(
    ("enough", "many", "expected"),
    [
        (4, 8, ("thorough", notes.thorough_by_size(8))),
        (4, 7, ("quick", notes.quick_by_size(8))),
        (5, 8, ("quick", notes.quick_by_rarest(4))),
        (5, 7, ("quick", notes.quick_by_size(8))),
    ],
)
def test_images_get_the_thorough_recipe_if_there_are_not_too_many_and_not_too_few_of_a_class(
    photographs: Path, monkeypatch: pytest.MonkeyPatch, enough: int, many: int, expected: tuple[str, Fact]
) -> None:
    monkeypatch.setattr(fitting, "ENOUGH", enough)
    monkeypatch.setattr(fitting, "MANY", many)
    name, (why,) = choose_recipe(named_recipe("quick"), str(photographs))
    assert (name, why) == expected


@pytest.mark.parametrize(("side", "expected"), [(32, "quick"), (33, "thorough")])
def test_small_images_get_the_quick_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int, expected: str
) -> None:
    monkeypatch.setattr(fitting, "ENOUGH", 4)
    folder = write_photographs(tmp_path / "small", side)
    name, (why,) = choose_recipe(named_recipe("quick"), str(folder))
    assert (name, why) == (expected, notes.quick_by_side(32) if expected == "quick" else notes.thorough_by_size(8))


@pytest.mark.parametrize(
    ("rare", "others", "final", "expected"),
    [(10, 100, "refit", "few"), (10, 99, "refit", "quick"), (9, 11, "refit", "few"), (10, 100, "ensemble", "quick")],
)
def test_the_distance_joins_if_one_of_two_classes_is_so_rare_that_the_other_one_is_normal(
    tmp_path: Path, rare: int, others: int, final: str, expected: str
) -> None:
    for label, num in (("broken", rare), ("good", others)):
        (tmp_path / label).mkdir()
        for i in range(num):
            Image.new("RGB", (8, 8), (i, num, 0)).save(tmp_path / label / f"{i}.png")
    base = named_recipe("quick").override(**{"data.folds": 2, "final": final})
    assert choose_recipe(base, str(tmp_path))[0] == expected


def test_images_that_cannot_be_read_do_not_stop_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_photographs(tmp_path / "some", 28)
    (folder / "cat" / "0.png").write_bytes(b"not an image")
    monkeypatch.setattr(fitting, "ENOUGH", 4)
    assert choose_recipe(named_recipe("quick"), str(folder))[0] == "thorough"


class Facts(Reporter):
    def __init__(self) -> None:
        self.facts: list[Fact] = []

    def fact(self, fact: Fact) -> None:
        self.facts.append(fact)


def test_the_time_counts_features_folds_and_the_comparison_with_quick(
    photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duration, "TIMED", 8)
    monkeypatch.setattr(features, "feature_seconds", lambda recipe, source: 30.0 if recipe.data.image_size else 10.0)
    monkeypatch.setattr(duration, "slowness", lambda: 2.0)
    source, rest = open_source(str(photographs)), 2 * duration.START_SECONDS
    one, three = (2 * fold_seconds(8, 2, regressions, few=True) for regressions in (1, 3))
    quick, thorough = named_recipe("quick"), named_recipe("thorough")
    found = [
        expect(thorough.override(**{"data.folds": 5}), (source, None)),
        expect(quick.override(**{"data.folds": 5}), (source, None)),
        expect(quick, (source, source)),
    ]
    values = [(each.seconds - rest, each.all_features, each.trainings) for each in found if each is not None]
    expected = [(40 + 6 * three + 5 * one, 40, 6), (10 + 6 * one, 10, 6), (20 + one, 20, 1)]
    assert values == [pytest.approx(each) for each in expected]
    assert expect(named_recipe("from-scratch"), (source, None)) is None
    monkeypatch.setattr(duration, "TIMED", 9)
    assert expect(quick, (source, None)) is None


def test_the_time_counts_the_regressions_of_a_class_with_few_images(
    photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duration, "TIMED", 8)
    monkeypatch.setattr(features, "feature_seconds", lambda recipe, source: 0.0)
    monkeypatch.setattr(duration, "slowness", lambda: 1.0)
    source, quick = open_source(str(photographs)), named_recipe("quick")
    few, enough = (fold_seconds(8, 2, few=few) for few in (True, False))

    def training(recipe: Recipe) -> float:
        expected = expect(recipe, (source, None))
        assert expected is not None
        return expected.training

    assert few > enough
    assert training(quick) == few
    assert training(quick.override(**{"regression.strength": 0.01})) == enough  # One regression.
    monkeypatch.setattr(regression, "FEW", 3)  # There are four of a class.
    assert training(quick.override(**{"data.test": 0.25})) == enough
    assert training(quick.override(**{"data.folds": 2})) == few
    assert training(quick.override(**{"data.folds": 4})) == enough


def test_the_time_of_few_counts_distances_and_the_cache_that_it_shares_with_quick(
    photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duration, "TIMED", 4)
    monkeypatch.setattr(features, "feature_seconds", lambda recipe, source: 10.0)
    monkeypatch.setattr(duration, "slowness", lambda: 1.0)
    source = open_source(str(photographs))
    few = named_recipe("few").override(**{"data.test": 0.0})

    def expected(recipe: Recipe, source: Source = source) -> Expected:
        found = expect(recipe, (source, None))
        assert found is not None
        return found

    both, alone = expected(few), expected(few.override(compare_quick=False))
    assert both.all_features == alone.all_features == 10
    assert both.training == distance_seconds(8) + fold_seconds(8, 2, 2, few=True)
    assert (both.comparison, alone.comparison) == (fold_seconds(8, 2, few=True), 0)
    (tmp_path / "cat").mkdir()
    for i in range(4):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / "cat" / f"{i}.png")
    one = expected(few, Sources().open(run.settle(few, str(tmp_path)))[0])
    assert (one.training, one.comparison) == (distance_seconds(4) + fold_seconds(4, 2, 0), 0)
    assert distance_seconds(4000) - distance_seconds(3000) == pytest.approx(
        distance_seconds(3000) - distance_seconds(2000)
    )
    assert distance_seconds(1000) > 2 * distance_seconds(500) > 2 * distance_seconds(400)
    assert distance_seconds(255) > distance_seconds(256), "Few images have more fits."


def test_what_is_left_follows_the_pace_of_the_last_training() -> None:
    known = Expected(features=30, compared_features=10, trainings=6, training=2.0, comparison=5.0, rest=4.0)
    assert known.seconds == 30 + 10 + 6 * 2 + 5 + 4
    assert known.left(2, 2.0) == 4 * 2 + 10 + 5 + 4
    assert known.left(2, 6.0) == 4 * 6 + 10 + 3 * (5 + 4)  # Three times as slow as expected.


def test_a_run_tells_its_time_before_it_begins_and_again_when_its_pace_is_known(
    photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duration, "TIMED", 8)
    told = Facts()
    recipe = named_recipe("quick").override(**{"data.image_size": 32, "data.folds": 2, "compare_quick": False})
    run.run_recipe(recipe, tmp_path / "run", data=str(photographs), reporter=told)
    kinds = [fact.kind for fact in told.facts]
    assert kinds.index("expected_time") < kinds.index("time_left")
    assert all(fact.values["seconds"] > 0 for fact in told.facts if fact.kind in ("expected_time", "time_left"))


def test_cached_features_take_no_time(photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path / "cache"))
    recipe = run.settle(named_recipe("quick").override(**{"data.image_size": 32}), str(photographs))
    source = open_source(str(photographs))
    assert features.feature_seconds(recipe, source) > 0
    features.fill_cache(recipe, str(photographs))
    assert features.feature_seconds(recipe, source) == 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], (260, "auto")),
        (["test=0.3", "--seed", "3"], (260, "auto")),
        (["--recipe", "default"], (260, "auto")),
        (["--recipe", "quick"], (None, "none")),
        (["image_size=64"], (64, "none")),
        (["tta=flip"], (None, "flip")),
        (["--encoder", "tf_efficientnet_lite1", "weights=embedded"], (None, "none")),
    ],
)
def test_fit_chooses_only_if_neither_a_recipe_nor_the_features_are_named(
    flags: list[str],
    expected: tuple[int | None, str],
    photographs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fitting, "ENOUGH", 4)
    taken: list[Recipe] = []

    def take(recipe: Recipe, *_: Any, **__: Any) -> None:
        taken.append(recipe)
        raise InputError("Enough.")

    monkeypatch.setattr("lopsided.runs.fitting.run_recipe", take)
    assert cli.run(["fit", str(photographs), "--out", str(tmp_path / "run"), "--quiet", *flags]) == 2
    assert (taken[0].data.image_size, taken[0].encoder.views) == expected
    named = "tf_efficientnet_lite1" if "--encoder" in flags else named_recipe("quick").encoder.name
    assert taken[0].encoder.name == named
    assert taken[0].data.test == (0.3 if "test=0.3" in flags else 0.15)


def test_a_resumed_run_keeps_its_recipe(photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    out.mkdir()
    recipe = run.settle(named_recipe("quick"), str(photographs))
    (out / "recipe.toml").write_text(recipe.to_toml())
    taken: list[Recipe] = []

    def take(recipe: Recipe, *_: Any, **__: Any) -> None:
        taken.append(recipe)
        raise InputError("Enough.")

    monkeypatch.setattr("lopsided.runs.fitting.run_recipe", take)
    assert cli.run(["fit", "--out", str(out), "--resume", "--quiet"]) == 2
    assert taken[0].encoder == named_recipe("quick").encoder
