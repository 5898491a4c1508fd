"""Sweeps: train each recipe of a set once, in one folder, across interruptions.

A sweep folder contains

- ``sweep.json``, which marks the folder as a sweep,
- ``records.jsonl``, with a line per finished run,
- ``failures.jsonl``, with a line per failed attempt,
- ``cells/KEY/``, the run folders. KEY is the start of the recipe's hash.

A second start skips finished cells, continues interrupted cells and retries failed cells. It also reads the run folders
whose record is missing. Several processes can work on one folder: the process that computes a cell locks
``claims/KEY/``.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lopsided import __version__, files
from lopsided.errors import LopsidedError, RunError, sentence
from lopsided.facts import Fact
from lopsided.recipe import Recipe
from lopsided.recipe.words import shown
from lopsided.runs.driver import Outcome, drive
from lopsided.runs.engines import LOST, Engine
from lopsided.runs.folder import METRICS, Run
from lopsided.runs.plan import CELLS, Cell, Plan, drop_model
from lopsided.runs.records import Failure, Record, append_failure, append_records, read_failures, read_records
from lopsided.runs.tracking import tracked_sweep
from lopsided.runs.view import View
from lopsided.stopping import handling
from lopsided.trackers import tracker as trackers

FORMAT = 1
"""The version of a sweep folder."""

SWEEP, RECORDS, FAILURES, CLAIMS = "sweep.json", "records.jsonl", "failures.jsonl", "claims"


def run_sweep(
    cells: Sequence[Recipe | Cell],
    folder: str | os.PathLike[str],
    *,
    engine: Engine,
    view: View | None = None,
    keep_models: bool = False,
    retries: int = 1,
    about: Mapping[str, Any] | None = None,
    until: float = math.inf,
) -> Outcome:
    """Train the recipes that are not yet finished in a sweep folder. Return the records of all recipes.

    Recipes with the same content are one cell. A failed cell is recorded with its error, and the other cells continue.
    A cell whose worker dies is retried from its checkpoint, at most ``retries`` times. The model and the checkpoint of
    a finished cell are removed unless ``keep_models`` is set. An interrupt or SIGTERM ends the workers at once and
    raises ``KeyboardInterrupt``; only the current epochs are lost. ``about`` is written to ``sweep.json``.
    Cells that are not finished at the time ``until`` of the monotonic clock are stopped.
    """
    _check_kind(folder, about or {})
    for part in (Path(folder), Path(folder) / CELLS, Path(folder) / CLAIMS):
        files.check_no_links(part)
    settled = [cell if isinstance(cell, Cell) else Cell.of(cell) for cell in cells]
    for cell in settled:
        trackers.check(cell.recipe.track)
    watcher = view or View()
    plan = Sweep(Path(folder), settled, about or {}, watcher.note, keep_models=keep_models)
    return drive(plan, engine, watcher, retries, until)


def open_sweep(folder: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> Path:
    """Create a sweep folder, or check an existing one, and update ``sweep.json`` with ``about``.

    ``about["kind"]`` is the command that made the sweep. Another command raises an error.
    """
    path = Path(folder)
    there = _check_kind(path, about or {})
    content = {"format": FORMAT, "lopsided": __version__, **there, **(about or {})}
    if content != there:
        files.make_folder(path)
        files.atomic_write(path / SWEEP, json.dumps(content) + "\n")
    return path


def _check_kind(folder: str | os.PathLike[str], about: Mapping[str, Any]) -> dict[str, Any]:
    there = about_sweep(folder)
    kind, own = there.get("kind"), about.get("kind")
    if kind is not None and own is not None and kind != own:
        made = f"`lopsided {shown(kind)[1:-1]}`"
        raise RunError(f"{folder} contains a sweep of {made}, not of `lopsided {own}`. Choose another folder.")
    return there


def about_sweep(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the contents of ``sweep.json``, empty if there is no sweep. Raise an error for other contents."""
    path = Path(folder)
    try:
        content = json.loads(files.read_whole(path / SWEEP))
        written = content["format"]
    except FileNotFoundError:
        if not path.exists() or all(item.name.startswith(".") for item in path.iterdir()):
            return {}
        if (path / SWEEP).exists():  # Another process has just created it.
            return about_sweep(path)
        raise RunError(f"{path} contains other files and no sweep. Choose a new or empty folder.") from None
    except NotADirectoryError:
        raise RunError(f"{path} is a file. Choose a folder for the sweep.") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        do = f'Restore the file, or replace its content by {{"format": {FORMAT}}}.'
        raise RunError(f"{path / SWEEP} cannot be read ({files.reason(error)}). {do}") from None
    if written != FORMAT:
        do = f"Open it with lopsided {content.get('lopsided', 'of that version')!s:.40}, which wrote it."
        got = f"format {shown(written)} in {path}"
        raise RunError(sentence(f"a sweep must have format {FORMAT}", got, do))
    return dict(content)


