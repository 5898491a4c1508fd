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
import os
import shutil
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from lopsided import __version__, files
from lopsided.errors import LopsidedError, RunError, sentence
from lopsided.recipe import Recipe
from lopsided.recipe.words import shown
from lopsided.runs.folder import CARD, CHECKPOINT, METRICS, Run
from lopsided.runs.record_files import append_failure, append_records, read_failures, read_records
from lopsided.runs.records import Failure, Record
from lopsided.sweeps.engines import CELLS, LOST, Cell, Ended, Engine, LocalEngine
from lopsided.sweeps.tracking import tracked_sweep
from lopsided.sweeps.view import View, sweep_view
from lopsided.trackers import catalogue as trackers

__all__ = [
    "Cell",
    "Engine",
    "LocalEngine",
    "SweepOutcome",
    "View",
    "open_sweep",
    "record_missing",
    "run_sweep",
    "sweep_view",
]

FORMAT = 1
"""The version of a sweep folder."""

SWEEP, RECORDS, FAILURES, CLAIMS = "sweep.json", "records.jsonl", "failures.jsonl", "claims"
_POLL_SECONDS = 1.0
_MODEL_FILES = ("model.safetensors", CARD)


@dataclass(frozen=True)
class SweepOutcome:
    """The result of a sweep: records of finished cells, failed cells, and how many cells were finished before."""

    done: list[Record]
    failed: list[Failure]
    skipped: int


def run_sweep(
    cells: Sequence[Recipe | Cell],
    folder: str | os.PathLike[str],
    *,
    engine: Engine,
    view: View | None = None,
    keep_models: bool = False,
    keep: Literal["runs", "records"] = "runs",
    retries: int = 1,
    about: Mapping[str, Any] | None = None,
) -> SweepOutcome:
    """Train the recipes that are not yet finished in a sweep folder. Return the records of all recipes.

    Recipes with the same content are one cell. A failed cell is recorded with its error, and the other cells continue.
    A cell whose worker dies is retried from its checkpoint, at most ``retries`` times. The model and the checkpoint of
    a finished cell are removed unless ``keep_models`` is set; ``keep="records"`` removes its whole folder. An interrupt
    or SIGTERM ends the workers at once and raises ``KeyboardInterrupt``. Only the current epochs are lost. ``about`` is
    written to ``sweep.json``; see ``open_sweep``.
    """
    _check_kind(folder, about or {})
    for part in (Path(folder), Path(folder) / CELLS, Path(folder) / CLAIMS):
        files.check_no_links(part)
    settled = (cell if isinstance(cell, Cell) else Cell.of(cell) for cell in cells)
    wanted = {cell.key: cell for cell in settled}
    for cell in wanted.values():
        trackers.check(cell.recipe.track)
    driver = _Driver(Path(folder), list(wanted.values()), engine, view or View(), retries)
    driver.about = about or {}
    driver.kept = "models" if keep_models else keep
    return driver.run()


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


