"""Progress on stderr: bars in a terminal, plain lines elsewhere, nothing when it is to be quiet. Needs no torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from lopsided.training.reporter import Reporter

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

Progress: TypeAlias = Callable[[int, int], None]
PLAIN_SECONDS = 5.0
"""Where there is no terminal, a count is told this often."""


def in_terminal() -> bool:
    """Whether someone may be watching stderr."""
    return sys.stderr.isatty()


def printable(text: str) -> str:
    """Replace what could steer a terminal: names of files and classes are anyone's."""
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


@contextmanager
def counter(label: str, *, quiet: bool = False) -> Iterator[Progress | None]:
    """Yield a function that is told how many of how many are done; None when it is to be quiet."""
    with reporter(quiet=quiet) as watcher:
        yield watcher.counting(label)


def _bars(*texts: str) -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = [TextColumn(text, markup=False) for text in texts]
    console = Console(stderr=True)
    bar = BarColumn(bar_width=20)
    return Bars(TextColumn("{task.description}"), bar, *columns, TimeRemainingColumn(), console=console)


class Meter:
    """Things done per second since it was made."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def rate(self, done: float) -> float:
        """Return the mean rate so far."""
        return done / max(time.monotonic() - self.start, 1e-6)


class Told(Reporter):
    """A reporter that says warnings on stderr and keeps silent otherwise; the two below say more.

    ``label`` stands before what is said, where several runs follow each other.
    """

    def __init__(self) -> None:
        self.label = ""

    def named(self, label: str) -> Told:
        """Put a label before what follows."""
        self.label = label
        return self

    def say(self, text: str) -> None:
        """Print one line on stderr."""
        before = f"{self.label}: " if self.label else ""
        print(printable(f"{before}{text}"), file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Say what makes the figures worth less."""
        self.say(f"warning: {text}")

    def counting(self, label: str) -> Progress | None:
        """Return a function that is told how many of how many are done, if they are to be told at all."""
        return None


class Lines(Told):
    """A line per epoch."""

    def counting(self, label: str) -> Progress | None:
        """Say the count every few seconds."""
        last = time.monotonic()

        def tell(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= PLAIN_SECONDS:
                last = time.monotonic()
                self.say(f"{label}: {done:,} of {total:,}")

        return tell

    def note(self, text: str) -> None:
        """Say a decision that the run took."""
        self.say(text)

    def stage(self, name: str, epochs: int, steps_per_epoch: int) -> None:
        """Start to count."""
        self.name, self.epochs = name, epochs
        self.meter, self.images, self.first = Meter(), 0, 0

    def step(self, loss: float, images: int) -> None:
        """Count images."""
        self.images += images

    def epoch(self, index: int, facts: Mapping[str, Any]) -> None:
        """Say what came out of an epoch, and how long the rest will take."""
        self.first = self.first or index
        seconds = time.monotonic() - self.meter.start
        left = seconds / (index - self.first + 1) * (self.epochs - index)
        parts = [*figures(facts), f"{self.meter.rate(self.images):,.0f} images/s", f"{clock(left)} left"]
        self.say(f"{self.name} {index}/{self.epochs}: {', '.join(parts)}")


class Bar(Lines):
    """A bar per stage, with rate, time left, loss and UWA."""

    def __init__(self) -> None:
        super().__init__()
        self.bars = _bars("{task.fields[done]}", "{task.fields[rate]}", "{task.fields[figures]}")

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        before = f"{self.label}: " if self.label else ""
        self.bars.console.print(printable(f"{before}{text}"), markup=False, highlight=False)

    def counting(self, label: str) -> Progress | None:
        """Draw a bar with the first count."""
        meter: Meter | None = None
        task: TaskID | None = None

        def tell(done: int, total: int) -> None:
            nonlocal meter, task
            if meter is None or task is None:
                meter = Meter()
                task = self.bars.add_task(label, total=total, done="", rate="", figures="")
            rate = f"{meter.rate(done):,.0f}/s"
            self.bars.update(task, completed=done, total=total, done=f"{done:,}/{total:,}", rate=rate)

        return tell

    def stage(self, name: str, epochs: int, steps_per_epoch: int) -> None:
        """Draw a new bar below those of the stages before."""
        super().stage(name, epochs, steps_per_epoch)
        self.steps, self.uwa = steps_per_epoch, ""
        self.calls, self.advance = 0, 1.0
        title = f"{self.label} {name}".strip()
        total = epochs * steps_per_epoch
        self.task = self.bars.add_task(title, total=total, done=f"epoch 1/{epochs}", rate="", figures="")

    def step(self, loss: float, images: int) -> None:
        """Move the bar; on a device that is asked rarely, a call stands for several steps."""
        super().step(loss, images)
        self.calls += 1
        rate = f"{self.meter.rate(self.images):,.0f} images/s"
        self.bars.update(self.task, advance=self.advance, rate=rate, figures=f"loss {loss:.4f} {self.uwa}")

    def epoch(self, index: int, facts: Mapping[str, Any]) -> None:
        """Put loss and UWA beside the bar; a resumed run's bar jumps to where it was."""
        self.advance, self.calls = self.steps / max(self.calls, 1), 0
        shown = figures(facts)
        self.uwa = shown[-1] if "val_uwa" in facts else ""
        done = f"epoch {min(index + 1, self.epochs)}/{self.epochs}"
        self.bars.update(self.task, completed=index * self.steps, done=done, figures=" ".join(shown))


def figures(facts: Mapping[str, Any]) -> list[str]:
    """Return the words for the loss and the UWA of an epoch, as far as it has them."""
    named = (("loss", "loss", ".4f"), ("val_uwa", "UWA", ".3f"))
    return [f"{word} {facts[key]:{form}}" for key, word, form in named if isinstance(facts.get(key), float)]


def clock(seconds: float) -> str:
    """Write a duration.

    >>> clock(75), clock(7300)
    ('1:15', '2:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def reporter(*, quiet: bool = False) -> Iterator[Told]:
    """Yield the reporter that fits whoever is watching."""
    if quiet:
        yield Told()
    elif in_terminal():
        bar = Bar()
        with bar.bars:
            yield bar
    else:
        yield Lines()
