"""Progress: bars in a terminal or a notebook, plain lines on stderr elsewhere, nothing if quiet. No torch."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from lopsided.facts import Fact
from lopsided.facts.log import Reporter

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

Counted: TypeAlias = Callable[[int, int], None]
Counting: TypeAlias = Callable[[str], AbstractContextManager[Counted | None]]
"""Takes the name of a step and gives the function that counts its images."""
V = TypeVar("V")
PLAIN_SECONDS = 5.0
"""Seconds between two counts if stderr is not a terminal."""
LONG_SECONDS = 60.0
"""Seconds without a line after which a line is printed during an epoch, if stderr is not a terminal."""


def in_terminal() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr.isatty()


def in_notebook() -> bool:
    """Return whether the code runs in a notebook, whose pages show HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def printable(text: str) -> str:
    """Replace control characters. Names of files and classes are untrusted and could control a terminal."""
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


@contextmanager
def counter(label: str, *, quiet: bool = False) -> Iterator[Counted | None]:
    """Yield a function that takes the number done and the total, or None if quiet."""
    with reporter(quiet=quiet) as watcher:
        yield watcher.counting(label)


class Voice:
    """Prints lines on stderr, above the bars of a terminal. Base class of the views of a run and of a sweep.

    ``label`` is printed before each line, to distinguish several runs.
    """

    label = ""
    console: Console | None = None

    def say(self, text: str) -> None:
        """Print one line on stderr."""
        text = printable(f"{self.label}: {text}" if self.label else text)
        if self.console is None:
            sys.stderr.write(f"{text}\n")  # One write: print() makes two, and another process could write in between.
            sys.stderr.flush()
        else:
            self.console.print(text, markup=False, highlight=False)


@contextmanager
def fitting(
    told: Callable[[], V],
    lines: Callable[[], V],
    screen: Callable[[], V],
    page: Callable[[], V] | None = None,
    *,
    quiet: bool,
) -> Iterator[V]:
    """Yield the view for quiet mode, for plain output, for a terminal or for the page of a notebook.

    A terminal view draws its ``live`` part.
    """
    shown = screen if in_terminal() else page if page is not None and in_notebook() else lines
    view = told() if quiet else shown()
    with getattr(view, "live", nullcontext()):
        yield view


class Told(Voice, Reporter):
    """A reporter that prints only cautions on stderr. The subclasses print more."""

    verbose = False
    """Whether details are printed, too."""
    _counted: tuple[str, Counted | None] | None = None

    def named(self, label: str) -> Told:
        """Set the label that is printed before the following lines."""
        self.label = label
        return self

    def fact(self, fact: Fact) -> None:
        """Print a caution."""
        if fact.is_caution:
            self.say(f"warning: {fact}")

    def counting(self, label: str) -> Counted | None:
        """Return a function that takes the number done and the total, or None if counts are not shown."""
        return None

    def count(self, label: str, done: int, total: int) -> None:
        """Show a count of the run. The counts of one label share a bar."""
        if self._counted is None or self._counted[0] != label:
            self._counted = label, self.counting(label)
        tell = self._counted[1]
        if tell is not None:
            tell(done, total)


