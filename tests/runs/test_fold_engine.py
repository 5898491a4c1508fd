from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forked import CONTEXT
from lopsided.errors import RunError
from lopsided.recipe import Recipe
from lopsided.runs.driver import drive
from lopsided.runs.engines import Ended, local
from lopsided.runs.engines.local import LocalEngine
from lopsided.runs.folds import FoldPlan
from lopsided.runs.plan import Cell, Plan
from lopsided.runs.records import Fold, Record
from lopsided.runs.run import run_recipe
from lopsided.runs.view import FoldLines
from tiny import write_photos

_RECORDS = Path(__file__).parents[2] / "results" / "fmnist.jsonl"
RECORD = Record.from_json(_RECORDS.read_text(encoding="utf-8").splitlines()[0])


class Scripted:
    """An engine that ends each cell as a script says."""

    slots = 2

    def __init__(self, answer: Callable[[Cell, int], Ended]) -> None:
        self.answer, self.running, self.tries, self.most = answer, [], [], 0  # type: ignore[var-annotated]
        self.state: list[str] = []

    def open(self, folder: Path, *, models: bool = False) -> None:
        self.state.append(f"open {models}")

    def submit(self, cell: Cell) -> None:
        self.running.append(cell)
        self.tries.append(cell.path)
        self.most = max(self.most, len(self.running))

    def wait(self, seconds: float) -> list[Ended]:
        cell = self.running.pop(0)
        return [self.answer(cell, self.tries.count(cell.path))]

    def close(self) -> None:
        self.state.append("close")


def plan(folder: Path, number: int = 4) -> Plan:
    recipe = Recipe().override(**{"data.folds": number, "data.source": "fashion-mnist-tops", "final": "refit"})
    return FoldPlan(folder, recipe).unfinished()


def test_folds_and_the_model_of_all_images_run_at_once_in_folders_of_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fold = Fold(1, 4, 80, 8)

    def answer(cell: Cell, tries: int) -> Ended:
        number = cell.recipe.data.fold
        record = None if number is None else replace(RECORD, seconds=3.0, fold=replace(fold, fold=number))
        return Ended(cell, record)

    engine = Scripted(answer)
    drive(plan(tmp_path), engine, FoldLines())
    assert engine.tries == ["folds/1", "folds/2", "folds/3", "folds/4", "folds/all"]
    assert engine.most == 2
    assert engine.state == ["open True", "close"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["fold 1", "fold 2", "fold 3", "fold 4"]


def test_finished_cells_are_not_submitted_again(tmp_path: Path) -> None:
    for name in ("folds/1", "folds/all"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.json").write_text("{}")
    engine = Scripted(lambda cell, tries: Ended(cell, RECORD))
    drive(plan(tmp_path, 3), engine)
    assert engine.tries == ["folds/2", "folds/3"]


def test_a_fold_that_a_comparison_has_trained_is_read_where_it_is(tmp_path: Path) -> None:
    recipe = Recipe().override(**{"data.folds": 2, "data.source": "fashion-mnist-tops"})
    key = FoldPlan(tmp_path, recipe).folds[1].key
    (tmp_path / "comparison" / "cells" / key).mkdir(parents=True)
    (tmp_path / "comparison" / "cells" / key / "metrics.json").write_text("{}")
    cells = FoldPlan(tmp_path, recipe).folds
    assert [cell.path for cell in cells] == ["folds/1", f"comparison/cells/{key}"]


def test_a_fold_whose_worker_dies_is_tried_once_more(tmp_path: Path) -> None:
    def answer(cell: Cell, tries: int) -> Ended:
        dies = cell.path == "folds/2" and tries == 1
        return Ended(cell, error="lost", died=True) if dies else Ended(cell, RECORD)

    engine = Scripted(answer)
    drive(plan(tmp_path), engine)
    assert engine.tries.count("folds/2") == 2
    with pytest.raises(RunError, match=r"Fold 3: lost"):
        drive(plan(tmp_path), Scripted(lambda cell, tries: Ended(cell, error="lost" if cell.path == "folds/3" else "")))


def test_an_error_of_a_fold_ends_all_and_closes_the_engine(tmp_path: Path) -> None:
    engine = Scripted(lambda cell, tries: Ended(cell, error="The disk is full."))
    with pytest.raises(RunError, match=r"Fold 1: The disk is full\."):
        drive(plan(tmp_path), engine)
    assert engine.state == ["open True", "close"]


def test_without_folds_to_train_no_engine_starts(tmp_path: Path) -> None:
    engine = Scripted(lambda cell, tries: Ended(cell))
    drive(Plan(tmp_path, []), engine)
    assert engine.state == ["close"]


@pytest.mark.slow
def test_two_processes_give_the_bytes_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "get_context", lambda _: CONTEXT)  # Workers that need not import torch.
    photos = write_photos(tmp_path / "photos", {"cat": 20, "dog": 6})
    tiny = {"encoder.name": "mlp-8", "encoder_training.loss": "ce", "encoder_training.epochs": 1, "threads": 1}
    recipe = Recipe().override(**{"data.source": str(photos), "data.folds": 2, **tiny})
    run_recipe(recipe, tmp_path / "one")
    run_recipe(recipe, tmp_path / "two", engine=LocalEngine(2))
    for name in ("model.safetensors", "predictions.csv", "model.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
