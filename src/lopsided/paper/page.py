"""The page of a sweep for the paper: figures over eta and gamma, verdicts, differences, failures. Needs no torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from lopsided.errors import InputError
from lopsided.paper import tables
from lopsided.paper.claims import BLIND, RULE, Verdict
from lopsided.paper.compare import Comparison, Entry, Protocol, compare
from lopsided.paper.protocol import CL, FIGURES, WORDS, Setting
from lopsided.recipe.words import amount
from lopsided.reports import svg
from lopsided.reports.page import render
from lopsided.reports.sweep_data import SweepData, read_sweep
from lopsided.reports.wording import ETA, GAMMA, MINUS, clean, signed
from lopsided.runs.answer import runs_text, shown_interval
from lopsided.runs.comparison import lopsidedness
from lopsided.runs.records import Record
from lopsided.runs.sweep import about_sweep

KIND = "reproduce"
"""The kind in ``sweep.json`` of a sweep for one of the paper's tables."""

STYLES = {"test": "c0", "held_out": "c1"}
Place = tuple[str | None, Setting]
Link = Callable[[str | None, Setting, int], str]
"""The address of a run's page by scenario, loss and seed; empty if there is none."""

_HYPHEN = re.compile(r"(?<![\w.])-(?=\d)")  # The hyphen of a negative number.


@dataclass(frozen=True)
class View:
    """One arrangement of the runs of a protocol: over eta, over gamma, over both, or by loss."""

    heading: str
    axis: str | None
    comparison: Comparison
    settings: tuple[Setting, ...]
    grid: bool = False

    @property
    def names(self) -> list[str]:
        """The settings as they are named along the axis."""
        return [str(setting) if self.axis is None else f"{getattr(setting, self.axis):g}" for setting in self.settings]


def is_of_paper(folder: Path) -> bool:
    """Return whether a sweep was made for a table of the paper."""
    return bool(about_sweep(folder).get("kind") == KIND)


def sweep_page(folder: Path, beside: Path | None = None) -> str:
    """Return the HTML page of a sweep. Its links to the pages of the runs are relative to the folder ``beside``."""
    sweep = read_sweep(folder, beside)
    groups = [
        _group(number, source, protocol, runs, sweep)
        for number, ((source, protocol), runs) in enumerate(by_protocol(sweep.records).items(), start=1)
    ]
    losses = {(record.method, Setting.of(record) or record.loss) for record in sweep.records}
    counts = Counter((r.source, Protocol.of(r), r.scenario, Setting.of(r) or r.loss) for r in sweep.records)
    return render(
        "sweep.html.j2",
        data={"kind": "sweep"},
        title=f"Sweep {sweep.name}",
        folder=sweep.name,
        summary=sweep.summary(amount(len(losses), "loss", "losses")),
        warnings=sweep.warnings(sum(number == 1 for number in counts.values())),
        groups=groups,
        failures=sweep.failure_rows(),
        rule=RULE,
        blind=BLIND,
        stars=tables.STARS,
        has_pages=bool(sweep.pages),
        eta=ETA,
        gamma=GAMMA,
    )


def by_protocol(records: Iterable[Record]) -> dict[tuple[str, Protocol], list[Record]]:
    """Group comparable records: the records of one source and one protocol."""
    found: dict[tuple[str, Protocol], list[Record]] = {}
    for record in records:
        found.setdefault((record.source, Protocol.of(record)), []).append(record)
    return found


def _group(number: int, source: str, protocol: Protocol, records: Sequence[Record], sweep: SweepData) -> dict[str, Any]:
    views, trouble = [], ""
    try:
        views = list(_views(records, protocol))
    except InputError as error:  # The runs differ in something that records do not hold. The page only lists them.
        trouble = str(error)
    cells = {(record.scenario, Setting.of(record), record.seed): record.cell for record in records}

    def link(*place: Any) -> str:
        return sweep.pages.get(cells.get(place, ""), "")

    return {
        "title": clean(source),
        "protocol": str(protocol),
        "verdicts": _verdicts([verdict for view in views for verdict in view.comparison.verdicts]),
        "views": [
            {
                "heading": view.heading,
                "words": _words(view),
                "heat_maps": list(_heat_maps(view, number, link)),
                "lines": [] if view.grid else _lines(view, link),
                "has_published": any(entry.published is not None for entry in view.comparison.entries.values()),
                "splits": [(STYLES[split], WORDS[split]) for split in view.comparison.splits],
                "differences": list(_differences(view)),
                "notes": tables.notes(view.comparison) if view.comparison.is_of_paper and not view.grid else [],
            }
            for view in views
        ],
        "trouble": clean(trouble),
        "run_groups": list(_run_groups(number, records, sweep)),
    }