def record_missing(folder: str | os.PathLike[str], *, but: Collection[str] = ()) -> int:
    """Record the finished runs without a record, except for the cells ``but``. Return their number."""
    path = Path(folder)
    known = {record.cell for record in read_records(path / RECORDS)[0]} if (path / RECORDS).exists() else set()
    missing: list[Record] = []
    for metrics in sorted((path / CELLS).glob(f"*/{METRICS}")):
        cell = metrics.parent.name
        if cell not in known.union(but):
            with suppress(LopsidedError, OSError):  # An unreadable run is trained again.
                record = Record.from_run(Run.open(metrics.parent))
                if record.cell == cell:
                    missing.append(record)
    if missing:
        append_records(path / RECORDS, *missing)
    return len(missing)


class Sweep(Plan):
    """Cells with records. Several processes may train them together. A failed cell does not stop the others."""

    needs_records = True

    def __init__(
        self,
        folder: Path,
        cells: Sequence[Cell],
        about: Mapping[str, Any],
        note: Callable[[str], None],
        *,
        keep_models: bool,
    ) -> None:
        super().__init__(folder, cells)
        self.about, self.keeps_models, self._note = about, keep_models, note
        self._old_failures = len(read_failures(folder / FAILURES))
        self._noted: set[str] = set()

    def finished(self) -> dict[str, Record | None]:
        """Return the recorded cells. Record those that a killed process finished."""
        self._remove_left_locks()
        record_missing(self.folder, but=[cell.key for cell in self.cells])
        there, done = self._records(), dict[str, Record | None]()
        for cell in self.cells:
            record = there.get(cell.key)
            is_trained = (self.folder / cell.path / METRICS).exists()
            if record is None and is_trained and isinstance(claim := self.claim(cell), ExitStack):
                with claim:
                    record = self._unrecorded(cell)
            if record is not None:
                done[cell.key] = record
        return done

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make the folder, and write ``sweep.json`` at the end. Remove new folders if the engine fails to open."""
        made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        files.make_folder(self.folder)
        try:
            yield
        except BaseException:
            files.remove_empty(*made)
            raise
        open_sweep(self.folder, self.about)

    def signals(self) -> AbstractContextManager[None]:
        """Let SIGTERM end the workers like an interrupt from the keyboard. A handler of the program is called first."""
        before = signal.getsignal(signal.SIGTERM)

        def interrupt(number: int, frame: FrameType | None) -> NoReturn:
            if callable(before):
                before(number, frame)
            raise KeyboardInterrupt

        return handling({signal.SIGTERM: interrupt})

    def tracked(self, done: Mapping[str, Record | None], warn: Callable[[Fact], None]) -> AbstractContextManager[None]:
        """Track the sweep."""
        return tracked_sweep(self.folder, self.cells, done, self.about, warn)

    def claim(self, cell: Cell) -> ExitStack | str:
        """Lock a cell against other sweeps."""
        sign = self.folder / CLAIMS / cell.key
        with ExitStack() as stack:
            try:
                stack.callback(files.remove_empty, sign)
                stack.enter_context(files.lock(sign))
                self.check_free(cell)
            except RunError as error:
                # An error of the disk has a cause. A missing folder was removed by the process that had the cell.
                if error.__cause__ is not None and not isinstance(error.__cause__, FileNotFoundError):
                    raise
                return str(error)
            return stack.pop_all()

    def known(self, cell: Cell) -> Record | Failure | None:
        """Return the record of a cell, or its failure in another process since this sweep began."""
        record = self._records().get(cell.key) or self._unrecorded(cell)
        failures = reversed(read_failures(self.folder / FAILURES)[self._old_failures :])
        return record or next((f for f in failures if f.cell == cell.key and not f.error.startswith(LOST)), None)

    def put_away(self, cell: Cell, record: Record | None) -> Record:
        """Write the record of a finished cell.

        Models that are not kept are removed before, because a cell with a record is not checked again.
        """
        assert record is not None
        record = replace(record, compared_as=cell.compared_as)
        if not self.keeps_models:
            drop_model(self.folder / cell.path)
        for note in append_records(self.folder / RECORDS, record):
            self._tell(note)
        return record

    def note_failure(self, failure: Failure) -> None:
        """Write a failed attempt."""
        append_failure(self.folder / FAILURES, failure)

    def give_up(self, cell: Cell, failure: Failure) -> None:
        """Leave a failed cell."""

    def close(self) -> None:
        """Remove the folder of claims."""
        files.remove_empty(self.folder / CLAIMS)

    def _remove_left_locks(self) -> None:
        """Remove locks of killed sweeps. Otherwise a claim to a finished cell would stay forever."""
        files.remove_left_lock(self.folder)
        for sign in (self.folder / CLAIMS).glob("*"):
            files.remove_left_lock(sign)
            files.remove_empty(sign)

    def _records(self) -> dict[str, Record]:
        if not (self.folder / RECORDS).exists():
            return {}
        records, notes = read_records(self.folder / RECORDS)
        for note in notes:
            self._tell(note)
        return {record.cell: record for record in records}

    def _unrecorded(self, cell: Cell) -> Record | None:
        """Record a cell that finished just before its sweep was stopped. The caller holds its claim."""
        path = self.folder / cell.path
        if not (path / METRICS).exists():
            return None
        with suppress(LopsidedError):  # The error appears again when the cell runs.
            record = Record.from_run(Run.open(path))
            if record.cell == cell.key:
                return self.put_away(cell, record)
        return None

    def _tell(self, note: str) -> None:
        """Pass on a note, but only once."""
        if note not in self._noted:
            self._noted.add(note)
            self._note(note)
