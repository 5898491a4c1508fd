"""Engines: they train the cells of a plan in other processes, or on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lopsided.runs.plan import Cell
from lopsided.runs.records import Record

LOST = (
    "The worker ended before its cell was finished. It was killed or ran out of memory; fewer workers need less memory."
)


@dataclass(frozen=True)
class Ended:
    """The result of a cell: a record, or an error message. A cell without test images has neither.

    ``died`` means that the worker died. The cell itself may be fine, so it may be tried again.
    """

    cell: Cell
    record: Record | None = None
    error: str = ""
    died: bool = False


class Engine(Protocol):
    """Trains cells below the folder of a plan."""

    @property
    def slots(self) -> int:
        """How many cells the engine trains at once. It is read before each submission."""

    def open(self, folder: Path, *, models: bool = False) -> None:
        """Prepare for the cells of this plan; ``models``: whether their models are kept."""

    def submit(self, cell: Cell) -> None:
        """Start a cell. An interrupted cell continues from its checkpoint."""

    def wait(self, seconds: float) -> list[Ended]:
        """Wait at most this many seconds, and return the cells that ended."""

    def close(self) -> None:
        """End all running cells at once. No process may remain."""
