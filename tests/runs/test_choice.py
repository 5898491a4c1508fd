"""Which recipe ``fit`` takes if none is named. No encoder runs here: only the choice is tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lopsided import cli
from lopsided.errors import InputError
from lopsided.facts import notes
from lopsided.recipe import Recipe, named_recipe
from lopsided.runs import choice, run
from lopsided.runs.choice import choose_recipe


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


def test_images_get_the_thorough_recipe(photographs: Path) -> None:
    name, (why,) = choose_recipe(named_recipe("quick"), str(photographs))
    assert (name, why.kind, why.values["images"]) == ("thorough", "thorough_by_size", 8)


def test_images_that_cannot_be_read_do_not_stop_the_choice(tmp_path: Path) -> None:
    folder = write_photographs(tmp_path / "some", 28)
    (folder / "cat" / "0.png").write_bytes(b"not an image")
    assert choose_recipe(named_recipe("quick"), str(folder))[0] == "thorough"


def test_many_images_get_the_default_because_of_the_time(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "MANY", 7)
    monkeypatch.setattr(choice, "SECONDS", 900.0)
    monkeypatch.setattr(choice.os, "cpu_count", lambda: 2)
    name, (why,) = choose_recipe(named_recipe("quick"), str(photographs))
    assert (name, why) == ("quick", notes.quick_by_size(8, why.values["minutes"]))
    assert 60.0 < why.values["minutes"] < 61.0, "Twelve fits of 8 images come on top."


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
