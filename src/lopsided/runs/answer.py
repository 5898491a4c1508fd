"""A comparison as text: which method to use, means and differences with intervals, tables for terminal and Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lopsided.evaluation.intervals import UNDEFINED, Estimate
from lopsided.evaluation.metric_table import is_share
from lopsided.evaluation.resampled import MOST_TIMES, cheapest_near_best, images_needed, repeats_needed, standard_error
from lopsided.recipe.words import amount, listed
from lopsided.runs.comparison import COMPARED_METRICS, RECALL, SECONDS, WORDS, Comparison

if TYPE_CHECKING:
    from rich.console import Console


DECIDING_METRIC = "uwa"
"""The metric that decides."""


@dataclass(frozen=True)
class Needed:
    """A method that has no reliable difference to the best one, and what it would take to show a difference.

    ``below`` is how far it lies below the best method, in points. ``repeats`` and ``images`` are the number of repeats
    and the number of images of the rarest class that would be enough; None if no reasonable number is.
    """

    method: str
    below: Estimate
    repeats: int | None
    images: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {"method": self.method, "below": self.below.to_dict(), "repeats": self.repeats, "images": self.images}


@dataclass(frozen=True)
class Answer:
    """What a comparison says about one scenario. ``best`` and ``chosen`` are empty without a finished run.

    ``chosen`` is the cheapest method within one standard error of the best one. ``incomplete`` methods lack folds that
    the others have, so they are not ranked. If the runs are not folds, ``folds`` is 0 and nothing is chosen.
    """

    best: str = ""
    value: Estimate = UNDEFINED
    chosen: str = ""
    close: tuple[Needed, ...] = ()
    lower: tuple[str, ...] = ()
    incomplete: Mapping[str, int] = field(default_factory=dict)
    minutes: Mapping[str, float] = field(default_factory=dict)
    folds: int = 0
    runs: int = 0
    rare: int = 0
    tested: int = 0
    where: str = ""
    split: str = "test"

    @property
    def repeats(self) -> int:
        """The number of complete or started repeats."""
        return -(-self.runs // self.folds) if self.folds else 0

    def sentences(self) -> list[str]:
        """Return the answer in words."""
        if not self.best:
            return [f"{self.where}, no method has a finished {'fold' if self.folds else 'run'}."]
        if not self.folds:
            return [self._best()]
        found = [f"{self.use()}." if self.use() else "", self._best(), *self._chosen()]
        found = [text for text in found if text]
        found += [self._needed(each) for each in self.close]
        found += [
            f"{method} is not ranked, because it has {number} of {self.runs} folds."
            for method, number in self.incomplete.items()
        ]
        return found

    def use(self) -> str:
        """Return which method to use and why; empty if there is only one, or if the runs are no folds."""
        others = [*(each.method for each in self.close), *self.lower]
        if not self.chosen or not others:
            return ""
        on = "" if self.where == "On all images" else f" {self.where[0].lower()}{self.where[1:]}"
        on = f"{on} on your {self.tested:,} images"
        if self.lower and not self.close:
            return f"Use {self.chosen}: it is reliably better than {listed(self.lower)}{on}"
        return f"Use {self.chosen}: nothing is reliably better{on}"

    def _best(self) -> str:
        on, what = ("", "fold") if self.folds else (f" on {WORDS[self.split]} images", "run")
        highest = f"highest balanced accuracy{on}, {self.value.value:.1f} per cent ({amount(self.runs, what)})"
        text = f"{self.where}, {self.best} has the {highest}"
        close = [each.method for each in self.close]
        parts = [f"{listed(close)} {_are(close)} not reliably lower"] if close else []
        parts += [f"{listed(self.lower)} {_are(self.lower)} reliably lower"] if self.lower else []
        return "; ".join([text, *parts]) + "."

    def _chosen(self) -> list[str]:
        cost = f"{time_text(60 * self.minutes[self.chosen])} per fold"
        if not (self.close or self.lower):
            return []
        if self.chosen == self.best:
            return [f"No method within one standard error of {self.best} is clearly cheaper ({cost})."]
        against = f"{self.best} needs {time_text(60 * self.minutes[self.best])}"
        why = "is the cheapest method within one standard error of the best"
        return [f"{self.chosen} {why} ({cost}; {against})."]

    def _needed(self, needed: Needed) -> str:
        both = f"{self.best} and {needed.method}"
        gap = f"{needed.below.value:.1f} points"
        if math.isnan(needed.below.value):
            return f"{both} have no fold in common."
        if needed.repeats is None and needed.images is None:
            if needed.below.value < 0.05:
                return (
                    f"{both} do not differ in balanced accuracy, so more repeats or images would not show a difference."
                )
            most = f"more than {MOST_TIMES:,.0f} times as many rare images"
            return f"{both} differ by {gap}. It would take {most} to show that."
        ways = []
        if needed.repeats is not None:
            ways.append(f"about {needed.repeats} repeats instead of {self.repeats}")
        if needed.images is not None:
            ways.append(f"about {_rounded(needed.images):,} rare images instead of {self.rare:,}")
        no_repeats = " More repeats of the same images would not be enough." if needed.repeats is None else ""
        return f"{both} differ by {gap}. It would take {' or '.join(ways)} to show that.{no_repeats}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "best": self.best or None,
            "uwa": self.value.to_dict(),
            "chosen": self.chosen or None,
            "no_reliable_difference": [each.to_dict() for each in self.close],
            "lower": list(self.lower),
            "incomplete": dict(self.incomplete),
            "minutes_per_fold": {method: round(minutes, 4) for method, minutes in self.minutes.items()},
            "sentences": self.sentences(),
        }


def _are(methods: Sequence[str]) -> str:
    return "is" if len(methods) == 1 else "are"


def _rounded(number: int) -> int:
    """Return a number with two digits, rounded up: more would be more than an estimate knows."""
    step = int(10 ** max(len(str(number)) - 2, 0))
    return math.ceil(number / step) * step


def answer(comparison: Comparison, scenario: str | None) -> Answer:
    """Return the answer for one scenario.

    The best method is known only after looking at the results, so its differences are corrected for all pairs.
    """
    where = "On all images" if scenario is None else f"At {scenario}"
    folds, split = comparison.folds or 0, "test"
    if not folds and "held_out" in comparison.splits:
        split = "held_out"
    there = {
        method: e
        for method in comparison.methods
        if (e := comparison.entry(scenario, method, split, DECIDING_METRIC)) is not None
    }
    if not there:
        return Answer(where=where, folds=folds)
    runs = max(len(entry.runs) for entry in there.values())
    found = {method: entry for method, entry in there.items() if not folds or len(entry.runs) == runs}
    seconds = {method: comparison.entry(scenario, method, "test", SECONDS) for method in there}
    minutes = {method: 0.0 if entry is None else entry.mean.value / 60 for method, entry in seconds.items()}
    best = max(found, key=lambda method: (found[method].mean.value, -minutes[method] if folds else 0.0))
    level = comparison.level(len(found) * (len(found) - 1) // 2)
    gaps = {method: found[best].less(entry, level) for method, entry in found.items() if method != best}
    lower = tuple(method for method, gap in gaps.items() if gap is not None and gap.differs)
    values = {method: [own - other for own, other in found[best].pairs(found[method])] for method in gaps}
    errors = {
        method: standard_error(each, found[best].overlap) if folds and each else 0.0 for method, each in values.items()
    }
    below = {method: found[best].mean.value - found[method].mean.value for method in gaps}
    close = tuple(
        Needed(
            method,
            UNDEFINED if gap is None else gap.estimate,
            repeats_needed(values[method], folds, found[best].overlap, level) if folds and values[method] else None,
            images_needed(values[method], comparison.rare, found[best].overlap, level)
            if folds and values[method]
            else None,
        )
        for method, gap in gaps.items()
        if method not in lower
    )
    return Answer(
        best=best,
        value=found[best].mean,
        chosen=cheapest_near_best(best, below, errors, minutes) if folds else "",
        close=close,
        lower=lower,
        incomplete={method: len(entry.runs) for method, entry in there.items() if method not in found},
        minutes=minutes,
        folds=folds,
        runs=len(found[best].runs),
        rare=comparison.rare,
        tested=comparison.tested,
        where=where,
        split=split,
    )


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison for JSON, with its answer for each scenario if the runs are folds."""
    answers = [answer(comparison, scenario) for scenario in comparison.scenarios]
    found = {**comparison.to_dict(), "sentences": [text for each in answers for text in each.sentences()]}
    if comparison.folds is not None:
        pairs = zip(comparison.scenarios, answers, strict=True)
        found["answers"] = [{"scenario": scenario, **each.to_dict()} for scenario, each in pairs]
    return found


