"""Train the folds of one run on an engine, several at once."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lopsided import files
from lopsided.errors import RunError
from lopsided.runs.folds import Parallel, Parts
from lopsided.runs.keys import cell_key
from lopsided.sweeps.engines import Cell, Engine

RETRIES = 1
"""How often a fold is tried again after its worker died."""
_POLL_SECONDS = 1.0
FREE_SECONDS = 60.0
"""How long to wait until the folder of a dead worker is free. A cluster may report a death before it is over."""


def on_engine(engine: Engine, tell: Callable[[str], None] = lambda text: None) -> Parallel:
    """Return a function that trains the runs of folds on an engine. ``tell`` receives a line per finished fold.

    A fold whose worker dies continues from its checkpoint, once. The first error ends all folds and raises.
    """

    def train(folder: Path, parts: Parts) -> None:
        if not parts:
            return
        engine.open(folder, models=True)
        try:
            _train([Cell(cell_key(recipe), recipe, place=where) for recipe, where in parts], folder, engine, tell)
        finally:
            engine.close()

    return train


def _train(cells: list[Cell], folder: Path, engine: Engine, tell: Callable[[str], None]) -> None:
    todo, running = deque(cells), 0
    deaths: Counter[str] = Counter()
    while todo or running:
        while todo and running < engine.slots:
            engine.submit(todo.popleft())
            running += 1
        for ended in engine.wait(_POLL_SECONDS):
            running -= 1
            cell = ended.cell
            if ended.record is not None:
                tell(f"fold {cell.recipe.data.fold}: UWA {ended.record.test.uwa:.3f}, {ended.record.seconds:.0f} s")
                continue
            deaths[cell.path] += 1
            if not ended.died or deaths[cell.path] > RETRIES:
                raise RunError(f"Fold {cell.recipe.data.fold}: {ended.error}")
            tell(f"fold {cell.recipe.data.fold}: the worker died, and the fold continues")
            _wait_until_free(folder / cell.path)
            todo.append(cell)


def _wait_until_free(folder: Path) -> None:
    end = time.monotonic() + FREE_SECONDS
    while time.monotonic() < end:
        with suppress(RunError):
            files.check_free(folder)
            return
        time.sleep(0.1)
