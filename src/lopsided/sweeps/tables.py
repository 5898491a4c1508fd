"""A comparison of arms as text: means and differences with their intervals, for a terminal and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from lopsided.evaluation.intervals import Figure

MISSING = "-"


def runs_text(low: int, high: int | None = None) -> str:
    """Say a number of runs, or from how many to how many.

    >>> runs_text(1), runs_text(3, 4), runs_text(4, 4)
    ('1 run', '3 to 4 runs', '4 runs')
    """
    high = low if high is None else high
    return f"{'' if low == high else f'{low} to '}{high} run{'' if high == 1 else 's'}"


def shown_interval(mean: Figure) -> tuple[float, float] | None:
    """Return the limits of a mean in per cent, as far as there are such shares; None if there is no interval."""
    return None if math.isnan(mean.high) else (max(mean.low, 0.0), min(mean.high, 100.0))


def is_cut(mean: Figure) -> bool:
    """Whether an interval goes on beyond 0 or 100 per cent."""
    return mean.low < 0 or mean.high > 100


def mean_text(mean: Figure) -> str:
    """Write a mean in per cent with its interval, by its limits where it would go beyond 0 or 100.

    >>> mean_text(Figure(90.0, 85.0, 95.0)), mean_text(Figure(98.0, 95.5, 100.5))
    ('90.0 ±5.0', '98.0 [95.5, 100.0]')
    """
    limits = shown_interval(mean)
    if limits is None:
        return f"{mean.value:.1f}"
    low, high = limits
    return f"{mean.value:.1f} [{low:.1f}, {high:.1f}]" if is_cut(mean) else f"{mean.value:.1f} ±{high - mean.value:.1f}"


def difference_text(value: Figure) -> str:
    """Write a difference with half of its interval, if it has one, and a star where that leaves out 0.

    >>> difference_text(Figure(1.25, 0.5, 2.0)), difference_text(Figure(-1.0, -3.0, 1.0))
    ('+1.2 ±0.8*', '-1.0 ±2.0')
    """
    text = f"{value.value:+.1f}"
    if math.isnan(value.high):
        return text
    return f"{text} ±{value.high - value.value:.1f}{'*' if value.leaves_out_0 else ''}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
