"""A cell: one training of one recipe in one folder. Does not import torch."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lopsided.errors import LopsidedError
from lopsided.recipe import Recipe
from lopsided.runs.folder import BANK, CARD, CHECKPOINT
from lopsided.runs.keys import cell_key, coordinates, proportion
from lopsided.runs.records import Record
from lopsided.runs.run import run_recipe, settle

CELLS = "cells"


@dataclass(frozen=True)
class Cell:
    """A settled recipe, its key in a plan, and the name of its method in a comparison."""

    key: str
    recipe: Recipe
    arm: str | None = None
    place: str = ""
    """The path of the run below the folder of the plan; by default the folder ``key`` among the cells."""

    @classmethod
    def of(cls, recipe: Recipe, arm: str | None = None) -> Cell:
        """Settle a recipe and name its folder."""
        settled = settle(recipe)
        return cls(cell_key(settled), settled, arm)

    @property
    def path(self) -> str:
        """The path of the run below the folder of the plan."""
        return self.place or f"{CELLS}/{self.key}"

    @property
    def name(self) -> str:
        """The cell in words."""
        what = self.arm or self.recipe.loss.label
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