def time_text(seconds: float) -> str:
    """Return the time of a run as text.

    >>> time_text(0.62), time_text(45), time_text(740)
    ('0.6 s', '45 s', '12.3 minutes')
    """
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.{int(seconds < 10)}f} s"


MISSING = "-"


def runs_text(low: int, high: int | None = None) -> str:
    """Return a number or a range of runs as text.

    >>> runs_text(1), runs_text(3, 4), runs_text(4, 4)
    ('1 run', '3 to 4 runs', '4 runs')
    """
    high = low if high is None else high
    return f"{'' if low == high else f'{low} to '}{high} run{'' if high == 1 else 's'}"


def shown_interval(mean: Estimate) -> tuple[float, float] | None:
    """Return the interval of a mean, limited to 0 to 100 per cent, or None if there is no interval."""
    return None if math.isnan(mean.high) else (max(mean.low, 0.0), min(mean.high, 100.0))


def is_cut(mean: Estimate) -> bool:
    """Return whether an interval extends below 0 or above 100 per cent."""
    return mean.low < 0 or mean.high > 100


def mean_text(mean: Estimate, metric: str = "") -> str:
    """Return a mean in per cent with its interval, as two limits if the interval exceeds 0 or 100.

    A log loss has three digits.

    >>> mean_text(Estimate(90.0, 85.0, 95.0)), mean_text(Estimate(98.0, 95.5, 100.5))
    ('90.0 ±5.0', '98.0 [95.5, 100.0]')
    """
    if not is_share(metric):
        return f"{mean.value:.3f}" if math.isnan(mean.high) else f"{mean.value:.3f} ±{mean.high - mean.value:.3f}"
    limits = shown_interval(mean)
    if limits is None:
        return f"{mean.value:.1f}"
    low, high = limits
    return f"{mean.value:.1f} [{low:.1f}, {high:.1f}]" if is_cut(mean) else f"{mean.value:.1f} ±{high - mean.value:.1f}"


