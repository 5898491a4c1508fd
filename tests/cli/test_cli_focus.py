"""``--focus CLASS``: the class that matters comes first in ``fit``, ``evaluate``, ``report`` and ``find``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lopsided import cli
from lopsided.recipe import Recipe
from lopsided.reports.run_page import run_page
from lopsided.runs.folder import Run
from lopsided.runs.metrics import focus_of, headlines
from tiny import write_photos
from tiny_command import Call

SMALL = ["--recipe", "quick", "image_size=32", "--device", "cpu", "--quiet", "test=0.4"]


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes, of which dog is the rarest."""
    return write_photos(tmp_path_factory.mktemp("pets") / "pets", {"cat": 14, "dog": 6, "fox": 10})


@pytest.fixture(scope="module")
def focused(tmp_path_factory: pytest.TempPathFactory, pets: Path) -> Path:
    """A run that follows the most frequent class."""
    run = tmp_path_factory.mktemp("focused") / "run"
    assert cli.run(["fit", str(pets), "--out", str(run), "--focus", "cat", *SMALL]) == 0
    return run


def lines_of(text: str) -> list[str]:
    return [line.split(":")[0] for line in text.splitlines() if ": finds " in line]


def test_fit_shows_the_class_in_focus_first_and_the_run_keeps_it(
    call: Call, pets: Path, focused: Path, tmp_path: Path
) -> None:
    assert Run.open(focused).recipe.decision.focus == "cat"
    again = call("fit", "--out", focused, "--resume", "--quiet")
    assert lines_of(again.out) == ["cat", "dog", "fox"]
    usual = call("fit", pets, "--out", tmp_path / "usual", *SMALL)
    assert lines_of(usual.out) == ["dog", "fox"]


def test_evaluate_report_and_find_follow_the_run_and_may_follow_another_class(
    call: Call, pets: Path, focused: Path, tmp_path: Path
) -> None:
    assert lines_of(call("evaluate", focused, pets, "--quiet").out)[0] == "cat"
    assert lines_of(call("evaluate", focused, pets, "--quiet", "--focus", "fox").out)[0] == "fox"
    assert "recall of “cat”, the class in focus" in run_page(focused)
    assert "recall of “fox”, the class in focus" in run_page(focused, focus="fox")
    pool = write_photos(tmp_path / "pool", {"cat": 2, "dog": 2}, start=50)
    for words, wanted in ((), "cat"), (("--class", "dog"), "dog"):
        ended = call("find", focused, pool, *words, "--out", tmp_path / f"{wanted}.csv", "--no-page", "--json")
        assert json.loads(ended.out)["class"] == wanted


def test_the_headline_follows_the_class_that_the_rule_names(call: Call, pets: Path, tmp_path: Path) -> None:
    ended = call("fit", pets, "--out", tmp_path / "run", "--decide", "threshold:fox=0.3", *SMALL)
    assert lines_of(ended.out) == ["fox", "dog"]


def test_a_number_of_alarms_without_a_class_is_about_the_class_in_focus(call: Call, pets: Path, tmp_path: Path) -> None:
    arguments = ["--focus", "fox", "--decide", "alarms:5000", "val=0.3"]
    ended = call("fit", pets, "--out", tmp_path / "run", *SMALL, *arguments)
    assert ended.code == 0, ended.err
    assert Recipe.load(tmp_path / "run" / "recipe.toml").decision.rule == "alarms:fox=5000"
    assert lines_of(ended.out)[0] == "fox"


def test_a_class_in_focus_that_there_is_not_is_one_sentence_before_anything_is_trained(
    call: Call, pets: Path, focused: Path, tmp_path: Path
) -> None:
    ended = call("fit", pets, "--out", tmp_path / "run", "--focus", "foxx", *SMALL)
    assert (ended.code, ended.out) == (2, "")
    said = "--focus must be a class of the images: cat, dog, fox, got 'foxx'. Did you mean fox?"
    assert ended.err == f"lopsided: {said}\n"
    assert not (tmp_path / "run" / "recipe.toml").exists()
    ended = call("evaluate", focused, pets, "--focus", "wolf")
    assert ended.code == 2
    assert "--focus must be a class of the model: cat, dog, fox, got 'wolf'." in ended.err


def test_the_lines_are_the_class_in_focus_and_then_the_rarest_ones(focused: Path) -> None:
    metrics = Run.open(focused).metrics
    assert metrics is not None
    assert focus_of(Run.open(focused).recipe, metrics) == "cat"
    assert [line.label for line in headlines(metrics["test"], "fox")] == ["fox", "dog"]
    assert [line.label for line in headlines(metrics["test"])] == ["dog", "fox"]