class Pace:
    """The rate of a count. What was done before the first count, for example by an earlier call, does not count."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first: int | None = None
        self._done = 0

    def add(self, done: int) -> None:
        """Note the number done."""
        if self._first is None:
            self._start, self._first = time.monotonic(), done
        self._done = done

    @property
    def rate(self) -> float:
        """The number per second since the first count."""
        return (self._done - (self._first or 0)) / max(time.monotonic() - self._start, 1e-6)

    def words(self, total: int) -> str:
        """Return rate and time left as text, or an empty text as long as they are unknown."""
        rate = self.rate
        if rate <= 0:
            return ""
        speed = f", {rate:,.0f}/s" if rate >= 1 else ""
        return f"{speed}, {clock((total - self._done) / rate)} left"


class Lines(Told):
    """Prints one line per epoch."""

    def counting(self, label: str) -> Counted | None:
        """Return a function that prints the count every few seconds, with the rate and the time left."""
        last = time.monotonic()
        pace = Pace()

        def tell(done: int, total: int) -> None:
            nonlocal last
            pace.add(done)
            if time.monotonic() - last >= PLAIN_SECONDS:
                last = time.monotonic()
                self.say(f"{label}: {done:,} of {total:,}{pace.words(total)}")

        return tell

    def fact(self, fact: Fact) -> None:
        """Print a note or a caution of the run."""
        if self.verbose or not fact.is_detail:
            self.say(f"warning: {fact}" if fact.is_caution else str(fact))

    def stage(self, name: str, epochs: int, steps_per_epoch: int) -> None:
        """Start to count images and time."""
        self.name, self.epochs = name, epochs
        self.start, self.images, self.first = time.monotonic(), 0, 0
        self.told, self.this_epoch = self.start, 0
        self.done: int | None = None  # Unknown until the first epoch ends, because the run may have been resumed.

    def step(self, loss: float, images: int) -> None:
        """Count images. Print a line if the last line is older than a minute."""
        self.images += images
        self.this_epoch += images
        now = time.monotonic()
        if self.console is None and now - self.told >= LONG_SECONDS:
            self.told = now
            where = "" if self.done is None else f" {self.done + 1}/{self.epochs}"
            self.say(f"{self.name}{where}: {self.this_epoch:,} images so far, loss {loss:.4f}, {self.rate()}")

    def rate(self) -> str:
        """Return the images per second of this stage as text."""
        return f"{self.images / max(time.monotonic() - self.start, 1e-6):,.0f} images/s"

    def epoch(self, index: int, facts: Mapping[str, Any]) -> None:
        """Print the figures of an epoch and the remaining time."""
        self.first = self.first or index
        left = (time.monotonic() - self.start) / (index - self.first + 1) * (self.epochs - index)
        parts = [*figures(facts), self.rate(), f"{clock(left)} left"]
        self.say(f"{self.name} {index}/{self.epochs}: {', '.join(parts)}")
        self.told, self.this_epoch, self.done = time.monotonic(), 0, index


class Bar(Lines):
    """Draws one bar per stage, with rate, remaining time, loss and UWA."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = Console(stderr=True)
        texts = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("done", "rate", "figures")]
        columns = [TextColumn("{task.description}"), BarColumn(bar_width=20), *texts, TimeRemainingColumn()]
        self.live = Progress(*columns, console=self.console)

    def add(self, title: str, total: int, done: str = "") -> TaskID:
        """Add a bar below the existing bars."""
        return self.live.add_task(title, total=total, done=done, rate="", figures="")

    def counting(self, label: str) -> Counted | None:
        """Return a function that draws a bar from the first count on."""
        task: TaskID | None = None
        pace = Pace()

        def tell(done: int, total: int) -> None:
            nonlocal task
            pace.add(done)
            if task is None:
                task = self.add(label, total)
            rate = f"{pace.rate:,.0f}/s"
            self.live.update(task, completed=done, total=total, done=f"{done:,}/{total:,}", rate=rate)

        return tell

    def stage(self, name: str, epochs: int, steps_per_epoch: int) -> None:
        """Add the bar of a new stage."""
        super().stage(name, epochs, steps_per_epoch)
        self.steps, self.uwa = steps_per_epoch, ""
        self.calls, self.advance = 0, 1.0
        self.task = self.add(f"{self.label} {name}".strip(), epochs * steps_per_epoch, f"epoch 1/{epochs}")

    def step(self, loss: float, images: int) -> None:
        """Advance the bar. On devices that report rarely, one call stands for several steps."""
        super().step(loss, images)
        self.calls += 1
        shown = f"loss {loss:.4f} {self.uwa}"
        self.live.update(self.task, advance=self.advance, rate=self.rate(), figures=shown)

    def epoch(self, index: int, facts: Mapping[str, Any]) -> None:
        """Show loss and UWA next to the bar. The bar of a resumed run jumps to its epoch."""
        self.advance, self.calls = self.steps / max(self.calls, 1), 0
        shown = figures(facts)
        self.uwa = shown[-1] if "val_uwa" in facts else ""
        done = f"epoch {min(index + 1, self.epochs)}/{self.epochs}"
        self.live.update(self.task, completed=index * self.steps, done=done, figures=" ".join(shown))


class Page(Lines):
    """Shows one bar per stage in a notebook. Notes and warnings are lines."""

    def counting(self, label: str) -> Counted | None:
        """Return a function that shows a bar from the first count on."""
        bar, pace = _PageBar(label), Pace()

        def tell(done: int, total: int) -> None:
            pace.add(done)
            bar.show(done, total, f"{done:,} of {total:,}{pace.words(total)}")

        return tell

    def stage(self, name: str, epochs: int, steps_per_epoch: int) -> None:
        """Start the bar of a new stage."""
        super().stage(name, epochs, steps_per_epoch)
        self.bar = _PageBar(f"{self.label} {name}".strip())

    def step(self, loss: float, images: int) -> None:
        """Count images."""
        self.images += images

    def epoch(self, index: int, facts: Mapping[str, Any]) -> None:
        """Advance the bar by an epoch."""
        self.bar.show(index, self.epochs, ", ".join([f"epoch {index}/{self.epochs}", *figures(facts), self.rate()]))


class _PageBar:
    """One bar in a notebook. It is drawn again at most ten times a second."""

    def __init__(self, label: str) -> None:
        self._label, self._drawn = label, 0.0
        self._handle: Any = None

    def show(self, done: int, total: int, words: str) -> None:
        """Draw the bar."""
        if self._handle is not None and done < total and time.monotonic() - self._drawn < 0.1:
            return
        from IPython.display import HTML, display

        self._drawn = time.monotonic()
        name, words = (html.escape(printable(text)) for text in (self._label, words))
        page = HTML(f"<div>{name} <progress value={done} max={max(total, 1)}></progress> {words}</div>")
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)


def figures(facts: Mapping[str, Any]) -> list[str]:
    """Return the loss and the UWA of an epoch as texts, if the epoch has them."""
    named = (("loss", "loss", ".4f"), ("val_uwa", "balanced accuracy", ".3f"))
    return [f"{word} {facts[key]:{form}}" for key, word, form in named if isinstance(facts.get(key), float)]


def clock(seconds: float) -> str:
    """Return a duration as text.

    >>> clock(75), clock(7300)
    ('1:15', '2:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def reporter(*, quiet: bool = False, verbose: bool = False) -> Iterator[Told]:
    """Yield the reporter for quiet mode, for plain output, for a terminal or for a notebook."""
    with fitting(Told, Lines, Bar, Page, quiet=quiet) as view:
        view.verbose = verbose
        yield view