def difference_text(value: Estimate, metric: str = "") -> str:
    """Return a difference with half of its interval, if it has one, and a star if the interval excludes 0.

    >>> difference_text(Estimate(1.25, 0.5, 2.0)), difference_text(Estimate(-1.0, -3.0, 1.0))
    ('+1.2 ±0.8*', '-1.0 ±2.0')
    """
    digits = 1 if is_share(metric) else 3
    text = f"{value.value:+.{digits}f}"
    if math.isnan(value.high):
        return text
    return f"{text} ±{value.high - value.value:.{digits}f}{'*' if value.leaves_out_0 else ''}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


MOST_CLASSES = 4
"""With more classes, the terminal tables omit the recalls; the page and the JSON have them."""


@dataclass(frozen=True)
class Block:
    """One table: a row per method, and a column per scenario of one metric, or per metric of one scenario."""

    title: str
    columns: tuple[tuple[str, str | None, str, str], ...]
    """Header, scenario, split and metric of each column."""

    def rows(self, comparison: Comparison) -> Iterator[list[str]]:
        """Yield a row of means per method, followed by a row of differences for every method but the baseline."""
        for method in comparison.methods:
            found = [(comparison.entry(scenario, method, *of), of[-1]) for _, scenario, *of in self.columns]
            yield [
                method,
                *(MISSING if e is None else f"{mean_text(e.mean, metric)} ({len(e.runs)})" for e, metric in found),
            ]
            if method != comparison.baseline:
                gaps = [(comparison.difference(scenario, method, *of), of[-1]) for _, scenario, *of in self.columns]
                texts = [MISSING if g is None else f"{difference_text(g.estimate, f)} ({g.pairs})" for g, f in gaps]
                yield [f"  less {comparison.baseline}", *texts]


