"""A plan: a set of cells in one folder, and what becomes of each. The driver trains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from lopsided import files
from lopsided.errors import RunError
from lopsided.facts import Fact
from lopsided.runs.cell import Cell
from lopsided.runs.records import Failure, Record


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
