"""Which recipe ``fit`` takes if none is named. No encoder runs here: only the choice is tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lopsided import cli
from lopsided.data.sources import open_source
from lopsided.errors import InputError
from lopsided.facts import Fact, notes
from lopsided.recipe import Recipe, named_recipe
from lopsided.runs import features, fitting, folds, run
from lopsided.runs.fitting import choose_recipe
from lopsided.runs.folds import fold_seconds, tell_time
from lopsided.training.reporter import Reporter


def write_photographs(folder: Path, side: int) -> Path:
    for name, level in (("cat", 190), ("dog", 60)):
        (folder / name).mkdir(parents=True)
        for i in range(4):
            pixels = np.full((side, side // 2, 3), level + i, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photographs(tmp_path_factory.mktemp("photographs"), 28)


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


def test_images_that_cannot_be_read_do_not_stop_the_choice(tmp_path: Path) -> None:
    folder = write_photographs(tmp_path / "some", 28)
    (folder / "cat" / "0.png").write_bytes(b"not an image")
    assert choose_recipe(named_recipe("quick"), str(folder))[0] == "quick"


class Facts(Reporter):
    def __init__(self) -> None:
        self.facts: list[Fact] = []

    def fact(self, fact: Fact) -> None:
        self.facts.append(fact)


def test_the_time_counts_features_folds_and_the_comparison_with_quick(
    photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folds, "TIMED", 8)
    monkeypatch.setattr(features, "feature_seconds", lambda recipe, source: 30.0 if recipe.data.image_size else 10.0)
    source, told = open_source(str(photographs)), Facts()
    one = fold_seconds(8, 2)
    for recipe in (named_recipe("thorough"), named_recipe("quick"), named_recipe("from-scratch")):
        tell_time(recipe.override(**{"data.folds": 5}), (source, None), told)
    tell_time(named_recipe("quick"), (source, source), told)
    values = [(fact.values["seconds"], fact.values["features"], fact.values["trainings"]) for fact in told.facts]
    expected = [(40 + 12 * one, 40, 6), (10 + 6 * one, 10, 6), (20 + one, 20, 1)]
    assert values == pytest.approx([pytest.approx(each, abs=0.1) for each in expected])
    monkeypatch.setattr(folds, "TIMED", 9)
    tell_time(named_recipe("quick"), (source, None), told)
    assert len(told.facts) == 3


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
