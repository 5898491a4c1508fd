"""Cells and plans: a cell is one training of one recipe in one folder, a plan is a set of cells.

The driver trains plans. Does not import torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from lopsided import files
from lopsided.errors import LopsidedError, RunError
from lopsided.facts import Fact
from lopsided.recipe import Recipe
from lopsided.runs.folder import BANK, CARD, CHECKPOINT
from lopsided.runs.keys import cell_key, coordinates, proportion
from lopsided.runs.records import Failure, Record
from lopsided.runs.run import run_recipe, settle

CELLS = "cells"


@dataclass(frozen=True)
class Cell:
    """A settled recipe, its key in a plan, and the name of its method in a comparison."""

    key: str
    recipe: Recipe
    compared_as: str | None = None
    place: str = ""
    """The path of the run below the folder of the plan; by default the folder ``key`` among the cells."""

    @classmethod
    def of(cls, recipe: Recipe, compared_as: str | None = None) -> Cell:
        """Settle a recipe and name its folder."""
        settled = settle(recipe)
        return cls(cell_key(settled), settled, compared_as)

    @property
    def path(self) -> str:
        """The path of the run below the folder of the plan."""
        return self.place or f"{CELLS}/{self.key}"

    @property
    def name(self) -> str:
        """The cell in words."""
        what = self.compared_as or self.recipe.loss.label
        return coordinates(proportion(self.recipe.data.scenario), what, self.recipe.seed, self.recipe.data.fold)


def train_cell(recipe: str, folder: str, threads: int) -> tuple[str, str]:
    """Train a cell from the TOML of its recipe. Return the line of its record and the error message.

    Arguments and results are text, so that the other process needs no error classes. A run without test images has no
    record.
    """
    try:
        run = run_recipe(Recipe.from_toml(recipe).override(threads=threads, compare_quick=False), folder, resume=True)
        return Record.from_run(run).to_json() if (run.metrics or {}).get("test") else "", ""
    except LopsidedError as error:
        return "", " ".join(str(error).split())
    except Exception as error:  # An unexpected error in one cell must not stop the others.
        reason = " ".join(str(error).split())
        return "", f"an unexpected error occurred ({type(error).__name__}{': ' if reason else ''}{reason})."


def drop_model(folder: Path, *further: str) -> None:
    """Remove the model and the checkpoint of a cell, and further files. Its metrics and predictions stay."""
    shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
    for name in ("model.safetensors", BANK, CARD, *further):
        with suppress(OSError):
            (folder / name).unlink()


class Plan:
    """Cells of one process, which holds their folder. All of them are trained, and the first error ends the plan.

    A cell that is finished already is trained like the others, which changes nothing. ``Sweep`` is a plan with records,
    which several processes may train together.
    """

    keeps_models = True
    needs_records = False

    def __init__(self, folder: Path, cells: Sequence[Cell]) -> None:
        self.folder = folder
        self.cells = list({cell.key: cell for cell in cells}.values())

    def finished(self) -> dict[str, Record | None]:
        """Return the cells that need no training."""
        return {}

    def opened(self) -> AbstractContextManager[None]:
        """Return a context in which the engine is opened."""
        return nullcontext()

    def signals(self) -> AbstractContextManager[None]:
        """Return a context that handles signals while cells are trained."""
        return nullcontext()

    def tracked(self, done: Mapping[str, Record | None], warn: Callable[[Fact], None]) -> AbstractContextManager[None]:
        """Return a context that tracks the plan. At its end, ``done`` has all finished cells."""
        return nullcontext()

    def claim(self, cell: Cell) -> ExitStack | str:
        """Take a cell for this process, or return the reason why another process has it."""
        return ExitStack()

    def check_free(self, cell: Cell) -> None:
        """Raise an error if a process uses the run folder of a cell. A worker may briefly outlive its plan."""
        path = self.folder / cell.path
        if (path / files.LOCK_NAME).exists():
            with files.lock(path):
                pass

    def known(self, cell: Cell) -> Record | Failure | None:
        """Return what another process has found out about a cell that was just claimed."""
        return None

    def put_away(self, cell: Cell, record: Record | None) -> Record | None:
        """Keep the result of a cell that was just trained, and return it."""
        return record

    def note_failure(self, failure: Failure) -> None:
        """Note a failed attempt."""

    def give_up(self, cell: Cell, failure: Failure) -> None:
        """End the plan, because a cell failed."""
        fold = cell.recipe.data.fold
        raise RunError(f"{'All images' if fold is None else f'Fold {fold}'}: {failure.error}")

    def close(self) -> None:
        """Clean up. No cell is trained any longer."""
