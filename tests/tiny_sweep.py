"""Cells that train within a second or two, and engines that only pretend to."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lopsided.recipe import Recipe
from lopsided.runs.engines import LOST, Ended
from lopsided.runs.engines.local import LocalEngine
from lopsided.runs.keys import proportion, treatment_of
from lopsided.runs.plan import CELLS, Cell, train_cell
from lopsided.runs.records import Failure, Record, Scores
from lopsided.runs.view import View


def tiny_recipe(photos: Path, epochs: int = 1, **changes: Any) -> Recipe:
    """A small network on small images."""
    fields = {
        "encoder.name": "mlp",
        "encoder_training.epochs": epochs,
        "encoder_training.batch_size": 8,
        "classifier.epochs": 1,
        "data.source": str(photos),
        "device": "cpu",
    }
    return Recipe().override(**fields | changes)


def record_of(recipe: Recipe, uwa: float = 0.75) -> Record:
    """The record that a cell might have come to."""
    figures = Scores(20, 5, 0.8, uwa, (0.9, 0.6), 0.85, 0.75, (("plain", uwa),), None)
    method, loss, classifier_loss, family = treatment_of(recipe)
    return Record(
        Cell.of(recipe).key, "photos", proportion(recipe.data.scenario), recipe.seed, method, loss, classifier_loss,
        "mlp", None, "auto", "none", figures, None, 1.5, 1, "0.1.0", "2.6.0", f"data-{recipe.seed}", family,
        (1, 1), ("cat", "dog"),
    )  # fmt: skip


class Scripted:
    """An engine that computes nothing: each cell comes to what the script says of its seed, else to a record.

    ``"died"`` is a lost worker, another text an error; ``before_wait`` is called before each look at what ended.
    """

    def __init__(self, script: dict[int, Sequence[str]] | None = None, slots: int = 2) -> None:
        self.script = {seed: deque(outcomes) for seed, outcomes in (script or {}).items()}
        self.slots = slots
        self.submitted: list[int] = []
        self.most = 0
        self.running: list[Cell] = []
        self.closed = False
        self.before_wait: Callable[[], object] = lambda: None

    def open(self, folder: Path, *, models: bool = False) -> None:
        self.folder, self.models = folder, models

    def submit(self, cell: Cell) -> None:
        self.submitted.append(cell.recipe.seed)
        self.running.append(cell)
        self.most = max(self.most, len(self.running))

    def wait(self, seconds: float) -> list[Ended]:
        self.before_wait()
        ended, self.running = [self._end(cell) for cell in self.running[:1]], self.running[1:]
        return ended

    def _end(self, cell: Cell) -> Ended:
        outcomes = self.script.get(cell.recipe.seed)
        outcome = outcomes.popleft() if outcomes else "done"
        if outcome == "died":
            return Ended(cell, error=LOST, died=True)
        if outcome != "done":
            return Ended(cell, error=outcome)
        write_run(self.folder / CELLS / cell.key)
        return Ended(cell, record_of(cell.recipe))

    def close(self) -> None:
        self.closed = True


class HereEngine(LocalEngine):
    """Trains as a worker does, one cell after the other, in this process."""

    def open(self, folder: Path, *, models: bool = False) -> None:
        self.folder, self.cells = folder, deque[Cell]()

    def submit(self, cell: Cell) -> None:
        self.cells.append(cell)

    def wait(self, seconds: float) -> list[Ended]:
        cell = self.cells.popleft()
        line, error = train_cell(cell.recipe.to_toml(), str(self.folder / cell.path), self.threads)
        return [Ended(cell, Record.from_json(line) if line else None, error)]

    def close(self) -> None:
        pass


RUN_FILES = ["checkpoint/state.safetensors", "log.jsonl", "metrics.json", "model.json", "model.safetensors"]


def write_run(folder: Path) -> None:
    """Write files with the names of a run's."""
    for name in RUN_FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


class Heard(View):
    """Keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.failures: list[tuple[Failure, bool]] = []
        self.reasons: list[str] = []
        self.numbers: tuple[int, int] | None = None
        self.uwas: list[float] = []

    def begin(self, total: int, skipped: int) -> None:
        self.numbers = total, skipped

    def finished(self, record: Record) -> None:
        self.uwas.append(record.test.uwa)

    def failed(self, failure: Failure, *, again: bool) -> None:
        self.failures.append((failure, again))

    def waiting(self, cells: int, reason: str) -> None:
        self.reasons.append(reason)

    def note(self, text: str) -> None:
        self.notes.append(text)


def wait_until(happened: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Return what a function gives once that is something."""
    end = time.monotonic() + seconds
    while not (value := happened()):
        assert time.monotonic() < end, f"nothing within {seconds} s"
        time.sleep(0.01)
    return value


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not yet asked for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
