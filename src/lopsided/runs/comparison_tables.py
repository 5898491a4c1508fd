"""Comparisons as text: means and differences with intervals, tables for a terminal and in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lopsided.evaluation.intervals import Figure
from lopsided.evaluation.metric_table import is_share
from lopsided.runs.answer import answer, time_text
from lopsided.runs.comparison import FIGURES, RECALL, SECONDS, Comparison

if TYPE_CHECKING:
    from rich.console import Console

MISSING = "-"


def runs_text(low: int, high: int | None = None) -> str:
    """Return a number or a range of runs as text.

    >>> runs_text(1), runs_text(3, 4), runs_text(4, 4)
    ('1 run', '3 to 4 runs', '4 runs')
    """
    high = low if high is None else high
    return f"{'' if low == high else f'{low} to '}{high} run{'' if high == 1 else 's'}"


def shown_interval(mean: Figure) -> tuple[float, float] | None:
    """Return the interval of a mean, limited to 0 to 100 per cent, or None if there is no interval."""
    return None if math.isnan(mean.high) else (max(mean.low, 0.0), min(mean.high, 100.0))


def is_cut(mean: Figure) -> bool:
    """Return whether an interval extends below 0 or above 100 per cent."""
    return mean.low < 0 or mean.high > 100


def mean_text(mean: Figure, figure: str = "") -> str:
    """Return a mean in per cent with its interval, as two limits if the interval exceeds 0 or 100.

    A log loss has three digits.

    >>> mean_text(Figure(90.0, 85.0, 95.0)), mean_text(Figure(98.0, 95.5, 100.5))
    ('90.0 ±5.0', '98.0 [95.5, 100.0]')
    """
    if not is_share(figure):
        return f"{mean.value:.3f}" if math.isnan(mean.high) else f"{mean.value:.3f} ±{mean.high - mean.value:.3f}"
    limits = shown_interval(mean)
    if limits is None:
        return f"{mean.value:.1f}"
    low, high = limits
    return f"{mean.value:.1f} [{low:.1f}, {high:.1f}]" if is_cut(mean) else f"{mean.value:.1f} ±{high - mean.value:.1f}"


def difference_text(value: Figure, figure: str = "") -> str:
    """Return a difference with half of its interval, if it has one, and a star if the interval excludes 0.

    >>> difference_text(Figure(1.25, 0.5, 2.0)), difference_text(Figure(-1.0, -3.0, 1.0))
    ('+1.2 ±0.8*', '-1.0 ±2.0')
    """
    digits = 1 if is_share(figure) else 3
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
    """One table: a row per arm, and a column per scenario of one figure, or per figure of one scenario."""

    title: str
    columns: tuple[tuple[str, str | None, str, str], ...]
    """Header, scenario, split and figure of each column."""

    def rows(self, comparison: Comparison) -> Iterator[list[str]]:
        """Yield a row of means per arm, followed by a row of differences for every arm but the baseline."""
        for arm in comparison.arms:
            found = [(comparison.entry(scenario, arm, *of), of[-1]) for _, scenario, *of in self.columns]
            yield [
                arm,
                *(MISSING if e is None else f"{mean_text(e.mean, figure)} ({len(e.runs)})" for e, figure in found),
            ]
            if arm != comparison.baseline:
                gaps = [(comparison.difference(scenario, arm, *of), of[-1]) for _, scenario, *of in self.columns]
                texts = [MISSING if g is None else f"{difference_text(g.figure, f)} ({g.pairs})" for g, f in gaps]
                yield [f"  less {comparison.baseline}", *texts]


def blocks(comparison: Comparison) -> list[Block]:
    """Arrange a comparison in tables."""
    few = len(comparison.classes) <= MOST_CLASSES
    figures = [name for name in comparison.figures if name in FIGURES or (few and name.startswith(RECALL))]
    source, found = comparison.source, []
    for split in comparison.splits:
        images = f"{comparison.images(split)} images, per cent"
        if len(comparison.scenarios) == 1:
            scenario = comparison.scenarios[0]
            where = "" if scenario is None else f" at {scenario}"
            columns = tuple((_header(comparison.word(figure)), scenario, split, figure) for figure in figures)
            found.append(Block(f"{source}{where}: {images}", columns))
            continue
        for figure in figures:
            columns = tuple((name or "all images", name, split, figure) for name in comparison.scenarios)
            unit = images.removesuffix(", per cent") if not is_share(figure) else images
            found.append(Block(f"{source}: {comparison.word(figure)} on {unit}", columns))
    return found


def _header(word: str) -> str:
    """Return a short header: "UWA balanced" in place of "UWA by the rule balanced", for 80 to 160 columns of text."""
    return word.replace(" by the rule ", " ")


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print tables, notes and conclusions to a terminal."""
    from rich.table import Table
    from rich.text import Text

    from lopsided.progress import printable

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
            f"{arm} {time_text(entry.mean.value)}"
            for arm in comparison.arms
            if (entry := comparison.entry(scenario, arm, "test", SECONDS)) is not None
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
