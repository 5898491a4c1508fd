"""Progress of a sweep: a live bar in a terminal, plain lines elsewhere, only failures and notes if quiet."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from lopsided.recipe.words import amount
from lopsided.runs.progress import Voice, clock, fitting, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lopsided.runs.plan import Cell
    from lopsided.runs.records import Failure, Record

PLAIN_SECONDS = 30.0
"""How often the state is printed without a terminal, while no cell ends."""

WAITING_SECONDS = 600.0
"""How often a quiet sweep prints that it waits for other processes."""

SHOWN = 8
"""The maximum number of running cells shown in a terminal."""


class View(Voice):
    """Receives the events of a sweep and counts cells. This base class prints nothing."""

    waiting_seconds = WAITING_SECONDS

    def __init__(self) -> None:
        self.total = self.skipped = self.finishes = self.failures = 0
        self.running: dict[str, tuple[str, float]] = {}
        self.start = time.monotonic()
        self.last_waiting: float | None = None

    def say(self, text: str) -> None:
        """Print nothing."""

    def begin(self, total: int, skipped: int) -> None:
        """Start a sweep of ``total`` cells, of which ``skipped`` are already finished."""
        self.total, self.skipped, self.start = total, skipped, time.monotonic()

    def started(self, cell: Cell) -> None:
        """Count a cell that started."""
        self.running[cell.key] = cell.name, time.monotonic()

    def finished(self, record: Record) -> None:
        """Count a cell that finished."""
        self.running.pop(record.cell, None)
        self.finishes += 1

    def failed(self, failure: Failure, *, again: bool) -> None:
        """Print the error of a cell; ``again``: whether the cell is tried again."""
        if not again:
            self.running.pop(failure.cell, None)
            self.failures += 1
        self.say(f"{failure.name} {'is tried again' if again else 'failed'}: {failure.error}")

    def note(self, text: str) -> None:
        """Print a note."""
        self.say(text)

    def waiting(self, cells: int, reason: str) -> None:
        """Print, at once and then at intervals, that other processes have all remaining cells."""
        now = time.monotonic()
        if self.last_waiting is None or now - self.last_waiting >= self.waiting_seconds:
            self.last_waiting = now
            self.say(_waiting(cells, reason))

    def tick(self) -> None:
        """Called about once per second."""

    def state(self) -> str:
        """Return the counts of done, running, failed and skipped cells, and the speed after the first cell."""
        numbers = {"running": len(self.running), "failed": self.failures, "skipped": self.skipped}
        parts = [f"{self.skipped + self.finishes}/{self.total} done"]
        parts += [f"{number} {word}" for word, number in numbers.items() if number]
        if self.finishes:
            seconds = max(time.monotonic() - self.start, 1e-6) / self.finishes
            left = self.total - self.skipped - self.finishes - self.failures
            rate = 3600 / seconds
            parts += [f"{rate:,.{int(rate < 10)}f} runs/h", f"{clock(left * seconds)} left"]
        return ", ".join(parts)


class Told(View):
    """Prints failures, notes and reasons for waiting."""

    def say(self, text: str) -> None:
        """Print one line on stderr."""
        Voice.say(self, text)


class FoldLines(Told):
    """Prints a line per finished fold as well."""

    def finished(self, record: Record) -> None:
        """Print the fold, its UWA and its time."""
        super().finished(record)
        fold = "all images" if record.fold is None else f"fold {record.fold.fold}"
        self.say(f"{fold}: balanced accuracy {record.test.uwa:.3f}, {record.seconds:.0f} s")


class Lines(Told):
    """Prints a line per finished cell, and the state at intervals while no cell ends."""

    waiting_seconds = PLAIN_SECONDS
    last = -math.inf

    def say(self, text: str) -> None:
        """Print one line on stderr."""
        super().say(text)
        self.last = time.monotonic()

    def begin(self, total: int, skipped: int) -> None:
        """Print the number of cells."""
        super().begin(total, skipped)
        self.say(self.state())

    def finished(self, record: Record) -> None:
        """Print the finished cell and its UWA."""
        super().finished(record)
        self.say(f"{record.name}: balanced accuracy {record.test.uwa:.3f} ({self.state()})")

    def tick(self) -> None:
        """Print the state if nothing was printed for ``PLAIN_SECONDS``."""
        if time.monotonic() - self.last >= PLAIN_SECONDS:
            self.say(self.state())


class Screen(Told):
    """Shows a bar that counts cells, with the running cells below it and messages above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__()
        self.bar = Progress(TextColumn("cells"), BarColumn(bar_width=20), TextColumn("{task.description}"))
        self.task = self.bar.add_task("", total=None)
        self.reason = ""
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, get_renderable=self.draw, refresh_per_second=2)

    def draw(self) -> RenderableType:
        """Return the current bar and running cells."""
        from rich.console import Group
        from rich.text import Text

        ended = self.skipped + self.finishes + self.failures
        self.bar.update(self.task, completed=ended, total=self.total or None, description=self.state())
        now, running = time.monotonic(), list(self.running.values())
        lines = [f"  {name}, {clock(now - since)}" for name, since in running[:SHOWN]]
        lines += [f"  and {len(running) - SHOWN} more"] if len(running) > SHOWN else []
        lines += [f"  {self.reason}"] if self.reason else []
        return Group(self.bar, *(Text(printable(line), overflow="ellipsis", no_wrap=True) for line in lines))

    def started(self, cell: Cell) -> None:
        """Count a cell that started, and remove the reason for waiting."""
        super().started(cell)
        self.reason = ""

    def finished(self, record: Record) -> None:
        """Print the finished cell and its UWA."""
        super().finished(record)
        self.say(f"{record.name}: balanced accuracy {record.test.uwa:.3f}")

    def waiting(self, cells: int, reason: str) -> None:
        """Show the reason for waiting: in full above the bar, and cut to the terminal's width below it."""
        super().waiting(cells, reason)
        self.reason = _waiting(cells, reason)


def _waiting(cells: int, reason: str) -> str:
    return f"waiting for {amount(cells, 'cell')} of other processes: {reason}"


def sweep_view(*, quiet: bool = False) -> AbstractContextManager[View]:
    """Return the view that fits the output."""
    return fitting(Told, Lines, Screen, quiet=quiet)