def blocks(comparison: Comparison) -> list[Block]:
    """Arrange a comparison in tables."""
    few = len(comparison.classes) <= MOST_CLASSES
    metrics = [name for name in comparison.metrics if name in COMPARED_METRICS or (few and name.startswith(RECALL))]
    source, found = comparison.source, []
    for split in comparison.splits:
        images = f"{comparison.images(split)} images, per cent"
        if len(comparison.scenarios) == 1:
            scenario = comparison.scenarios[0]
            where = "" if scenario is None else f" at {scenario}"
            columns = tuple(
                (comparison.word(metric).replace("balanced accuracy by the rule ", "by rule "), scenario, split, metric)
                for metric in metrics
            )
            found.append(Block(f"{source}{where}: {images}", columns))
            continue
        for metric in metrics:
            columns = tuple((name or "all images", name, split, metric) for name in comparison.scenarios)
            unit = images.removesuffix(", per cent") if not is_share(metric) else images
            found.append(Block(f"{source}: {comparison.word(metric)} on {unit}", columns))
    return found


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print tables, notes and conclusions to a terminal."""
    from rich.table import Table
    from rich.text import Text

    from lopsided.runs.progress import printable

    for block in blocks(comparison):
        console.print(Text(printable(block.title), style="bold"))
        table = Table(box=None, pad_edge=False)
        for i, header in enumerate(["method", *(column[0] for column in block.columns)]):
            table.add_column(printable(header), justify="right" if i else "left", no_wrap=not i)
        for row in block.rows(comparison):
            styles = ["", *("bold" if "*" in cell else "" for cell in row[1:])]
            cells = [Text(printable(cell), style=style) for cell, style in zip(row, styles, strict=True)]
            table.add_row(*cells, style="dim" if row[0].startswith("  ") else "")
        console.print(table)
        console.print()
    for text in notes(comparison):
        console.print(Text(printable(text), style="dim"))
    console.print()
    for scenario in comparison.scenarios:
        for text in answer(comparison, scenario).sentences():
            console.print(Text(printable(text), style="bold"))


def notes(comparison: Comparison) -> list[str]:
    """Return notes: the duration of a run, what the numbers mean, and which runs were ignored."""
    found = []
    for scenario in comparison.scenarios:
        times = [
            f"{method} {time_text(entry.mean.value)}"
            for method in comparison.methods
            if (entry := comparison.entry(scenario, method, "test", SECONDS)) is not None
        ]
        if times:
            what = "run" if comparison.folds is None else "fold"
            found.append(f"Time of a {what}{'' if scenario is None else f' at {scenario}'}: {', '.join(times)}.")
    means = (
        "Means over runs with Student's 95 % interval; the number of runs, or of pairs, is in parentheses."
        if comparison.folds is None
        else "Means over folds with a 95 % interval; the number of folds is in parentheses."
    )
    found.append(f"{means} {comparison.rule} * The interval excludes 0.")
    if comparison.passed_over:
        number = runs_text(comparison.passed_over)
        found.append(f"{number} ignored: an earlier run has the same method, data and seed.")
    return found
