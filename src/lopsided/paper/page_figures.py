"""The figures on the page of a sweep: heat maps, and line plots with a dot per run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from lopsided.paper.compare import Comparison, Entry
from lopsided.paper.protocol import Setting
from lopsided.reports import svg
from lopsided.runs.comparison import WORDS
from lopsided.runs.comparison_tables import runs_text, shown_interval

STYLES = {"test": "c0", "held_out": "c1"}
Link = Callable[[str | None, Setting, int], str]
"""The address of a run's page by scenario, loss and seed; empty if there is none."""


@dataclass(frozen=True)
class HeatCell:
    """One cell of a heat map; ``shade`` ranges from 1, the lowest value, to 10."""

    text: str
    note: str
    shade: int
    is_best: bool
    address: str


@dataclass(frozen=True)
class HeatMap:
    """One figure on one split over two of scenario, eta and gamma."""

    caption: str
    figure: str
    split: str
    corner: str
    columns: list[str]
    rows: list[tuple[str, list[HeatCell | None]]]


Place = tuple[str | None, Setting]


def heat_map(
    comparison: Comparison,
    places: Sequence[tuple[str, Sequence[Place]]],
    columns: Sequence[str],
    corner: str,
    caption: str,
    figure: str,
    split: str,
    number: int,
    link: Link,
) -> HeatMap:
    """Return a heat map of the cells in ``places``, row by row; ``number`` is the number of their group of runs.

    A cell with one run links to the page of the run, if it exists. Other cells link to the list of their runs.
    """
    entries = [[comparison.entry(*place, split, figure) for place in row] for _, row in places]
    means = [entry.mean.value for row in entries for entry in row if entry is not None]
    low, high = (min(means), max(means)) if means else (0.0, 1.0)
    rows = []
    for (name, row), found in zip(places, entries, strict=True):
        best = max((entry.mean.value for entry in found if entry is not None), default=math.nan)
        cells = [
            None if entry is None else _cell(entry, _address(entry, place, number, link), low, high, best)
            for place, entry in zip(row, found, strict=True)
        ]
        rows.append((name, cells))
    return HeatMap(caption, figure, split, corner, list(columns), rows)


def _address(entry: Entry, place: Place, number: int, link: Link) -> str:
    page = link(*place, next(iter(entry.values))) if len(entry.values) == 1 else ""
    return page or f"#{anchor(number, *place)}"


def _cell(entry: Entry, address: str, low: float, high: float, best: float) -> HeatCell:
    share = (entry.mean.value - low) / (high - low) if high > low else 0.5
    limits = shown_interval(entry.mean)
    return HeatCell(
        text=f"{entry.mean.value:.1f}",
        note=runs_text(entry.runs) if limits is None else f"{limits[0]:.1f} to {limits[1]:.1f}",
        shade=1 + round(9 * share),
        is_best=entry.mean.value == best,
        address=address,
    )


def anchor(number: int, scenario: str | None, setting: Setting) -> str:
    """Return the HTML id for the runs of a cell.

    >>> anchor(1, "90:10", Setting(300.0, 0.0))
    'runs-1-90-10-300-0'
    """
    text = f"{number}-{scenario or 'all'}-{setting.eta:g}-{setting.gamma:g}"
    return "runs-" + "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in text)


def lines(
    comparison: Comparison,
    scenario: str | None,
    settings: Sequence[Setting],
    axis: str | None,
    figure: str,
    y: svg.Range,
    link: Link,
) -> Markup:
    """Draw one figure of one scenario over eta, gamma or losses: means with intervals, runs, and the paper's values."""
    positions = [float(i) if axis is None else getattr(setting, axis) for i, setting in enumerate(settings)]
    spread = (max(positions) - min(positions)) or 1.0
    names = [str(setting) if axis is None else f"{getattr(setting, axis):g}" for setting in settings]
    where = "" if scenario is None else f" at {scenario}"
    plot = svg.Plot(
        f"{WORDS[figure]}{where} over {axis or 'losses'}",
        (min(positions) - 0.06 * spread, max(positions) + 0.06 * spread),
        y,
        x_label=axis or "",
        x_ticks=positions,
        x_names=names,
        width=400,
        height=250,
    )
    drawn = [split for split in STYLES if split in comparison.splits]
    for number, split in enumerate(drawn):
        aside = 0.018 * spread * (2 * number - len(drawn) + 1)
        entries = [
            (x + aside, setting, entry)
            for x, setting in zip(positions, settings, strict=True)
            if (entry := comparison.entry(scenario, setting, split, figure)) is not None
        ]
        _series(
            plot, entries, STYLES[split], f"{WORDS[split]} {WORDS[figure]}", scenario, link, joined=axis is not None
        )
    for x, setting in zip(positions, settings, strict=True):
        value = comparison.published(scenario, setting, figure)
        if value is not None and y[0] <= value <= y[1]:
            plot.dot(x, value, "hollow", f"published: {value:.2f}", radius=4.5)
    return plot.render()


def _series(
    plot: svg.Plot,
    entries: Sequence[tuple[float, Setting, Entry]],
    style: str,
    words: str,
    scenario: str | None,
    link: Link,
    *,
    joined: bool,
) -> None:
    if joined:
        plot.line([(x, entry.mean.value) for x, _, entry in entries], f"{style} thin")
    for x, setting, entry in entries:
        told = f"{setting}, {words} {entry.mean.value:.1f}"
        if (limits := shown_interval(entry.mean)) is not None:
            low, high = limits
            plot.whisker(x, max(low, plot.y[0]), min(high, plot.y[1]), style)
            told += f" [{low:.1f}, {high:.1f}]"
        for seed, value in entry.values.items():
            address = link(scenario, setting, seed)
            if address:
                plot.parts.append(Markup('<a href="{}">').format(address))
            plot.dot(x, value, f"run {style}", f"{setting}, seed {seed}: {words} {value:.1f}", radius=2.4)
            if address:
                plot.parts.append(Markup("</a>"))
        plot.dot(x, entry.mean.value, f"dot {style}", f"{told}, {entry.runs} runs", radius=4)


def y_range(comparison: Comparison, figure: str, settings: Sequence[Setting]) -> svg.Range:
    """Return the range of a common scale that covers every run, interval and published value."""
    found: list[float] = []
    for (_, setting, _, name), entry in comparison.entries.items():
        if name == figure and setting in settings:
            found += [*entry.values.values(), *([] if entry.published is None else [entry.published])]
            found += [limit for limit in (entry.mean.low, entry.mean.high) if not math.isnan(limit)]
    low, high = svg.padded(found, floor=0.0)
    return max(low, 0.0), min(high, 100.0)