def about_sweep(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the contents of ``sweep.json``, or an empty dictionary if there is no sweep."""
    path = Path(folder) / SWEEP
    return dict(json.loads(files.read_whole(path))) if check_sweep(folder) else {}


def _check_kind(folder: str | os.PathLike[str], about: Mapping[str, Any]) -> dict[str, Any]:
    there = about_sweep(folder)
    kind, own = there.get("kind"), about.get("kind")
    if kind is not None and own is not None and kind != own:
        made = f"`lopsided {shown(kind)[1:-1]}`"
        raise RunError(f"{folder} contains a sweep of {made}, not of `lopsided {own}`. Choose another folder.")
    return there


def check_sweep(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder contains a sweep. Raise an error for other contents or another format."""
    path = Path(folder)
    try:
        content = json.loads(files.read_whole(path / SWEEP))
        written = content["format"]
    except FileNotFoundError:
        if _is_empty(path):
            return False
        if (path / SWEEP).exists():  # Another process has just created it.
            return check_sweep(path)
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
    return True


def _is_empty(path: Path) -> bool:
    return not path.exists() or all(item.name.startswith(".") for item in path.iterdir())


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


class _Driver:
    """Submits the cells of a sweep to an engine and records the results."""

    kept = "runs"
    about: Mapping[str, Any] = {}

    def __init__(self, folder: Path, cells: list[Cell], engine: Engine, view: View, retries: int) -> None:
        self.folder, self.cells, self.engine, self.view, self.retries = folder, cells, engine, view, retries
        self.done: dict[str, Record] = {}
        self.failed: dict[str, Failure] = {}
        self.todo: deque[Cell] = deque()
        self.elsewhere: deque[Cell] = deque()
        self.lost: deque[Cell] = deque()
        self.claims: dict[str, ExitStack] = {}
        self.deaths: Counter[str] = Counter()
        self.old_failures = len(read_failures(folder / FAILURES))
        self.told: set[str] = set()
        self.reasons: dict[str, str] = {}
        self.next_look = 0.0

    def run(self) -> SweepOutcome:
        self.take_stock()
        skipped = len(self.done)
        try:
            with _handling({signal.SIGTERM: _interrupt}):
                self.open()
                self.view.begin(len(self.cells), skipped)
                with tracked_sweep(
                    self.folder, self.cells, self.done, self.about, lambda fact: self.view.note(str(fact))
                ):
                    self.loop()
        finally:
            with _handling({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}):  # The sweep is ending.
                self.engine.close()  # Close it before the claims: its workers still use the cells.
                for claim in self.claims.values():
                    claim.close()
                _remove_if_empty(self.folder / CLAIMS)
        return SweepOutcome(
            [self.done[cell.key] for cell in self.cells if cell.key in self.done], list(self.failed.values()), skipped
        )

    def open(self) -> None:
        """Open the engine if there is work, then the sweep. Remove new folders if the engine fails to open."""
        made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        files.make_folder(self.folder)
        try:
            if self.todo:
                self.engine.open(self.folder, models=self.kept == "models")
        except BaseException:
            for path in made:
                _remove_if_empty(path)
            raise
        open_sweep(self.folder, self.about)

    def take_stock(self) -> None:
        """Find the finished cells."""
        self.remove_left_locks()
        record_missing(self.folder, but=[cell.key for cell in self.cells])
        there = self.records()
        for cell in self.cells:
            record = there.get(cell.key)
            finished = (self.folder / CELLS / cell.key / METRICS).exists()
            if record is None and finished and (claim := self.claim(cell)) is not None:
                with claim:
                    record = self.unrecorded(cell)
            if record is None:
                self.todo.append(cell)
            else:
                self.done[cell.key] = record

    def remove_left_locks(self) -> None:
        """Remove locks of killed sweeps. Otherwise a claim to a finished cell would stay forever."""
        files.remove_left_lock(self.folder)
        for sign in (self.folder / CLAIMS).glob("*"):
            files.remove_left_lock(sign)
            _remove_if_empty(sign)

    def records(self) -> dict[str, Record]:
        if not (self.folder / RECORDS).exists():
            return {}
        records, notes = read_records(self.folder / RECORDS)
        for note in notes:
            self.tell(note)
        return {record.cell: record for record in records}

    def unrecorded(self, cell: Cell) -> Record | None:
        """Record a cell that finished just before its sweep was stopped. The caller holds its claim."""
        path = self.folder / CELLS / cell.key
        if not (path / METRICS).exists():
            return None
        with suppress(LopsidedError):  # The error appears again when the cell runs.
            record = replace(Record.from_run(Run.open(path)), arm=cell.arm)
            if record.cell == cell.key:
                self.put_away(cell, record)
                return record
        return None

    def loop(self) -> None:
        while self.todo or self.elsewhere or self.claims:
            for _ in range(len(self.lost)):
                self.start_again(self.lost.popleft())
            while self.todo and self.has_room():
                self.start(self.todo.popleft())
            if not self.todo and self.elsewhere and time.monotonic() >= self.next_look:
                self.look_elsewhere()
            for ended in self.engine.wait(_POLL_SECONDS):
                self.settle(ended)
            self.view.tick()

    def has_room(self) -> bool:
        return len(self.claims) - len(self.lost) < self.engine.slots

    def look_elsewhere(self) -> None:
        """Check whether cells of other processes are now finished or free."""
        for _ in range(len(self.elsewhere)):
            if self.has_room():
                self.start(self.elsewhere.popleft())
        if self.elsewhere and not self.claims:
            reasons = [self.reasons[cell.key] for cell in self.elsewhere]
            # Prefer a reason that names a lock file: such a wait may need the user to remove the file.
            self.view.waiting(len(reasons), next((r for r in reasons if files.LOCK_NAME in r), reasons[0]))
        self.next_look = time.monotonic() + _POLL_SECONDS

    def start(self, cell: Cell) -> None:
        """Start a cell, unless another process computes it or has computed it."""
        claim = self.claim(cell)
        if claim is None:
            self.elsewhere.append(cell)
            return
        self.claims[cell.key] = claim
        record = self.records().get(cell.key) or self.unrecorded(cell)
        failures = read_failures(self.folder / FAILURES)[self.old_failures :]
        failure = next((f for f in reversed(failures) if f.cell == cell.key and not f.error.startswith(LOST)), None)
        if record is not None:
            self.finish(cell, record)
        elif failure is not None:
            self.give_up(cell, failure)
        else:
            self.view.started(cell)
            self.engine.submit(cell)

    def start_again(self, cell: Cell) -> None:
        """Restart a cell whose worker died, once its folder is free. A cluster may report a death before it is over."""
        try:
            self.check_free(cell)
        except RunError as error:
            if error.__cause__ is not None:
                raise
            self.lost.append(cell)
        else:
            self.engine.submit(cell)

    def check_free(self, cell: Cell) -> None:
        """Raise an error if a process uses the run folder of a cell. A worker may briefly outlive its sweep."""
        path = self.folder / CELLS / cell.key
        if (path / files.LOCK_NAME).exists():
            with files.lock(path):
                pass

    def claim(self, cell: Cell) -> ExitStack | None:
        """Lock a cell against other sweeps. Return None, and store the reason, if another process uses the cell."""
        sign = self.folder / CLAIMS / cell.key
        with ExitStack() as stack:
            try:
                stack.callback(_remove_if_empty, sign)
                stack.enter_context(files.lock(sign))
                self.check_free(cell)
            except RunError as error:
                # An error of the disk has a cause. A missing folder was removed by the process that had the cell.
                if error.__cause__ is not None and not isinstance(error.__cause__, FileNotFoundError):
                    raise
                self.reasons[cell.key] = str(error)
                return None
            return stack.pop_all()

    def settle(self, ended: Ended) -> None:
        cell = ended.cell
        if ended.record is not None:
            record = replace(ended.record, arm=cell.arm)
            self.put_away(cell, record)
            self.finish(cell, record)
            return
        failure = Failure.of(cell.recipe, ended.error, cell.arm)
        append_failure(self.folder / FAILURES, failure)
        self.deaths[cell.key] += ended.died
        if ended.died and self.deaths[cell.key] <= self.retries:
            self.view.failed(failure, again=True)
            self.lost.append(cell)
        else:
            self.give_up(cell, failure)

    def finish(self, cell: Cell, record: Record) -> None:
        self.done[cell.key] = record
        self.claims.pop(cell.key).close()
        self.view.finished(record)

    def give_up(self, cell: Cell, failure: Failure) -> None:
        self.failed[cell.key] = failure
        self.claims.pop(cell.key).close()
        self.view.failed(failure, again=False)

    def write_down(self, record: Record) -> None:
        for note in append_records(self.folder / RECORDS, record):
            self.tell(note)

    def tell(self, note: str) -> None:
        """Print a note, but only once."""
        if note not in self.told:
            self.told.add(note)
            self.view.note(note)

    def put_away(self, cell: Cell, record: Record) -> None:
        """Write the record of a finished cell, and remove the files that are not kept.

        Models are removed before the record is written, because a cell with a record is not checked again. The folder
        is removed after it, because a cell without a record is recorded from its folder.
        """
        path = self.folder / CELLS / cell.key
        if self.kept == "runs":
            shutil.rmtree(path / CHECKPOINT, ignore_errors=True)
            for name in _MODEL_FILES:
                with suppress(OSError):
                    (path / name).unlink()
        self.write_down(record)
        if self.kept == "records":
            shutil.rmtree(path, ignore_errors=True)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Callable[..., object] | signal.Handlers]) -> Iterator[None]:
    """Replace signal handlers inside the block. Does nothing outside the main thread, which alone can set them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