def _views(records: Sequence[Record], protocol: Protocol) -> Iterator[View]:
    there = [(record, setting) for record in records if (setting := Setting.of(record)) is not None]
    drawn = [(record, setting) for record, setting in there if record.scenario is not None]
    whole = [(record, setting) for record, setting in there if record.scenario is None]
    for part, table in ((drawn, "eta"), (drawn, "gamma"), (whole, "isic")):
        if not part:
            continue
        settings = sorted({setting for _, setting in part})
        scenarios = sorted({record.scenario for record, _ in part}, key=lopsidedness)
        if table == "isic":
            chosen, axis, heading = settings, None, "By loss"
        else:
            other = "gamma" if table == "eta" else "eta"
            chosen, axis = [setting for setting in settings if getattr(setting, other) == 0], table
            heading = f"Over {ETA}, the weight of the negatives" if table == "eta" else f"Over {GAMMA}, the focus"
            if not chosen or (len(chosen) < 2 and (table == "gamma" or len(settings) > 1)):
                continue
        comparison = compare([r for r, _ in part], table, protocol, scenarios=scenarios, settings=chosen)
        yield View(heading, axis, comparison, tuple(chosen))
    if any(setting.eta and setting.gamma for _, setting in drawn):
        settings = sorted({setting for _, setting in drawn})
        scenarios = sorted({record.scenario for record, _ in drawn}, key=lopsidedness)
        comparison = compare([r for r, _ in drawn], "eta", protocol, scenarios=scenarios, settings=settings)
        entries = {key: replace(entry, published=None) for key, entry in comparison.entries.items()}
        comparison = replace(comparison, entries=entries, verdicts=())
        yield View(f"Over {ETA} and {GAMMA} together", None, comparison, tuple(settings), grid=True)


def _heat_maps(view: View, number: int, link: Link) -> Iterator[dict[str, Any]]:
    comparison = view.comparison
    for figure in FIGURES:
        for split in comparison.splits:
            what = f"{WORDS[figure]} on {WORDS[split]} images, per cent"
            if view.grid:
                etas, gammas = (sorted({getattr(s, name) for s in view.settings}) for name in ("eta", "gamma"))
                names, corner = [f"{gamma:g}" for gamma in gammas], f"{ETA} down, {GAMMA} across"
                for scenario in comparison.scenarios:
                    places = [(f"{eta:g}", [(scenario, Setting(eta, gamma)) for gamma in gammas]) for eta in etas]
                    yield heat_map(view, places, names, corner, f"{scenario}: {what}", figure, split, number, link)
                continue
            places = [
                (clean(scenario or "all images"), [(scenario, setting) for setting in view.settings])
                for scenario in comparison.scenarios
            ]
            corner = {"eta": ETA, "gamma": GAMMA}.get(view.axis or "", "")
            yield heat_map(view, places, view.names, corner, what, figure, split, number, link)


def _lines(view: View, link: Link) -> list[dict[str, Any]]:
    plots = []
    for figure in FIGURES:
        y = y_range(view.comparison, figure, view.settings)
        drawn = [(clean(s or "all images"), lines(view, s, figure, y, link)) for s in view.comparison.scenarios]
        plots.append({"figure": figure, "plots": drawn})
    return plots


def _differences(view: View) -> Iterator[dict[str, Any]]:
    for (scenario, setting, split, figure), entry in view.comparison.entries.items():
        if setting != CL and entry.difference is not None:
            value = entry.difference
            yield {
                "scenario": clean(scenario or "all images"),
                "rank": lopsidedness(scenario)[0],
                "loss": str(setting),
                "figure": WORDS[figure],
                "split": WORDS[split],
                "pairs": entry.pairs,
                "value": value.value,
                "text": signed(value.value, 1),
                "interval": f"[{signed(value.low, 1)}, {signed(value.high, 1)}]" if not math.isnan(value.low) else "",
                "differs": entry.differs,
            }


