"""What whoever watches a sweep is told: a live bar in a terminal, plain lines elsewhere, failures alone when quiet."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from lopsided.progress import Voice, clock, fitting, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lopsided.runs.records import Failure, Record
    from lopsided.sweeps.engines import Cell

PLAIN_SECONDS = 30.0
"""Where there is no terminal and no cell ends, the state is told this often."""

WAITING_SECONDS = 600.0
"""Whoever wants to hear little is told this often that a sweep waits for others."""

SHOWN = 8
"""So many running cells a terminal shows."""


class View(Voice):
    """Told what happens in a sweep, and counts; this one keeps silent, those below do not."""

    waiting_seconds = WAITING_SECONDS

    def __init__(self) -> None:
        self.total = self.skipped = self.finishes = self.failures = 0
        self.running: dict[str, tuple[str, float]] = {}
        self.start = time.monotonic()
        self.last_waiting: float | None = None

    def say(self, text: str) -> None:
        """Keep silent."""

    def begin(self, total: int, skipped: int) -> None:
        """So many cells there are, of which so many were done before."""
        self.total, self.skipped, self.start = total, skipped, time.monotonic()

    def started(self, cell: Cell) -> None:
        """A cell is being computed."""
        self.running[cell.key] = cell.name, time.monotonic()

    def finished(self, record: Record) -> None:
        """A cell is done."""
        self.running.pop(record.cell, None)
        self.finishes += 1

    def failed(self, failure: Failure, *, again: bool) -> None:
        """Say what went wrong with an attempt at a cell, which may be tried again."""
        if not again:
            self.running.pop(failure.cell, None)
            self.failures += 1
        self.say(f"{failure.name} {'is tried again' if again else 'failed'}: {failure.error}")

    def note(self, text: str) -> None:
        """Say something that was found, in one sentence."""
        self.say(text)

    def waiting(self, cells: int, reason: str) -> None:
        """Say that all that is left is with others: at once, then from time to time; it may take someone to end it."""
        now = time.monotonic()
        if self.last_waiting is None or now - self.last_waiting >= self.waiting_seconds:
            self.last_waiting = now
            self.say(_waiting(cells, reason))

    def tick(self) -> None:
        """Some time went by."""

    def state(self) -> str:
        """Say how many cells are done, running, failed and skipped, and once the first one is done how fast it goes."""
        numbers = {"running": len(self.running), "failed": self.failures, "skipped": self.skipped}
        parts = [f"{self.skipped + self.finishes}/{self.total} done"]
        parts += [f"{number} {word}" for word, number in numbers.items() if number]
        if self.finishes:
            seconds = max(time.monotonic() - self.start, 1e-6) / self.finishes
            left = self.total - self.skipped - self.finishes - self.failures
            rate = 3600 / seconds
            parts += [f"{rate:,.{int(rate < 10)}f} cells/h", f"{clock(left * seconds)} left"]
        return ", ".join(parts)


class Told(View):
    """Says failures, notes and what is waited for."""

    def say(self, text: str) -> None:
        """Print one line on stderr."""
        Voice.say(self, text)


class Lines(Told):
    """A line per finished cell, and one from time to time while none ends."""

    waiting_seconds = PLAIN_SECONDS
    last = -math.inf

    def say(self, text: str) -> None:
        """Print one line on stderr."""
        super().say(text)
        self.last = time.monotonic()

    def begin(self, total: int, skipped: int) -> None:
        """Say how much there is to do."""
        super().begin(total, skipped)
        self.say(self.state())

    def finished(self, record: Record) -> None:
        """Say which cell is done, and its figure."""
        super().finished(record)
        self.say(f"{record.name}: UWA {record.test.uwa:.3f} ({self.state()})")

    def tick(self) -> None:
        """Say where the sweep stands if nothing was said for long."""
        if time.monotonic() - self.last >= PLAIN_SECONDS:
            self.say(self.state())


class Screen(Told):
    """A bar that counts cells, below it those that are running; what happened scrolls by above."""

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
        """Return the bar and the cells that are running, as they are now."""
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
        """A cell is being computed; nothing is waited for."""
        super().started(cell)
        self.reason = ""

    def finished(self, record: Record) -> None:
        """Say which cell is done, and its figure."""
        super().finished(record)
        self.say(f"{record.name}: UWA {record.test.uwa:.3f}")

    def waiting(self, cells: int, reason: str) -> None:
        """Show what is waited for; the line of the bar is cut where the terminal ends, what is said above is not."""
        super().waiting(cells, reason)
        self.reason = _waiting(cells, reason)


def _waiting(cells: int, reason: str) -> str:
    what = "1 cell that is" if cells == 1 else f"{cells} cells that are"
    return f"waiting for {what} computed elsewhere: {reason}"


def sweep_view(*, quiet: bool = False) -> AbstractContextManager[View]:
    """Yield the view that fits whoever is watching."""
    return fitting(Told, Lines, Screen, quiet=quiet)
