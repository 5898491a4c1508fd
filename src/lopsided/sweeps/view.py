"""What whoever watches a sweep is told: a live bar in a terminal, plain lines elsewhere, failures alone when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lopsided.progress import clock, in_terminal, printable

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


class View:
    """Told what happens in a sweep; this one keeps silent."""

    def begin(self, total: int, skipped: int) -> None:
        """So many cells there are, of which so many were done before."""

    def started(self, cell: Cell) -> None:
        """A cell is being computed."""

    def finished(self, record: Record) -> None:
        """A cell is done."""

    def failed(self, failure: Failure, *, again: bool) -> None:
        """An attempt at a cell failed; the cell may be tried again."""

    def waiting(self, cells: int, reason: str) -> None:
        """All that is left, so many cells, is with other processes."""

    def note(self, text: str) -> None:
        """Something that was found, in one sentence."""

    def tick(self) -> None:
        """Some time went by."""


class Told(View):
    """Says failures, notes and what is waited for on stderr, and counts for the two below."""

    waiting_seconds = WAITING_SECONDS

    def __init__(self) -> None:
        self.total = self.skipped = self.finishes = self.failures = 0
        self.running: dict[str, tuple[str, float]] = {}
        self.start = time.monotonic()
        self.last_waiting: float | None = None

    def say(self, text: str) -> None:
        """Print one line on stderr."""
        print(printable(text), file=sys.stderr, flush=True)

    def begin(self, total: int, skipped: int) -> None:
        """Start to count."""
        self.total, self.skipped, self.start = total, skipped, time.monotonic()

    def started(self, cell: Cell) -> None:
        """Count a cell as running."""
        self.running[cell.key] = cell.name, time.monotonic()

    def finished(self, record: Record) -> None:
        """Count a cell as done."""
        self.running.pop(record.cell, None)
        self.finishes += 1

    def failed(self, failure: Failure, *, again: bool) -> None:
        """Say what went wrong."""
        if not again:
            self.running.pop(failure.cell, None)
            self.failures += 1
        self.say(f"{failure.name} {'is tried again' if again else 'failed'}: {failure.error}")

    def note(self, text: str) -> None:
        """Say what was found."""
        self.say(text)

    def waiting(self, cells: int, reason: str) -> None:
        """Say it at once, then from time to time; it may take someone to end it."""
        now = time.monotonic()
        if self.last_waiting is None or now - self.last_waiting >= self.waiting_seconds:
            self.last_waiting = now
            self.say(_waiting(cells, reason))

    def counts(self) -> str:
        """Say how many cells are done, running, failed and skipped."""
        done = f"{self.skipped + self.finishes}/{self.total} done"
        numbers = {"running": len(self.running), "failed": self.failures, "skipped": self.skipped}
        return ", ".join([done, *(f"{number} {word}" for word, number in numbers.items() if number)])

    def pace(self) -> str:
        """Say how fast cells are done and how long the rest will take, once the first one is."""
        if not self.finishes:
            return ""
        seconds = max(time.monotonic() - self.start, 1e-6) / self.finishes
        left = self.total - self.skipped - self.finishes - self.failures
        rate = 3600 / seconds
        return f"{rate:,.{int(rate < 10)}f} cells/h, {clock(left * seconds)} left"


class Lines(Told):
    """A line per finished cell, and one from time to time while none ends."""

    waiting_seconds = PLAIN_SECONDS

    def __init__(self) -> None:
        super().__init__()
        self.last = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line on stderr."""
        super().say(text)
        self.last = time.monotonic()

    def state(self) -> str:
        """Say where the sweep stands."""
        return ", ".join(filter(None, [self.counts(), self.pace()]))

    def begin(self, total: int, skipped: int) -> None:
        """Say how much there is to do."""
        super().begin(total, skipped)
        self.say(self.counts())

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
        console = Console(stderr=True)
        self.live = Live(console=console, get_renderable=self.draw, refresh_per_second=2)

    def draw(self) -> RenderableType:
        """Return the bar and the cells that are running, as they are now."""
        from rich.console import Group
        from rich.text import Text

        state = ", ".join(filter(None, [self.counts(), self.pace()]))
        ended = self.skipped + self.finishes + self.failures
        self.bar.update(self.task, completed=ended, total=self.total or None, description=state)
        now, running = time.monotonic(), list(self.running.values())
        lines = [f"  {name}, {clock(now - since)}" for name, since in running[:SHOWN]]
        lines += [f"  and {len(running) - SHOWN} more"] if len(running) > SHOWN else []
        lines += [f"  {self.reason}"] if self.reason else []
        return Group(self.bar, *(Text(printable(line), overflow="ellipsis", no_wrap=True) for line in lines))

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self.live.console.print(printable(text), markup=False, highlight=False)

    def started(self, cell: Cell) -> None:
        """Count a cell as running."""
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


@contextmanager
def sweep_view(*, quiet: bool = False) -> Iterator[View]:
    """Yield the view that fits whoever is watching."""
    if quiet:
        yield Told()
    elif in_terminal():
        screen = Screen()
        with screen.live:
            yield screen
    else:
        yield Lines()