def _words(view: View) -> str:
    """Return a sentence on the largest difference to CL, on held-out images if there are any."""
    comparison = view.comparison
    split = "held_out" if "held_out" in comparison.splits else "test"
    found = [
        (scenario, setting, entry)
        for (scenario, setting, of, figure), entry in comparison.entries.items()
        if of == split and figure == "uwa" and entry.difference is not None and not math.isnan(entry.difference.low)
    ]
    if not found:
        return "No difference to CL has an interval: it needs two runs with seeds of CL and unequal differences."
    scenario, setting, entry = max(found, key=lambda item: abs(item[2].difference.value if item[2].difference else 0.0))
    value = entry.difference or entry.mean
    where = "" if scenario is None else f" at {clean(scenario)}"
    clear = sum(entry.differs for _, _, entry in found)
    return (
        f"{setting}{where} has the largest difference to CL in UWA on {WORDS[split]} images: "
        f"{signed(value.value, 1)} points [{signed(value.low, 1)}, {signed(value.high, 1)}]. "
        f"The interval excludes 0 for {clear} of {amount(len(found), 'difference')} to CL."
    )


def _verdicts(verdicts: Iterable[Verdict]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Group the verdicts by claim."""
    found: dict[str, list[dict[str, Any]]] = {}
    for verdict in verdicts:
        told = {
            "decision": verdict.decision,
            "style": verdict.decision.replace(" ", "-"),
            "where": verdict.where,
            "reason": _HYPHEN.sub(MINUS, verdict.reason()),
            "decides": verdict.decides,
        }
        found.setdefault(verdict.text, []).append(told)
    return list(found.items())


def _run_groups(number: int, records: Iterable[Record], sweep: SweepData) -> Iterator[dict[str, Any]]:
    """Yield the runs of each cell for the list at the end of the page."""
    cells: dict[tuple[float, str, Setting, str], list[Record]] = {}
    for record in records:
        setting = Setting.of(record)
        place = (*lopsidedness(record.scenario), setting or CL, "" if setting else record.loss.label)
        cells.setdefault(place, []).append(record)
    for (*_, setting, other), runs in sorted(cells.items(), key=lambda item: item[0]):
        yield {
            "anchor": "" if other else anchor(number, runs[0].scenario, setting),
            "scenario": clean(runs[0].scenario or "all images"),
            "what": clean(other) or str(setting),
            "runs": [sweep.run_row(run) for run in sorted(runs, key=lambda run: run.seed)],
        }


def heat_map(
    view: View,
    places: Sequence[tuple[str, Sequence[Place]]],
    columns: Sequence[str],
    corner: str,
    caption: str,
    figure: str,
    split: str,
    number: int,
    link: Link,
) -> dict[str, Any]:
    """Return a heat map of the cells in ``places``, row by row; ``number`` is the number of their group of runs.

    A cell with one run links to the page of the run, if it exists. Other cells link to the list of their runs.
    """
    entries = [[view.comparison.entry(*place, split, figure) for place in row] for _, row in places]
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
    about = {"caption": caption, "figure": figure, "split": split, "corner": corner}
    return {**about, "columns": list(columns), "rows": rows}


def _address(entry: Entry, place: Place, number: int, link: Link) -> str:
    page = link(*place, next(iter(entry.values))) if len(entry.values) == 1 else ""
    return page or f"#{anchor(number, *place)}"


def _cell(entry: Entry, address: str, low: float, high: float, best: float) -> dict[str, Any]:
    """Return one cell; its shade ranges from 1, the lowest value, to 10."""
    share = (entry.mean.value - low) / (high - low) if high > low else 0.5
    limits = shown_interval(entry.mean)
    return {
        "text": f"{entry.mean.value:.1f}",
        "note": runs_text(entry.runs) if limits is None else f"{limits[0]:.1f} to {limits[1]:.1f}",
        "shade": 1 + round(9 * share),
        "is_best": entry.mean.value == best,
        "address": address,
    }


def anchor(number: int, scenario: str | None, setting: Setting) -> str:
    """Return the HTML id for the runs of a cell.

    >>> anchor(1, "90:10", Setting(300.0, 0.0))
    'runs-1-90-10-300-0'
    """
    text = f"{number}-{scenario or 'all'}-{setting.eta:g}-{setting.gamma:g}"
    return "runs-" + "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in text)


def lines(view: View, scenario: str | None, figure: str, y: svg.Range, link: Link) -> Markup:
    """Draw one figure of one scenario over eta, gamma or losses: means with intervals, runs, and the paper's values."""
    comparison, settings, axis = view.comparison, view.settings, view.axis
    positions = [float(i) if axis is None else getattr(setting, axis) for i, setting in enumerate(settings)]
    spread = (max(positions) - min(positions)) or 1.0
    where = "" if scenario is None else f" at {scenario}"
    plot = svg.Plot(
        f"{WORDS[figure]}{where} over {axis or 'losses'}",
        (min(positions) - 0.06 * spread, max(positions) + 0.06 * spread),
        y,
        x_label=axis or "",
        x_ticks=positions,
        x_names=view.names,
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
